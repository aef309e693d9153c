"""One connection from a bridge: frames in, frames out, never more under way than the reader takes."""

from __future__ import annotations

import collections
import select

from . import wire

CONGESTED = 256 << 10
"""Bytes waiting for the channel above which streams are not read: so an answer never waits long behind them."""


class Connection:
    """Calls `on_frame(connection, header, data)` and, once, `on_end(connection)`."""

    def __init__(self, loop, sock, on_frame, on_end, on_room):
        self._loop = loop
        self._sock = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._on_room = on_room
        self._decoder = wire.Decoder()
        self._outgoing = collections.deque()
        self._size = 0
        self._open = True
        sock.setblocking(False)
        loop.add(sock.fileno(), select.EPOLLIN, self._ready)

    def send(self, header, data=b""):
        """Queue one frame; written at once as far as the socket takes it."""
        if not self._open:
            return
        frame = wire.encode(header, data)
        self._outgoing.append(frame)
        self._size += len(frame)
        if len(self._outgoing) == 1:
            self._flush()

    def congested(self):
        """Whether streams have to wait."""
        return self._size > CONGESTED

    def close(self):
        """Let go of the socket; idempotent."""
        if self._open:
            self._open = False
            self._loop.remove(self._sock.fileno())
            self._sock.close()
            self._on_end(self)

    def _ready(self, events):
        if events & select.EPOLLOUT:
            self._flush()
            # Only from here, never from within `send`: what is resumed sends again.
            if not self.congested():
                self._on_room()
        if self._open and events & ~select.EPOLLOUT:
            self._read()

    def _read(self):
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

    def _flush(self):
        while self._outgoing:
            try:
                sent = self._sock.send(self._outgoing[0])
            except BlockingIOError:
                break
            except OSError:
                self.close()
                return
            self._size -= sent
            frame = self._outgoing.popleft()
            if sent < len(frame):
                self._outgoing.appendleft(memoryview(frame)[sent:])
                break
        self._loop.change(self._sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._outgoing else 0))
