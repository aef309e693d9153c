"""The channel over a pod exec: a websocket whose messages begin with the number of a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence

from aiohttp import ClientWebSocketResponse, WSMsgType

from hermes_core import AsyncStreamChannel, CommandError, Sandbox

MESSAGE_BYTES = 1 << 16
"""Maximum size of one message of input."""
_STDIN, _STDOUT, _STDERR, _STATUS = range(4)


class PodChannel(AsyncStreamChannel):
    """The channel over a websocket of the protocol `v4.channel.k8s.io`. Standard error is kept apart.

    The last message, on the stream of the status, is an object `Status` of Kubernetes in JSON. A websocket that closes
    without one broke.
    """

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        super().__init__(self._receive, self._send, wait=self._wait_for_exit, close=self._socket.close)

    async def _receive(self) -> AsyncGenerator[bytes, None]:
        while not self._exit.done():
            message = await self._socket.receive()
            if message.type is not WSMsgType.BINARY:
                self._exit.cancel()
                raise message.data if isinstance(message.data, Exception) else ConnectionError(_end(self._socket))
            stream, data = message.data[:1], message.data[1:]
            if stream == bytes([_STDERR]):
                self.feed_stderr(data)
            elif stream == bytes([_STATUS]):
                self._exit.set_result(exit_status(data))
            elif data:
                yield data

    async def _send(self, data: bytes) -> None:
        for at in range(0, len(data), MESSAGE_BYTES):
            await self._socket.send_bytes(bytes([_STDIN]) + data[at : at + MESSAGE_BYTES])

    async def _wait_for_exit(self) -> int:
        try:
            return await asyncio.shield(self._exit)
        except asyncio.CancelledError:
            if self._exit.cancelled():
                raise ConnectionError("no exit status came") from None
            raise


def _end(socket: ClientWebSocketResponse) -> str:
    return f"the connection was closed with code {socket.close_code}, and no exit status came"


def exit_status(data: bytes) -> int:
    """Return the exit status of a program from the object `Status` at its end.

    Raises:
        ConnectionError: it says that the program could not be started or watched.
        ValueError: it is no such object.
    """
    status = json.loads(data)
    if not isinstance(status, dict):
        raise ValueError(f"the exec's status is no object: {data[:200]!r}")
    if status.get("status") == "Success":
        return 0
    for cause in (status.get("details") or {}).get("causes") or []:
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise ConnectionError(f"the exec failed: {str(status.get('message'))[:500]}")


def command_of(argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the command of an exec that starts `argv` with these variables, which the API has no field for.

    It begins with a shell, because the container runtime would not say that a program is missing by an exit status.

    Raises:
        CommandError: an argument is no text.
    """
    variables = [f"{name}={value}" for name, value in env.items()]
    command = ["/bin/sh", "-c", 'exec "$@"', "sh", *argv]
    if variables:
        command = ["/bin/sh", "-c", 'exec env "$@"', "sh", *variables, *command]
    try:
        "".join(command).encode()
    except UnicodeEncodeError as error:
        raise CommandError("arguments must be UTF-8: the API of Kubernetes takes no others", code="not_utf8") from error
    return command


async def run_to_end(sandbox: Sandbox, argv: Sequence[str]) -> tuple[int, str, str]:
    """Run a program. Return its exit status, the last piece of its output, and the end of its standard error."""
    channel, output = await sandbox.open(argv), b""
    try:
        while data := await channel.read(4096):
            output = data
        return await channel.wait(), output.decode(errors="replace"), channel.stderr_tail
    finally:
        await channel.aclose()
