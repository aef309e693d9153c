"""Reads what a model server says about its rate limits, and computes how long a request has to wait for them."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

MINUTE_S = 60.0
"""The time in which a limit is available again, if the server does not say it."""

LONGEST_S = 86400.0
"""Longest time in seconds that is believed of a server. None of the known ones has a limit for more than a day."""

_NAMES = {
    "requests": (
        "x-ratelimit-{}-requests",  # OpenAI, and most others with its API
        "anthropic-ratelimit-requests-{}",
        "x-ratelimit-{}",  # gateways, which stand before vLLM
        "ratelimit-{}",
    ),
    "tokens": ("x-ratelimit-{}-tokens", "anthropic-ratelimit-tokens-{}"),
}
"""The headers of each kind; `{}` is `limit`, `remaining` or `reset`. The first one that is there counts."""

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|us|µs|ns|[dhms])")
_DURATION = re.compile(rf"(?:{_PART.pattern})+")
_EPOCH_S, _EPOCH_MS = 1e9, 1e12
"""From these on, a number is no duration but a moment, in seconds or milliseconds since the epoch."""


@dataclass(frozen=True)
class Said:
    """What one answer says about one limit."""

    kind: str
    limit: float
    remaining: float
    reset_s: float | None
    """Seconds until the whole limit is available again; None if the server does not say it."""


@dataclass
class Budget:
    """One limit. What is used comes back at a constant rate.

    The server's count and our own are kept apart. Only ours has the requests that are on their way to the server, and
    only the server's has those of other processes with the same key. The lower one counts.
    """

    limit: float
    rate: float
    """How much comes back per second."""
    ours: float
    theirs: float
    at: float
    """When `ours` and `theirs` were computed."""

    @classmethod
    def full(cls, limit: float) -> Budget:
        """Return a limit of so much per minute, of which nothing was used yet, and of which the server said nothing."""
        return cls(limit, limit / MINUTE_S, limit, math.inf, time.monotonic())

    def take(self, amount: float) -> None:
        """Use some of it."""
        self._refill()
        self.ours -= amount
        self.theirs -= amount

    def correct(self, amount: float) -> None:
        """Use so much more than was taken, or less if it is negative. The server counted right at once."""
        self._refill()
        self.ours -= amount

    def wait_s(self, amount: float) -> float:
        """Return the seconds until this much is available, or all if it is never so much."""
        self._refill()
        missing = min(amount, self.limit) - min(self.ours, self.theirs)
        return max(0.0, missing / self.rate)

    def learn(self, said: Said) -> None:
        """Take over what the server says."""
        self._refill()
        used = said.limit - said.remaining
        if said.reset_s and used:
            self.rate = max(used / said.reset_s, said.limit / LONGEST_S)
        elif said.limit != self.limit:
            self.rate = said.limit / MINUTE_S
        self.ours += said.limit - self.limit
        self.limit, self.theirs = said.limit, said.remaining

    def _refill(self) -> None:
        now = time.monotonic()
        more = (now - self.at) * self.rate
        self.ours = min(self.limit, self.ours + more)
        if self.theirs < self.limit:
            self.theirs = min(self.limit, self.theirs + more)
        self.at = now


def said_limits(headers: Mapping[str, str]) -> Iterator[Said]:
    """Yield the limits that the headers of an answer name. Numbers that can't be true are left out.

    Args:
        headers: a mapping that does not distinguish upper and lower case.
    """
    for kind, names in _NAMES.items():
        for name in names:
            limit, remaining = (_count(headers.get(name.format(part))) for part in ("limit", "remaining"))
            if limit and remaining is not None:
                yield Said(kind, limit, min(remaining, limit), seconds_until(headers.get(name.format("reset"))))
                break


def asked_wait(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the server asks to wait before the next request; None if it does not, or in no form that
    makes sense."""
    milliseconds = _count(headers.get("retry-after-ms"))
    return seconds_until(headers.get("retry-after")) if milliseconds is None else min(LONGEST_S, milliseconds / 1000)


def seconds_until(text: str | None) -> float | None:
    """Return the seconds until the moment that a header names: as a number, a duration (`6m0s`), a moment since the
    epoch, or a date. None if it is none of them, or negative."""
    text = (text or "").strip()
    number = _count(text)
    if number is not None:
        scale = 1000 if number >= _EPOCH_MS else 1
        seconds = number / scale - time.time() if number >= _EPOCH_S else number
    elif _DURATION.fullmatch(text):
        seconds = sum(float(amount) * _UNITS[unit] for amount, unit in _PART.findall(text))
    else:
        moment = _date(text)
        if moment is None:
            return None
        seconds = moment.timestamp() - time.time()
    return min(LONGEST_S, max(0.0, seconds))


def _count(text: str | None) -> float | None:
    """Return the number that a header begins with (`100, 100;w=60` has 100), if it is finite and not negative."""
    try:
        number = float((text or "").split(",")[0].split(";")[0])
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _date(text: str) -> datetime | None:
    """Return the date of a header, in the form of HTTP or of RFC 3339; without a zone it is in UTC."""
    for read in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            moment = read(text)
        except (ValueError, TypeError, OverflowError, IndexError):
            continue
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return None
