"""Counts the cost of a profile's sandboxes, and compares it with `max_cost`."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hermes_core.errors import PolicyError

GROWTH_PART = 0.9
"""When this part of `max_cost` is spent, no further sandbox is made. The rest is for the existing sandboxes."""

_HOUR_S = 3600.0


class CostLimitReached(PolicyError):
    """The profile's `max_cost` is spent."""


@dataclass(frozen=True)
class SandboxUsage:
    """The usage of a profile's sandboxes so far."""

    sandbox_s: float
    """The seconds of all sandboxes together."""
    cost: float | None
    """The cost in the currency of the profile's prices; None without prices."""


class Meter:
    """Counts the seconds that one profile's sandboxes exist, each from its creation by the provider until its end.

    Args:
        profile: the name of the profile, for messages.
        price: the price of one sandbox per hour; None if it is unknown.
        limit: the profile's `max_cost`.
    """

    def __init__(self, profile: str, price: float | None, limit: float | None) -> None:
        self.profile = profile
        self._price = price
        self._limit = limit
        self._running: dict[str, float] = {}
        self._ended_s = 0.0

    def begin(self, sandbox_id: str) -> None:
        """Begin to count a sandbox. Idempotent."""
        self._running.setdefault(sandbox_id, time.monotonic())

    def end(self, sandbox_id: str) -> None:
        """Stop counting a sandbox. Idempotent."""
        if (began := self._running.pop(sandbox_id, None)) is not None:
            self._ended_s += time.monotonic() - began

    def usage(self) -> SandboxUsage:
        """Return the usage until now."""
        now = time.monotonic()
        seconds = self._ended_s + sum(now - began for began in self._running.values())
        return SandboxUsage(seconds, None if self._price is None else seconds * self._price / _HOUR_S)

    @property
    def may_grow(self) -> bool:
        """Return whether another sandbox may be made."""
        return self._below(GROWTH_PART)

    @property
    def is_spent(self) -> bool:
        """Return whether `max_cost` is spent, so that rollouts get no more slots."""
        return not self._below(1.0)

    def next_change_s(self) -> float | None:
        """Return the seconds until `may_grow` or `is_spent` changes if no sandbox begins or ends; None if never."""
        if self._limit is None or not self._price or not self._running or self.is_spent:
            return None
        part = GROWTH_PART if self.may_grow else 1.0
        budget = part * self._limit - (self.usage().cost or 0.0)
        return max(0.0, budget * _HOUR_S / (self._price * len(self._running)))

    def refusal(self) -> CostLimitReached:
        """Return the error for a caller that asks for a slot now."""
        cost = self.usage().cost or 0.0
        effect = "no slot is given any more" if self.is_spent else "no further sandbox is made"
        return CostLimitReached(
            f"profile {self.profile!r} has cost {cost:.4g} of its max_cost {self._limit:g}, and {effect}",
            hint="raise max_cost",
        )

    def _below(self, part: float) -> bool:
        return self._limit is None or (self.usage().cost or 0.0) < part * self._limit
