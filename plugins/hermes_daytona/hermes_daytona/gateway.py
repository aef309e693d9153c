"""The way into a sandbox: one connection to Daytona's SSH gateway, and a session in it for each program.

Of Daytona's ways to start a program, only SSH is a binary stream that waits for slow readers: a terminal's stream drops
them, and a session's log is text. The gateway does not forward standard error, though, and may drop the exit status. So
a program leaves both in files of the sandbox, which a second session reads at its end.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import asyncssh

from hermes_core import AsyncStreamChannel, CommandError, SingleFlight, TaskSet
from hermes_daytona.service import UNTRUSTED, ServiceFailed, SshAccess

asyncssh.set_log_level(logging.WARNING)  # the library logs tokens and commands

CONNECT_LIMIT_S = 30.0
OPEN_LIMIT_S = 30.0
KEEPALIVE_S, KEEPALIVES = 5, 2
"""Seconds between keep-alives, and how many of them may stay without an answer."""
CHUNK_BYTES = 1 << 18
ANSWER_BYTES = 1 << 16
"""Maximum size of what one of our own scripts prints."""
COMMAND_BYTES = 120_000
"""Maximum size of a command. Linux allows 128 KiB for one argument, and the gateway gives the command to `sh -c`."""

CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "chacha20-poly1305@openssh.com", "aes256-ctr")
"""The fastest ones first."""

_SETTINGS: Mapping[str, Any] = {
    "config": None,
    "client_keys": None,
    "agent_path": None,
    "gss_host": None,
    "compression_algs": ["none"],
    "keepalive_interval": KEEPALIVE_S,
    "keepalive_count_max": KEEPALIVES,
}
"""Neither the configuration nor the keys of the driver's user are read: a token is all that it takes."""

_PROGRAM = """
end=$1
shift
{ { "$@"; echo $? >"$end.status"; } 2>&1 >&3 3>&- | tail -c 8192 >"$end.words"; } 3>&1
read -r status <"$end.status"
exit "$status"
"""
"""Runs a program, and leaves its exit status and the end of its standard error in files."""

_END = """
read -r status <"$1.status" || exit
echo "$status"
cat "$1.words"
rm -f "$1.status" "$1.words"
"""
"""Prints the files that a program has left, and removes them."""

FAILURES = (asyncssh.Error, OSError, TimeoutError)
"""The errors that a session may raise."""


