"""Places for rollouts, which all processes of a user on one host share."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

LOOK_S = 0.05
"""Seconds between two looks for a free place."""


class Places:
    """A number of places, each a lock file. The kernel frees the places of a process that has ended.

    Processes may have different numbers: together they never have more rollouts than the highest.

    Args:
        directory: where the lock files are; on a local disk. It is made when it is needed.
        count: the number of places.
    """

    def __init__(self, directory: Path, count: int) -> None:
        self._files = [directory / str(number) for number in range(count)]
        self._line = asyncio.Lock()
        """Held by the first in line of this process, who looks for a place."""

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Wait for a free place, and hold it in the block. Callers of one process are served in order."""
        async with self._line:
            while (place := self._free()) is None:  # noqa: ASYNC110 (other processes set no event)
                await asyncio.sleep(LOOK_S)
        try:
            yield
        finally:
            os.close(place)

    def _free(self) -> int | None:
        """Return the descriptor of a lock file that is now ours, or None."""
        self._files[0].parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in self._files:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
            else:
                return descriptor
        return None
