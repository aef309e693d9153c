"""A rate limiter: sends requests to a model server in order, as soon as the server's limits have room."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from hermes_core.agents.endpoint.circuit import CircuitBreaker
from hermes_core.agents.endpoint.errors import EndpointDown
from hermes_core.agents.endpoint.headers import LONGEST_S, ReportedLimit, read_limits

logger = logging.getLogger(__name__)

MINUTE_S = 60.0
"""Seconds in which a whole limit becomes available again, if the server reports no time."""


class Bucket:
    """One limit, as a bucket that is refilled at a constant rate.

    The server's count and ours are kept apart. Only our count has the requests that are still on their way to the
    server. Only the server's count has the requests of other processes with the same key. The lower count is used.

    Args:
        limit: the amount in the full bucket, and the amount that is refilled in a minute.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._rate = limit / MINUTE_S
        self._ours, self._theirs = limit, math.inf
        self._refilled_at = time.monotonic()

    def take(self, amount: float) -> None:
        """Take this amount, even if the bucket has less."""
        self.correct(amount)
        self._theirs -= amount

    def correct(self, amount: float) -> None:
        """Correct our own count by this amount, which may be negative. The server's count was right from the start."""
        self._refill()
        self._ours -= amount

    def wait_s(self, amount: float) -> float:
        """Return the seconds until the bucket has this amount, or, if the amount is larger than the bucket, until the
        bucket is full."""
        self._refill()
        return max(0.0, (min(amount, self.limit) - min(self._ours, self._theirs)) / self._rate)

    def learn(self, reported: ReportedLimit) -> None:
        """Set the limit, the rate and the server's count to what the server reports."""
        self._refill()
        used = reported.limit - reported.remaining
        if reported.reset_s and used:
            self._rate = max(used / reported.reset_s, reported.limit / LONGEST_S)
        elif reported.limit != self.limit:
            self._rate = reported.limit / MINUTE_S
        self._ours += reported.limit - self.limit
        self.limit, self._theirs = reported.limit, reported.remaining

    def _refill(self) -> None:
        now = time.monotonic()
        more = (now - self._refilled_at) * self._rate
        self._ours = min(self.limit, self._ours + more)
        if self._theirs < self.limit:
            self._theirs = min(self.limit, self._theirs + more)
        self._refilled_at = now


@dataclass(frozen=True)
class Permit:
    """The permission for one request."""

    sent_at: float
    generation: int
    """The circuit's generation when the request was sent."""
    tokens: float
    """The number of tokens that the request was expected to use."""
    overdrawn: list[str]
    """The limits that had no room for the request, as far as the server had reported them."""


