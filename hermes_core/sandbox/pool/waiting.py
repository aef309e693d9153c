"""Who waits for a slot, in order of arrival."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import operator
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from hermes_core.errors import HermesError
from hermes_core.sandbox.pool.leases import Lease

_NUMBERS = itertools.count()
_BY_NUMBER = operator.attrgetter("number")


@dataclass(eq=False)
class Waiter:
    """One who waits for a lease."""

    future: asyncio.Future[Lease]
    trajectory_id: str | None
    group: str | None
    verification: bool
    apart_from: str | None = None
    """The id of a sandbox that it had rather not come to."""
    number: int = field(default_factory=lambda: next(_NUMBERS))
    """The place in the queue: smaller came earlier."""
    failures: int = 0
    """Slots chosen for this waiter that could not be opened."""

    @property
    def gone(self) -> bool:
        """Return whether nobody waits any more: it was served, failed, timed out or cancelled."""
        return self.future.done()

    def refuse(self, error: HermesError) -> None:
        """Raise where it waits, if it still does."""
        if not self.gone:
            self.future.set_exception(error)


class WaitQueue:
    """Waiters in order of arrival: ordinary ones, and those for verification, which have slots of their own."""

    def __init__(self) -> None:
        self._queues: dict[bool, list[Waiter]] = {False: [], True: []}

    def __iter__(self) -> Iterator[Waiter]:
        return iter(sorted(itertools.chain(*self._queues.values()), key=_BY_NUMBER))

    def count(self, *, verification: bool) -> int:
        """Return how many wait for a slot to verify in, or for an ordinary one."""
        return len(self._queues[verification])

    def heads(self) -> list[Waiter]:
        """Return the first of each kind who still waits, in order of arrival."""
        for queue in self._queues.values():
            while queue and queue[0].gone:  # cancelled in this very turn of the event loop, and had no time to leave
                del queue[0]
        return sorted((queue[0] for queue in self._queues.values() if queue), key=_BY_NUMBER)

    def join(self, waiter: Waiter) -> None:
        """Take a place at the end, or the old place for one who comes back."""
        bisect.insort(self._queues[waiter.verification], waiter, key=_BY_NUMBER)

    def leave(self, waiter: Waiter) -> None:
        """Give the place up; nothing if it has none."""
        with suppress(ValueError):
            self._queues[waiter.verification].remove(waiter)
