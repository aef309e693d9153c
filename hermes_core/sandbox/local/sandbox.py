"""A local sandbox as its driver holds it: opening channels into it, asking how it is, ending it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from hermes_core.errors import ChannelLost, InfraError, SandboxLost
from hermes_core.sandbox.channels.blocking import AsyncioStreamChannel
from hermes_core.sandbox.contract import Channel, Sandbox, SandboxStatus
from hermes_core.sandbox.local import directories, lifetimes, processes, view
from hermes_core.sandbox.local.launch import launcher_argv, request_file
from hermes_core.sandbox.local.records import Record

_END_S, _KILL_S = 30.0, 5.0


class LocalSandbox(Sandbox):
    """A process tree of this host, and its directory. Made by `LocalBackend`."""

    def __init__(self, record: Record, directory: Path) -> None:
        self.id = record.sandbox_id
        self.record = record
        self.directory = directory
        self.uid_base = record.uid_base
        """The first of 512 user ids that are this sandbox's alone on this host; None if we are not to give any."""
        if not record.isolated:
            self.workspace_base = str(directory / directories.DATA)
            self.state_dir = f"{self.workspace_base}/.hermes"

    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        """Start `argv` in the sandbox; `python3` is the interpreter that runs us.

        Its environment is PATH, LANG, HERMES_SANDBOX_ID, the sandbox's own, and `env`: nothing of ours. It lives on
        when the channel is closed.
        """
        if not directories.held(str(self.directory)):
            raise SandboxLost("the sandbox has ended", hint="create another one", sandbox_id=self.id)
        command = [view.interpreter() if argv[0] == "python3" else argv[0], *argv[1:]]
        given = {processes.MARKER: self.id, **self.record.environment, **(env or {})}
        request = {
            "isolated": self.record.isolated,
            "init": self.record.init,
            "command": command,
            "environment": view.base_environment(given),
            "directory": self.workspace_base,
        }
        try:
            with request_file(request) as descriptor:
                return await AsyncioStreamChannel.spawn(
                    launcher_argv("enter", descriptor), env={}, pass_fds=(descriptor,)
                )
        except OSError as error:
            raise ChannelLost(f"a channel into the sandbox can't be opened: {error}", sandbox_id=self.id) from error

    async def status(self) -> SandboxStatus:
        """Running as long as its supervisor lives; gone with its directory."""
        lifetimes.reap(self.record.supervisor)
        if directories.held(str(self.directory)):
            return SandboxStatus.RUNNING
        return SandboxStatus.ENDED if self.directory.exists() else SandboxStatus.GONE

    async def terminate(self) -> None:
        """End it: every process killed, its directory removed."""
        await end(self.record, self.directory)


async def end(record: Record, directory: Path) -> None:
    """End a sandbox and remove what it had. Idempotent.

    Raises:
        InfraError: something of it can't be killed or removed.
    """
    supervisor = record.supervisor
    if processes.alive(*supervisor):
        lifetimes.send(supervisor, signal.SIGTERM)
        if not await lifetimes.gone(supervisor, _END_S):
            lifetimes.send(supervisor, signal.SIGKILL)
            await lifetimes.gone(supervisor, _KILL_S)
    lifetimes.reap(supervisor)
    if not await asyncio.to_thread(_remove_remains, record, directory):
        raise InfraError(
            "the sandbox's supervisor can't be ended from here",
            hint=f"it is process {supervisor[0]}, perhaps of another pid namespace",
            sandbox_id=record.sandbox_id,
        )


def _remove_remains(record: Record, directory: Path) -> bool:
    """Do what a supervisor that was itself killed could not; False if a supervisor lives after all."""
    if not directory.exists():
        return True
    if not record.isolated:
        processes.kill_marked(record.sandbox_id)
    directories.discard_dead(str(directory))
    return not directories.held(str(directory))
