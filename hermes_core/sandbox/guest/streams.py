"""What a command's pipes are connected to: a resumable stream each way, a file, or nothing but a drain."""

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
    """Passes output on in numbered pieces, as far as the reader has given credit; keeps what is not confirmed.

    Args:
        identity: the request's.
        send: sends a frame.
        congested: whether the channel is busy.
    """

    def __init__(self, identity: str, send: Send, congested: Callable[[], bool]) -> None:
        self._identity = identity
        self._send_frame = send
        self._congested = congested
        self._kept: collections.deque[tuple[int, bytes]] = collections.deque()
        self._credit = WINDOW
        self._held = False
        self._ended = False
        self.total = 0

    def room(self) -> int:
        """Return how many bytes may be fed now: none while the reader is behind or the channel is busy."""
        return 0 if self._held or self._congested() else min(CHUNK, self._credit - self.total)

    def feed(self, data: bytes) -> None:
        """Take what was read and pass it on."""
        self._kept.append((self.total, data))
        self._send(self.total, data)
        self.total += len(data)

    def end(self) -> None:
        """Say that no more will be fed, before the request itself ends."""
        self._ended = True
        self._send_frame({"ev": "out", "id": self._identity, "off": self.total, "eof": True}, b"")

    def confirm(self, offset: int) -> None:
        """Note that the reader has taken everything before `offset`."""
        self._credit = max(self._credit, offset + WINDOW)
        while self._kept and self._kept[0][0] + len(self._kept[0][1]) <= offset:
            self._kept.popleft()

    def hold(self) -> None:
        """Hold the stream on a new channel until the reader has said what it has."""
        self._held = True

    def resend(self, offset: int) -> None:
        """Pass on again what the reader, who has everything before `offset`, may have missed."""
        self._held = False
        self.confirm(offset)
        for start, data in self._kept:
            self._send(start, data)
        if self._ended:
            self.end()

    def _send(self, offset: int, data: bytes) -> None:
        self._send_frame({"ev": "out", "id": self._identity, "off": offset}, data)


class Input:
    """Feeds standard input from numbered pieces; says how much was taken, so that the writer never runs ahead.

    Args:
        fd: the pipe; None if it comes later, by `connect`.
        terminal: what comes is a terminal.
        on_end: called with whether all was taken, when nothing more can be written.
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
        """Add a piece from the driver, without what was received before. A piece behind a gap is dropped."""
        if offset > self.received:
            return
        if offset < self.received:
            self._tell()  # The word that it was taken may have been lost with a channel.
        fresh = data[self.received - offset :]
        self.received += len(fresh)
        self._eof = self._eof or eof
        if fresh:
            self._pending.append(fresh)
        self._push()

    def connect(self, fd: int) -> None:
        """Connect the pipe for what was received, or the terminal to type it into."""
        if self._closed:
            os.close(fd)
        else:
            self._fd = fd
            self._push()

    def pending(self) -> int:
        """Return how many bytes from the driver the process has not read yet."""
        return self.received - self._taken

    @property
    def closed(self) -> bool:
        """Return whether nothing can be written any more: we ended it, or nobody reads it."""
        return self._closed or (self._eof and not self._terminal)

    def close(self) -> None:
        """End the input. What was not read counts as taken, as nobody will read it. Idempotent."""
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
        """End the input after all was passed on. A terminal gets the end-of-file key, as closing would hang it up."""
        if not self._terminal or self._fd is None:
            self.close()
            return
        key = terminal.end_of_file(self._fd)
        try:
            # In the middle of a line the first one ends what there is of it, and only the second the file.
            os.write(self._fd, key if self._last in b"\r\n" else key + key)
        except BlockingIOError:
            self._watch(True)
            return
        except OSError:  # no program has it open any more
            pass
        self._eof, self._last = False, b"\n"
        self._watch(False)

    def _tell(self) -> None:
        self._send({"ev": "taken", "id": self._identity, "off": self._taken}, b"")

    def _watch(self, wanted: bool) -> None:
        if self._fd is None or wanted == self._watching:
            return
        self._watching = wanted
        if wanted:
            self._loop.add(self._fd, select.POLLOUT, self._push)
        else:
            self._loop.remove(self._fd)


class Spool:
    """The whole of a command's output in a file that the slot can read but not change.

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
        """Add bytes, up to the limit; a full disk ends the file, never the command."""
        if self._fd is None:
            return
        try:
            self._size += os.write(self._fd, data[: self.LIMIT - self._size])
        except OSError:
            self.close()
        if self._size >= self.LIMIT:
            self.close()

    def close(self) -> None:
        """Close the stream, as the command has ended. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Drains:
    """Reads and forgets what processes that a command left behind write, so that they neither block nor get SIGPIPE.

    At a bounded rate for all of them together: nobody's forgotten `yes` shall keep the guest busy.
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
        """Drain `fd` (non-blocking, watched by nobody) from now on. The oldest is closed when there are too many."""
        if len(self._fds) >= self.MOST:
            self._drop(self._fds[0])
        self._fds.append(fd)
        if not self._resting:
            self._watch(fd)

    def close(self) -> None:
        """Let go of all of them."""
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
        except OSError:  # a terminal that nobody has open any more
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
