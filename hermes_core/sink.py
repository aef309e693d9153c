"""What a sink is: a place, besides the output folder, where a run's records go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Sink(Protocol):
    """Where else trajectories go."""

    async def write(self, record: Mapping[str, Any]) -> None:
        """Take one record. What it raises ends the run."""

    async def aclose(self) -> None:
        """Called once, after the last record."""
