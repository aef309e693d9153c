"""A real guest on this host, shared by the tests of a module; each test has a slot of its own."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest_asyncio
from hypothesis import HealthCheck, settings

from hermes_core.plugins import builtin
from hermes_core.sandbox.channels.blocking import AsyncioStreamChannel
from hermes_core.sandbox.commands import ExecutionResult, SlotCommands
from hermes_core.sandbox.contract import Channel, Isolation, Sandbox, SandboxStatus
from hermes_core.sandbox.guest_client.client import GuestClient
from hermes_core.sandbox.guest_client.connection import GuestSettings
from hermes_core.tools.base import CallContext
from hermes_core.tools.registry import ToolRegistry

# On a busy machine an example may well take longer than Hypothesis's deadline.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


class Host(Sandbox):
    """This host as a sandbox, below one directory."""

    def __init__(self, base: Path) -> None:
        self.id = base.name
        self.workspace_base = str(base / "data")
        self.state_dir = str(base / "state")
        self.uid_base = None
        (base / "data").mkdir()
        (base / "state").mkdir(mode=0o700)

    async def open(self, argv: Sequence[str], *, env: Any = None) -> Channel:
        return await AsyncioStreamChannel.spawn(argv, env={"PATH": os.environ["PATH"], **(env or {})})

    async def status(self) -> SandboxStatus:
        return SandboxStatus.RUNNING

    async def terminate(self) -> None:
        pass


@dataclass
class SlotUnderTest:
    """A slot, and the tools as one trajectory calls them."""

    commands: SlotCommands
    path: Path
    ctx: CallContext
    tools: ToolRegistry

    async def result(self, name: str, **args: Any) -> ExecutionResult:
        return await self.tools.call(self.tools.get(name), self.ctx, args)

    async def __call__(self, name: str, **args: Any) -> dict[str, Any]:
        """The answer that the model gets."""
        return (await self.result(name, **args)).to_tool_result()

    def write(self, path: str, content: str | bytes) -> Path:
        target = self.path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
        return target

    def read(self, path: str) -> str:
        return (self.path / path).read_bytes().decode()

    def as_other_trajectory(self, **changes: Any) -> SlotUnderTest:
        ctx = CallContext(**{"trajectory_id": "other", "commands": self.commands, **changes})
        return SlotUnderTest(self.commands, self.path, ctx, self.tools)


def builtin_tools() -> ToolRegistry:
    tools = ToolRegistry()
    builtin.hermes_register_tools(tools)  # type: ignore[arg-type] # it has the same three methods
    return tools


@dataclass
class Guest:
    client: GuestClient
    numbers: itertools.count[int]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guest(tmp_path_factory: Any) -> AsyncIterator[Guest]:
    host = Host(tmp_path_factory.mktemp("host"))
    settings = GuestSettings("lease", "driver", Isolation.SHARED, 200, host.workspace_base, host.state_dir, 30.0)
    client = await GuestClient.start(host, settings)
    yield Guest(client, itertools.count())
    await client.aclose(end_sandbox=True)


@pytest_asyncio.fixture(loop_scope="module")
async def slot(guest: Guest) -> AsyncIterator[SlotUnderTest]:
    index = next(guest.numbers)
    workspace = Path(await guest.client.open_slot(index))
    commands = guest.client.commands(index)
    ctx = CallContext(trajectory_id="t", timeout_s=60, commands=commands)
    yield SlotUnderTest(commands, workspace, ctx, builtin_tools())
    await guest.client.kill_slot(index)
