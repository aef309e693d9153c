"""The type of a sink: a place where a run's records go in addition to the output folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Sink(Protocol):
    """An additional place for trajectories."""

    async def write(self, record: Mapping[str, Any]) -> None:
        """Take one record. An exception ends the run."""

    async def aclose(self) -> None:
        """Close the sink. Called once, after the last record."""
