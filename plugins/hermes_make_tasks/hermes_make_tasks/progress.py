"""How far the making is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any


@dataclass
class MakingStanding:
    """What `Progress` shows of it."""

    stage: str = "starting"
    """What is being done: a few words."""
    kept: int = 0
    """How many tasks there are."""
    tried: int = 0
    """How many changes were tried, those of earlier sessions included."""
    noun: str = "task"
    began: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> int:
        """Return how many tasks there are."""
        return self.kept

    @property
    def news(self) -> object:
        """Return everything that changes with an event."""
        return self.stage, self.kept, self.tried

    def counts(self, total: int) -> str:
        """Return `40 changes tried in 0:01:12: trying changes`."""
        return f"{self.tried} changes tried in {timedelta(seconds=int(self._elapsed_s))}: {self.stage}"

    def state(self, total: int) -> dict[str, Any]:
        """Return it for programs."""
        elapsed_s = round(self._elapsed_s, 3)
        return {"stage": self.stage, "kept": self.kept, "tried": self.tried, "elapsed_s": elapsed_s}

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self.began
