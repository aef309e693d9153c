"""What the sandboxes of a profile cost: their seconds, their price, and the most that the profile allows."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hermes_core.errors import PolicyError

GROWTH_PART = 0.9
"""The part of `max_cost` from which on no further sandbox is made: the rest is for those that there are."""

_HOUR_S = 3600.0


class CostLimitReached(PolicyError):
    """The profile's `max_cost` is spent."""


@dataclass(frozen=True)
class SandboxUsage:
    """What a profile's sandboxes have used so far."""

    sandbox_s: float
    """Seconds, of all sandboxes together."""
    cost: float | None
    """In the currency of the profile's prices; None without prices."""


class Meter:
    """Counts the seconds of one profile's sandboxes, from the answer of the provider until their end.

    Args:
        profile: its name, for messages.
        price: of a sandbox by the hour; None is not known.
        limit: the profile's `max_cost`.
    """

    def __init__(self, profile: str, price: float | None, limit: float | None) -> None:
        self.profile = profile
        self._price = price
        self._limit = limit
        self._running: dict[str, float] = {}
        self._ended_s = 0.0

    def begin(self, sandbox_id: str) -> None:
        """Count its seconds from now on; nothing if they are counted already."""
        self._running.setdefault(sandbox_id, time.monotonic())

    def end(self, sandbox_id: str) -> None:
        """Count no more, as it has ended; nothing if it is not known."""
        if (began := self._running.pop(sandbox_id, None)) is not None:
            self._ended_s += time.monotonic() - began

    def usage(self) -> SandboxUsage:
        """Return what was used until now."""
        now = time.monotonic()
        seconds = self._ended_s + sum(now - began for began in self._running.values())
        return SandboxUsage(seconds, None if self._price is None else seconds * self._price / _HOUR_S)

    @property
    def may_grow(self) -> bool:
        """Return whether another sandbox may be made."""
        return self._below(GROWTH_PART)

    @property
    def spent(self) -> bool:
        """Return whether rollouts get no more slots."""
        return not self._below(1.0)

    def next_change_s(self) -> float | None:
        """Return the seconds until one of the two changes, with the sandboxes that run now; None if neither will."""
        if self._limit is None or not self._price or not self._running or self.spent:
            return None
        part = GROWTH_PART if self.may_grow else 1.0
        left = part * self._limit - (self.usage().cost or 0.0)
        return max(0.0, left * _HOUR_S / (self._price * len(self._running)))

    def refusal(self) -> CostLimitReached:
        """Return the error for whoever asks for a slot now."""
        cost = self.usage().cost or 0.0
        what = "no slot is given any more" if self.spent else "no further sandbox is made"
        return CostLimitReached(
            f"profile {self.profile!r} has cost {cost:.4g} of its max_cost {self._limit:g}, and {what}",
            hint="raise max_cost",
        )

    def _below(self, part: float) -> bool:
        return self._limit is None or (self.usage().cost or 0.0) < part * self._limit
