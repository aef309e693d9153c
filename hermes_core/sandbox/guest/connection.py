"""A connection from the driver, with a check for too many unsent bytes, and the outlet to the current connection."""

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
"""With more bytes than this waiting for the channel, streams are not read, so that answers never wait long."""
_READ_BYTES = 1 << 18
_FRAMES_PER_WRITE = 64


class DriverConnection:
    """A connection over one channel.

    Its socket leads to a bridge. The bridge sends the two descriptors of the channel over it and then only waits for
    its end, so frames never pass through the bridge.

    Args:
        on_frame: called with the connection, the header and the data of each frame.
        on_end: called with the connection, once.
        on_room: called when streams may send again.
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
        """Queue one frame. It is written together with the other frames of this round of the loop."""
        if not self._open:
            return
        frame = wire.encode(header, data)
        self._outgoing.append(frame)
        self._size += len(frame)
        if len(self._outgoing) == 1:
            self._loop.after(self._write)

    def is_congested(self) -> bool:
        """Return whether streams have to wait, because too many bytes are queued."""
        return self._size > CONGESTED

    def close(self) -> None:
        """Close the channel and let its bridge end. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._outgoing.clear()
        for fd in self._streams:
            self._loop.remove(fd)
            os.close(fd)
        self._loop.remove(self._sock.fileno())
        try:
            self._sock.send(b"\0")  # tells the bridge that we did not die
        except OSError:
            pass
        self._sock.close()
        self._on_end(self)

    def _on_bridge(self, _events: int) -> None:
        """Take the channel's descriptors from the bridge. Any later event means that the bridge has ended."""
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

    def _write(self, _events: int = 0) -> None:
        """Write what is queued, and let streams go on if there is room.

        It is called by the loop only, and never within `send`, because streams that are resumed call `send`.
        """
        self._flush()
        if self._open and not self.is_congested():
            self._on_room()

    def _flush(self) -> None:
        if not self._open:
            return
        output = self._streams[1]
        try:
            while self._outgoing:
                self._drop_sent(os.writev(output, list(itertools.islice(self._outgoing, _FRAMES_PER_WRITE))))
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if self._outgoing and not self._blocked:
            self._loop.add(output, select.POLLOUT, self._write)
        elif self._blocked and not self._outgoing:
            self._loop.remove(output)
        self._blocked = bool(self._outgoing)

    def _drop_sent(self, size: int) -> None:
        """Remove `size` bytes, which were sent, from the queue."""
        self._size -= size
        while size:
            frame = self._outgoing.popleft()
            if size < len(frame):
                self._outgoing.appendleft(memoryview(frame)[size:])
                return
            size -= len(frame)


class Outlet:
    """Sends frames over the driver's current connection."""

    def __init__(self) -> None:
        self.connection: DriverConnection | None = None
        self._paused: list[Callable[[], object]] = []

    def send(self, header: Mapping[str, Any], data: bytes = b"") -> None:
        """Send one frame. Without a connection the frame is dropped, because a driver that resumes asks again."""
        if self.connection is not None:
            self.connection.send(header, data)

    def is_congested(self) -> bool:
        """Return whether streams have to wait: there is no connection, or too many bytes are queued."""
        return self.connection is None or self.connection.is_congested()

    def pause(self, resume: Callable[[], object]) -> None:
        """Call `resume` when there is room again."""
        if resume not in self._paused:
            self._paused.append(resume)

    def resume_paused(self) -> None:
        """Resume the paused streams."""
        waiting, self._paused = self._paused, []
        for resume in waiting:
            resume()
