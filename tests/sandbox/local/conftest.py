"""The same scenario as root and as an ordinary user, each with a state directory of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 - an ordinary user could not read it when it is first needed
import os
import shutil
import sys
import tempfile
import time
import traceback
import uuid
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import hermes_core
from hermes_core.sandbox.contract import Isolation, Sandbox, SandboxSpec
from hermes_core.sandbox.local.backend import LocalBackend, LocalConfig
from hermes_core.sandbox.local.sandbox import LocalSandbox
from tests.support.accounts import AGAIN

ORDINARY_UID = 54_321
SYSTEM_PYTHON = "/usr/bin/python3"


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Host:
    """Who we are in a test, and where our sandboxes are kept."""

    root: bool
    state_dir: Path

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        """Run the scenario as that user; its failure is the test's."""
        if self.root or os.geteuid() != 0:
            asyncio.run(scenario())  # type: ignore[arg-type]
            return
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            os.close(reader)
            _as_ordinary_user(scenario, writer)
        os.close(writer)
        with open(reader, encoding="utf-8") as stream:
            failure = stream.read()
        _, status = os.waitpid(child, 0)
        assert status == 0 and not failure, f"as uid {ORDINARY_UID}: wait status {status}\n{failure}"

    def backend(self) -> LocalBackend:
        return LocalBackend(state_dir=str(self.state_dir))

    def left(self) -> list[str]:
        return sorted(path.name for path in self.state_dir.iterdir())


def _as_ordinary_user(scenario: Callable[[], Awaitable[None]], failures: int) -> None:
    status = 1
    try:
        os.setsid()
        os.setgroups([])
        os.setresgid(ORDINARY_UID, ORDINARY_UID, ORDINARY_UID)
        os.setresuid(ORDINARY_UID, ORDINARY_UID, ORDINARY_UID)
        os.chdir("/")
        os.environ["HOME"] = "/nonexistent"
        sys._base_executable = SYSTEM_PYTHON  # type: ignore[attr-defined]
        sys.base_prefix = sys.base_exec_prefix = "/usr"
        asyncio.run(scenario())  # type: ignore[arg-type]
        status = 0
    except BaseException:
        os.write(failures, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _reachable_by_others(path: Path) -> bool:
    return all(directory.stat().st_mode & 0o001 for directory in path.parents)


@pytest.fixture(params=["root", pytest.param("ordinary", marks=AGAIN)])
def host(request: pytest.FixtureRequest, isolates: None) -> Iterator[Host]:
    """Root where the tests run as root; an ordinary user always, if there is an interpreter for it."""
    root = request.param == "root"
    if root and os.geteuid() != 0:
        pytest.skip("not root")
    if not root and os.geteuid() == 0:
        if not Path(SYSTEM_PYTHON).exists():
            pytest.skip(f"no {SYSTEM_PYTHON} for an ordinary user to run")
        if not _reachable_by_others(Path(hermes_core.__file__).resolve()):
            pytest.skip("an ordinary user can't read this checkout")
    directory = Path(tempfile.mkdtemp(prefix="hermes-test-", dir="/tmp"))
    if not root and os.geteuid() == 0:
        os.chown(directory, ORDINARY_UID, ORDINARY_UID)
    try:
        yield Host(root, directory)
        assert sorted(path.name for path in directory.iterdir()) == []
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Tools:
    """What every scenario needs."""

    @staticmethod
    def spec(
        level: Isolation = Isolation.NAMESPACE, *, creation_id: str | None = None, ttl_s: float = 30, **config: Any
    ) -> SandboxSpec:
        return SandboxSpec(
            creation_id=creation_id or uuid.uuid4().hex,
            owner="tests",
            config=LocalConfig(**{"orphan_ttl_s": ttl_s, **config}),
            isolation=level,
        )

    @classmethod
    @asynccontextmanager
    async def sandbox(
        cls, host: Host, level: Isolation = Isolation.NAMESPACE, **options: Any
    ) -> AsyncIterator[LocalSandbox]:
        sandbox = await host.backend().create(cls.spec(level, **options))
        assert isinstance(sandbox, LocalSandbox)
        try:
            yield sandbox
        finally:
            await sandbox.terminate()

    @staticmethod
    async def run(sandbox: Sandbox, *argv: str, env: dict[str, str] | None = None) -> Ran:
        """A program's status and output."""
        channel = await sandbox.open(argv, env=env)
        try:
            parts = []
            while data := await channel.read(1 << 16):
                parts.append(data)
            status = await channel.wait()
            return Ran(status, b"".join(parts).decode(), channel.stderr_tail)
        finally:
            await channel.aclose()

    @classmethod
    async def python(cls, sandbox: Sandbox, program: str, *arguments: str) -> str:
        """What a program in Python prints; it has to succeed."""
        ran = await cls.run(sandbox, "python3", "-I", "-S", "-c", program, *arguments)
        assert ran.status == 0, ran
        return ran.out.strip()

    @staticmethod
    async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            await asyncio.sleep(0.01)

    @staticmethod
    def argv_of_living(words: Sequence[str]) -> list[str]:
        """The command lines of this host's processes that contain one of the words."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
            if any(word in line for word in words):
                found.append(line)
        return found


@pytest.fixture(scope="session")
def tools() -> type[Tools]:
    return Tools
