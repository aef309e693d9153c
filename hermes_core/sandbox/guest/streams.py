"""Objects that the guest connects to a command's pipes: resumable streams in both directions, a spool, and a drain."""

from __future__ import annotations

import collections
import os
import select

from . import terminal
from .wire import CHUNK, WINDOW

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .loop import Loop

    Send = Callable[[dict[str, Any], bytes], object]


class Stream:
    """Sends output in pieces with offsets, as far as the reader has given credit. Keeps the pieces until they are
    confirmed, to send them again on another channel.

    Args:
        identity: the id of the request.
        send: sends a frame.
        is_congested: returns whether too many bytes wait for the channel.
    """

    def __init__(self, identity: str, send: Send, is_congested: Callable[[], bool]) -> None:
        self._identity = identity
        self._send_frame = send
        self._is_congested = is_congested
        self._unconfirmed: collections.deque[tuple[int, bytes]] = collections.deque()
        self._credit = WINDOW
        self._held = False
        self._ended = False
        self.total = 0

    def room(self) -> int:
        """Return how many bytes may be fed now: none if the reader is slow or the channel is congested."""
        return 0 if self._held or self._is_congested() else min(CHUNK, self._credit - self.total)

    def feed(self, data: bytes) -> None:
        """Send the next piece of output."""
        self._unconfirmed.append((self.total, data))
        self._send(self.total, data)
        self.total += len(data)

    def end(self) -> None:
        """Mark the end of the stream. The request itself goes on."""
        self._ended = True
        self._send_frame({"ev": "out", "id": self._identity, "off": self.total, "eof": True}, b"")

    def confirm(self, offset: int) -> None:
        """Record that the reader has everything before `offset`."""
        self._credit = max(self._credit, offset + WINDOW)
        while self._unconfirmed and self._unconfirmed[0][0] + len(self._unconfirmed[0][1]) <= offset:
            self._unconfirmed.popleft()

    def hold(self) -> None:
        """Send nothing on a new channel until `resend` says how many bytes the reader has."""
        self._held = True

    def resend(self, offset: int) -> None:
        """Send everything from `offset` on again."""
        self._held = False
        self.confirm(offset)
        for start, data in self._unconfirmed:
            self._send(start, data)
        if self._ended:
            self.end()

    def _send(self, offset: int, data: bytes) -> None:
        self._send_frame({"ev": "out", "id": self._identity, "off": offset}, data)


