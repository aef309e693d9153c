"""One command of a slot: its pipes, its output (captured, streamed or kept in a ring), its input, its time limit."""

from __future__ import annotations

import collections
import os
import select
import signal
import time

from .wire import CHUNK, WINDOW

DRAIN_LIMIT = 8 << 20
"""Bytes read after a command has ended: more than any pipe holds, so that what it wrote is all there."""
DRY, CLOSED, FULL = "dry", "closed", "full"


class Capture:
    """Keeps the head and the tail of a stream up to a limit, and counts all of it."""

    def __init__(self, limit):
        self._head_limit = limit - limit // 2
        self._tail_limit = limit // 2
        self.head = bytearray()
        self._tail = collections.deque()
        self._tail_size = 0
        self.total = 0

    def room(self):
        """Bytes that may be read now."""
        return CHUNK

    def feed(self, data):
        """Take what was read."""
        self.total += len(data)
        space = self._head_limit - len(self.head)
        if space > 0:
            self.head += data[:space]
            data = data[space:]
        if data:
            self._tail.append(data)
            self._tail_size += len(data)
            while self._tail_size - len(self._tail[0]) >= self._tail_limit:
                self._tail_size -= len(self._tail.popleft())

    def tail(self):
        """The last bytes, at most the tail's share of the limit."""
        joined = b"".join(self._tail)
        return joined[-self._tail_limit :] if self._tail_limit else b""


