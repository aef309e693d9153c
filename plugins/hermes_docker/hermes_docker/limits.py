"""Limits the load on the daemon: few creations and removals at the same time, and a pause after a failure."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hermes_docker.daemon import DaemonError

AT_A_TIME = 8
"""Maximum number of creations and removals at the same time, over all pools."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0
"""The pause in seconds after the daemon's first failure, which doubles with each further one, and its limit."""


class Throttle:
    """Limits creations and removals. A failure of the daemon makes all of them wait."""

    def __init__(self, at_a_time: int = AT_A_TIME) -> None:
        self._places = asyncio.Semaphore(at_a_time)
        self._pause_s = 0.0
        self._not_before = 0.0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a place and for the end of a pause. A failure in the block begins or lengthens the pause."""
        loop = asyncio.get_running_loop()
        async with self._places:
            await asyncio.sleep(max(0.0, self._not_before - loop.time()))
            try:
                yield
            except DaemonError as error:
                if error.status is None or error.status >= 500:
                    self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
                    self._not_before = loop.time() + self._pause_s * random.uniform(0.5, 1.0)
                raise
            else:
                self._pause_s = 0.0
