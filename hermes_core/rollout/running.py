"""The rollouts that run now. Each is a task with a deadline; a rollout that misses it is ended in the background."""

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
        """The time on the monotonic clock when a rollout last ended, or began while no other ran."""
        self._tasks = TaskSet()

    def __len__(self) -> int:
        """Return the number of rollouts that have not ended, including those that missed their deadline."""
        return len(self._tasks)

    async def run(self, work: Coroutine[Any, Any, None], name: str, deadline_s: float | None) -> bool:
        """Do the work of one rollout. Return whether it ended before the deadline.

        At the deadline, the work is cancelled. Its clean-up goes on in the background.

        Args:
            deadline_s: seconds from now; None is no deadline.

        Raises:
            Exception: any error that the work raises.
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
        """Run clean-up work of a rollout that missed its deadline, in the background."""
        self._tasks.spawn(work, name)

    async def aclose(self) -> None:
        """Cancel the rollouts that have not ended, and wait for them for a limited time."""
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._tasks.aclose()
        except TimeoutError:
            log.error("%d rollouts were cancelled at their deadline and do not end: a hook blocks that", len(self))
