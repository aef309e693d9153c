"""One connection from a bridge: frames in, frames out, never more under way than the reader takes."""

from __future__ import annotations

import collections
import select

from . import wire

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from typing import Any

    from .loop import Loop

CONGESTED = 256 << 10
"""Bytes waiting for the channel above which streams are not read: so an answer never waits long behind them."""


class Connection:
    """Calls `on_frame(connection, header, data)`, `on_room()` when streams may go on, and `on_end(connection)` once."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_frame: Callable[[Connection, dict[str, Any], bytes], object],
        on_end: Callable[[Connection], object],
        on_room: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._on_room = on_room
        self._decoder = wire.Decoder()
        self._outgoing: collections.deque[bytes | memoryview] = collections.deque()
        self._size = 0
        self._open = True
        sock.setblocking(False)
        loop.add(sock.fileno(), select.EPOLLIN, self._ready)

    def send(self, header: Mapping[str, Any], data: bytes = b"") -> None:
        """Queue one frame; written at once as far as the socket takes it."""
        if not self._open:
            return
        frame = wire.encode(header, data)
        self._outgoing.append(frame)
        self._size += len(frame)
        if len(self._outgoing) == 1:
            self._flush()

    def congested(self) -> bool:
        """Whether streams have to wait."""
        return self._size > CONGESTED

    def close(self) -> None:
        """Let go of the socket; idempotent."""
        if self._open:
            self._open = False
            self._outgoing.clear()
            self._loop.remove(self._sock.fileno())
            self._sock.close()
            self._on_end(self)

    def _ready(self, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush()
            # Only from here, never from within `send`: what is resumed sends again.
            if self._open and not self.congested():
                self._on_room()
        if self._open and events & ~select.EPOLLOUT:
            self._read()

    def _read(self) -> None:
        try:
            data = self._sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            frames = self._decoder.feed(data)
        except wire.FrameError:
            data, frames = b"", []
        for header, body in frames:
            self._on_frame(self, header, body)
        if not data:
            self.close()

    def _flush(self) -> None:
        while self._outgoing:
            frame = self._outgoing[0]
            try:
                sent = self._sock.send(frame)
            except BlockingIOError:
                break
            except OSError:
                self.close()
                return
            self._size -= sent
            if sent < len(frame):
                self._outgoing[0] = memoryview(frame)[sent:]
                break
            self._outgoing.popleft()
        self._loop.change(self._sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._outgoing else 0))
