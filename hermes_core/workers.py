"""Threads for blocking calls, which also accept calls while the program ends."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

_KEEPS_THREADS = (3, 12, 0) <= sys.version_info[:3] <= (3, 12, 1)
"""Whether this version of Python can't start threads when the main thread has ended, so that idle threads are kept for
later calls."""


def begin_thread(call: Callable[[], object], name: str) -> None:
    """Run a call in a daemon thread. Unlike an executor's threads, it never delays the end of the program.

    Python 3.12.0 and 3.12.1 start no thread once the main thread has ended; the call then gets a thread that is idle.

    Raises:
        RuntimeError: no thread can be started.
    """
    if _KEEPS_THREADS:
        _kept.begin(call, name)
    else:
        threading.Thread(target=call, name=name, daemon=True).start()


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> bool:
    """Call a function in the event loop's thread. If the loop is closed, return False without the call, because then no
    one needs it."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return False
    return True


class _KeptThreads:
    """Threads that are reused. Their number is the largest number of calls that ever ran at the same time."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all threads: a forked child has none of them."""
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], str]] = queue.SimpleQueue()
        self._changing = threading.Lock()
        self._threads = 0
        self._free = 0
        """Number of threads that wait for a call; below 0, the number of calls that wait for a thread."""

    def begin(self, call: Callable[[], object], name: str) -> None:
        with self._changing:
            if self._free <= 0:
                try:
                    threading.Thread(target=self._work, args=(call, name), daemon=True).start()
                except RuntimeError:
                    if not self._threads:
                        raise
                else:
                    self._threads += 1
                    return
            self._free -= 1
            self._calls.put((call, name))

    def _work(self, call: Callable[[], object], name: str) -> None:
        thread = threading.current_thread()
        try:
            while True:
                thread.name = name
                call()
                thread.name = "idle"
                with self._changing:
                    self._free += 1
                call, name = self._calls.get()
        finally:
            with self._changing:
                self._threads -= 1


_kept = _KeptThreads()
os.register_at_fork(after_in_child=_kept.forget)


class Workers(concurrent.futures.ThreadPoolExecutor):
    """An executor that accepts calls for as long as threads can run.

    Python's own executor accepts no calls when the main thread has ended, but some objects are only closed then. Python
    3.12.0 and 3.12.1 start no threads at that time, so calls wait for existing threads.

    Args:
        most: maximum number of threads, which are started when needed.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._most = most
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._begun: list[threading.Thread] = []
        self._under_way = 0
        self._closed = False
        self._changing = threading.Lock()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        """Run a call in a thread.

        Raises:
            RuntimeError: the executor is shut down, or there is no thread and none can be started.
        """
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

        def call() -> None:
            if outcome.set_running_or_notify_cancel():
                try:
                    outcome.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    outcome.set_exception(error)
            with self._changing:
                self._under_way -= 1

        with self._changing:
            if self._closed:
                raise RuntimeError("these threads are shut down")
            if self._under_way >= len(self._begun) < self._most:
                with contextlib.suppress(RuntimeError) if self._begun else contextlib.nullcontext():
                    self._begin_one()
            self._under_way += 1
            self._calls.put(call)
        return outcome

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end when all calls are done; `cancel_futures` is not supported. Idempotent."""
        with self._changing:
            if not self._closed:
                self._closed = True
                for _ in self._begun:
                    self._calls.put(None)
        if wait:
            for thread in self._begun:
                thread.join()

    def _begin_one(self) -> None:
        thread = threading.Thread(target=self._work, name="blocking calls", daemon=True)
        thread.start()
        self._begun.append(thread)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
