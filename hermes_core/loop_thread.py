"""An event loop in a thread of its own: for what must outlive a caller's loop, and end before the interpreter does."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from hermes_core.errors import UsageError
from hermes_core.workers import Workers

LOOK_S = 0.1
"""How often it looks whether the main thread still lives, in seconds."""

MOST_WORKERS = 32
"""Blocking calls at the same time."""

T = TypeVar("T")


class LoopEnded(UsageError):
    """The program is ending, or has closed the loop."""

    def __init__(self) -> None:
        super().__init__(
            "this event loop has ended", hint="make another one; once the main thread has ended it is too late for that"
        )


class LoopThread:
    """Runs coroutines for callers in any thread or loop, until it is closed, or the main thread ends.

    The interpreter waits for it at its end, before anything is torn down: what `close` does then still works. Blocking
    calls (`asyncio.to_thread`) do, too, which Python's own executors refuse by then.

    Args:
        name: of the thread.
        close: awaited in the loop as the last thing.

    Raises:
        LoopEnded: the main thread has ended.
    """

    def __init__(self, name: str, close: Callable[[], Awaitable[object]]) -> None:
        if not threading.main_thread().is_alive():
            raise LoopEnded
        self._close = close
        self._under_way: dict[concurrent.futures.Future[Any], tuple[Coroutine[Any, Any, Any], ...]] = {}
        self._over = False
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._thread.start()
        self._begun.wait()

    async def run(self, work: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, Any]] | None = None) -> T:
        """Await `work` there, from any other loop; cancelled with the caller.

        Args:
            undo: what takes its outcome back, where that came too late for a caller who was cancelled.

        Raises:
            LoopEnded: it has ended, or does so before `work` is done.
        """
        outcome, cancel = self._begin(work)
        waiting = asyncio.wrap_future(outcome)
        waiting.add_done_callback(lambda future: future.cancelled() or future.exception())
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if outcome.cancelled() and not _cancelling():
                raise LoopEnded from None
            if not outcome.cancelled():
                self._call(cancel)
                if undo is not None:
                    outcome.add_done_callback(lambda done: self._take_back(done, undo))
            raise

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, blocking the calling thread.

        Raises:
            UsageError: the caller is this very thread, which would wait for itself.
            LoopEnded: it has ended, or does so before `work` is done.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise UsageError("a blocking call from its own event loop would never end", hint="await the other form")
        outcome, cancel = self._begin(work)
        try:
            return outcome.result()
        except concurrent.futures.CancelledError:
            raise LoopEnded from None
        except BaseException:
            if not outcome.done():  # Ctrl-C
                self._call(cancel)
            raise

    def begin_close(self) -> None:
        """Let it end. Idempotent."""
        self._call(self._stop.set)

    def close(self, timeout_s: float | None = None) -> None:
        """End it, blocking until it has ended. Idempotent."""
        self.begin_close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=_Loop) as runner:
                runner.run(self._main())
        finally:
            self._over = True
            self._drop()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._begun.set()
        while threading.main_thread().is_alive() and not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), LOOK_S)
        await self._close()

    def _begin(self, work: Coroutine[Any, Any, T]) -> tuple[concurrent.futures.Future[T], Callable[[], object]]:
        """Start it; its outcome, and what cancels it when called in the loop."""
        tasks: list[asyncio.Task[Any]] = []

        async def noted() -> T:
            current = asyncio.current_task()
            assert current is not None
            tasks.append(current)
            return await work

        def cancel() -> object:
            return tasks[0].cancel() if tasks else self._loop.call_soon(cancel)  # it is just about to begin

        if self.closed:
            work.close()
            raise LoopEnded
        beginning = noted()
        try:
            outcome = asyncio.run_coroutine_threadsafe(beginning, self._loop)
        except RuntimeError:  # it ends just now
            beginning.close()
            work.close()
            raise LoopEnded from None
        self._under_way[outcome] = beginning, work
        outcome.add_done_callback(self._under_way.pop)
        if self._over:
            self._drop()
        return outcome, cancel

    def _drop(self) -> None:
        """What was asked for too late for the loop to begin it is not waited for."""
        for outcome, late in [*self._under_way.items()]:
            if outcome.cancel():
                for work in late:
                    work.close()

    def _take_back(self, outcome: concurrent.futures.Future[T], undo: Callable[[T], Coroutine[Any, Any, Any]]) -> None:
        if not outcome.cancelled() and outcome.exception() is None:
            asyncio.run_coroutine_threadsafe(undo(outcome.result()), self._loop)

    def _call(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # it has ended
            return


def _cancelling() -> bool:
    """Whether it is the current task that is being cancelled."""
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose blocking calls find a thread also while the program ends."""

    def __init__(self) -> None:
        super().__init__()
        self._workers = Workers(MOST_WORKERS)
        self._workers.submit(int)  # from now on there is one
        self.set_default_executor(self._workers)

    async def shutdown_default_executor(self, *_: object, **__: object) -> None:
        """Wait for them, in place: asyncio's own begins a thread for that, which may not be possible any more."""
        self._workers.shutdown()