class Gateway:
    """The connection to one sandbox. It is made when it is first used, and again after it was lost.

    Args:
        grant: returns a fresh token.
        ends: a directory of the sandbox for the files that programs leave.
    """

    def __init__(self, grant: Callable[[], Awaitable[SshAccess]], ends: str) -> None:
        self._grant, self._ends = grant, ends
        self._work = TaskSet()
        self._connection: SingleFlight[Any] = SingleFlight("the connection to a sandbox", keep=True)

    async def open(self, argv: Sequence[str], env: Mapping[str, str]) -> ProgramChannel:
        """Start a program, and return the stream to it."""
        end = f"{self._ends}/{uuid.uuid4().hex}"
        variables = [f"{name}={value}" for name, value in env.items()]
        program = ["env", *variables, "/bin/sh", "-c", 'exec "$@"', "sh", *argv]
        process = await self._start(["/bin/sh", "-c", _PROGRAM, "hermes-program", end, *program])
        return ProgramChannel(process, lambda: self.run(_END, end))

    async def run(self, script: str, *arguments: str) -> str:
        """Run a script of ours, and return what it prints."""
        async with asyncio.timeout(OPEN_LIMIT_S):
            process = await self._start(["/bin/sh", "-c", script, "hermes", *arguments])
            try:
                process.stdin.write_eof()
                parts, size = [], 0
                while (data := await process.stdout.read(ANSWER_BYTES)) and size < ANSWER_BYTES:
                    parts.append(data)
                    size += len(data)
            finally:
                process.close()
        return b"".join(parts).decode("utf-8", "replace")

    async def _start(self, argv: Sequence[str]) -> Any:
        command = shlex.join(argv)
        try:
            size = len(command.encode())
        except UnicodeEncodeError as error:
            raise CommandError("arguments must be UTF-8: SSH takes no others", code="not_utf8") from error
        if size > COMMAND_BYTES:
            raise CommandError(f"a command has {size} bytes, and {COMMAND_BYTES} are possible", code="too_large")
        async with asyncio.timeout(OPEN_LIMIT_S):
            opening = self._work.spawn(self._open_session(command), "opening a session")
            try:
                return await asyncio.shield(opening)
            except asyncio.CancelledError:
                opening.add_done_callback(_close_late)
                raise

    async def _open_session(self, command: str) -> Any:
        connection = await self._connect()
        return await connection.create_process(command, encoding=None, stderr=asyncssh.DEVNULL)

    async def _connect(self) -> Any:
        kept = self._connection.kept.get(None)
        if kept is not None and kept.is_closed():
            del self._connection.kept[None]
        return await self._connection.get(self._work, self._log_in)

    async def _log_in(self) -> Any:
        access = await self._grant()
        try:
            keys = [asyncssh.import_public_key(key) for key in access.host_keys]
        except asyncssh.KeyImportError as error:
            raise ServiceFailed(f"the key of the SSH gateway is not understood: {error}", 502) from error
        try:
            return await asyncssh.connect(
                access.host,
                access.port,
                username=access.token,
                known_hosts=(keys, [], []),
                encryption_algs=CIPHERS,
                connect_timeout=CONNECT_LIMIT_S,
                login_timeout=CONNECT_LIMIT_S,
                **_SETTINGS,
            )
        except asyncssh.HostKeyNotVerifiable as error:
            raise ServiceFailed(
                f"SSH gateway {access.host} has another key than it should: {error}", UNTRUSTED
            ) from error

    def drop(self) -> None:
        """Give up the connection, which does not answer. The next program gets another one."""
        if (connection := self._connection.kept.pop(None, None)) is not None:
            connection.abort()

    async def aclose(self) -> None:
        """Close the connection. Programs go on."""
        await self._work.aclose()
        if (connection := self._connection.kept.pop(None, None)) is not None:
            connection.abort()
            await connection.wait_closed()


def _close_late(opening: asyncio.Task[Any]) -> None:
    """Close a session that nobody waits for any more."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


class ProgramChannel(AsyncStreamChannel):
    """The stream to a program.

    Args:
        process: the session of the SSH library.
        read_end: returns what the program has left: its exit status in a line, then the end of its standard error.
    """

    def __init__(self, process: Any, read_end: Callable[[], Awaitable[str]]) -> None:
        self._process, self._read_end = process, read_end
        self._flight: SingleFlight[int] = SingleFlight("the end of a program", keep=True)
        self._ending = TaskSet()
        super().__init__(self._output, self._send, wait=self._finish, close=self._close_session)

    async def _output(self) -> AsyncGenerator[bytes, None]:
        while data := await self._process.stdout.read(CHUNK_BYTES):
            yield data
        await self._finish()

    async def _send(self, data: bytes) -> None:
        for at in range(0, len(data), CHUNK_BYTES):
            self._process.stdin.write(data[at : at + CHUNK_BYTES])
            await self._process.stdin.drain()

    async def _finish(self) -> int:
        return await self._flight.get(self._ending, self._learn_end)

    async def _learn_end(self) -> int:
        await self._process.wait_closed()
        status, line, words = (await self._read_end()).partition("\n")
        if not line or not re.fullmatch(r"\d{1,3}", status):
            raise ConnectionError("the session ended before the program")
        self.feed_stderr(words.encode())
        return int(status)

    async def _close_session(self) -> None:
        await self._ending.aclose()
        self._process.close()
