"""Servers for the tests: a real sshd each, on the account that `.ci/ssh` has made."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import hermes_ssh
import pytest

from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from hermes_core.tool_backend import ToolBackend
from tests.support.selection import makes_tests_full

Check = Callable[[str, str | None], None]


def _load_server() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ssh_server", Path(__file__).with_name("server.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ssh_server"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
@makes_tests_full
def make_server(require: Check, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts servers; options are those of sshd_config."""
    module = _load_server()
    require("ssh", module.missing())
    servers = []

    def make(**options: str) -> Any:
        directory = tmp_path / f"server-{len(servers)}"
        directory.mkdir()
        servers.append(module.Server(directory, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def server(make_server: Callable[..., Any]) -> Any:
    """A server as `.ci/ssh` configures it."""
    return make_server()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory on the host for this test's sandboxes, which is to be gone after it."""
    path = Path(f"/var/tmp/hermes-ssh-test-{uuid.uuid4().hex[:8]}")
    yield path
    left = path.exists()
    shutil.rmtree(path, ignore_errors=True)
    assert not left


@pytest.fixture
def runtime_of() -> Callable[..., Runtime]:
    """A runtime with this plugin and no other."""

    def make(**settings: Any) -> Runtime:
        return Runtime(Settings(**settings), plugins=[hermes_ssh], load_entry_points=False)

    return make


@pytest.fixture
def tool_backend(
    runtime_of: Callable[..., Runtime], place: Path
) -> Callable[..., AbstractAsyncContextManager[ToolBackend]]:
    """`tool_backend(isolation, **config)`: a tool backend with one sandbox, unless the config says otherwise."""

    @contextlib.asynccontextmanager
    async def make(isolation: str = "namespace", **config: Any) -> AsyncIterator[ToolBackend]:
        given = {"max_sandboxes": 1, "slots_per_sandbox": 4, "directory": str(place), **config}
        async with (
            runtime_of() as runtime,
            runtime.tool_backend("ssh", isolation=isolation, config=given, profiles={}) as backend,
        ):
            yield backend

    return make


def processes_of(sandbox: str) -> list[int]:
    """The processes on this host that carry the sandbox's marker in their environment."""
    wanted, found = f"HERMES_SANDBOX_ID={sandbox.rpartition('/')[2]}".encode(), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


@pytest.fixture
def marked() -> Callable[[str], list[int]]:
    """The processes of a sandbox by its id."""
    return processes_of
