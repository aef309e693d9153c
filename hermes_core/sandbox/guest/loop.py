"""The guest's event loop: descriptors, timers, and children's deaths, one thread."""

from __future__ import annotations

import collections
import heapq
import itertools
import math
import os
import select
import signal
import time

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST_POLL_MS = 3_600_000
_UNCLAIMED = 1024
_STALE_TIMERS = 256


class Timer:
    """A call that is due once; `cancel()` makes it never happen."""

    __slots__ = ("_loop", "call", "due")

    def __init__(self, loop: Loop, due: float, call: Callable[[], object]) -> None:
        self._loop = loop
        self.due = due
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """Forget it."""
        if self.call is not None:
            self.call = None
            self._loop.timer_cancelled()


class Loop:
    """Calls back when a descriptor is ready, a time has come, or a child has ended.

    Callbacks run one after the other from `run`, never from within another one. They must stand a spurious call for
    a descriptor: it may have been closed and opened anew since the kernel was asked.

    By poll, not epoll: what epoll watches is counted by user, and a slot of our own user could leave us no room for
    more. At the hundred descriptors of a busy guest it costs three microseconds.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[int], object]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._cancelled = 0
        self._order = itertools.count()
        self._watched: dict[int, Callable[[int], object]] = {}
        self._unclaimed: collections.OrderedDict[int, tuple[int, float]] = collections.OrderedDict()
        self._running = True
        self._after: list[Callable[[], object]] = []
        self._wake, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.add(self._wake, select.POLLIN, self._on_signal)

    def add(self, fd: int, events: int, handler: Callable[[int], object]) -> None:
        """Call `handler(events)` whenever `fd` is ready."""
        self._poll.register(fd, events)
        self._handlers[fd] = handler

    def change(self, fd: int, events: int) -> None:
        """Wait for other events on `fd`, if it is watched."""
        if fd in self._handlers:
            self._poll.modify(fd, events)

    def remove(self, fd: int) -> None:
        """Stop watching `fd`; call before closing it. Idempotent."""
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def after(self, call: Callable[[], object]) -> None:
        """Call once, after all that is ready now has been served: what can be done for all of it at once."""
        self._after.append(call)

    def later(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Call once, in so many seconds."""
        timer = Timer(self, time.monotonic() + seconds, call)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def timer_cancelled(self) -> None:
        """Count a timer that will not be called; time limits of commands that ended must not pile up until due."""
        self._cancelled += 1
        if self._cancelled > _STALE_TIMERS and self._cancelled > len(self._timers) // 2:
            self._timers = [entry for entry in self._timers if entry[2].call is not None]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def watch(self, pid: int, call: Callable[[int], object], since: float) -> None:
        """Call `call(status)` once the child `pid` has been reaped.

        It may have been already: a process becomes our child by its parent's death, or before we learn its pid. `since`
        is a monotonic time at which it had not ended, so that it is not taken for an earlier one of the same pid.
        """
        status, when = self._unclaimed.pop(pid, (0, -1.0))
        if when >= since:
            self.later(0, lambda: call(status))
        else:
            self._watched[pid] = call

    def reap(self) -> None:
        """Reap every child that has ended; orphans of dead slot parents come here too, as the guest is subreaper."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            call = self._watched.pop(pid, None)
            if call is not None:
                call(status)
                continue
            self._unclaimed.pop(pid, None)
            self._unclaimed[pid] = (status, time.monotonic())
            while len(self._unclaimed) > _UNCLAIMED:
                self._unclaimed.popitem(last=False)

    def reaped(self, pid: int, since: float) -> bool:
        """Return whether this unwatched child has ended."""
        return self._unclaimed.get(pid, (0, -1.0))[1] >= since

    def stop(self) -> None:
        """Return from `run` after this callback."""
        self._running = False

    def run(self) -> None:
        """Serve until `stop`."""
        while self._running:
            for fd, events in self._poll.poll(self._timeout()):
                handler = self._handlers.get(fd)
                if handler is not None and self._running:
                    handler(events)
            self._call_due()
            calls, self._after = self._after, []
            for call in calls:
                call()

    def _on_signal(self, _events: int) -> None:
        try:
            os.read(self._wake, 4096)
        except BlockingIOError:
            return
        self.reap()

    def _timeout(self) -> int:
        """Return the milliseconds to the next timer, rounded up so that we never wake before it with nothing to do."""
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
            self._cancelled -= 1
        if not self._timers:
            return _LONGEST_POLL_MS
        seconds = max(0.0, self._timers[0][0] - time.monotonic())
        return min(_LONGEST_POLL_MS, math.ceil(seconds * 1000))

    def _call_due(self) -> None:
        now = time.monotonic()
        while self._running and self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.call is None:
                self._cancelled -= 1
            else:
                call, timer.call = timer.call, None
                call()
