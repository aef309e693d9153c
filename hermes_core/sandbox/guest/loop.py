"""The guest's event loop: descriptors, timers, and the ends of children, in one thread."""

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
    """A call that happens once, at the monotonic time `due`, unless it is cancelled."""

    __slots__ = ("_loop", "call", "due")

    def __init__(self, loop: Loop, due: float, call: Callable[[], object]) -> None:
        self._loop = loop
        self.due = due
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        """Cancel the call. Idempotent."""
        if self.call is not None:
            self.call = None
            self._loop.count_cancelled()


class Loop:
    """Calls back when a descriptor is ready, a timer is due, or a child has ended.

    `run` makes all calls, one after the other. A handler may be called although its descriptor is not ready, because
    the number may have been closed and reused since `poll` returned.

    We use poll, because the kernel limits the descriptors in epolls per user, so a slot with our own user id could use
    up our share. With the hundred descriptors of a busy guest, poll costs three microseconds.
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
        """Call `call` at the end of this round of the loop, when all ready descriptors have been handled.

        A call that is added at the end of a round is made at the end of the next one, which follows at once.
        """
        self._after.append(call)

    def later(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Call `call` once, in `seconds`."""
        timer = Timer(self, time.monotonic() + seconds, call)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def count_cancelled(self) -> None:
        """Count a cancelled timer. When many have been cancelled, they are all removed, long before they are due."""
        self._cancelled += 1
        if self._cancelled > _STALE_TIMERS and self._cancelled > len(self._timers) // 2:
            self._timers = [entry for entry in self._timers if entry[2].call is not None]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def watch(self, pid: int, call: Callable[[int], object], since: float) -> None:
        """Call `call(status)` when the child `pid` has been reaped.

        The child may have been reaped already, if it became our child when its parent died, or before we knew its pid.
        `since` is a monotonic time at which the child was alive; earlier children had the same pid by chance.
        """
        status, when = self._unclaimed.pop(pid, (0, -1.0))
        if when >= since:
            self.later(0, lambda: call(status))
        else:
            self._watched[pid] = call

    def reap(self) -> None:
        """Reap all children that have ended, also orphans of dead slot parents, because the guest is subreaper."""
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

    def was_reaped(self, pid: int, since: float) -> bool:
        """Return whether this child, which nobody watches, was reaped after the monotonic time `since`."""
        return self._unclaimed.get(pid, (0, -1.0))[1] >= since

    def stop(self) -> None:
        """Make `run` return after the current callback."""
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
        """Return the milliseconds until the next timer, rounded up, so that we never wake too early."""
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
            self._cancelled -= 1
        if self._after:
            return 0
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
