"""The progress of making tasks, for its display."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any


@dataclass
class MakingStanding:
    """The state that `Progress` shows."""

    stage: str = "starting"
    """The present stage, in a few words."""
    kept: int = 0
    """Number of tasks that were made."""
    tried: int = 0
    """Number of changes that were tried, also in earlier sessions."""
    noun: str = "task"
    began: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> int:
        """Return the number of tasks that were made."""
        return self.kept

    @property
    def news(self) -> object:
        """Return the values that change with events."""
        return self.stage, self.kept, self.tried

    def counts(self, total: int) -> str:
        """Return `40 changes tried in 0:01:12: trying changes`."""
        return f"{self.tried} changes tried in {timedelta(seconds=int(self._elapsed_s))}: {self.stage}"

    def state(self, total: int) -> dict[str, Any]:
        """Return the state as JSON values."""
        elapsed_s = round(self._elapsed_s, 3)
        return {"stage": self.stage, "kept": self.kept, "tried": self.tried, "elapsed_s": elapsed_s}

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self.began
