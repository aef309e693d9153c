"""Implements `SlotCommands` in the direct mode, with `sh`."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from hermes_core.errors import ChannelLost, CommandError
from hermes_core.sandbox.commands import (
    Call,
    Command,
    CommandResult,
    Forward,
    LogChunk,
    ProcessStatus,
    Serve,
    WindowSize,
    operation,
)
from hermes_core.sandbox.contract import Channel
from hermes_core.sandbox.direct import sh
from hermes_core.sandbox.direct.files import CLEAR, ScriptedFiles, with_path
from hermes_core.sandbox.direct.run import GRACE_S, RunningCommand, exit_or_signal
from hermes_core.sandbox.guest.background import KEEP_S, MOST
from hermes_core.sandbox.linux.output import Rolling

MAX_WORD = 100_000
"""Maximum number of bytes of a command line that is passed as one argument. A longer one is written to a file first."""


@dataclass(eq=False)
class _Process:
    """A background process. It lives as long as its channel."""

    process_id: str
    command: str
    cwd: str
    mark: str
    channel: Channel
    output: Rolling
    started_at: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by its next output, and by its end."""
    exit_code: int | None = None
    signal: int | None = None
    lifetime: float = 0.0

    def end(self, status: int) -> None:
        self.lifetime = time.monotonic() - self.began
        self.exit_code, self.signal = exit_or_signal(status)
        self.ended.set()
        self.changed.set()

    def feed(self, data: bytes) -> None:
        if data:
            self.output.feed(data)
            self.changed.set()

    async def more(self, limit_s: float) -> None:
        """Wait for output, for the end, or until the time limit."""
        self.changed.clear()
        if not self.ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), limit_s)

    async def end_within(self, limit_s: float | None) -> ProcessStatus:
        """Wait for the end, or until the time limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.ended.wait()
        return self.status()

    def status(self) -> ProcessStatus:
        running = not self.ended.is_set()
        return ProcessStatus(
            process_id=self.process_id,
            command=self.command,
            cwd=self.cwd,
            pid=None,
            started_at=self.started_at,
            running=running,
            exit_code=self.exit_code,
            signal=self.signal,
            output_bytes=self.output.total,
            uptime_s=time.monotonic() - self.began if running else self.lifetime,
        )


@dataclass(eq=False)
class DirectSlot:
    """The state of one slot, which all of its `DirectCommands` share."""

    workspace: str
    scratch: str
    """The directory of the slot's home and temporary files."""
    mark: str
    """The prefix of the marks in the environments of the slot's processes. A mark ends with its command's number."""
    used: bool = False
    """Whether any command ran since the last reset."""
    processes: dict[str, _Process] = field(default_factory=dict)
    starting: int = 0

    @property
    def directories(self) -> tuple[str, str]:
        """Return the workspace, and the directory of the home and temporary files."""
        return self.workspace, self.scratch

    def make_room(self) -> None:
        """Remove processes that ended long ago. If there is still no room, remove those that ended first.

        Raises:
            CommandError: the maximum number of processes is running.
        """
        now = time.monotonic()
        ended = [process for process in self.processes.values() if process.ended.is_set()]
        for process in sorted(ended, key=lambda each: each.began + each.lifetime):
            if self._full() or now - process.began - process.lifetime > KEEP_S:
                del self.processes[process.process_id]
        if self._full():
            raise CommandError(f"{MOST} background processes run already", code="too_many")

    def _full(self) -> bool:
        return len(self.processes) + self.starting >= MOST

    async def forget_processes(self) -> None:
        """Forget its background processes, which were killed with the slot."""
        for process in self.processes.values():
            await process.channel.aclose()
        self.processes.clear()


