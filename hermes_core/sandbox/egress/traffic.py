"""What the programs of a rollout reached through the proxy, and what they asked for and were refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_NAMED = 100
"""Maximum number of destinations that are named in each of the two lists of a phase."""

MAX_NAME = 260
"""Maximum number of characters of a destination."""

OTHERS = "others"
"""Counts the destinations that are not named because there are too many."""


@dataclass
class PhaseTraffic:
    """What one phase of a rollout asked for. Names come from programs in slots, so their number is bounded."""

    reached: Counter[str] = field(default_factory=Counter)
    """Number of connections and requests, by `HOST:PORT`."""
    refused: Counter[str] = field(default_factory=Counter)
    """Number of connections and requests that the rules refused, by `HOST:PORT`."""
    failed: int = 0
    """Number of permitted ones that did not come about: unknown names, servers that do not answer."""
    bytes_sent: int = 0
    """Bytes from programs in slots."""
    bytes_received: int = 0

    def count_reached(self, destination: object) -> None:
        """Count a permitted connection or request."""
        _count(self.reached, destination)

    def count_refused(self, destination: object) -> None:
        """Count a refused connection or request."""
        _count(self.refused, destination)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as JSON values, the most frequent destinations first."""
        return {
            "reached": dict(self.reached.most_common()),
            "refused": dict(self.refused.most_common()),
            "failed": self.failed,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
        }


def _count(counts: Counter[str], destination: object) -> None:
    name = str(destination)[:MAX_NAME]
    counts[name if name in counts or len(counts) < MAX_NAMED else OTHERS] += 1


class Traffic:
    """The traffic of a rollout, by phase: `setup`, `agent`, `verify`. All of its slots count here."""

    def __init__(self) -> None:
        self._phases: dict[str, PhaseTraffic] = {}

    def of(self, phase: str) -> PhaseTraffic:
        """Return the counts of a phase."""
        return self._phases.setdefault(phase, PhaseTraffic())

    def __iter__(self) -> Iterator[tuple[str, PhaseTraffic]]:
        return iter(self._phases.items())

    def to_json(self) -> Mapping[str, Any] | None:
        """Return the counts by phase as JSON values; None if no phase had a proxy."""
        return {str(phase): traffic.to_json() for phase, traffic in self} or None