class Input:
    """Writes standard input from pieces with offsets. Tells the driver how much the process has taken.

    Args:
        fd: the pipe, or None if `connect` will pass it.
        terminal: whether `connect` will pass a terminal.
        on_end: called when nothing more can be written, with whether all input was written.
    """

    def __init__(
        self,
        loop: Loop,
        fd: int | None,
        identity: str,
        send: Send,
        terminal: bool = False,
        on_end: Callable[[bool], object] | None = None,
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._terminal = terminal
        self._on_end = on_end
        self._closed = False
        self._last = b"\n"
        self._identity = identity
        self._send = send
        self._pending: collections.deque[bytes] = collections.deque()
        self._watching = False
        self._eof = False
        self.received = 0
        self._taken = 0

    def add(self, offset: int, data: bytes, eof: bool) -> None:
        """Add a piece from the driver. Bytes that were received before, and pieces behind a gap, are dropped."""
        if offset > self.received:
            return
        if offset < self.received:
            self._tell()  # the confirmation may have been lost with a channel
        piece = data[self.received - offset :]
        self.received += len(piece)
        self._eof = self._eof or eof
        if piece:
            self._pending.append(piece)
        self._push()

    def connect(self, fd: int) -> None:
        """Take the pipe or the terminal to write to."""
        if self._closed:
            os.close(fd)
        else:
            self._fd = fd
            self._push()

    def pending(self) -> int:
        """Return how many received bytes were not written yet."""
        return self.received - self._taken

    @property
    def is_closed(self) -> bool:
        """Return whether nothing can be added any more: the input has ended, or nobody reads it."""
        return self._closed or (self._eof and not self._terminal)

    def close(self) -> None:
        """End the input. All received bytes count as taken, because nobody will read them. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._fd is not None:
            if self._watching:
                self._loop.remove(self._fd)
            os.close(self._fd)
            self._fd = None
        whole = self._eof and not self._pending
        self._pending.clear()
        if self._on_end is not None:
            self._on_end(whole)

    def _push(self, _events: int = 0) -> None:
        if self._fd is None and not self._closed:
            return
        before = self._taken
        while self._pending and self._fd is not None:
            try:
                written = os.write(self._fd, self._pending[0][: 4 * CHUNK])
            except BlockingIOError:
                break
            except OSError:  # nobody reads it any more
                self.close()
                break
            self._taken += written
            self._last = self._pending[0][written - 1 : written]
            rest = self._pending.popleft()[written:]
            if rest:
                self._pending.appendleft(rest)
        if self._fd is None:
            self._pending.clear()
            self._taken = self.received
        elif self._eof and not self._pending:
            self._end()
        else:
            self._watch(bool(self._pending))
        if self._taken != before:
            self._tell()

    def _end(self) -> None:
        """End the input when all is written. A terminal gets the end-of-file key, because closing would hang it up."""
        if not self._terminal or self._fd is None:
            self.close()
            return
        key = terminal.end_of_file(self._fd)
        try:
            # In the middle of a line, the first key only flushes the line, and the second one is end-of-file.
            os.write(self._fd, key if self._last in b"\r\n" else key + key)
        except BlockingIOError:
            self._watch(True)
            return
        except OSError:  # no program has the terminal open any more
            pass
        self._eof, self._last = False, b"\n"  # more input may follow, as after Ctrl-D in a shell
        self._watch(False)

    def _tell(self) -> None:
        self._send({"ev": "taken", "id": self._identity, "off": self._taken}, b"")

    def _watch(self, watching: bool) -> None:
        if self._fd is None or watching == self._watching:
            return
        self._watching = watching
        if watching:
            self._loop.add(self._fd, select.POLLOUT, self._push)
        else:
            self._loop.remove(self._fd)


class Spool:
    """A file with the whole output of a command, which the slot can read but not change.

    Raises:
        OSError: the file can't be made.
    """

    LIMIT = 1 << 30

    def __init__(self, path: str, gid: int | None) -> None:
        self.path = path
        self._size = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd: int | None = os.open(path, flags, 0o644 if gid is None else 0o640)
        if gid is not None:
            os.chown(path, -1, gid)

    def write(self, data: bytes) -> None:
        """Add bytes, up to the limit. A full disk ends the file, never the command."""
        if self._fd is None:
            return
        try:
            self._size += os.write(self._fd, data[: self.LIMIT - self._size])
        except OSError:
            self.close()
        if self._size >= self.LIMIT:
            self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Drains:
    """Reads and drops the output of processes that a command left running, so that they neither block nor get SIGPIPE.

    The rate of all of them together is bounded, so that a forgotten `yes` does not keep the guest busy.
    """

    MOST = 64
    TICK_S = 0.05
    TICK_BYTES = 1 << 20

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._fds: list[int] = []
        self._budget = self.TICK_BYTES
        self._resting = False

    def add(self, fd: int) -> None:
        """Drain `fd`, which is non-blocking and not in the loop. If there are too many, the oldest is closed."""
        if len(self._fds) >= self.MOST:
            self._drop(self._fds[0])
        self._fds.append(fd)
        if not self._resting:
            self._watch(fd)

    def close(self) -> None:
        """Close all descriptors."""
        for fd in list(self._fds):
            self._drop(fd)

    def _watch(self, fd: int) -> None:
        self._loop.add(fd, select.POLLIN, lambda _events: self._drain(fd))

    def _drop(self, fd: int) -> None:
        self._loop.remove(fd)
        self._fds.remove(fd)
        os.close(fd)

    def _drain(self, fd: int) -> None:
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return
        except OSError:  # EIO of a terminal that no program has open
            data = b""
        if not data:
            self._drop(fd)
            return
        self._budget -= len(data)
        if self._budget <= 0:
            self._resting = True
            for other in self._fds:
                self._loop.remove(other)
            self._loop.later(self.TICK_S, self._resume)

    def _resume(self) -> None:
        self._resting = False
        self._budget = self.TICK_BYTES
        for fd in self._fds:
            self._watch(fd)
