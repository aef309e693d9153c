"""A process in a container: the connection of the daemon's exec, and the channel over it."""

from __future__ import annotations

import time
from typing import Any

from docker import APIClient

from hermes_core.sandbox.channels import BlockingStreamChannel

_STDERR = 2
_POLL_S = (0.005, 0.25)


class ExecStream:
    """The connection of an exec, in the daemon's frames: eight bytes that say which stream and how long, then bytes."""

    def __init__(self, api: APIClient, exec_id: str, stream: Any) -> None:
        self._api, self._exec_id = api, exec_id
        self._response = stream._response
        self._frames = self._response.raw._fp.fp  # not the socket below it: it may hold what came with the headers
        self._socket = getattr(stream, "_sock", stream)
        self._socket.settimeout(None)
        self._left, self._kind, self._closed = 0, 0, False
        self.write = self._socket.sendall

    def read(self, n: int) -> tuple[int, bytes]:
        """Up to n bytes, and the number of their stream."""
        while not self._left:
            header = self._frames.read(8)
            if not header:
                return 1, b""
            if len(header) < 8:
                raise ConnectionError("the stream ended in the middle")
            self._kind, self._left = header[0], int.from_bytes(header[4:], "big")
        data = self._frames.read1(min(n, self._left))
        if not data:
            raise ConnectionError("the stream ended in the middle")
        self._left -= len(data)
        return self._kind, data

    def wait(self) -> int:
        """The exit status; the daemon knows it a moment after the stream has ended."""
        pause, longest = _POLL_S
        while not self._closed:
            found = self._api.exec_inspect(self._exec_id)
            if not found["Running"] and found["ExitCode"] is not None:
                return int(found["ExitCode"])
            time.sleep(pause)
            pause = min(2 * pause, longest)
        raise ConnectionError("it was closed")

    def close(self) -> None:
        """End the connection; the process may live on."""
        self._closed = True
        try:
            self._socket.shutdown(2)
        except OSError:  # the far end was first
            pass
        self._frames.close()
        self._socket.close()
        self._response.close()


class ExecChannel(BlockingStreamChannel):
    """Standard output of an exec's stream, its standard error kept apart."""

    def __init__(self, stream: ExecStream) -> None:
        self._stream = stream
        super().__init__(self._stdout, stream.write, close=stream.close, wait=stream.wait)

    def _stdout(self, n: int) -> bytes:
        while True:
            kind, data = self._stream.read(n)
            if kind != _STDERR:
                return data
            self.feed_stderr(data)
