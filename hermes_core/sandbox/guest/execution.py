"""One command of a slot: its pipes, its output (captured, streamed, or kept in a ring), its input, its time limit."""

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
        """Pipes that ended commands left open in other processes."""

        def stop(self, identity: str, grace: float) -> None:
            """Send TERM to a command and the processes that it started, and KILL after `grace` seconds."""

        def last_resort(self, execution: Execution) -> None:
            """Empty the slot, because even KILL did not end the command."""


DRAIN_LIMIT = 2 << 20
"""Maximum number of bytes read after a command has ended. A pipe holds less, so all output of the command is read."""
LAST_RESORT_S = 3.0
"""How long after KILL the slot is emptied, if the command has not ended."""
_HUNG_UP_S = 0.1
"""The time between two reads of a terminal that no program has open."""
_LITTLE, _REST_S = 1 << 10, 0.002
"""After a read of fewer than 1024 bytes, and at the start of a stream, the next read is 2 ms later. Otherwise, each
line that a program writes would wake us, the channel and the driver; and a short command would wake us twice, for its
output and for its end."""
_HELD_S = 0.05
"""How long a possible beginning of a secret is held back, if somebody may be following the output."""
_DRY, _CLOSED, _FULL, _SPENT = "dry", "closed", "full", "spent"


class Stdio(Value):
    """The standard streams of a command."""

    mode: str
    """Where standard output goes: `capture` keeps its head and tail, `ring` keeps its last bytes, and `stream` sends it
    to the driver piece by piece."""
    limit: int
    """Maximum number of bytes kept."""
    merge: bool
    """Whether standard error is merged into standard output, in the order written."""
    pty: tuple[int, int] | None
    """Rows and columns of the terminal that replaces all three streams; `merge` then has no effect."""
    masked: tuple[bytes, ...]
    """The secrets that are masked in the output."""


class Execution:
    """A command from its start to its result.

    Args:
        owner: the command's slot.
        identity: the id of the request.
        on_end: called once, when the command has ended and its output is read.

    Raises:
        OSError: there are no descriptors left.
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
            return  # the slot's parent will send our end of the terminal
        if not stdio.merge:
            # Only standard output is streamed. A file operation writes its outcome to standard error.
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
            return Stream(self.id, self._outlet.send, self._outlet.is_congested)
        return Rolling(limit) if mode == "ring" else HeadTail(min(limit, CAPTURE_LIMIT))

    @property
    def fetches(self) -> bool:
        """Return whether the slot's parent makes the command's pipes, because we may be unable to send descriptors."""
        return self._takes_pipes and self.pty is None

    @property
    def stream(self) -> Stream | None:
        """Return the stream to the driver; None if the output is not streamed."""
        return self.sinks[0] if isinstance(self.sinks[0], Stream) else None

    def descriptors(self, wants_input: bool) -> list[int]:
        """Return the command's ends of its pipes: input (if `wants_input`), output, errors. `close_sent_fds` closes
        them. The list is empty if the slot's parent makes the pipes or a terminal.

        Raises:
            OSError: there are no descriptors left.
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

    def close_sent_fds(self) -> None:
        """Close the command's ends of its pipes, because the slot's parent has copies now. Idempotent."""
        for fd in self._child_fds:
            os.close(fd)
        self._child_fds = []

    def record_start(self, pid: int, fds: list[int]) -> None:
        """Record that the slot's parent has started the command, and take our ends of its pipes out of `fds`."""
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
        """Resize the command's terminal. Raises OSError."""
        for master in self._open:
            terminal.resize(master, rows, columns)
        self.pty = (rows, columns)

    # --- its end ----------------------------------------------------------------------------------------------------

    def limit_time(self, seconds: float, grace: float) -> None:
        """Stop the command after `seconds`, with `grace` seconds from TERM to KILL, and set `timed_out`."""

        def expire() -> None:
            self.timed_out = True
            self.stop(grace)

        self._timers.append(self._loop.later(seconds, expire))

    def stop(self, grace: float) -> None:
        """End the command and the processes that it started: TERM, `grace` seconds later KILL, and if even that fails,
        empty the slot."""
        if self.ended or self.status is not None:
            return
        self._stopping = True
        if not self.handed_over:
            self.record_exit(int(signal.SIGKILL))
            return
        self._owner.stop(self.id, grace)
        self._timers.append(self._loop.later(grace + LAST_RESORT_S, lambda: self._owner.last_resort(self)))

    def record_exit(self, status: int) -> None:
        """Record the command's wait status. The result is complete when the pipes are drained."""
        if self.status is None and not self.ended:
            self.status = status
            self._stop_timers()
            self._finish_if_drained()

    def end_with_slot(self, error: dict[str, str] | None = None) -> None:
        """End the command, because its slot was emptied, or was lost with `error`. Read what its pipes still hold."""
        if self.ended:
            return
        self.error = error
        if self.status is None:
            self.status = int(signal.SIGKILL)
            self._stop_timers()
        for fd in list(self._open):
            if self._pump(fd, DRAIN_LIMIT) == _FULL and self.error is None:
                self.error = {"kind": "command", "code": "killed", "message": "the slot's processes were killed"}
        self._end()

    def fail(self, error: dict[str, str]) -> None:
        """Record that the command could not be started."""
        if self.status is None and not self.ended:
            if self._stopping:
                self.status = int(signal.SIGKILL)
            else:
                self.error = error
            self._stop_timers()
            self._end()

    def _stop_timers(self) -> None:
        self.duration = time.monotonic() - self.began
        for timer in [*self._timers, *filter(None, [self._rest])]:
            timer.cancel()
        self._timers = []

    def _finish_if_drained(self) -> None:
        """After the exit, read what the pipes hold. Don't wait for output that other processes may write later."""
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
        self._release()
        self._on_end(self)

    def _release(self) -> None:
        self.close_sent_fds()
        if self.stdin is not None:
            self.stdin.close()
        if self.spool is not None:
            self.spool.close()
        for fd in list(self._open):
            self._keep_held(fd)
            self._unwatch(fd)
            del self._open[fd]
            # A child of the command may still hold the pipe. If we closed our end, SIGPIPE would kill the child.
            self._owner.drains.add(fd)

    def _close_all(self) -> None:
        for fd in [*self._open, *self._child_fds]:
            self._loop.remove(fd)
            os.close(fd)

    def outcome(self) -> dict[str, Any]:
        """Return the fields of an answer's header that say how the command ended."""
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
        """Read from paused pipes again, because there may be room."""
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
        """Read output again after `seconds`, or when the command ends."""
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
        """Read up to `budget` bytes. Return the reason to stop: the pipe is dry or closed, the sink is full, or the
        budget is spent."""
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
            except OSError:  # EIO of a terminal that no program has open
                if self.status is None and not self.ended:
                    # Programs may open the terminal again, so we keep our end until the command ends.
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
        """Keep the bytes that were held back, because they seem to be no beginning of a secret."""
        if fd in self._masks and fd in self._open:
            self._keep(self._open[fd], self._masks[fd].rest())
