"""The queue for slots: first come, first served."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hermes_core.sandbox.pool.leases import Lease

_numbers = itertools.count()


@dataclass(eq=False)
class Waiter:
    """One who waits for a lease."""

    future: asyncio.Future[Lease]
    trajectory_id: str | None
    group: str | None
    verification: bool
    apart_from: str | None = None
    """The id of a sandbox that it had rather not come to."""
    number: int = field(default_factory=lambda: next(_numbers))
    """The place in the queue: smaller came earlier."""
    failures: int = 0
    """Slots chosen for this waiter that could not be opened."""

    @property
    def gone(self) -> bool:
        """Whether nobody waits any more: served, failed, timed out or cancelled."""
        return self.future.done()


class WaitQueue:
    """Waiters in order of arrival: ordinary ones, and those for verification, which have slots of their own."""

    def __init__(self) -> None:
        self._queues: dict[bool, dict[Waiter, None]] = {False: {}, True: {}}

    def __len__(self) -> int:
        return self.ordinary + self.verification

    def __iter__(self) -> Iterator[Waiter]:
        return iter(sorted([*self._queues[False], *self._queues[True]], key=lambda waiter: waiter.number))

    @property
    def ordinary(self) -> int:
        """How many wait for an ordinary slot."""
        return len(self._queues[False])

    @property
    def verification(self) -> int:
        """How many wait for a slot to verify in."""
        return len(self._queues[True])

    def join(self, waiter: Waiter) -> None:
        """Take a place at the end, or the old place for one who comes back."""
        queue = self._queues[waiter.verification]
        queue[waiter] = None
        if any(other.number > waiter.number for other in queue):
            self._queues[waiter.verification] = dict.fromkeys(sorted(queue, key=lambda each: each.number))

    def leave(self, waiter: Waiter) -> None:
        """Give the place up; nothing if it has none."""
        self._queues[waiter.verification].pop(waiter, None)

    def next(self, can_serve: Callable[[bool], bool]) -> Waiter | None:
        """Take the first waiter out of the queue for whom there is a slot: `can_serve(verification)` says so."""
        heads = [head for queue in self._queues.values() if (head := _first(queue))]
        for head in sorted(heads, key=lambda waiter: waiter.number):
            if can_serve(head.verification):
                self.leave(head)
                return head
        return None


def _first(queue: dict[Waiter, None]) -> Waiter | None:
    """The first who still waits: one who was cancelled in this very turn of the event loop had none yet to leave."""
    for waiter in [*itertools.takewhile(lambda each: each.gone, queue)]:
        del queue[waiter]
    return next(iter(queue), None)
