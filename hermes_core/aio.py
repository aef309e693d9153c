"""Tasks with an owner, attempts that callers share, and an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import concurrent.futures.thread  # imported first, so that its executors are shut down after `_finish` has run
import contextlib
import logging
import os
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hermes_core.errors import InfraError, UsageError
from hermes_core.workers import Workers, call_in

log = logging.getLogger(__name__)

T = TypeVar("T")

_CLEAN_UP_S = 5.0
"""Seconds that a task that is already being cancelled may take before it is cancelled again."""


async def cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks. Don't wait for the end of tasks that this call cancels.

    A task that was already being cancelled gets `_CLEAN_UP_S` seconds first. When `asyncio.run` ends, it cancels both a
    task and its owner, and a second cancellation would interrupt the clean-up after the first one. If the task then
    still runs, because the first cancellation was only meant for a part of it (such as a time limit inside), it is
    cancelled again.
    """
    me = asyncio.current_task()
    spared = {task for task in tasks if task is not me and task.cancelling()}
    for task in {*tasks} - spared:
        task.cancel()
    if spared:
        _, going_on = await asyncio.wait(spared, timeout=_CLEAN_UP_S)
        for task in going_on:
            task.cancel()


@asynccontextmanager
async def alongside(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run the work during the block, and cancel it at the block's end."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """Open a task group that raises its first error alone, not in a group: other errors only come from the tasks that
    it cancelled."""
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as errors:
        failure = errors.exceptions[0]
    if failure is not None:  # raised outside of the `except` block, so that the error keeps its own cause
        raise failure


@contextmanager
def exits_are_errors() -> Iterator[None]:
    """Turn a plugin's call of `sys.exit` into an ordinary error. In a task, it would end the loop and all other tasks.

    Raises:
        RuntimeError: the block raised SystemExit.
    """
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r}) was called") from error


async def complete(work: Coroutine[Any, Any, T]) -> T:
    """Await the work to its end, even if the caller is cancelled meanwhile. The cancellation is raised afterwards.

    This is for clean-up. The work needs a time limit of its own, because nothing else stops it.
    """
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled() and (failed := task.exception()) is not None:
        raise cancelled from failed
    raise cancelled


async def repeat_call(
    attempt: Callable[[], Awaitable[T]],
    pause_asked: Callable[[Exception], float | None],
    *,
    patience_s: float,
    first_pause_s: float = 0.25,
    longest_pause_s: float = 8.0,
) -> T:
    """Return the result of the first attempt that succeeds. The pause after each failed attempt is twice as long as the
    one before, minus a random part.

    Args:
        pause_asked: returns after a failure the least pause in seconds that the other side asks for; None if no
            repetition helps.
        patience_s: seconds after which no further attempt begins.
        first_pause_s: our own pause after the first failure, in seconds.
        longest_pause_s: the longest pause of our own, in seconds.

    Raises:
        Exception: the failure of the last attempt.
    """
    loop = asyncio.get_running_loop()
    end, pause_s = loop.time() + patience_s, first_pause_s
    while True:
        try:
            return await attempt()
        except Exception as error:
            asked = pause_asked(error)
            if asked is None:
                raise
            wait_s = max(asked, pause_s * random.uniform(0.5, 1.0))
            if loop.time() + wait_s > end:
                raise
            log.debug("again in %.1f s: %s", wait_s, error)
        await asyncio.sleep(wait_s)
        pause_s = min(2 * pause_s, longest_pause_s)


class TaskSet:
    """The running tasks of one owner, which may outlive the call that started them.

    A `TaskGroup` must end in the task that began it, and a failed child cancels the others. This class is for owners
    with `start()` and `aclose()`: another task may close the owner than the task that started it, and the owner's tasks
    are independent of each other.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.closing = False
        """Whether this set is being closed or is closed. Then only clean-up work may be started."""

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start `work` as a task. If nobody awaits the task, its error is logged."""
        finish_at_end(asyncio.get_running_loop())
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("background task %s failed: %s", task.get_name(), error, exc_info=error)

    async def aclose(self) -> None:
        """Cancel the running tasks and wait until all have ended, including tasks that they start meanwhile."""
        self.closing = True
        await cancel(self._tasks)
        await self.join()

    async def join(self) -> None:
        """Wait until all tasks have ended by themselves."""
        me = asyncio.current_task()
        while pending := {task for task in self._tasks if task is not me}:
            await asyncio.wait(pending)


class BrokenOff(InfraError):
    """The awaited work was given up, because its owner was closed."""

    retryable = False


@dataclass(eq=False)
class _Attempt(Generic[T]):
    """One attempt, and the number of callers that wait for it."""

    task: asyncio.Task[T]
    waiting: int = 0
    given_up: bool = False
    """Whether the last caller has left, so that the attempt is being undone."""


class SingleFlight(Generic[T]):
    """At most one attempt at a time for each key, shared by all callers.

    - A caller that asks while an attempt is in progress waits for it, and gets its outcome or error.
    - The attempt belongs to all waiting callers. The caller that started it may be cancelled without affecting the
      others.
    - The attempt is cancelled when its last caller is cancelled. The cancellation of this caller lasts until the
      attempt has cleaned up. A caller that asks meanwhile starts another attempt afterwards.
    - A failed attempt is forgotten: the next caller starts another one.
    - When the owner's `TaskSet` is closed, waiting callers get `BrokenOff`, and so do callers that would start an
      attempt.

    Args:
        what: the name of the attempted work, for the error and for the names of the tasks.
        keep: give the outcome to all later callers, too. Otherwise, they start another attempt.
        go_on: let an attempt continue when no caller waits for it any more, for an outcome that is useful for the next
            caller.
    """

    def __init__(self, what: str, *, keep: bool = False, go_on: bool = False) -> None:
        self.kept: dict[Hashable, T] = {}
        """The outcomes that are kept, by key."""
        self._what = what
        self._keep = keep
        self._go_on = go_on
        self._attempts: dict[Hashable, _Attempt[T]] = {}

    async def get(self, work: TaskSet, begin: Callable[[], Awaitable[T]], key: Hashable = None) -> T:
        """Return the kept outcome for this key, or else the outcome of the attempt in progress or of a new attempt.

        Args:
            work: the owner of a new attempt.
            begin: makes the attempt. Called in a task of its own.
            key: separates attempts that may run at the same time; not needed if there is only one kind.

        Raises:
            BrokenOff: the owner was closed.
            Exception: as the attempt raised it. All callers that waited get the same error.
        """
        while key not in self.kept:
            attempt = self._attempts.get(key) or self._begin(work, begin, key)
            if not attempt.given_up:
                return await self._outcome(attempt)
            await asyncio.wait([attempt.task])
        return self.kept[key]

    def _begin(self, work: TaskSet, begin: Callable[[], Awaitable[T]], key: Hashable) -> _Attempt[T]:
        if work.closing:
            raise self._error()
        name = self._what if key is None else f"{self._what} {key}"
        attempt = self._attempts[key] = _Attempt(work.spawn(self._run(begin, key), name))
        # `_run` can't do this at its end, because a task that is cancelled before its first step never gets there.
        attempt.task.add_done_callback(lambda _: self._attempts.pop(key))
        return attempt

    async def _run(self, begin: Callable[[], Awaitable[T]], key: Hashable) -> T:
        outcome = await begin()
        if self._keep:
            self.kept[key] = outcome
        return outcome

    async def _outcome(self, attempt: _Attempt[T]) -> T:
        attempt.waiting += 1
        try:
            await asyncio.wait([attempt.task])  # never raises the task's error, so a cancellation here is our own
        except asyncio.CancelledError:
            if attempt.waiting == 1 and not self._go_on:
                attempt.given_up = True
                await cancel([attempt.task])
                await asyncio.wait([attempt.task])
            raise
        finally:
            attempt.waiting -= 1
        if attempt.task.cancelled():
            raise self._error()
        return attempt.task.result()

    def _error(self) -> BrokenOff:
        return BrokenOff(
            f"{self._what} was broken off, as its owner was closed",
            hint="use it inside the `async with` block that owns it",
        )


LOOK_S = 0.1
"""Seconds between two checks that the main thread still runs."""

MOST_WORKERS = 32
"""Maximum number of blocking calls at the same time."""


class LoopEnded(UsageError):
    """The program is ending, or has closed the loop."""

    def __init__(self) -> None:
        super().__init__("this event loop has ended", hint="make another one, before the main thread has ended")


class LoopThread:
    """Runs coroutines for callers in any thread or loop, until it is closed or the main thread ends.

    The interpreter waits for this thread before it tears anything down, so `close` can still use everything. Blocking
    calls (`asyncio.to_thread`) still work, too, when Python's own executors already refuse them.

    Args:
        name: the thread's name.
        close: the last work of the loop.

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
        # Set explicitly: a thread that a daemon thread starts is a daemon by default, and the interpreter does not wait
        # for daemons.
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._thread.start()
        self._begun.wait()

    async def run(self, work: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, Any]] | None = None) -> T:
        """Await `work` in this loop, from any other loop. If the caller is cancelled, `work` is cancelled, too.

        Args:
            undo: called with the outcome if the caller was cancelled before it got this outcome.

        Raises:
            LoopEnded: the loop has ended, or ends before `work` is done.
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
                call_in(self._loop, cancel)
                if undo is not None:
                    outcome.add_done_callback(lambda done: self._take_back(done, undo))
            raise

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, blocking the calling thread.

        Raises:
            UsageError: the caller runs in this loop's own thread, which would wait for itself.
            LoopEnded: the loop has ended, or ends before `work` is done.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise UsageError(
                "a blocking call from its own event loop would never end", hint="await the asynchronous form"
            )
        outcome, cancel = self._begin(work)
        try:
            return outcome.result()
        except concurrent.futures.CancelledError:
            raise LoopEnded from None
        except BaseException:
            if not outcome.done():  # Ctrl-C
                call_in(self._loop, cancel)
            raise

    def begin_close(self) -> None:
        """Tell the loop to end. Idempotent."""
        call_in(self._loop, self._stop.set)

    def close(self, timeout_s: float | None = None) -> None:
        """End the loop, and block until it has ended. Idempotent."""
        self.begin_close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    @property
    def closed(self) -> bool:
        """Return whether the loop has ended."""
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
        """Start work. Return a future for its outcome, and a function that cancels the work when called in the loop."""
        tasks: list[asyncio.Task[Any]] = []

        async def remember_task() -> T:
            current = asyncio.current_task()
            assert current is not None
            tasks.append(current)
            return await work

        def cancel() -> object:
            return tasks[0].cancel() if tasks else self._loop.call_soon(cancel)  # the task is about to start

        if self.closed:
            work.close()
            raise LoopEnded
        beginning = remember_task()
        try:
            outcome = asyncio.run_coroutine_threadsafe(beginning, self._loop)
        except RuntimeError:  # the loop is ending
            beginning.close()
            work.close()
            raise LoopEnded from None
        self._under_way[outcome] = beginning, work
        outcome.add_done_callback(self._under_way.pop)
        if self._over:
            self._drop()
        return outcome, cancel

    def _drop(self) -> None:
        """Stop waiting for work that was requested too late for the loop to start it."""
        for outcome, late in [*self._under_way.items()]:
            if outcome.cancel():
                for work in late:
                    work.close()

    def _take_back(self, outcome: concurrent.futures.Future[T], undo: Callable[[T], Coroutine[Any, Any, Any]]) -> None:
        if not outcome.cancelled() and outcome.exception() is None:
            asyncio.run_coroutine_threadsafe(undo(outcome.result()), self._loop)


def _cancelling() -> bool:
    """Return whether the current task is being cancelled."""
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose blocking calls get a thread even while the program ends."""

    def __init__(self) -> None:
        super().__init__()
        self._workers = Workers(MOST_WORKERS)
        self._workers.submit(int)  # starts the first thread now
        self.set_default_executor(self._workers)

    async def shutdown_default_executor(self, *_: object, **__: object) -> None:
        """Wait for the threads in this thread. asyncio would start a thread for this, which may be impossible now."""
        self._workers.shutdown()


# The rest of this module is for event loops that, when the program ends, were neither closed nor run by `asyncio.run`.

_END_S = 60.0
"""Seconds that the tasks of a loop may take to end."""

_loops: set[asyncio.AbstractEventLoop] = set()


def finish_at_end(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the loop's tasks when the main thread ends, if the loop is open but does not run at that time.

    `asyncio.run` does the same. Otherwise, Python destroys the tasks while it tears down its modules. Then no task
    could end its sandbox, and each would log an error.
    """
    if loop not in _loops:
        _loops.difference_update([each for each in [*_loops] if each.is_closed()])
        _loops.add(loop)


def _finish() -> None:
    for loop in [*_loops]:
        if not (loop.is_closed() or loop.is_running()):
            _cancel_all(loop)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=_END_S))
    loop.run_until_complete(loop.shutdown_asyncgens())


os.register_at_fork(after_in_child=_loops.clear)  # a forked child has its parent's loops, but must not run them
with contextlib.suppress(RuntimeError):  # this module is imported while the program ends, so no loop will follow
    # The functions of `atexit` would run too late, when executors accept no more calls.
    threading._register_atexit(_finish)  # type: ignore[attr-defined]
