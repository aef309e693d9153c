"""A process in a container: an exec of the daemon, with its connection, and a channel over it."""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any

from docker import APIClient

from hermes_core import SocketChannel

_STDERR = 2
_HEADER_BYTES = 8
_POLL_S = (0.005, 0.25)


class Exec:
    """An exec that was started, with its connection."""

    def __init__(self, api: APIClient, exec_id: str, stream: Any) -> None:
        self._api, self._exec_id = api, exec_id
        self._response = stream._response
        self._closed = False
        self.connection: socket.socket = getattr(stream, "_sock", stream)
        self.connection.setblocking(False)
        try:  # data that came together with the response's headers is in the HTTP library's buffer
            self.early: bytes = self._response.raw._fp.fp.peek()
        except ssl.SSLWantReadError:
            self.early = b""

    def wait(self) -> int:
        """Return the exit status. The daemon knows it shortly after the stream has ended."""
        pause, longest = _POLL_S
        while not self._closed:
            info = self._api.exec_inspect(self._exec_id)
            if not info["Running"] and info["ExitCode"] is not None:
                return int(info["ExitCode"])
            time.sleep(pause)
            pause = min(2 * pause, longest)
        raise ConnectionError("it was closed")

    def has_ended(self) -> bool:
        """Ask the daemon whether the process has ended. The stream does not show this: if a process has not read all of
        its input, the daemon may keep the stream open for minutes after the end."""
        return not self._api.exec_inspect(self._exec_id)["Running"]

    def close(self) -> None:
        """Close the connection. The process may live on."""
        self._closed = True
        self._response.close()


class ExecChannel(SocketChannel):
    """The channel over an exec. It carries standard output, and keeps standard error apart.

    The daemon sends frames: a header of eight bytes, whose first byte is the stream and whose last four are the length
    of the data, and then the data (Docker Engine API, "attach to a container", stream format).
    """

    def __init__(self, started: Exec) -> None:
        self._header = b""
        self._kind = self._left = 0
        super().__init__(
            started.connection,
            wait=started.wait,
            unpack=self._split,
            early=started.early,
            ended=started.has_ended,
            close=started.close,
        )

    def _split(self, data: bytes) -> bytes:
        if not data and (self._header or self._left):
            raise ConnectionError("the stream ended in the middle")
        rest, output = memoryview(data), bytearray()
        while rest:
            if not self._left:
                missing = _HEADER_BYTES - len(self._header)
                self._header, rest = self._header + bytes(rest[:missing]), rest[missing:]
                if len(self._header) == _HEADER_BYTES:
                    self._kind, self._left = self._header[0], int.from_bytes(self._header[4:], "big")
                    self._header = b""
                continue
            piece, rest = rest[: self._left], rest[self._left :]
            self._left -= len(piece)
            if self._kind == _STDERR:
                self.feed_stderr(bytes(piece))
            else:
                output += piece
        return bytes(output)
