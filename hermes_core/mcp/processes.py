"""Programs of MCP servers: their standard streams in a slot or on the driver, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from hermes_core.aio import alongside, complete
from hermes_core.errors import CommandError
from hermes_core.mcp.servers import McpServer
from hermes_core.sandbox.channels.base import CHUNK_BYTES, Tail
from hermes_core.sandbox.commands import SlotCommands
from hermes_core.sandbox.local.processes import MARKER, kill_marked
from hermes_core.sandbox.programs import GRACE_S, ProgramEnded, SlotProgram, describe_end

_LOOK_S = 0.02
_INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
"""Variables of the driver that its programs get. Others may be secret."""


class ServerProcess(Protocol):
    """A running program with its standard input and output."""

    async def read(self) -> bytes:
        """Return the next bytes of its output; none when it has ended."""

    async def write(self, data: bytes) -> None:
        """Write to its input, and wait while it does not read.

        Raises:
            ProgramEnded: it has ended.
        """

    async def ending(self, wait_s: float) -> str:
        """Return how it ended, in words, with the end of what it wrote to standard error; empty if it still runs after
        so many seconds.

        Raises:
            InfraError: the sandbox that it ran in is gone.
        """


@asynccontextmanager
async def running(server: McpServer, commands: SlotCommands | None) -> AsyncIterator[ServerProcess]:
    """Run a server's program while the block runs: in a slot, or on the driver if `commands` is None.

    At the end its input is ended. If it does not end in time, it is killed with all that it has started.

    Raises:
        CommandError: the driver can't start it.
    """
    assert server.command is not None
    argv = [server.command, *server.args]
    if commands is None:
        async with _on_driver(argv, server.env, server.cwd) as program:
            yield program
        return
    async with SlotProgram(commands).run(argv, server.env, server.cwd) as in_slot:
        yield in_slot


class _OnDriver:
    """A program in a process group of its own, on the driver's host.

    Args:
        mark: the mark in the environment of the program and of all processes that it starts.
    """

    def __init__(self, process: asyncio.subprocess.Process, mark: str) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._process = process
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._mark = mark
        self._tail = Tail()

    async def read(self) -> bytes:
        return await self._stdout.read(CHUNK_BYTES)

    async def write(self, data: bytes) -> None:
        try:
            self._stdin.write(data)
            await self._stdin.drain()
        except (ConnectionError, RuntimeError) as error:
            raise ProgramEnded from error

    async def ending(self, wait_s: float) -> str:
        if not await self._wait_end(wait_s):
            return ""
        await asyncio.sleep(_LOOK_S)  # for the last of its standard error
        status = self._process.returncode or 0
        how = f"signal {-status} ended it" if status < 0 else f"it ended with status {status}"
        return describe_end(how, self._tail.text())

    async def keep_errors(self) -> None:
        """Read its standard error, and keep the end of it."""
        while data := await self._stderr.read(CHUNK_BYTES):
            self._tail.feed(data)

    async def end(self) -> None:
        """End its input, then the program and everything that it has started."""
        self._stdin.close()
        async with alongside(self._drain()):
            if not await self._wait_end(GRACE_S):
                self._signal(signal.SIGTERM)
                await self._wait_end(GRACE_S)
            self._signal(signal.SIGKILL)  # also what it has left running
            with contextlib.suppress(OSError):  # no /proc
                await asyncio.to_thread(kill_marked, self._mark)  # and what has left its group
            await self._wait_end(GRACE_S)
        # A process without the mark may hold the pipes open, and asyncio then would never close them.
        if (transport := getattr(self._process, "_transport", None)) is not None:
            transport.close()

    async def _drain(self) -> None:
        """Read and drop what the program still writes: blocked on a full pipe, it would not notice the end of its
        input."""
        while await self._stdout.read(CHUNK_BYTES):
            pass

    async def _wait_end(self, limit_s: float) -> bool:
        """Return whether it ends in time. `Process.wait` would also wait for others that hold its pipes open."""
        for _ in range(math.ceil(limit_s / _LOOK_S)):
            if self._process.returncode is not None:
                break
            await asyncio.sleep(_LOOK_S)
        return self._process.returncode is not None

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


@asynccontextmanager
async def _on_driver(argv: Sequence[str], env: Mapping[str, str], cwd: str | None) -> AsyncIterator[_OnDriver]:
    directory = None if cwd is None else os.path.expanduser(cwd)  # noqa: ASYNC240, PTH111 - only text is changed
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    mark = f"mcp-{uuid.uuid4().hex}"
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**inherited, **env, MARKER: mark},
            cwd=directory,
            start_new_session=True,
        )
    )
    try:
        await asyncio.wait([starting])
    except asyncio.CancelledError:
        await complete(_undo(starting, mark))
        raise
    try:
        program = _OnDriver(starting.result(), mark)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CommandError(f"{argv[0]!r} can't be started: {reason}", code="not_found") from error
    try:
        async with alongside(program.keep_errors()):
            yield program
    finally:
        await complete(program.end())


async def _undo(starting: asyncio.Task[asyncio.subprocess.Process], mark: str) -> None:
    """End a program that was being started when its caller was cancelled."""
    await asyncio.wait([starting])
    if starting.exception() is None:
        await _OnDriver(starting.result(), mark).end()
