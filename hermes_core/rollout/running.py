"""The rollouts that run now: each is a task with a deadline, and ends in the background if it misses it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from hermes_core.aio import TaskSet, cancel

log = logging.getLogger(__name__)

LEAVE_S = 10.0
"""Seconds that `aclose` waits for rollouts that missed their deadline."""


class RunningRollouts:
    """The rollouts of one run that have not ended yet."""

    def __init__(self) -> None:
        self.ended = time.monotonic()
        """When a rollout last ended, or began as the only one; by the monotonic clock."""
        self._tasks = TaskSet()

    def __len__(self) -> int:
        """Return how many have not ended, including those that missed their deadline."""
        return len(self._tasks)

    async def run(self, work: Coroutine[Any, Any, None], name: str, deadline_s: float | None) -> bool:
        """Do the work of one rollout. Return whether it ended before the deadline.

        After the deadline, the work is cancelled and left to its clean-up, which nobody waits for.

        Args:
            deadline_s: seconds from now; None is no deadline.

        Raises:
            Exception: as the work raised it.
        """
        if not self._tasks:
            self.ended = time.monotonic()
        task = self._tasks.spawn(work, name)
        try:
            await asyncio.wait([task], timeout=deadline_s)
        except asyncio.CancelledError:
            await cancel([task])
            await asyncio.wait([task])
            raise
        finally:
            self.ended = time.monotonic()
        if task.done():
            task.result()
            return True
        task.cancel()
        return False

    def clean_up(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Do the work of a rollout that missed its deadline, in the background."""
        self._tasks.spawn(work, name)

    async def aclose(self) -> None:
        """Cancel the rollouts that have not ended, and wait for them for a limited time."""
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._tasks.aclose()
        except TimeoutError:
            log.error("%d rollouts were cancelled at their deadline and do not end: a hook blocks that", len(self))
