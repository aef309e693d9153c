"""Tasks with an owner, and single-flight: one attempt shared by all who want its outcome, in place of a lock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hermes_core.errors import InfraError
from hermes_core.program_end import finish_at_end

log = logging.getLogger(__name__)

T = TypeVar("T")


_CLEAN_UP_S = 5.0
"""How long what is being cancelled already may take before it is cancelled once more, in seconds."""


async def cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, without waiting for those that this has cancelled.

    One that was being cancelled already gets some time for it: `asyncio.run` cancels a task and its owner both at its
    end, and a second cancellation would cut the clean-up off that the first began. What it was cancelled for may be
    less than its end, such as a time limit within it, and so it is cancelled if it then goes on.
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


class TaskSet:
    """The running tasks of one owner, which may outlive the call that began them.

    A `TaskGroup` ends in the task that began it, and one failed child takes the others down. An owner with `start()`
    and `aclose()` may be closed from another task than it was started in, and its tasks are independent: hence this.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.closing = False
        """Whether it is being closed, or was: what begins now is to clean up, and nothing else."""

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Begin `work`; its error, if nobody awaits the task, is logged."""
        finish_at_end(asyncio.get_running_loop())
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("background task %s failed: %s", task.get_name(), error, exc_info=error)

    async def aclose(self) -> None:
        """Cancel what runs and wait until all of it has ended, whatever those tasks begin meanwhile."""
        self.closing = True
        await cancel(self._tasks)
        await self.join()

    async def join(self) -> None:
        """Wait until all of it has ended by itself."""
        me = asyncio.current_task()
        while pending := {task for task in self._tasks if task is not me}:
            await asyncio.wait(pending)


class BrokenOff(InfraError):
    """What was waited for was given up, as its owner was closed."""

    retryable = False


@dataclass(eq=False)
class _Attempt(Generic[T]):
    """One attempt, and how many wait for it."""

    task: asyncio.Task[T]
    waiting: int = 0
    given_up: bool = False
    """Whether the last of those waiting has left: it is being undone."""


class SingleFlight(Generic[T]):
    """At most one attempt at a time for each key, shared by all who ask.

    - Who asks while an attempt is under way waits for that one, and gets its outcome, or its error.
    - It belongs to all who wait, and not to the one who began it: that one may be cancelled, and the others are served.
    - It is cancelled when the last of them is. That one's cancellation lasts until the attempt has undone what it
      began, as if nobody else had ever been there; who asks meanwhile begins another one after that.
    - An attempt that failed is forgotten: who asks next begins another one.
    - When the owner's `TaskSet` is closed, those who wait get `BrokenOff`, and so does who would begin another one.

    Args:
        what: what is attempted, for the error and for the names of the tasks.
        keep: give the outcome to all who ask later, too. Without, they begin another attempt.
        go_on: let an attempt that nobody waits for any more go on: for what is of use to whoever asks next.
    """

    def __init__(self, what: str, *, keep: bool = False, go_on: bool = False) -> None:
        self.kept: dict[Hashable, T] = {}
        """The outcomes that are kept, by key."""
        self._what = what
        self._keep = keep
        self._go_on = go_on
        self._attempts: dict[Hashable, _Attempt[T]] = {}

    async def get(self, work: TaskSet, begin: Callable[[], Awaitable[T]], key: Hashable = None) -> T:
        """The outcome that is kept for this key, or that of the attempt under way, or of one that begins now.

        Args:
            work: the owner of an attempt that begins now.
            begin: makes the attempt. Called in a task of its own.
            key: tells apart what may be attempted at the same time; not needed where there is one thing only.

        Raises:
            BrokenOff: the owner was closed.
            Whatever the attempt raises: the same error for all who waited for it.
        """
        while key not in self.kept:
            attempt = self._attempts.get(key) or self._begin(work, begin, key)
            if not attempt.given_up:
                return await self._outcome(attempt)
            await asyncio.wait([attempt.task])
        return self.kept[key]

    def _begin(self, work: TaskSet, begin: Callable[[], Awaitable[T]], key: Hashable) -> _Attempt[T]:
        if work.closing:
            raise self._broken_off()
        name = self._what if key is None else f"{self._what} {key}"
        attempt = self._attempts[key] = _Attempt(work.spawn(self._run(begin, key), name))
        # Not at the end of `_run`: a task that is cancelled before its first step never gets there.
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
            await asyncio.wait([attempt.task])  # never raises what the task does, so a cancellation here is our own
        except asyncio.CancelledError:
            if attempt.waiting == 1 and not self._go_on:
                attempt.given_up = True
                await cancel([attempt.task])
                await asyncio.wait([attempt.task])
            raise
        finally:
            attempt.waiting -= 1
        if attempt.task.cancelled():
            raise self._broken_off()
        return attempt.task.result()

    def _broken_off(self) -> BrokenOff:
        return BrokenOff(
            f"{self._what} was broken off, as its owner was closed",
            hint="use it inside the `async with` block that owns it",
        )
