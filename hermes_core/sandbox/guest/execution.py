"""One command of a slot: its pipes, its output (captured, streamed or kept in a ring), its input, its time limit."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import time

from ..linux.output import HeadTail, Rolling
from . import terminal
from .masking import Mask
from .streams import Input, Spool, Stream
from .value import Value
from .wire import CAPTURE_LIMIT, CHUNK

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    from .loop import Timer
    from .site import Site
    from .streams import Drains

    Sink = HeadTail | Rolling | Stream

    class Owner(Protocol):
        """The slot of a command."""

        drains: Drains
        """Pipes that ended commands have left to other processes."""

        def stop(self, identity: str, grace: float) -> None:
            """Send TERM to a command and what it started, and KILL after so many seconds."""

        def last_resort(self, execution: Execution) -> None:
            """Empty the slot, because even KILL did not end the command."""


DRAIN_LIMIT = 2 << 20
"""Maximum number of bytes read after a command has ended. A pipe holds fewer, so all that it wrote is read."""
LAST_RESORT_S = 3.0
_HUNG_UP_S = 0.1
"""Seconds between looks at a terminal that no program has open."""
_LITTLE, _REST_S = 1 << 10, 0.002
"""After so few bytes, and at the start of a stream, output is read only in so many seconds. Otherwise, a program that
writes line by line wakes us, the channel and the driver for each line, and a short command for its output and its end.
"""
_HELD_S = 0.05
"""Seconds for which a possible beginning of a secret is held back, if somebody may be following the output."""
_DRY, _CLOSED, _FULL, _SPENT = "dry", "closed", "full", "spent"


class Stdio(Value):
    """The standard streams of a command."""

    mode: str
    """Where standard output goes: `capture` keeps its head and tail, `ring` its last bytes, and `stream` sends it to
    the driver piece by piece."""
    limit: int
    """Maximum number of bytes that are kept."""
    merge: bool
    """Whether standard error goes the same way, in the order written."""
    pty: tuple[int, int] | None
    """Rows and columns of the terminal that takes the place of all three; then `merge` means nothing."""
    masked: tuple[bytes, ...]
    """Values that are masked in the output."""


class Execution:
    """A command from its start to its result.

    Args:
        owner: its slot.
        identity: the id of the request that it answers.
        on_end: called once, when it has ended and its output is read.

    Raises:
        OSError: there are no more descriptors.
    """

    def __init__(
        self, site: Site, owner: Owner, identity: str, stdio: Stdio, on_end: Callable[[Execution], object]
    ) -> None:
        self.id = identity
        self._owner = owner
        self._loop = site.loop
        self._outlet = site.outlet
        self._takes_pipes = site.takes_pipes
        self._on_end = on_end
        self.stdin: Input | None = None
        self.spool: Spool | None = None
        self.on_start: Callable[[], object] | None = None
        self.on_output: Callable[[], object] | None = None
        self.pty = stdio.pty
        self.cancel_grace = 0.0
        self.pid: int | None = None
        self.handed_over = False
        self.status: int | None = None
        self.error: dict[str, str] | None = None
        self.timed_out = False
        self.ended = False
        self.began = time.monotonic()
        self.duration = 0.0
        self._stopping = False
        self._still_drained = DRAIN_LIMIT
        self._timers: list[Timer] = []
        self._rest: Timer | None = None
        self._open: dict[int, Sink] = {}
        self._masked = stdio.masked
        self._masks: dict[int, Mask] = {}
        self._paused: set[int] = set()
        self._child_fds: list[int] = []
        self.sinks = [self._sink(stdio.mode, stdio.limit)]
        if stdio.pty is not None:
            return  # the slot's parent sends our end of the terminal when it has started the command
        if not stdio.merge:
            # Only standard output is streamed: the outcome of a file operation comes on standard error.
            self.sinks.append(self._sink("capture" if stdio.mode == "stream" else stdio.mode, stdio.limit))
        if self.fetches:
            return
        try:
            for sink in self.sinks:
                reader, writer = os.pipe2(os.O_CLOEXEC)
                self._child_fds.append(writer)
                self._connect(reader, sink)
        except OSError:
            self._close_all()
            raise

    def _connect(self, fd: int, sink: Sink) -> None:
        self._open[fd] = sink
        if self._masked:
            self._masks[fd] = Mask(self._masked)
        os.set_blocking(fd, False)
        if isinstance(sink, Stream):
            self._read_later(_REST_S)
        else:
            self._watch(fd)

    def _sink(self, mode: str, limit: int) -> Sink:
        if mode == "stream":
            return Stream(self.id, self._outlet.send, self._outlet.congested)
        return Rolling(limit) if mode == "ring" else HeadTail(min(limit, CAPTURE_LIMIT))

    @property
    def fetches(self) -> bool:
        """Return whether the slot's parent makes its pipes, because the guest may be unable to send any."""
        return self._takes_pipes and self.pty is None

    @property
    def stream(self) -> Stream | None:
        """Return the stream to the driver, if its output is streamed."""
        return self.sinks[0] if isinstance(self.sinks[0], Stream) else None

    def descriptors(self, wants_input: bool) -> list[int]:
        """Return the descriptors of the command's pipes: input if it has any, output, errors. None for a terminal.

        `spawned` closes them.

        Raises:
            OSError: there are no more.
        """
        if self.pty is not None:
            self.stdin = Input(self._loop, None, self.id, self._outlet.send, terminal=True)
            return []
        if self.fetches:
            if wants_input:
                self.stdin = Input(self._loop, None, self.id, self._outlet.send)
            return []
        outputs = [self._child_fds[0], self._child_fds[-1]]
        if not wants_input:
            return outputs
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(writer, False)
        self.stdin = Input(self._loop, writer, self.id, self._outlet.send)
        self._child_fds.append(reader)
        return [reader, *outputs]

    def spawned(self) -> None:
        """Close the command's descriptors, of which the slot's parent now has copies. Idempotent."""
        for fd in self._child_fds:
            os.close(fd)
        self._child_fds = []

    def started(self, pid: int, fds: list[int]) -> None:
        """Record that the slot's parent has started it, and take the guest's ends of its streams from `fds`."""
        self.pid = pid
        if self.fetches:
            for sink in self.sinks[: len(fds)]:
                self._connect(fds.pop(0), sink)
            if fds and self.stdin is not None:
                self.stdin.connect(fds.pop())
        if self.pty is not None and fds and self.stdin is not None:
            master = fds.pop()
            self._connect(master, self.sinks[0])
            self.stdin.connect(fcntl.fcntl(master, fcntl.F_DUPFD_CLOEXEC, 0))
        if self.on_start is not None:
            self.on_start()

    def resize(self, rows: int, columns: int) -> None:
        """Give its terminal another size. Raises OSError."""
        for master in self._open:
            terminal.resize(master, rows, columns)
        self.pty = (rows, columns)

    # --- its end ----------------------------------------------------------------------------------------------------

    def limit_time(self, seconds: float, grace: float) -> None:
        """Stop it after this many seconds, and say that its time was up."""

        def expire() -> None:
            self.timed_out = True
            self.stop(grace)

        self._timers.append(self._loop.later(seconds, expire))

    def stop(self, grace: float) -> None:
        """End the command and what it started: TERM, the grace period, KILL; empty the slot if even that fails."""
        if self.ended or self.status is not None:
            return
        self._stopping = True
        if not self.handed_over:
            self.exited(int(signal.SIGKILL))
            return
        self._owner.stop(self.id, grace)
        self._timers.append(self._loop.later(grace + LAST_RESORT_S, lambda: self._owner.last_resort(self)))

    def exited(self, status: int) -> None:
        """Record the command's wait status. The result is complete once the pipes are drained."""
        if self.status is None and not self.ended:
            self.status = status
            self._settled()
            self._finish_if_drained()

    def killed_with_slot(self, error: dict[str, str] | None = None) -> None:
        """Record that the slot was emptied while it ran, or lost because of `error`. What its pipes hold is kept."""
        if self.ended:
            return
        self.error = error
        if self.status is None:
            self.status = int(signal.SIGKILL)
            self._settled()
        for fd in list(self._open):
            if self._pump(fd, DRAIN_LIMIT) == _FULL and self.error is None:
                self.error = {"kind": "command", "code": "killed", "message": "the slot's processes were killed"}
        self._end()

    def failed(self, error: dict[str, str]) -> None:
        """Record that it could not be started."""
        if self.status is None and not self.ended:
            if self._stopping:
                self.status = int(signal.SIGKILL)
            else:
                self.error = error
            self._settled()
            self._end()

    def _settled(self) -> None:
        self.duration = time.monotonic() - self.began
        for timer in [*self._timers, *filter(None, [self._rest])]:
            timer.cancel()
        self._timers = []

    def _finish_if_drained(self) -> None:
        """After the exit, keep what the pipes hold, and don't wait for what other processes write later."""
        drained = True
        for fd in list(self._open):
            sink = self._open[fd]
            before = sink.total
            state = self._pump(fd, self._still_drained)
            self._still_drained -= sink.total - before
            if state == _FULL:
                self._pause(fd)
                drained = False
        if drained and not self.ended:
            self._end()

    def _end(self) -> None:
        self.ended = True
        self._let_go()
        self._on_end(self)

    def _let_go(self) -> None:
        self.spawned()
        if self.stdin is not None:
            self.stdin.close()
        if self.spool is not None:
            self.spool.close()
        for fd in list(self._open):
            self._keep_held(fd)
            self._unwatch(fd)
            del self._open[fd]
            # A child that the command left behind may hold the pipe: closing our end would kill it with SIGPIPE.
            self._owner.drains.add(fd)

    def _close_all(self) -> None:
        for fd in [*self._open, *self._child_fds]:
            self._loop.remove(fd)
            os.close(fd)

    def outcome(self) -> dict[str, Any]:
        """Return the header's fields that tell how it ended."""
        fields: dict[str, Any] = {"duration": self.duration, "timed_out": self.timed_out}
        if self.spool is not None:
            fields["spool"] = self.spool.path
        if self.status is not None:
            if os.WIFSIGNALED(self.status):
                fields["signal"] = os.WTERMSIG(self.status)
            else:
                fields["exit"] = os.WEXITSTATUS(self.status)
        return fields

    # --- its output -------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Resume paused reading, as there may be room again."""
        for fd in list(self._paused):
            self._paused.discard(fd)
            self._watch(fd)
        if self.status is not None and not self.ended:
            self._finish_if_drained()

    def _watch(self, fd: int) -> None:
        self._loop.add(fd, select.POLLIN, lambda _events: self._readable(fd))

    def _unwatch(self, fd: int) -> None:
        if fd in self._paused:
            self._paused.discard(fd)
        else:
            self._loop.remove(fd)

    def _readable(self, fd: int) -> None:
        if fd not in self._open:
            return
        sink = self._open[fd]
        before = sink.total
        state = self._pump(fd, CHUNK)
        if state == _FULL:
            self._pause(fd)
        elif state == _DRY and sink.total - before < _LITTLE:
            self._read_later(_REST_S)

    def _read_later(self, seconds: float) -> None:
        """Read no output until then, unless the command ends first."""
        for fd in self._open:
            self._loop.remove(fd)
        if self._rest is not None:
            self._rest.cancel()
        self._rest = self._loop.later(seconds, self._read_on)

    def _read_on(self) -> None:
        for fd in self._open:
            if fd not in self._paused:
                self._watch(fd)

    def _pause(self, fd: int) -> None:
        if fd not in self._paused:
            self._loop.remove(fd)
            self._paused.add(fd)
        self._outlet.pause(self.resume)

    def _pump(self, fd: int, budget: int) -> str:
        """Read until the budget is spent; says whether it was, or the pipe is dry or closed, or the sink full."""
        sink = self._open[fd]
        while budget > 0:
            room = sink.room() if isinstance(sink, Stream) else CHUNK
            if room <= 0:
                return _FULL
            try:
                data = os.read(fd, room)
            except BlockingIOError:
                if isinstance(sink, Rolling) and fd in self._masks and self._masks[fd].holds:
                    self._loop.later(_HELD_S, lambda: self._keep_held(fd))
                return _DRY
            except OSError:  # a terminal that no program has open
                if self.status is None and not self.ended:
                    # Programs may reopen it, so we don't hang it up before the command ends.
                    self._read_later(_HUNG_UP_S)
                    return _CLOSED
                data = b""
            if not data:
                self._keep_held(fd)
                self._unwatch(fd)
                del self._open[fd]
                os.close(fd)
                return _CLOSED
            self._keep(sink, self._masks[fd].feed(data) if fd in self._masks else data)
            budget -= len(data)
        return _SPENT

    def _keep(self, sink: Sink, data: bytes) -> None:
        if data:
            sink.feed(data)
            if self.spool is not None:
                self.spool.write(data)
            if self.on_output is not None:
                self.on_output()

    def _keep_held(self, fd: int) -> None:
        """Keep held-back bytes: what looked like the beginning of a secret seems to be none."""
        if fd in self._masks and fd in self._open:
            self._keep(self._open[fd], self._masks[fd].rest())
