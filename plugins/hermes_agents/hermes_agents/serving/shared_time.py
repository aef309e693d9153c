"""The time for which a rollout waits for its model, while calls overlap."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from hermes_core import AgentTask, ModelError, TaskSet, cancel


@dataclass(eq=False)
class SharedTime:
    """Enters `AgentTask.waiting` once for all overlapping calls, because the rollout's clock can only be stopped
    once."""

    task: AgentTask
    work: TaskSet
    calls: int = 0
    seconds: float = 0.0
    """Seconds in which at least one call was under way. Calls that are under way now are not included yet."""
    up: ModelError | None = None
    """Set when the rollout has reached its time limit for waiting for the model."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    clock: asyncio.Task[None] | None = None

    async def measure(self, ask: Any) -> Any:
        """Await a call, and return its result. Time in which several calls overlap counts once.

        Raises:
            ModelError: the rollout has reached its time limit for waiting for the model.
        """
        async with self._running() as clock:
            call = asyncio.ensure_future(ask)
            try:
                await asyncio.wait({call, clock}, return_when=asyncio.FIRST_COMPLETED)
                if not call.done():
                    self._check(clock)
                    raise ModelError("the wait for the model was given up", hint="look at what ended the rollout")
                return call.result()
            finally:
                if not call.done():
                    await cancel([call])
                    await asyncio.wait([call])

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[asyncio.Task[None]]:
        if self.clock is None:
            self.done = asyncio.Event()
            self.clock = self.work.spawn(self._wait(self.done), "the wait for the model")
        self.calls += 1
        try:
            yield self.clock
        finally:
            self.calls -= 1
            if not self.calls:
                self.done.set()
                self.clock = None

    def _check(self, clock: asyncio.Task[None]) -> None:
        try:
            clock.result()
        except ModelError as error:
            self.up = error
            raise

    async def _wait(self, done: asyncio.Event) -> None:
        began = time.monotonic()
        try:
            async with self.task.waiting():
                await done.wait()
        finally:
            self.seconds += time.monotonic() - began
