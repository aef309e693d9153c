"""The queue of waiters for slots, in order of arrival."""

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
    """A caller that waits for a lease."""

    future: asyncio.Future[Lease]
    trajectory_id: str | None
    group: str | None
    verification: bool
    apart_from: str | None = None
    """The id of a sandbox to avoid if possible."""
    number: int = field(default_factory=lambda: next(_NUMBERS))
    """The place in the queue. It grows with the time of arrival."""
    failures: int = 0
    """The number of slots for this waiter that could not be opened."""

    @property
    def gone(self) -> bool:
        """Return whether it was served, refused or cancelled."""
        return self.future.done()

    def refuse(self, error: HermesError) -> None:
        """Raise the error in the waiting caller. Does nothing if the waiter is gone."""
        if not self.gone:
            self.future.set_exception(error)


class WaitQueue:
    """Waiters in order of arrival, in two queues: for rollouts and for verifications, which have reserved slots."""

    def __init__(self) -> None:
        self._queues: dict[bool, list[Waiter]] = {False: [], True: []}

    def __iter__(self) -> Iterator[Waiter]:
        return iter(sorted(itertools.chain(*self._queues.values()), key=_BY_NUMBER))

    def count(self, *, verification: bool) -> int:
        """Return the number of waiters for verification, or of all others."""
        return len(self._queues[verification])

    def heads(self) -> list[Waiter]:
        """Return the first waiter of each queue, in order of arrival."""
        for queue in self._queues.values():
            while queue and queue[0].gone:  # cancelled in this turn of the event loop, before it could leave
                del queue[0]
        return sorted((queue[0] for queue in self._queues.values() if queue), key=_BY_NUMBER)

    def join(self, waiter: Waiter) -> None:
        """Add a waiter at the end, or at its old place if it comes back."""
        bisect.insort(self._queues[waiter.verification], waiter, key=_BY_NUMBER)

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter. Idempotent."""
        with suppress(ValueError):
            self._queues[waiter.verification].remove(waiter)
