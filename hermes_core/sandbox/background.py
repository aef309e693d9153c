"""Background work with an owner: tasks that outlive the call that began them, and are ended by whoever owns them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

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


class Background:
    """The running tasks of one owner.

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
