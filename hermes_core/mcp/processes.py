"""Programs of MCP servers, in a slot or on the driver: runs them, and connects their standard streams."""

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
"""The driver's environment variables that servers' programs on the driver get. Others may be secret."""


class ServerProcess(Protocol):
    """A running program with its standard input and output."""

    async def read(self) -> bytes:
        """Return the next bytes of the program's output; empty when the program has ended."""

    async def write(self, data: bytes) -> None:
        """Write to the program's input, and wait while the program does not read.

        Raises:
            ProgramEnded: the program has ended.
        """

    async def ending(self, wait_s: float) -> str:
        """Return a text that says how the program ended, with the end of its standard error; empty if the program still
        runs after `wait_s` seconds.

        Raises:
            InfraError: the sandbox in which the program ran is gone.
        """


@asynccontextmanager
async def running(server: McpServer, commands: SlotCommands | None) -> AsyncIterator[ServerProcess]:
    """Run a server's program while the block runs: in a slot, or on the driver if `commands` is None.

    At the end of the block, the program's input is closed. If the program does not end in time, it is killed together
    with all processes that it has started.

    Raises:
        CommandError: the driver can't start the program.
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
        await asyncio.sleep(_LOOK_S)  # the end of its standard error may still arrive
        status = self._process.returncode or 0
        how = f"signal {-status} ended it" if status < 0 else f"it ended with status {status}"
        return describe_end(how, self._tail.text())

    async def keep_errors(self) -> None:
        """Read the program's standard error, and keep its end."""
        while data := await self._stderr.read(CHUNK_BYTES):
            self._tail.feed(data)

    async def end(self) -> None:
        """Close the program's input, then end the program and all processes that it has started."""
        self._stdin.close()
        async with alongside(self._drain()):
            if not await self._wait_end(GRACE_S):
                self._signal(signal.SIGTERM)
                await self._wait_end(GRACE_S)
            self._signal(signal.SIGKILL)  # also kills processes that the program has left in its group
            with contextlib.suppress(OSError):  # no /proc
                await asyncio.to_thread(kill_marked, self._mark)  # kills processes that have left the group
            await self._wait_end(GRACE_S)
        # A process without the mark may hold the pipes open, and then asyncio would never close them.
        if (transport := getattr(self._process, "_transport", None)) is not None:
            transport.close()

    async def _drain(self) -> None:
        """Read and drop the program's further output, because a program that is blocked by a full pipe does not notice
        the end of its input."""
        while await self._stdout.read(CHUNK_BYTES):
            pass

    async def _wait_end(self, limit_s: float) -> bool:
        """Return whether the program ends in time. `Process.wait` would also wait for other processes that hold the
        program's pipes open."""
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
