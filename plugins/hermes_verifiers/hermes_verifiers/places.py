"""Limits the number of rollouts at the same time, over all processes of a user on one host."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

LOOK_S = 0.05
"""Seconds between checks for a free place."""


class Places:
    """A semaphore of lock files. The kernel frees the places of a process that has ended.

    Processes may have different counts. Together they never hold more places than the largest count.

    Args:
        directory: the folder of the lock files, on a local disk. It is made when it is needed.
        count: the number of places.
    """

    def __init__(self, directory: Path, count: int) -> None:
        self._files = [directory / str(number) for number in range(count)]
        self._line = asyncio.Lock()
        """A lock, held by the only caller in this process that checks for a free place."""

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
        """Lock a free file. Return its descriptor, or None if all are locked."""
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
