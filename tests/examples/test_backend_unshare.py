"""The worked example of docs/guides/writing-a-backend.md: installed as a distribution of its own, it passes the kit."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_core.errors import PolicyError, ProvisionError
from hermes_core.runtime import Runtime
from hermes_core.sandbox import uids
from hermes_core.sandbox.contract import Isolation, SandboxSpec

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "backend_unshare"
LIMIT = 100
TOOLS = ("unshare", "nsenter", "setsid")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example, as pip installs it."""
    source = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "example")
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", target, source], check=True, env={**os.environ, "PIP_NO_INDEX": "1"})
    return target


def test_it_is_under_a_hundred_lines() -> None:
    assert len((EXAMPLE / "backend_unshare.py").read_text().splitlines()) < LIMIT


def test_the_document_shows_the_very_file() -> None:
    text = (EXAMPLE.parents[1] / "docs" / "guides" / "writing-a-backend.md").read_text()
    assert f"```python\n{(EXAMPLE / 'backend_unshare.py').read_text()}```" in text


@pytest.fixture
def unshare(
    installed: Path, monkeypatch: pytest.MonkeyPatch, isolates: None, require: Callable[[str, str | None], None]
) -> Any:
    """The example's module."""
    require("unshare", None if os.geteuid() == 0 and all(map(shutil.which, TOOLS)) else "it takes root and util-linux")
    monkeypatch.syspath_prepend(str(installed))
    return importlib.import_module("backend_unshare")


async def test_nothing_is_started_before_a_sandboxs_root_is_its_own(
    unshare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that entered earlier would run on the host."""
    slow = tmp_path / "chroot"
    slow.write_text(f'#!/bin/sh\nsleep 0.5; exec {shutil.which("chroot", path=unshare.PATH)} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setattr(unshare, "PATH", f"{tmp_path}:{unshare.PATH}")
    async with (
        Runtime(plugins=[plugin_of(unshare)], load_entry_points=False) as runtime,
        runtime.tool_backend("unshare", isolation="user") as tools,
        tools.lease("a") as slot,
    ):
        listed = await tools.execute(slot, "bash", {"command": "ls -d /home /root /boot 2>&1; ls -d /data"})
    assert listed.output.count("No such file") == 3, listed.output


def plugin_of(unshare: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(hermes_register_backends=unshare.hermes_register_backends)


def locks() -> int:
    """Return how many descriptors of ours hold blocks of user ids."""
    return sum("hermes-rl-uids" in os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())


@pytest.mark.parametrize("later_s", [0, 0.02])
async def test_a_cancelled_creation_leaves_no_user_ids_reserved(
    unshare: Any, later_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, before = threading.Event(), locks()
    reserve = unshare.reserve

    def slow() -> Any:
        begun.set()
        time.sleep(0.2)
        return reserve()

    monkeypatch.setattr(unshare, "reserve", slow)
    backend = unshare.UnshareBackend(None)
    spec = SandboxSpec(uuid.uuid4().hex, "test", unshare.UnshareConfig(name="test"), Isolation.USER)
    creation = asyncio.create_task(backend.create(spec))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    await asyncio.sleep(later_s)
    creation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creation
    await asyncio.sleep(0.3)
    assert locks() == before
    assert await backend.list("test") == []


@pytest.mark.parametrize(
    ("part", "replaced", "error", "says"),
    [
        ("_lock", lambda *_: False, ProvisionError, "blocks of user ids are taken"),
        ("choose_range", lambda *_: (0, 0), PolicyError, "can't keep its slots apart"),
    ],
)
async def test_without_user_ids_no_slot_is_given(
    unshare: Any, part: str, replaced: Any, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uids, part, replaced)
    before = locks()
    async with Runtime(plugins=[plugin_of(unshare)], load_entry_points=False) as runtime:
        with pytest.raises(error, match=says):
            async with runtime.tool_backend("unshare", isolation="user") as tools:
                await tools.acquire(timeout_s=5)
    assert locks() == before


@pytest.mark.long
@pytest.mark.full
@pytest.mark.parametrize(
    "groups",
    [
        ("contract", "slots"),
        ("pools", "failure"),
        pytest.param(("commands", "processes", "files", "leaks", "speed"), marks=pytest.mark.stress),
    ],
)
def test_it_passes_the_kit(
    installed: Path, groups: tuple[str, ...], isolates: None, require: Callable[[str, str | None], None]
) -> None:
    require("unshare", None if os.geteuid() == 0 and all(map(shutil.which, TOOLS)) else "it takes root and util-linux")
    environment = {**os.environ, "PYTHONPATH": str(installed), "HERMES_PLUGINS": "testing,unshare"}
    words = [word for group in groups for word in ("--group", group)]
    command = [sys.executable, "-m", "hermes_core", "conformance", "unshare", "--json", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout, done.stderr
    checks = json.loads(done.stdout)["checks"]
    assert [each for each in checks if each["outcome"] == "failed"] == []
    assert any(each["outcome"] == "passed" for each in checks)
    assert done.returncode == 0
