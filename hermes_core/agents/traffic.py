"""The requests of this process to one model server: who is next, how many at a time, how fast, and whether it works."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from weakref import WeakValueDictionary

from hermes_core.agents.failures import EndpointDown
from hermes_core.agents.limits import Budget, said_limits

logger = logging.getLogger(__name__)

PAUSE_AFTER = 3
"""Minimum number of failures in a row, of any requests, after which only one request at a time is sent to a server."""


@dataclass(frozen=True)
class Place:
    """One request under way."""

    began: float
    era: int
    tokens: float
    """The tokens that were expected of it."""
    overdrawn: tuple[str, ...]
    """The limits that had no room for it, by what the server had said."""


class Traffic:
    """All requests of this process to one model server.

    They are sent in the order in which they came, as soon as the server's rate limits have room. Nothing is locked
    while a request is under way.

    A server that says that it gets too many requests gets half as many at a time, and then slowly more again. A server
    that fails is paused: one request at a time is sent to it, and the first answer ends the pause.
    """

    def __init__(self) -> None:
        self.answered = False
        """Whether it ever answered. A server that once accepted the key and the model will accept them again."""
        self.failures = 0
        """Failures since the last answer."""
        self.failing_since = 0.0
        self.failed_at = 0.0
        self.paused = False
        self.given_up: EndpointDown | None = None
        """Why it was given up, if it has not answered since."""
        self.quiet_since = 0.0
        """When it last gave any answer, also a refusal, or else was first asked."""
        self.owes_answer = False
        """Whether it was asked since then, and let the time limits of requests pass or may still answer."""
        self.silent = False
        """Whether it gives no answer and no sign of life."""
        self.asked_for_sign = False
        """Whether it is being asked for a sign of life."""
        self.called_slow = False
        """Whether users were told that it is slow."""
        self._line = asyncio.Lock()
        self._changed = asyncio.Event()
        """Set when the first in line may have to wait no longer."""
        self._under_way = 0
        self._era = 0
        """Number of pauses. Requests from before a pause do not count as under way, because they may hang."""
        self._room = math.inf
        """Maximum number of requests at a time, as learnt from refusals."""
        self._cut_at = 0.0
        self._not_before = 0.0
        self._set: dict[str, Budget] = {}
        self._learnt: dict[str, Budget] = {}
        self._disbelieved: set[str] = set()
        self._mean_tokens = 0.0

    def limit(self, kind: str, per_minute: float | None) -> None:
        """Set a limit, beside those that the server names."""
        if per_minute is not None and (kind not in self._set or self._set[kind].limit != per_minute):
            self._set[kind] = Budget.full(per_minute)

    @asynccontextmanager
    async def turn(self, longest_s: float, given_up: EndpointDown | None) -> AsyncIterator[Place]:
        """Wait until a request may be sent, and count it as under way in the block.

        Args:
            longest_s: maximum seconds to wait for a limit that the server named. Then the request is sent in any case,
                because what the server said may be wrong.
            given_up: the value of `given_up` when the caller began to wait.

        Raises:
            EndpointDown: the server was given up in the meantime.
        """
        async with self._line:
            place = await self._place(longest_s, given_up)
        try:
            yield place
        finally:
            if place.era == self._era:
                self._under_way -= 1
            self._changed.set()

    async def _place(self, longest_s: float, given_up: EndpointDown | None) -> Place:
        """Wait, as the first in line, and return a place. Raise as `turn`."""
        began = time.monotonic()
        while True:
            if self.given_up is not None and self.given_up is not given_up:
                raise self.given_up.twin() from self.given_up
            now = time.monotonic()
            cost = {"requests": 1.0, "tokens": self._mean_tokens}
            learnt = {kind: budget.wait_s(cost[kind]) for kind, budget in self._learnt.items()}
            wait = max(
                self._not_before - now,
                min(max(learnt.values(), default=0.0), began + longest_s - now),
                *(budget.wait_s(cost[kind]) for kind, budget in self._set.items()),
                0.0,
            )
            crowded = self._under_way >= (1 if self.paused else self._room)
            if not crowded and not wait:
                break
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if crowded else wait):
                    await self._changed.wait()
        for budgets in (self._set, self._learnt):
            for kind, budget in budgets.items():
                budget.take(cost[kind])
        self._under_way += 1
        return Place(now, self._era, cost["tokens"], tuple(kind for kind, left in learnt.items() if left))

    def learn(self, headers: Mapping[str, str]) -> None:
        """Take over the limits that the headers of an answer name."""
        for said in said_limits(headers):
            if said.kind in self._disbelieved:
                continue
            budget = self._learnt.setdefault(said.kind, Budget.full(said.limit))
            budget.learn(said)
        self._changed.set()

    def hold(self, seconds: float) -> None:
        """Send nothing for this time."""
        self._not_before = max(self._not_before, time.monotonic() + seconds)

    def too_many(self, place: Place) -> None:
        """Note that the server refused this request because it gets too many."""
        if place.began > self._cut_at:  # the others that were sent before are refused for the same reason
            self._room = max(1.0, min(self._room, self._under_way) / 2)
            self._cut_at = time.monotonic()

    def works(self, place: Place, *, tokens: int = 0, proves: bool = True) -> None:
        """Note that the server answered this request.

        Args:
            tokens: how many it used, prompt and answer; 0 is not known.
            proves: whether the answer shows that the server accepts the key and the model.
        """
        for kind in place.overdrawn:
            if self._learnt.pop(kind, None) is not None:
                self._disbelieved.add(kind)
                logger.warning("a model endpoint names a limit of %s that it does not have: it is ignored", kind)
        if tokens:
            self._mean_tokens += (tokens - self._mean_tokens) * (0.2 if self._mean_tokens else 1.0)
            for budgets in (self._set, self._learnt):
                if "tokens" in budgets:
                    budgets["tokens"].correct(tokens - place.tokens)
        self._room += 1 / self._room
        self.answered = self.answered or proves
        self.speaks()

    def fails(self) -> None:
        """Note that the server failed a request, and pause it after as many failures in a row as there are requests
        under way."""
        self.failed_at = time.monotonic()
        if not self.failures:
            self.failing_since = self.failed_at
        self.failures += 1
        if not self.paused and self.failures >= max(PAUSE_AFTER, self._under_way):
            self.pause()

    def asked(self) -> None:
        """Note that the server is sent a request."""
        if not self.owes_answer:
            self.quiet_since, self.owes_answer = time.monotonic(), True

    def heard(self) -> None:
        """Note that the server gave any answer."""
        self.quiet_since, self.owes_answer, self.silent = time.monotonic(), False, False
        self._changed.set()

    def falls_silent(self) -> None:
        """Note that the server gives no sign of life, and pause it."""
        if not self.failures:
            self.fails()
        self.silent = True
        if not self.paused:
            self.pause()

    def speaks(self) -> None:
        """Forget what failed, because the server answers again."""
        self.failures, self.paused, self.given_up = 0, False, None
        self.heard()

    def pause(self) -> None:
        """Send one request at a time, until there is an answer."""
        self.paused = True
        self._era += 1
        self._under_way = 0
        self._changed.set()

    def give_up(self, reason: EndpointDown) -> None:
        """Tell all who wait that there will be no answer. Whoever asks later tries it again."""
        self.given_up = reason
        if not self.paused:
            self.pause()
        self._changed.set()


_shared: WeakValueDictionary[tuple[int, str, str, str], Traffic] = WeakValueDictionary()


def traffic_to(url: str, key: str, model: str) -> Traffic:
    """Return the traffic to this server, which is shared by all who use the same URL, key and model on this event
    loop. Servers have limits per key and model."""
    return _shared.setdefault((id(asyncio.get_running_loop()), url, key, model), Traffic())


# ---------------------------------------------------------------------- seconds that were waited


@dataclass
class Waits:
    """Seconds that requests waited for their server."""

    seconds: float = 0.0


_counting: ContextVar[Waits | None] = ContextVar("_counting", default=None)


@contextmanager
def counted_waits() -> Iterator[Waits]:
    """Count the seconds that requests in the block wait for their server: for its limits, while it is paused, and in
    attempts that failed."""
    waits = Waits()
    token = _counting.set(waits)
    try:
        yield waits
    finally:
        _counting.reset(token)


def count_wait(seconds: float) -> None:
    """Add to the waits of the block that this runs in, if it counts them."""
    if (waits := _counting.get()) is not None:
        waits.seconds += seconds
