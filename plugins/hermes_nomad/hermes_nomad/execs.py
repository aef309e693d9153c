"""A program in an allocation: an exec of Nomad's API over a websocket, and the channel to it.

Nomad's docker driver ends the streams of an exec as soon as its process has ended, also if output is still under way.
And no frame says that the process has begun. So a shell runs the program, and talks to us beside it:

1. It writes a mark to standard error: the program begins.
2. The program ends: it writes the mark and the exit status to standard error. All that follows is only for the output.
3. We write the mark to its standard input, and it writes the mark to standard output: this is the end of the output.
4. It lives until its standard input ends, which it does when we close the websocket.

A program that still runs when the websocket closes goes on: Nomad ends its input, and nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from hermes_core import AsyncStreamChannel, CommandError, TaskSet
from hermes_nomad.api import NomadApi, NomadError, WebSocket, find_part

TASK = "sandbox"
"""The name of a job's group, and of its task."""
START_LIMIT_S = 60.0
"""Seconds until a program must have begun."""
BEAT_S = 10.0
"""Seconds between two heartbeats, so that no proxy finds the connection idle."""
PIECE_BYTES = 48 << 10
"""Maximum size of the data of one frame."""
_MARK_LINE = 64
"""More bytes than a line with our mark has."""
_SHELL = """mark=$1; shift
echo "$mark" >&2
(exec "$@")
echo "$mark $?" >&2
grep -q "$mark" 2>/dev/null || while read -r line; do case $line in *"$mark") break; esac; done
printf %s "$mark"
cat >/dev/null 2>&1 || while read -r line; do :; done"""


async def start_program(
    api: NomadApi, allocation_id: str, namespace: str, argv: Sequence[str], env: Mapping[str, str]
) -> AsyncStreamChannel:
    """Start a program in an allocation. Return the channel to it when it has begun.

    Raises:
        NomadError: Nomad starts no program there.
        CommandError: the arguments are no UTF-8.
    """
    mark = secrets.token_hex(16)
    variables = ["env", *(f"{name}={value}" for name, value in env.items())] if env else []
    command = ["/bin/sh", "-c", _SHELL, "hermes-exec", mark, *variables, *argv]
    try:
        "".join(command).encode()
    except UnicodeEncodeError as error:
        raise CommandError("arguments must be UTF-8: Nomad's API takes no others", code="not_utf8") from error
    query = {"task": TASK, "tty": "false", "command": json.dumps(command), "namespace": namespace}
    program = _Program(await api.open_websocket(f"/v1/client/allocation/{allocation_id}/exec", query), mark.encode())
    try:
        async with asyncio.timeout(START_LIMIT_S):
            await program.begin()
    except TimeoutError as error:
        await program.close()
        raise NomadError(f"the program did not begin within {START_LIMIT_S:.0f} s") from error
    except BaseException:
        await program.close()
        raise
    channel = AsyncStreamChannel(program.read_output, program.write, wait=program.wait, close=program.close)
    program.feed_stderr = channel.feed_stderr
    return channel


class _Program:
    """The shell that runs a program, and what it has said so far."""

    def __init__(self, websocket: WebSocket, mark: bytes) -> None:
        self._websocket, self._mark = websocket, mark
        self._stdout = self._stderr = b""
        self._began = self._reading = self._drained = False
        self._status: int | None = None
        self._failure: NomadError | None = None
        self._over = asyncio.Event()
        self._work = TaskSet()
        self.feed_stderr: Callable[[bytes], None] = lambda data: None

    async def begin(self) -> None:
        """Wait until the program has begun."""
        while not self._began and not self._stdout:  # output may overtake the mark
            await self._take_frame()
        self._work.spawn(self._beat(), "heartbeats of an exec")

    async def read_output(self) -> AsyncGenerator[bytes, None]:
        """Yield the output up to its end. After it was closed, another call continues there."""
        self._reading = True
        await self._hear(b"")
        while not self._drained or self._stdout:
            if data := self._take_output():
                yield data
            elif not self._drained:
                await self._take_frame()

    async def write(self, data: bytes) -> None:
        """Write to the program's standard input."""
        for at in range(0, len(data), PIECE_BYTES):
            piece = base64.b64encode(data[at : at + PIECE_BYTES]).decode()
            await self._websocket.send({"stdin": {"data": piece}})

    async def wait(self) -> int:
        """Return the exit status."""
        await self._over.wait()
        if self._status is None:
            raise self._failure or NomadError("the websocket was closed")
        return self._status

    async def close(self) -> None:
        """Close the websocket. The program lives on."""
        await self._work.aclose()
        await self._websocket.close()

    async def _take_frame(self) -> None:
        try:
            frame = await self._websocket.receive()
            self._stdout += _data(frame, "stdout")
            if heard := _data(frame, "stderr"):
                await self._hear(heard)
            if find_part(frame, "exited", kind=bool):
                self._drained = True
                if self._status is None:
                    raise NomadError(f"the program was killed: {_result(frame)}")
        except NomadError as error:
            self._failure = error
            self.feed_stderr(self._stderr)
            self._over.set()
            raise

    def _take_output(self) -> bytes:
        """Return the output that has arrived, without our mark."""
        data, self._stdout = self._stdout, b""
        if self._status is None:
            return data
        output, found, _ = data.partition(self._mark)
        if found:
            self._drained = True
        elif not self._drained:  # what may be the beginning of the mark waits for the rest
            output, self._stdout = data[: -len(self._mark)], data[-len(self._mark) :]
        return output

    async def _hear(self, data: bytes) -> None:
        """Take standard error: the program's words, and lines with our mark."""
        self._stderr += data
        while self._mark in self._stderr:
            words, _, rest = self._stderr.partition(self._mark)
            line, ended, rest = rest.partition(b"\n")
            if not ended and len(line) < _MARK_LINE:
                return  # the rest of the line is still under way
            self._stderr = rest
            if not ended:
                raise NomadError("the program forged our mark")
            if not self._began:
                self._began = True
                if not self._reading:
                    return  # the rest is heard once there is a channel, which keeps the words
                continue
            self.feed_stderr(words)
            self._status = int(line[:4]) if line[:4].strip().isdigit() else 255
            self._over.set()
            await self.write(self._mark + b"\n")
        self.feed_stderr(self._stderr[:-_MARK_LINE])
        self._stderr = self._stderr[-_MARK_LINE:]

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self._websocket.send({})


def _data(frame: Any, name: str) -> bytes:
    """Return the bytes of one of the streams in a frame."""
    try:
        return base64.b64decode(find_part(frame, name, "data", kind=str))
    except ValueError as error:
        raise NomadError("a frame of the exec is malformed") from error


def _result(frame: Any) -> str:
    return f"exit status {find_part(frame, 'result', 'exit_code', kind=int)}"
