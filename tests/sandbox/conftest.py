"""Guests on this host without a backend: a directory, a user id block, and a channel that can be cut."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from hermes_core.errors import ChannelLost
from hermes_core.sandbox import uids
from hermes_core.sandbox.channels.blocking import AsyncioStreamChannel
from hermes_core.sandbox.commands import SlotCommands
from hermes_core.sandbox.contract import Channel, Isolation, Sandbox, SandboxStatus
from hermes_core.sandbox.guest_client.client import GuestClient
from hermes_core.sandbox.guest_client.connection import GuestSettings
from hermes_core.sandbox.linux.probe import probe_process
from hermes_core.sandbox.local import processes

ROOT = os.geteuid() == 0
SYSTEM_PYTHON = "/usr/bin/python3"
_PROBED = probe_process()
_NAMESPACES = _PROBED["namespaces"] if ROOT else _PROBED["namespaces"] or _PROBED["user_namespaces"]
_MISSING = {
    "user": None if ROOT else "a uid per slot takes root",
    "namespace": None if _NAMESPACES else f"no namespaces: {_PROBED['reason']}",
}
_FAST = next((level for level, missing in _MISSING.items() if missing is None), "shared")
"""The level that whoever runs the tests would get. What does not depend on the level is `full` at the next stronger
one, and `stress` at `shared`, where a slot is the same with less around it."""


def _level(name: str) -> Any:
    missing = _MISSING.get(name)
    marks = [] if missing is None else [pytest.mark.skipif(True, reason=missing)]
    elsewhere = pytest.mark.stress if name == "shared" else pytest.mark.full
    return pytest.param(name, marks=marks if name == _FAST else [*marks, elsewhere])


LEVELS = [_level(name) for name in ("shared", "user", "namespace")]
OWN = LEVELS[1:]
"""The levels at which a slot's processes are its own: never `kill -9 -1` at `shared`."""


class HostSandbox(Sandbox):
    """This host as a sandbox, in a directory that every user can reach."""

    def __init__(self, python: str = sys.executable) -> None:
        self.id = f"test-{uuid.uuid4().hex[:12]}"
        self.python = python
        # Not below /tmp, of which slots may have their own.
        self.base = tempfile.mkdtemp(prefix="hermes-guest-", dir="/srv" if ROOT else Path.home())
        os.chmod(self.base, 0o755)
        self.workspace_base = self.base + "/data"
        self.state_dir = self.base + "/state"
        self.channels: list[AsyncioStreamChannel] = []
        self.reachable = True
        self.running = True
        self._block = uids.reserve() if ROOT else uids.UidBlock()
        self.uid_base = self._block.uid_base

    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        if not self.reachable:
            raise ChannelLost("unplugged")
        own = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TOKEN": "token-of-the-sandbox"}
        environment = {**own, processes.MARKER: self.id, **(env or {})}
        channel = await AsyncioStreamChannel.spawn([self.python, *argv[1:]], env=environment)
        self.channels.append(channel)
        return channel

    def cut(self) -> None:
        """Break the channel that is open now, in the middle of whatever it carries."""
        transport = self.channels[-1]._transport
        assert transport is not None
        if transport.get_returncode() is None:
            transport.kill()

    async def status(self) -> SandboxStatus:
        return SandboxStatus.RUNNING if self.running else SandboxStatus.ENDED

    async def terminate(self) -> None:
        """Everything that the test left, whatever has become of the guest."""
        await asyncio.to_thread(processes.kill_marked, self.id)
        self._block.close()
        shutil.rmtree(self.base, ignore_errors=True)

    def settings(self, level: str, **changes: Any) -> GuestSettings:
        settings = GuestSettings(
            creation_id=self.id,
            driver_id="driver",
            isolation=Isolation.parse(level),
            slots=16,
            workspace_base=self.workspace_base,
            state_dir=self.state_dir,
            orphan_ttl_s=20.0,
            uid_base=self.uid_base,
            max_processes=256,
        )
        return replace(settings, **changes)


class Rig:
    """A guest, its client, and slots that no other test uses."""

    def __init__(self, sandbox: HostSandbox, client: GuestClient, level: str) -> None:
        self.sandbox = sandbox
        self.client = client
        self.level = level
        self._next = 0

    async def slot(self) -> SlotCommands:
        """The commands of a slot of its own."""
        return self.client.commands(await self.index())

    async def index(self) -> int:
        """A slot of its own."""
        index, self._next = self._next, self._next + 1
        await self.client.open_slot(index)
        return index

    @property
    def guest_pid(self) -> int:
        """The guest's process."""
        return guest_pid(self.sandbox)


def guest_pid(sandbox: HostSandbox) -> int:
    """The first process of the sandbox that carries no channel. Who isn't root can't see all of its children."""
    bridges = {channel._transport.get_pid() for channel in sandbox.channels if channel._transport is not None}
    started = {}
    for pid in processes.find_marked(sandbox.id):
        try:
            started[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        except OSError:
            continue
    return min(started.keys() - bridges, key=lambda pid: (started[pid], pid))


@asynccontextmanager
async def rigged(level: str, python: str = sys.executable, **changes: Any) -> AsyncIterator[Rig]:
    """A guest for the time of the block."""
    sandbox = HostSandbox(python)
    try:
        client = await GuestClient.start(sandbox, sandbox.settings(level, **changes))
        try:
            yield Rig(sandbox, client, level)
        finally:
            await client.aclose(end_sandbox=True)
    finally:
        await sandbox.terminate()


@pytest.fixture(name="rigged", scope="session")
def _rigged() -> Any:
    """`async with rigged("user", slots=4) as rig:` a guest of the test's own."""
    return rigged


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    """Each level that this host can grant."""
    return request.param


@pytest.fixture(scope="session")
def host_sandbox() -> type[HostSandbox]:
    return HostSandbox


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rigs() -> AsyncIterator[Any]:
    """One guest for each level that a module's tests ask for, shared by them."""
    opened: dict[str, tuple[Any, Rig]] = {}

    async def get(level: str) -> Rig:
        if level not in opened:
            context = rigged(level, slots=200)
            opened[level] = (context, await context.__aenter__())
        return opened[level][1]

    yield get
    for context, _ in opened.values():
        await context.__aexit__(None, None, None)


@pytest_asyncio.fixture(loop_scope="module", params=LEVELS)
async def rig(request: pytest.FixtureRequest, rigs: Any) -> Rig:
    """The module's guest at each level in turn."""
    return await rigs(request.param)


@pytest_asyncio.fixture(loop_scope="module", params=OWN)
async def own_rig(request: pytest.FixtureRequest, rigs: Any) -> Rig:
    """The module's guest at each level at which a slot's processes are its own."""
    return await rigs(request.param)


@pytest_asyncio.fixture(loop_scope="module")
async def slot(rig: Rig) -> SlotCommands:
    """A slot of its own of the module's guest, at each level in turn."""
    return await rig.slot()
