"""Keeps the sandboxes of a living driver alive: E2B ends each of them some time after the last call for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from hermes_core import TaskSet

log = logging.getLogger(__name__)

CALLS_PER_TIMEOUT = 3
"""The number of calls for a sandbox in the time after which it would end without them."""
AT_A_TIME = 8
"""Maximum number of calls at the same time."""
LOOK_S = 1.0
"""Seconds between two looks for sandboxes that need a call."""


class KeepAlive:
    """Moves the end of sandboxes, again and again, from a single task.

    Args:
        extend: takes a sandbox's id and a timeout in seconds, lets the sandbox end after this time, and returns whether
            the sandbox exists.
    """

    def __init__(self, extend: Callable[[str, int], Awaitable[bool]]) -> None:
        self._extend = extend
        self._timeouts: dict[str, int] = {}
        self._due: dict[str, float] = {}
        self._work = TaskSet()
        self._places = asyncio.Semaphore(AT_A_TIME)

    def __contains__(self, sandbox_id: str) -> bool:
        return sandbox_id in self._timeouts

    def add(self, sandbox_id: str, timeout_s: int) -> None:
        """Keep a sandbox alive that E2B would end in `timeout_s` seconds."""
        self._timeouts[sandbox_id] = timeout_s
        self._due[sandbox_id] = time.monotonic() + timeout_s / CALLS_PER_TIMEOUT
        if not len(self._work):
            self._work.spawn(self._run(), "keep sandboxes alive")

    def drop(self, sandbox_id: str) -> None:
        """Forget a sandbox."""
        self._timeouts.pop(sandbox_id, None)
        self._due.pop(sandbox_id, None)

    async def aclose(self) -> None:
        """Stop. E2B then ends the sandboxes after their timeouts."""
        await self._work.aclose()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            await asyncio.gather(*(self._move(each) for each, due in [*self._due.items()] if due <= now))

    async def _move(self, sandbox_id: str) -> None:
        async with self._places:
            timeout_s = self._timeouts.get(sandbox_id)
            if timeout_s is None:
                return
            try:
                exists = await self._extend(sandbox_id, timeout_s)
            except Exception as error:  # the next look tries again, until the sandbox has ended
                log.warning(
                    "sandbox %s ends in at most %d s, as E2B refuses to keep it: %s", sandbox_id, timeout_s, error
                )
                self._due[sandbox_id] = time.monotonic() + timeout_s / CALLS_PER_TIMEOUT / 4
                return
            if not exists:
                self.drop(sandbox_id)
            elif sandbox_id in self._due:
                self._due[sandbox_id] = time.monotonic() + timeout_s / CALLS_PER_TIMEOUT
