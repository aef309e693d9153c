"""One channel of the driver's, never with more under way than it takes, and the way to the one that there is now."""

from __future__ import annotations

import collections
import itertools
import os
import select

from ..linux import descriptors
from . import wire

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from typing import Any

    from .loop import Loop

CONGESTED = 256 << 10
"""Bytes waiting for the channel above which streams are not read: so an answer never waits long behind them."""
_READ_BYTES = 1 << 18
_PIECES = 64


class DriverConnection:
    """Calls `on_frame(connection, header, data)`, `on_room()` when streams may go on, and `on_end(connection)` once.

    Its socket comes from a bridge, which sends the channel's own two descriptors over it and waits for its end: the
    frames never pass through the bridge.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_frame: Callable[[DriverConnection, dict[str, Any], bytes], object],
        on_end: Callable[[DriverConnection], object],
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
        self._streams: list[int] = []
        self._blocked = False
        sock.setblocking(False)
        loop.add(sock.fileno(), select.POLLIN, self._on_bridge)

    def send(self, header: Mapping[str, Any], data: bytes = b"") -> None:
        """Queue one frame. It is written with the others of this round, as far as the channel takes them."""
        if not self._open:
            return
        frame = wire.encode(header, data)
        self._outgoing.append(frame)
        self._size += len(frame)
        if len(self._outgoing) == 1:
            self._loop.after(self._flush)

    def congested(self) -> bool:
        """Return whether streams have to wait."""
        return self._size > CONGESTED

    def close(self) -> None:
        """Let go of the channel and of its bridge; idempotent."""
        if not self._open:
            return
        self._open = False
        self._outgoing.clear()
        for fd in self._streams:
            self._loop.remove(fd)
            os.close(fd)
        self._loop.remove(self._sock.fileno())
        try:
            self._sock.send(b"\0")  # so that the bridge can tell this from our death
        except OSError:
            pass
        self._sock.close()
        self._on_end(self)

    def _on_bridge(self, _events: int) -> None:
        """Take the channel's streams from the bridge. Anything that comes later means that the bridge has ended."""
        try:
            _, fds = descriptors.receive(self._sock, 1)
        except BlockingIOError:
            return
        except OSError:
            fds = []
        if self._streams or len(fds) != 2:
            for fd in fds:
                os.close(fd)
            self.close()
            return
        self._streams = fds
        for fd in fds:
            os.set_blocking(fd, False)
        self._loop.add(fds[0], select.POLLIN, self._on_input)

    def _on_input(self, _events: int) -> None:
        try:
            data = os.read(self._streams[0], _READ_BYTES)
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

    def _on_output(self, _events: int) -> None:
        self._flush()
        # Only from here, never from within `send`: what is resumed sends again.
        if self._open and not self.congested():
            self._on_room()

    def _flush(self) -> None:
        if not self._open:
            return
        output = self._streams[1]
        try:
            while self._outgoing:
                self._forget(os.writev(output, list(itertools.islice(self._outgoing, _PIECES))))
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if self._outgoing and not self._blocked:
            self._loop.add(output, select.POLLOUT, self._on_output)
        elif self._blocked and not self._outgoing:
            self._loop.remove(output)
        self._blocked = bool(self._outgoing)

    def _forget(self, sent: int) -> None:
        """Forget so many bytes, which are on their way."""
        self._size -= sent
        while sent:
            frame = self._outgoing.popleft()
            if sent < len(frame):
                self._outgoing.appendleft(memoryview(frame)[sent:])
                return
            sent -= len(frame)


class Outlet:
    """Frames to whichever connection is the driver's."""

    def __init__(self) -> None:
        self.connection: DriverConnection | None = None
        self._paused: list[Callable[[], object]] = []

    def send(self, header: Mapping[str, Any], data: bytes = b"") -> None:
        """Send one frame; without a connection it is dropped, as a resumed driver asks again."""
        if self.connection is not None:
            self.connection.send(header, data)

    def congested(self) -> bool:
        """Return whether streams have to wait: there is no driver, or enough is under way already."""
        return self.connection is None or self.connection.congested()

    def pause(self, resume: Callable[[], object]) -> None:
        """Remember a stream that waits for room, to resume it when there is some."""
        if resume not in self._paused:
            self._paused.append(resume)

    def resume_paused(self) -> None:
        """Resume the paused streams, as there is room again."""
        waiting, self._paused = self._paused, []
        for resume in waiting:
            resume()
