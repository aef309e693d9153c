"""The summary of a run: counts, mean reward, failures by kind, and how long each stage takes."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

from hermes_core.envs.record import STAGES, Record
from hermes_core.errors import FailureKind
from hermes_core.sandbox.pool.cost import SandboxUsage

Key = tuple[str, int]
"""Identifies a rollout: item id and rollout index."""

RATED_FROM_S = 60.0
"""Minimum seconds of a session for its rate to be meaningful."""

SOLVED = 1.0
"""The reward from which a rollout counts as solved."""


@dataclass(frozen=True)
class RunSummary:
    """The outcome of a run, `summary.json`. Every count is over the whole folder, including the earlier sessions of a
    resumed run."""

    total: int
    """Number of rollouts of the run."""
    scored: int
    """Number of rollouts with a reward."""
    solved: int
    """Number of rollouts with a reward of 1.0 or more."""
    mean_reward: float | None
    """Mean reward of the scored rollouts; None if there are none."""
    failures: Mapping[str, int]
    """Number of rollouts that ended without a reward, by kind: `infra`, `setup`, `model`, `verifier`, `cancelled`."""
    infra_retries: int
    """Number of restarts of rollouts after infrastructure failures."""
    elapsed_s: float
    """Seconds of this session."""
    rollouts_per_hour: float
    """Rollouts per hour in this session."""
    timings: Mapping[str, Mapping[str, float]]
    """Seconds of each stage (`acquire_s`, …): `p50`, `p95` and `max`."""
    sandbox_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of sandboxes in this session, by profile."""
    cost: Mapping[str, float] = field(default_factory=dict)
    """Cost of the sandboxes in this session, by profile, if the profile has prices."""
    stopped: str | None = None
    """Why the run ended before all rollouts had been tried, or None."""
    out_dir: str | None = None

    @property
    def complete(self) -> bool:
        """Return whether every rollout has a reward."""
        return self.scored == self.total

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return asdict(self)


class _Outcome(NamedTuple):
    """The part of one record that a summary needs. It is small, because there is one for every rollout of a run."""

    reward: float | None
    failure: FailureKind | None
    infra_retries: int
    timings: tuple[float | None, ...]


class Tally:
    """Adds up records as they come. The last record of a rollout replaces earlier ones.

    Args:
        window: the number of recent rollouts that `infra_rate` is computed from.
    """

    def __init__(self, window: int = 20) -> None:
        self._outcomes: dict[Key, _Outcome] = {}
        self._recent: deque[bool] = deque(maxlen=window)
        self._started = time.monotonic()
        self.session = 0
        """Number of records added in this session."""
        self.scored = 0
        """Number of rollouts with a reward."""
        self.solved = 0
        """Number of rollouts with a reward of 1.0 or more."""
        self.failed = 0
        """Number of rollouts that ended without a reward in this session, except cancelled ones."""

    def add(self, record: Record, *, earlier: bool = False) -> None:
        """Add a record; `earlier` if it is from an earlier session."""
        failure = record.failure.kind if record.failure else None
        timings = tuple(record.timings.get(f"{stage}_s") for stage in STAGES)
        key = (record.item_id, record.rollout_index)
        before = self._outcomes.get(key)
        self._outcomes[key] = outcome = _Outcome(record.reward, failure, record.infra_retries, timings)
        for counted, by in ((before, -1), (outcome, 1)):
            if counted is not None and counted.reward is not None:
                self.scored += by
                self.solved += by * (counted.reward >= SOLVED)
        if not earlier:
            self.failed += outcome.reward is None and failure != FailureKind.CANCELLED
            self.session += 1
            self._recent.append(failure in (FailureKind.INFRA, FailureKind.MODEL))

    def start_session(self) -> None:
        """Start measuring the session's time."""
        self._started = time.monotonic()

    def is_scored(self, key: Key) -> bool:
        """Return whether the rollout has a reward."""
        outcome = self._outcomes.get(key)
        return outcome is not None and outcome.reward is not None

    @property
    def recorded(self) -> int:
        """Return the number of rollouts that ended, with or without a reward."""
        return len(self._outcomes)

    def infra_rate(self, least: int = 10) -> float:
        """Return the share of recent rollouts that failed because of our infrastructure or the model's; 0 if fewer than
        `least` ended."""
        return sum(self._recent) / len(self._recent) if len(self._recent) >= least else 0.0

    @property
    def elapsed_s(self) -> float:
        """Return the seconds of this session."""
        return max(time.monotonic() - self._started, 1e-6)

    def rate(self) -> float:
        """Return the rollouts per second in this session."""
        return self.session / self.elapsed_s

    def summary(
        self,
        total: int,
        *,
        usage: Mapping[str, SandboxUsage] | None = None,
        stopped: str | None = None,
        out_dir: str | None = None,
    ) -> RunSummary:
        """Return the current summary.

        Args:
            usage: the cost of the sandboxes so far, by profile.
        """
        used = usage or {}
        outcomes = self._outcomes.values()
        rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
        failures = Counter(outcome.failure for outcome in outcomes if outcome.failure is not None)
        return RunSummary(
            total=total,
            scored=self.scored,
            solved=self.solved,
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
            failures={str(kind): count for kind, count in sorted(failures.items())},
            infra_retries=sum(outcome.infra_retries for outcome in outcomes),
            elapsed_s=round(self.elapsed_s, 3),
            rollouts_per_hour=round(self.rate() * 3600, 1),
            timings=self._timings(),
            sandbox_s={name: round(each.sandbox_s, 3) for name, each in used.items()},
            cost={name: round(each.cost, 6) for name, each in used.items() if each.cost is not None},
            stopped=stopped,
            out_dir=out_dir,
        )

    def _timings(self) -> dict[str, dict[str, float]]:
        columns = {}
        for index, stage in enumerate(STAGES):
            seconds = sorted(t for o in self._outcomes.values() if (t := o.timings[index]) is not None)
            if seconds:
                p50, p95 = percentile(seconds, 0.50), percentile(seconds, 0.95)
                columns[f"{stage}_s"] = {"p50": p50, "p95": p95, "max": seconds[-1]}
        return columns


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed. Values must be ascending and
    not empty."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


class Progress(Protocol):
    """Displays the progress of a run."""

    def begin(self, total: int, tally: Tally) -> None:
        """Begin; `tally` holds the results of earlier sessions."""

    def update(self, tally: Tally) -> None:
        """Show that a rollout ended."""

    def end(self, tally: Tally) -> None:
        """End the display. Called after success and failure."""


class NoProgress:
    """Shows nothing."""

    def begin(self, total: int, tally: Tally) -> None:
        """Show nothing."""

    def update(self, tally: Tally) -> None:
        """Show nothing."""

    def end(self, tally: Tally) -> None:
        """Show nothing."""
