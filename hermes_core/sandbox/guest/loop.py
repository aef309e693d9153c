"""The guest's event loop: descriptors by epoll, timers, and children's deaths, one thread."""

from __future__ import annotations

import collections
import heapq
import itertools
import os
import select
import signal
import time


class Timer:
    """A call that is due once; `cancel()` makes it never happen."""

    __slots__ = ("call", "due")

    def __init__(self, due, call):
        self.due = due
        self.call = call

    def cancel(self):
        """Forget it."""
        self.call = None


class Loop:
    """Calls back when a descriptor is ready, a time has come, or a child has ended."""

    def __init__(self):
        self._epoll = select.epoll()
        self._handlers = {}
        self._timers = []
        self._order = itertools.count()
        self._watched = {}
        self._unclaimed = collections.OrderedDict()
        self._running = True
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wake = wake_read
        self.add(wake_read, select.EPOLLIN, lambda _: os.read(wake_read, 4096) and self.reap())

    def add(self, fd, events, handler):
        """Call `handler(events)` whenever `fd` is ready."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def change(self, fd, events):
        """Wait for other events on `fd`, if it is watched."""
        if fd in self._handlers:
            self._epoll.modify(fd, events)

    def remove(self, fd):
        """Stop watching `fd`; call before closing it."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def later(self, seconds, call):
        """Call once, in so many seconds."""
        timer = Timer(time.monotonic() + seconds, call)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def watch(self, pid, call):
        """Call `call(status)` once the child `pid` has been reaped, at once if that has happened already."""
        if pid in self._unclaimed:
            call(self._unclaimed.pop(pid))
        else:
            self._watched[pid] = call

    def reap(self):
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
            # A slot's parent in a pid namespace becomes our child before we learn its pid: it may have died already.
            self._unclaimed[pid] = status
            while len(self._unclaimed) > 256:
                self._unclaimed.popitem(last=False)

    def stop(self):
        """Return from `run` after this round."""
        self._running = False

    def run(self):
        """Serve until `stop`."""
        while self._running:
            for fd, events in self._epoll.poll(self._timeout()):
                handler = self._handlers.get(fd)
                if handler is not None:
                    handler(events)
            self._call_due()

    def _timeout(self):
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return -1
        return max(0.0, self._timers[0][0] - time.monotonic())

    def _call_due(self):
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.call is not None:
                timer.call()