class RateLimiter:
    """Limits the requests and tokens per minute, and the number of requests in flight.

    The limits per minute come from the settings and from the server's reports. A server that answers 429 gets half as
    many requests at a time, and then slowly more again. A server whose circuit is not closed gets one request at a
    time.

    Args:
        circuit: knows whether the server works.
        changed: set when the first waiting request may no longer have to wait.
    """

    def __init__(self, circuit: CircuitBreaker, changed: asyncio.Event) -> None:
        self._circuit = circuit
        self._changed = changed
        self._line = asyncio.Lock()
        self._in_flight: dict[int, int] = {}
        """Requests in flight by generation."""
        self._max_in_flight = math.inf
        """Maximum number of requests in flight, as learnt from answers 429."""
        self._halved_at = 0.0
        self._hold_until = 0.0
        self._set: dict[str, Bucket] = {}
        self._reported: dict[str, Bucket] = {}
        self._disproven: set[str] = set()
        """Limits that the server reported, but does not enforce."""
        self._mean_tokens = 0.0

    @property
    def in_flight(self) -> int:
        """Return the number of requests in flight. Requests of earlier generations do not count, because they may
        hang."""
        return self._in_flight.get(self._circuit.generation, 0)

    def set_limit(self, kind: str, per_minute: float | None) -> None:
        """Set a limit on `requests` or `tokens`, in addition to the limits that the server reports. None changes
        nothing."""
        if per_minute is not None and (kind not in self._set or self._set[kind].limit != per_minute):
            self._set[kind] = Bucket(per_minute)

    def learn(self, headers: Mapping[str, str]) -> None:
        """Take over the limits that the headers of an answer report."""
        for reported in read_limits(headers):
            if reported.kind not in self._disproven:
                self._reported.setdefault(reported.kind, Bucket(reported.limit)).learn(reported)
        self._changed.set()

    def hold(self, seconds: float) -> None:
        """Send no request for this time."""
        self._hold_until = max(self._hold_until, time.monotonic() + seconds)

    @asynccontextmanager
    async def turn(self, max_wait_s: float, known: EndpointDown | None) -> AsyncIterator[Permit]:
        """Wait until a request may be sent. The request counts as in flight until the block ends.

        Args:
            max_wait_s: maximum seconds to wait for limits that the server reported, because they may be wrong.
            known: the circuit's `error` when the caller began to wait.

        Raises:
            EndpointDown: the server was given up in the meantime.
        """
        async with self._line:
            permit = await self._acquire(max_wait_s, known)
        try:
            yield permit
        finally:
            self._in_flight[permit.generation] -= 1
            if not self._in_flight[permit.generation]:
                del self._in_flight[permit.generation]
            self._changed.set()

    async def _acquire(self, max_wait_s: float, known: EndpointDown | None) -> Permit:
        circuit, deadline = self._circuit, time.monotonic() + max_wait_s
        while True:
            if circuit.error is not None and circuit.error is not known:
                raise circuit.error.twin() from circuit.error
            now = time.monotonic()
            for_reported = min(self._wait_s(self._reported), deadline - now)
            wait = max(0.0, self._hold_until - now, self._wait_s(self._set), for_reported)
            crowded = self.in_flight >= (self._max_in_flight if circuit.closed else 1)
            if not crowded and not wait:
                break
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if crowded else wait):
                    await self._changed.wait()
        overdrawn = [kind for kind, bucket in self._reported.items() if bucket.wait_s(self._cost(kind))]
        for kind, bucket in (*self._set.items(), *self._reported.items()):
            bucket.take(self._cost(kind))
        self._in_flight[circuit.generation] = self.in_flight + 1
        return Permit(now, circuit.generation, self._mean_tokens, overdrawn)

    def _cost(self, kind: str) -> float:
        """Return the amount of a limit that the next request is expected to use."""
        return self._mean_tokens if kind == "tokens" else 1.0

    def _wait_s(self, buckets: Mapping[str, Bucket]) -> float:
        """Return the seconds until all of these limits have room."""
        return max((bucket.wait_s(self._cost(kind)) for kind, bucket in buckets.items()), default=0.0)

    def record_success(self, permit: Permit, tokens: int = 0) -> None:
        """Note that the server answered a request.

        Args:
            tokens: number of tokens that the request used, prompt and answer together; 0 if it is not known.
        """
        for kind in permit.overdrawn:
            if self._reported.pop(kind, None) is not None:
                self._disproven.add(kind)
                logger.warning("a model endpoint names a limit of %s that it does not have: it is ignored", kind)
        if tokens:
            self._mean_tokens += (tokens - self._mean_tokens) * (0.2 if self._mean_tokens else 1.0)
            for buckets in (self._set, self._reported):
                if "tokens" in buckets:
                    buckets["tokens"].correct(tokens - permit.tokens)
        self._max_in_flight += 1 / self._max_in_flight

    def record_refusal(self, permit: Permit) -> None:
        """Note that the server refused a request because it gets too many requests."""
        if permit.sent_at > self._halved_at:  # refusals of requests that were sent before have the same reason
            self._max_in_flight = max(1.0, min(self._max_in_flight, self.in_flight) / 2)
            self._halved_at = time.monotonic()