class Ring:
    """Keeps the last bytes of a stream, addressed by their offset in everything that was written."""

    def __init__(self, limit):
        self._limit = limit
        self.data = bytearray()
        self.total = 0

    def room(self):
        """Bytes that may be read now."""
        return CHUNK

    def feed(self, data):
        """Take what was read."""
        self.total += len(data)
        self.data += data
        # Cut in steps: moving the buffer for every few bytes would cost more than keeping some more of them.
        if len(self.data) > self._limit + max(CHUNK, self._limit // 4):
            del self.data[: len(self.data) - self._limit]

    def window(self):
        """The bytes that are promised to be held."""
        return bytes(self.data[-self._limit :])


class Stream:
    """Passes a stream on in numbered pieces, as far as the reader has given credit; keeps what is not confirmed."""

    def __init__(self, number, execution):
        self._number = number
        self._execution = execution
        self._kept = collections.deque()
        self.total = 0
        self.credit = WINDOW

    def room(self):
        """Bytes that may be read now: none while the reader is behind or the channel is busy."""
        if self._execution.slot.daemon.congested():
            return 0
        return min(CHUNK, self.credit - self.total)

    def feed(self, data):
        """Take what was read and pass it on."""
        self._kept.append((self.total, data))
        self._send(self.total, data)
        self.total += len(data)

    def confirm(self, offset):
        """The reader has taken everything before `offset`."""
        self.credit = max(self.credit, offset + WINDOW)
        while self._kept and self._kept[0][0] + len(self._kept[0][1]) <= offset:
            self._kept.popleft()

    def resend(self, offset):
        """Pass on again what the reader, who has everything before `offset`, may have missed."""
        self.confirm(offset)
        for start, data in self._kept:
            self._send(start, data)

    def _send(self, offset, data):
        header = {"ev": "out", "id": self._execution.id, "s": self._number, "off": offset}
        self._execution.slot.daemon.send(header, data)


class Input:
    """Feeds standard input from numbered pieces; says how much was taken, so that the writer never runs ahead."""

    def __init__(self, execution, fd):
        self._execution = execution
        self._loop = execution.slot.daemon.loop
        self._fd = fd
        self._pending = collections.deque()
        self._watching = False
        self.received = 0
        self.taken = 0
        self._eof = False

    def add(self, offset, data, eof):
        """A piece from the driver; what has been received before is left out."""
        if offset > self.received:
            return
        fresh = data[self.received - offset :]
        self.received += len(fresh)
        self._eof = self._eof or eof
        if fresh:
            self._pending.append(fresh)
        self._push(0)

    def pending(self):
        """Bytes taken from the driver that the process has not read yet."""
        return self.received - self.taken

    def close(self):
        """No more input."""
        if self._fd is None:
            return
        if self._watching:
            self._loop.remove(self._fd)
        os.close(self._fd)
        self._fd = None
        self._pending.clear()

    def _push(self, _events):
        before = self.taken
        while self._pending:
            if self._fd is None:
                self.taken += len(self._pending.popleft())
                continue
            try:
                written = os.write(self._fd, self._pending[0][: 4 * CHUNK])
            except BlockingIOError:
                break
            except BrokenPipeError:
                self.taken += sum(len(data) for data in self._pending)
                self.close()
                break
            self.taken += written
            rest = self._pending.popleft()[written:]
            if rest:
                self._pending.appendleft(rest)
        self._watch(bool(self._pending))
        if self._eof and not self._pending:
            self.close()
        if self.taken != before:
            self._execution.slot.daemon.send({"ev": "taken", "id": self._execution.id, "off": self.taken})

    def _watch(self, wanted):
        if self._fd is None or wanted == self._watching:
            return
        self._watching = wanted
        if wanted:
            self._loop.add(self._fd, select.EPOLLOUT, self._push)
        else:
            self._loop.remove(self._fd)


class Spool:
    """Writes the whole of a command's output to a file that the slot can read but not change."""

    LIMIT = 1 << 30

    def __init__(self, folder, identity):
        self.path = os.path.join(folder, identity.rsplit(":", 1)[-1] + ".log")
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._size = 0

    def write(self, data):
        """Add bytes, up to the limit; a full disk ends the file, never the command."""
        if self._fd is None or self._size >= self.LIMIT:
            return
        try:
            self._size += os.write(self._fd, data)
        except OSError:
            self.close()

    def close(self):
        """The command has ended."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Execution:
    """A command from its spawn to its result. `on_end(execution)` is called once, when it has ended and is drained."""

    def __init__(self, slot, identity, mode, limit, merge, on_end):
        self.slot = slot
        self.id = identity
        self.mode = mode
        self._on_end = on_end
        self._loop = slot.daemon.loop
        self._open = {}
        self._paused = set()
        self.sinks = []
        self.stdin = None
        self.pid = None
        self.status = None
        self.error = None
        self.timed_out = False
        self.killed = False
        self.ended = False
        self.started = time.time()
        self._clock = time.monotonic()
        self.duration = 0.0
        self._timers = []
        self.spool = None
        make = {"capture": lambda n: Capture(limit), "ring": lambda n: Ring(limit), "stream": lambda n: Stream(n, self)}
        self._child_fds = []
        for number in (1,) if merge else (1, 2):
            # The outcome of a file operation comes on standard error: captured even where the data is streamed.
            sink = make[mode](number) if number == 1 or mode != "stream" else Capture(1 << 16)
            self.sinks.append(sink)
            reader, writer = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(reader, False)
            self._child_fds.append(writer)
            self._open[reader] = sink
            self._loop.add(reader, select.EPOLLIN, lambda _events, fd=reader: self._readable(fd))

    def descriptors(self, wants_input):
        """What the child gets as 0, 1 and 2; to be closed by `spawned`."""
        if wants_input:
            reader, writer = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(writer, False)
            self.stdin = Input(self, writer)
        else:
            reader = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._child_fds.insert(0, reader)
        return [self._child_fds[0], self._child_fds[1], self._child_fds[-1]]

    def spawned(self):
        """The child has its descriptors: let go of our copies."""
        for fd in self._child_fds:
            os.close(fd)
        self._child_fds = []

    def limit_time(self, seconds, grace):
        """TERM after so many seconds, KILL after the grace period, everything in the slot's reach if even that fails."""

        def expire():
            self.timed_out = True
            self.kill(grace)

        self._timers.append(self._loop.later(seconds, expire))

    def kill(self, grace):
        """End the command and what it started: TERM first if there is a grace period."""
        if self.ended:
            return
        self.killed = True
        if grace > 0:
            self.slot.signal(self, signal.SIGTERM)
            self._timers.append(self._loop.later(grace, lambda: self.slot.signal(self, signal.SIGKILL)))
        else:
            self.slot.signal(self, signal.SIGKILL)
        self._timers.append(self._loop.later(grace + 2.0, lambda: self.slot.last_resort(self)))

    def exited(self, status):
        """The command's wait status is known; the result is complete once the pipes are drained."""
        if self.status is None:
            self.status = status
            self.duration = time.monotonic() - self._clock
            for timer in self._timers:
                timer.cancel()
            self._finish_if_drained()

    def failed(self, error):
        """It could not be started, or its slot was emptied under it."""
        if self.status is None and not self.ended:
            if self.killed:
                self.status = int(signal.SIGKILL)
            else:
                self.error = error
            self.duration = time.monotonic() - self._clock
            self._end()

    def resume(self):
        """There may be room again: go on reading what was paused."""
        for fd in list(self._paused):
            self._paused.discard(fd)
            self._loop.add(fd, select.EPOLLIN, lambda _events, fd=fd: self._readable(fd))
        if self.status is not None:
            self._finish_if_drained()

    def _readable(self, fd):
        if self._pump(fd, CHUNK) == FULL:
            self._pause(fd)
        elif self.status is not None:
            self._finish_if_drained()

    def _pause(self, fd):
        if fd in self._open and fd not in self._paused:
            self._loop.remove(fd)
            self._paused.add(fd)
            self.slot.daemon.paused(self)

    def _pump(self, fd, budget):
        """Read until the budget is used; says whether the pipe is dry or closed, or the sink full."""
        sink = self._open[fd]
        while budget > 0:
            room = sink.room()
            if room <= 0:
                return FULL
            try:
                data = os.read(fd, room)
            except BlockingIOError:
                return DRY
            if not data:
                self._close(fd)
                return CLOSED
            sink.feed(data)
            if self.spool is not None:
                self.spool.write(data)
            budget -= len(data)
        return None

    def _finish_if_drained(self):
        """After the exit: what is in the pipes is the command's; what others write later is not waited for."""
        if self.ended:
            return
        drained = True
        for fd in list(self._open):
            state = self._pump(fd, DRAIN_LIMIT)
            if state == FULL:
                self._pause(fd)
                drained = False
        if drained:
            self._end()

    def _close(self, fd):
        if fd in self._paused:
            self._paused.discard(fd)
        else:
            self._loop.remove(fd)
        self._open.pop(fd)
        os.close(fd)

    def _end(self):
        self.ended = True
        for timer in self._timers:
            timer.cancel()
        self.spawned()
        if self.stdin is not None:
            self.stdin.close()
        if self.spool is not None:
            self.spool.close()
        for fd in list(self._open):
            paused = fd in self._paused
            self._paused.discard(fd)
            self._open.pop(fd)
            if not paused:
                self._loop.remove(fd)
            # A child that the command left behind may hold the pipe: closing our end would kill it with SIGPIPE.
            self.slot.keep_draining(fd)
        self._on_end(self)

    def outcome(self):
        """The header's fields that tell how it ended."""
        fields = {"duration": self.duration, "timed_out": self.timed_out}
        if self.spool is not None:
            fields["spool"] = self.spool.path
        if self.status is not None:
            if os.WIFSIGNALED(self.status):
                fields["signal"] = os.WTERMSIG(self.status)
            else:
                fields["exit"] = os.WEXITSTATUS(self.status)
        return fields
