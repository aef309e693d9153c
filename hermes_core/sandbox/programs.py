"""Programs in a slot that communicate over their standard streams, and a cutter for the lines that they write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from hermes_core.aio import alongside
from hermes_core.errors import HermesError, InfraError
from hermes_core.sandbox.channels.base import CHUNK_BYTES, Inbox
from hermes_core.sandbox.commands import CommandResult, SlotCommands

GRACE_S = 5.0
"""How long a program may take to end after the end of its input, and again after SIGTERM."""

ENDING_S = 2.0
"""How long to wait for a program's exit status after its output has ended."""

_AHEAD_BYTES = 128 << 10
_STDERR_BYTES = 16 << 10
_STDERR_CHARS = 500


class ProgramEnded(Exception):
    """The program has ended, so nothing can be written to it."""


class SlotProgram:
    """A program that runs as one command of a slot. While nobody reads its output, the program has to wait."""

    def __init__(self, commands: SlotCommands) -> None:
        self._commands = commands
        self._output = Inbox()
        self._room = asyncio.Event()
        self._input: asyncio.Queue[bytes | None] = asyncio.Queue(1)
        self._closing = False
        self._running: asyncio.Task[CommandResult]

    @asynccontextmanager
    async def run(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str | None = None
    ) -> AsyncIterator[SlotProgram]:
        """Run the program during the block. At the end of the block, close its input, and kill it if it does not end in
        time."""
        command = self._commands.run(
            argv, cwd=cwd, env=env, stdin=self._lines(), stdout=self._take, output_limit=_STDERR_BYTES
        )
        async with alongside(command) as self._running:
            self._running.add_done_callback(lambda _: self._output.end())
            try:
                yield self
            finally:
                self._closing = True
                self._room.set()
                async with alongside(self._input.put(None)):
                    await asyncio.wait([self._running], timeout=GRACE_S)

    @property
    def result(self) -> CommandResult | None:
        """Return the program's result; None if it has not ended, or was killed at the end of `run`.

        Raises:
            HermesError: the program could not be run, or the sandbox is gone.
        """
        has_result = self._running.done() and not self._running.cancelled()
        return self._running.result() if has_result else None

    async def read(self) -> bytes:
        """Return the next bytes of the program's standard output; `b""` at its end."""
        data = await self._output.take(CHUNK_BYTES)
        self._room.set()
        return data

    async def write(self, data: bytes) -> None:
        """Write to the program's standard input. Waits while the program does not read.

        Raises:
            ProgramEnded: the program has ended.
        """
        async with alongside(self._input.put(data)) as put:
            await asyncio.wait({put, self._running}, return_when=asyncio.FIRST_COMPLETED)
            if self._running.done():
                raise ProgramEnded

    async def ending(self, wait_s: float) -> str:
        """Wait up to `wait_s` seconds for the program's end. Return a description of the end, with the last part of
        standard error; an empty text if the program still runs.

        Raises:
            InfraError: the sandbox is gone.
        """
        await asyncio.wait([self._running], timeout=wait_s)
        if not self._running.done():
            return ""
        try:
            result = self._running.result()
        except InfraError:
            raise
        except HermesError as error:
            return error.message
        end = f"signal {result.signal} ended it" if result.signal else f"it ended with status {result.returncode}"
        return describe_end(end, result.error_text)

    async def _take(self, piece: bytes) -> None:
        if self._closing:  # drop the output, so that the program is not blocked and notices the end of its input
            return
        self._output.feed(piece)
        while len(self._output) >= _AHEAD_BYTES and not self._closing:
            self._room.clear()
            await self._room.wait()

    async def _lines(self) -> AsyncIterator[bytes]:
        while (data := await self._input.get()) is not None:
            yield data


def describe_end(end: str, stderr: str) -> str:
    """Return the description of a program's end, with the last part of its standard error added."""
    text = stderr.strip()[-_STDERR_CHARS:]
    return f"{end}, and wrote: {text}" if text else end


class Flooded(Exception):
    """A program wrote a line that is too long, or a message that can't be read."""


class LineCutter:
    """Cuts a stream into lines of bounded length, in linear time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pieces: list[bytes] = []
        """The pieces of the incomplete last line."""
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Add data. Return the lines that are complete now, without their ends.

        Raises:
            Flooded: a line is longer than the limit.
        """
        *complete, rest = data.split(b"\n")
        lines = []
        for part in complete:
            self._add(part)
            lines.append(b"".join(self._pieces))
            self._pieces, self._size = [], 0
        self._add(rest)
        return lines

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._limit:
            raise Flooded(f"it wrote a message of more than {self._limit} bytes")
        if part:
            self._pieces.append(part)