class DirectCommands(ScriptedFiles):
    """The commands of one slot.

    Args:
        environment: environment variables of every command.
        call: carries out each operation.
        cwd: the directory for relative paths, absolute or relative to the workspace.
    """

    def __init__(
        self, shell: sh.Shell, environment: Mapping[str, str], slot: DirectSlot, call: Call, cwd: str = ""
    ) -> None:
        super().__init__(slot.workspace, call, cwd)
        self._aside = f"{slot.scratch}/run/"
        self._shell = shell
        self._base_environment = environment
        self._slot = slot

    def forward(self, serve: Serve, *, port: int | None = None, most: int = 64) -> AbstractAsyncContextManager[Forward]:
        """Raise CommandError, because only a guest can carry connections."""
        message = "a sandbox without a guest opens no port for the driver"
        raise CommandError(message, code="no_forward", hint="use an image with python3, and a slot that is not root")

    # --- commands ---------------------------------------------------------------------------------------------------

    async def _run(self, command: Command) -> CommandResult:
        """Run a command and wait for its end. Spooling is not supported here, so `spool_path` stays None."""
        run = await self._prepare(command)
        return await run.result(command)

    async def _prepare(self, command: Command) -> RunningCommand:
        if command.pty is not None:
            message = "a sandbox without Python gives no terminal"
            raise CommandError(message, code="no_pty", hint="leave out pty, or use an image with python3")
        argv, path, env = await self._argv(command.args), self._path(command.cwd or "."), self._environment(command.env)
        return RunningCommand(self._shell, argv, path, env, mark=self._slot.mark, scratch=self._slot.scratch)

    async def _argv(self, args: str | Sequence[str]) -> list[str]:
        self._slot.used = True
        if not isinstance(args, str):
            sh.check_words(*args)
            if not args:
                raise CommandError("the command is empty", code="invalid")
            return list(args)
        sh.check_words(args)
        text = args.encode("utf-8", "surrogateescape")
        if len(text) <= MAX_WORD:
            return [self._shell.program, "-c", args]
        path = f"{self._slot.scratch}/run/{self._shell.next_number()}.sh"
        await self._write(path, text)
        return [self._shell.program, path]

    def _environment(self, env: Mapping[str, str] | None) -> dict[str, str]:
        sh.check_words(*(env or {}).keys(), *(env or {}).values())
        return {
            "HOME": f"{self._slot.scratch}/home",
            "TMPDIR": f"{self._slot.scratch}/tmp",
            "USER": "slot",
            "LOGNAME": "slot",
            **self._base_environment,
            **(env or {}),
        }

    def _path(self, path: str) -> str:
        if not path:
            raise CommandError("a path has at least one character", code="invalid")
        sh.check_words(path)
        return posixpath.join(self.workspace_dir, self.cwd, path)

    # --- background processes ---------------------------------------------------------------------------------------

    async def _start(self, command: Command) -> ProcessStatus:
        """Start a background process on a channel of its own. Spooling is not supported here."""
        self._slot.make_room()
        self._slot.starting += 1
        try:
            run = await self._prepare(command)
            channel, token, output = await run.open_background()
        finally:
            self._slot.starting -= 1
        process = _Process(
            process_id=f"proc_{secrets.token_hex(6)}",
            command=command.line,
            cwd=run.cwd,
            mark=run.mark,
            channel=channel,
            output=Rolling(command.output_limit),
        )
        self._slot.processes[process.process_id] = process
        self._shell.work.spawn(self._follow(process, token, output), f"process {process.process_id}")
        return process.status()

    async def _follow(self, process: _Process, token: str, output: bytes) -> None:
        status = 128 + 9
        try:
            status = int((await sh.until_token(process.channel, token, process.feed, output)).rest)
        except (sh.Ended, ChannelLost):
            pass
        finally:
            process.end(status)
            await process.channel.aclose()

    def _process(self, process_id: str) -> _Process:
        try:
            return self._slot.processes[process_id]
        except KeyError:
            raise CommandError(f"there is no background process {process_id!r}", code="unknown_process") from None

    @operation
    async def processes(self) -> Sequence[ProcessStatus]:
        """Return the slot's background processes, oldest first."""
        return [process.status() for process in self._slot.processes.values()]

    @operation
    async def poll(self, process_id: str) -> ProcessStatus:
        """Return one background process."""
        return self._process(process_id).status()

    @operation
    async def log(
        self, process_id: str, *, offset: int = 0, limit: int = 200_000, wait_s: float | None = None
    ) -> LogChunk:
        """Return the output of a background process from a byte offset on."""
        process = self._process(process_id)
        output = process.output
        if wait_s and output.total <= offset:
            await process.more(wait_s)
        data, begin = output.read(offset, limit)
        dropped = max(0, output.start - max(offset, 0))
        return LogChunk(data, begin, output.total, dropped, not process.ended.is_set())

    @operation
    async def wait(self, process_id: str, *, timeout_s: float | None = None) -> ProcessStatus:
        """Wait until a background process ends, or until the time limit."""
        return await self._process(process_id).end_within(timeout_s)

    @operation
    async def write(self, process_id: str, data: bytes, *, eof: bool = False) -> int:
        """Write to the standard input of a background process, which can't be closed here."""
        process = self._process(process_id)
        if eof:
            raise CommandError("input can't be ended in a sandbox without Python", hint="kill the process instead")
        if process.ended.is_set():
            raise CommandError("the process has ended")
        await process.channel.write(data)
        return len(data)

    @operation
    async def resize(self, process_id: str, size: WindowSize) -> ProcessStatus:
        """Raise CommandError, because there are no terminals here."""
        self._process(process_id)
        raise CommandError("the process has no terminal", code="no_pty")

    @operation
    async def kill(self, process_id: str, *, grace_s: float = 2.0) -> ProcessStatus:
        """Send TERM, then KILL after the grace period, to the process and everything that it started."""
        process = self._process(process_id)
        if not process.ended.is_set():
            await self._shell.kill(f"HERMES_DIRECT={process.mark}", "TERM", rounds=1)
            await process.end_within(grace_s)
        await self._shell.kill(f"HERMES_DIRECT={process.mark}", "KILL")
        return await process.end_within(GRACE_S)

    # --- files ------------------------------------------------------------------------------------------------------

    async def _file(self, script: str, path: str, *args: str, stdin: bytes = b"", limit: int = 1 << 20) -> bytes:
        self._slot.used = True
        try:
            return await self._shell.script(*with_path(script, self._path(path)), *args, stdin=stdin, limit=limit)
        except CommandError as error:
            raise CommandError(f"{path}: {error.message}", code=error.code, hint=error.hint) from error

    @operation
    async def clear(self, keep: Sequence[str] = ()) -> None:
        """Remove all files of the slot, except some entries of its workspace."""
        await self._file(CLEAR, ".", f"{self._slot.scratch}/home", f"{self._slot.scratch}/tmp", *keep)
