"""What a run amounts to: counts, mean reward, failures by kind, and how long each stage takes."""

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
"""Which rollout a record is of: item id and rollout index."""

RATED_FROM_S = 60.0
"""Seconds from which on a session has a rate that tells something."""

SOLVED = 1.0
"""The reward from which a rollout counts as solved."""


@dataclass(frozen=True)
class RunSummary:
    """The outcome of a run, `summary.json`. Every count is over the whole folder, a resumed run's past included."""

    total: int
    """Rollouts that the run consists of."""
    scored: int
    """Those with a reward."""
    solved: int
    """Those with a reward of 1.0 or more."""
    mean_reward: float | None
    """Of the scored ones; None if there are none."""
    failures: Mapping[str, int]
    """The others that ended, by kind: `infra`, `setup`, `model`, `verifier`, `cancelled`."""
    infra_retries: int
    """How often a rollout was restarted after an infrastructure failure."""
    elapsed_s: float
    """Of this session."""
    rollouts_per_hour: float
    """Of this session."""
    timings: Mapping[str, Mapping[str, float]]
    """Seconds of each stage (`acquire_s`, …): `p50`, `p95` and `max`."""
    sandbox_s: Mapping[str, float] = field(default_factory=dict)
    """Of this session: seconds of sandbox by profile."""
    cost: Mapping[str, float] = field(default_factory=dict)
    """Of this session: what they cost, by profile, where the profile has prices."""
    stopped: str | None = None
    """Why the run ended before all rollouts had been tried."""
    out_dir: str | None = None

    @property
    def complete(self) -> bool:
        """Whether every rollout has a reward."""
        return self.scored == self.total

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


class _Outcome(NamedTuple):
    """What a summary needs of one record; small, as there is one for every rollout of a run."""

    reward: float | None
    failure: FailureKind | None
    infra_retries: int
    timings: tuple[float | None, ...]


class Tally:
    """Adds records up as they come. The last record of a rollout replaces those before it.

    Args:
        window: how many of the last rollouts `infra_rate` is about.
    """

    def __init__(self, window: int = 20) -> None:
        self._outcomes: dict[Key, _Outcome] = {}
        self._recent: deque[bool] = deque(maxlen=window)
        self._started = time.monotonic()
        self.session = 0
        """Records added in this session."""
        self.scored = 0
        """Rollouts with a reward."""
        self.solved = 0
        """Rollouts with a reward of 1.0 or more."""
        self.failed = 0
        """Rollouts that ended without a reward in this session, other than by being cancelled."""

    def add(self, record: Record, *, earlier: bool = False) -> None:
        """Take a record in; `earlier` if it is of a session before this one."""
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
        """Count the session's time from now on."""
        self._started = time.monotonic()

    def is_scored(self, key: Key) -> bool:
        """Return whether the rollout has a reward."""
        outcome = self._outcomes.get(key)
        return outcome is not None and outcome.reward is not None

    @property
    def recorded(self) -> int:
        """Rollouts that ended, one way or the other."""
        return len(self._outcomes)

    def infra_rate(self, least: int = 10) -> float:
        """The share of the last rollouts that our infrastructure or the model's failed; 0 for less than `least`."""
        return sum(self._recent) / len(self._recent) if len(self._recent) >= least else 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds of this session."""
        return max(time.monotonic() - self._started, 1e-6)

    def rate(self) -> float:
        """Rollouts a second, in this session."""
        return self.session / self.elapsed_s

    def summary(
        self,
        total: int,
        *,
        usage: Mapping[str, SandboxUsage] | None = None,
        stopped: str | None = None,
        out_dir: str | None = None,
    ) -> RunSummary:
        """Return where the run stands.

        Args:
            usage: what the sandboxes have cost, by profile.
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
    """Return the smallest value that at least this share of the (ascending, not empty) values does not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


class Progress(Protocol):
    """Told by a run where it stands."""

    def begin(self, total: int, tally: Tally) -> None:
        """The run starts; `tally` holds what an earlier session did."""

    def update(self, tally: Tally) -> None:
        """A rollout ended."""

    def end(self, tally: Tally) -> None:
        """The run is over, whatever the reason."""


class NoProgress:
    """Shows nothing."""

    def begin(self, total: int, tally: Tally) -> None:
        """Show nothing."""

    def update(self, tally: Tally) -> None:
        """Show nothing."""

    def end(self, tally: Tally) -> None:
        """Show nothing."""
