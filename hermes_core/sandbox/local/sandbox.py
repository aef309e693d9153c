"""A local sandbox for its driver: opens channels into it, asks for its status, ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hermes_core.errors import ChannelLost, SandboxLost
from hermes_core.sandbox.channels.blocking import AsyncioStreamChannel
from hermes_core.sandbox.contract import Channel, Sandbox, SandboxStatus
from hermes_core.sandbox.local import host, processes
from hermes_core.sandbox.local.host import SandboxRecord
from hermes_core.sandbox.local.launch import launcher_argv, request_file


class LocalSandbox(Sandbox):
    """A process tree on this host, and its directory. Made by `LocalBackend`.

    Args:
        place: the directory with the directories of all sandboxes.
    """

    def __init__(self, place: str, record: SandboxRecord) -> None:
        self.id = record.sandbox_id
        self.record = record
        self.directory = Path(place, record.sandbox_id)
        self.uid_base = record.uid_base
        self.slot_root = record.slot_root
        self.workspace_base = host.workspace_base(place, record)
        self.state_dir = f"{self.workspace_base}/.hermes"
        self._place = place

    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        """Start `argv` in the sandbox, with the environment that `host.entry` describes. The program goes on when the
        channel is closed."""
        if not host.runs(self._place, self.id):
            raise SandboxLost("the sandbox has ended", hint="create another one", sandbox_id=self.id)
        try:
            with request_file(self._entry(argv, env or {})) as descriptor:
                return await AsyncioStreamChannel.spawn(
                    launcher_argv("enter", descriptor), env={}, pass_fds=(descriptor,)
                )
        except OSError as error:
            raise ChannelLost(f"a channel into the sandbox can't be opened: {error}", sandbox_id=self.id) from error

    def _entry(self, argv: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
        """Return the launcher's request to start a program in the sandbox."""
        return host.entry(self._place, self.record, argv, env)

    async def status(self) -> SandboxStatus:
        """Return RUNNING while its supervisor lives, and GONE when its directory was removed."""
        processes.reap(self.record.supervisor)
        return SandboxStatus(host.status(self._place, self.id))

    async def terminate(self) -> None:
        """Kill all processes of the sandbox, and remove its directory."""
        await asyncio.to_thread(host.end, self._place, self.record)
