"""The summary of a run: counts, mean reward, failures by kind, and how long each stage takes."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import accumulate
from typing import Any, Protocol

from hermes_core.agents.base import Usage
from hermes_core.errors import FailureKind
from hermes_core.records.record import STAGES, Record
from hermes_core.sandbox.pool.cost import SandboxUsage

Key = tuple[str, int]
"""Item id and rollout index, which identify a rollout."""

RATED_FROM_S = 60.0
"""Minimum length of a session in seconds for a meaningful rate."""

SOLVED = 1.0
"""The reward from which a rollout counts as solved."""


@dataclass(frozen=True)
class RunSummary:
    """The outcome of a run, `summary.json`. Every count includes the earlier sessions of a resumed run."""

    total: int
    """Number of rollouts of the run."""
    finished: int
    """Number of rollouts that ended without a failure. All of them have a reward, unless the environment gives none."""
    scored: int
    """Number of rollouts with a reward."""
    solved: int
    """Number of rollouts with a reward of 1.0 or more."""
    mean_reward: float | None
    """Mean reward of the scored rollouts; None if there are none."""
    failures: Mapping[str, int]
    """Number of rollouts that failed, by kind: `infra`, `image`, `setup`, `model`, `verifier`, `cancelled`."""
    infra_retries: int
    """Number of restarts of rollouts after infrastructure failures."""
    trainable: int | None
    """Number of rollouts that ended without a failure and whose tokens can be trained on; None in a run without
    tokens."""
    split: int | None
    """Number of trainable rollouts with several sequences; None in a run without tokens."""
    elapsed_s: float
    """Seconds of this session."""
    rollouts_per_hour: float
    """Rollouts per hour in this session."""
    timings: Mapping[str, Mapping[str, float]]
    """Seconds of each stage (`acquire_s`, …): `p50`, `p95` (both to three digits) and `max`."""
    usage: Usage = field(default_factory=Usage)
    """The model's requests, tokens and cost. Attempts that were repeated are included."""
    cost_per_solved: float | None = None
    """Cost of the model's tokens per solved rollout, in US dollars; None if it is not known, or none is solved."""
    waited_s: float = 0.0
    """Seconds that rollouts waited for the endpoint, together: for its rate limits, and until it worked again."""
    sandbox_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of sandboxes in this session, by profile."""
    cost: Mapping[str, float] = field(default_factory=dict)
    """Cost of the sandboxes in this session, by profile, if the profile has prices."""
    stopped: str | None = None
    """Why the run ended before all rollouts had been tried, or None."""
    out_dir: str | None = None

    @property
    def complete(self) -> bool:
        """Return whether every rollout ended without a failure."""
        return self.finished == self.total

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return asdict(self)


class Spread:
    """The distribution of many numbers, in bounded memory: it counts numbers with equal first three digits."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()
        self.largest = -math.inf
        """The largest number."""

    def add(self, value: float) -> None:
        """Add a number."""
        self._counts[float(f"{value:.3g}")] += 1
        self.largest = max(self.largest, value)

    def percentile(self, share: float) -> float:
        """Return the smallest number, to three digits, such that at least this share of the numbers is not larger. At
        least one number must have been added."""
        rank = max(1, math.ceil(self._counts.total() * share))
        ordered = sorted(self._counts)
        passed = accumulate(self._counts[value] for value in ordered)
        rounded = next(value for value, count in zip(ordered, passed, strict=True) if count >= rank)
        return min(rounded, self.largest)


class Standing(Protocol):
    """The state of some work, for a display."""

    noun: str
    """The noun for the units of work, such as `rollouts`."""
    stage: str
    """The name of the current stage; empty for work with a single stage."""

    @property
    def done(self) -> int:
        """Return the number of units of work that are done."""

    @property
    def news(self) -> object:
        """Return a value that changes when there is something new to show. The display then writes another line."""

    def counts(self, total: int) -> str:
        """Return the figures other than `done`, as text."""

    def state(self, total: int) -> dict[str, Any]:
        """Return the figures for programs, as JSON values."""


class Tally:
    """Adds up records as they are written. A failed rollout counts until a later record of the same rollout is added.

    Nothing is kept of a rollout that finished in this session, so that a run may have any number of rollouts.

    Args:
        window: the number of recent rollouts that `infra_rate` is computed from.
    """

    noun, stage = "rollout", ""

    def __init__(self, window: int = 20) -> None:
        self._failed: dict[Key, FailureKind] = {}
        self._kinds: Counter[FailureKind] = Counter()
        self._before: set[Key] = set()
        self._recent: deque[bool] = deque(maxlen=window)
        self._started = time.monotonic()
        self._rewards = 0.0
        self._infra_retries = 0
        self._timings = {stage: Spread() for stage in STAGES}
        self.usage = Usage()
        """The model's requests, tokens and cost, including those of failed rollouts that were done again."""
        self.waited_s = 0.0
        """Seconds that rollouts waited for the endpoint."""
        self.session = 0
        """Number of records added in this session."""
        self.finished = 0
        """Number of rollouts that ended without a failure."""
        self.scored = 0
        """Number of rollouts with a reward."""
        self.solved = 0
        """Number of rollouts with a reward of 1.0 or more."""
        self._exact = False
        self._trainable = 0
        self._split = 0

    def add(self, record: Record, *, earlier: bool = False) -> None:
        """Add a record. `earlier` says that the record is from an earlier session and its rollout is not done again."""
        key = (record.item_id, record.rollout_index)
        if (kind := self._failed.pop(key, None)) is not None:
            self._kinds[kind] -= 1
        if record.failure is not None:
            self._failed[key] = record.failure.kind
            self._kinds[record.failure.kind] += 1
        else:
            self.finished += 1
            self._exact |= bool(record.sequences) or record.tokens_refused is not None
            self._trainable += bool(record.sequences)
            self._split += len(record.sequences) > 1
        if record.reward is not None:
            self.scored += 1
            self.solved += record.reward >= SOLVED
            self._rewards += record.reward
        self._infra_retries += record.infra_retries
        self.count_usage(record)
        for stage, spread in self._timings.items():
            if (seconds := record.timings.get(f"{stage}_s")) is not None:
                spread.add(seconds)
        if earlier:
            self._before.add(key)
        else:
            self.session += 1
            self._recent.append(record.failure is not None and record.failure.kind in _NOT_OF_THE_AGENT)

    def count_usage(self, record: Record) -> None:
        """Add only the model's usage of a record whose rollout is done again."""
        self.usage.add(record.usage)
        self.waited_s += record.waited_s

    def start_session(self) -> None:
        """Start measuring the session's time."""
        self._started = time.monotonic()

    def was_done_before(self, key: Key) -> bool:
        """Return whether an earlier session did the rollout, and this session does not do it again."""
        return key in self._before

    @property
    def failures(self) -> dict[str, int]:
        """Return the number of failed rollouts by kind."""
        return {str(kind): count for kind, count in sorted(self._kinds.items()) if count}

    @property
    def failed(self) -> int:
        """Return the number of failed rollouts, except cancelled ones."""
        return self._kinds.total() - self._kinds[FailureKind.CANCELLED]

    @property
    def done(self) -> int:
        """Return the number of rollouts that ended, except cancelled ones."""
        return self.finished + self.failed

    @property
    def news(self) -> object:
        """Return the number of finished rollouts and the number of failed ones."""
        return self.finished, self.failed

    def infra_rate(self, least: int = 10) -> float:
        """Return the share of recent rollouts with a failure of the infrastructure, an image or the model's endpoint; 0
        if fewer than `least` rollouts have ended."""
        return sum(self._recent) / len(self._recent) if len(self._recent) >= least else 0.0

    @property
    def elapsed_s(self) -> float:
        """Return the seconds of this session."""
        return max(time.monotonic() - self._started, 1e-6)

    def rate(self) -> float:
        """Return the rollouts per second in this session."""
        return self.session / self.elapsed_s

    def left_s(self, total: int) -> float | None:
        """Return the seconds until all rollouts are done at the present rate; None if the rate is not known."""
        left = total - self.done
        if left <= 0:
            return 0.0
        return left / self.rate() if self.session else None

    def counts(self, total: int) -> str:
        """Return a text with the numbers of solved and failed rollouts, and the cost, rate and time left if known."""
        parts = [f"{self.solved} solved"] if self.scored or not self.finished else []
        if self.failed:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.failures.items() if kind != "cancelled")
            parts.append(f"{self.failed} failed ({kinds})")
        if self.usage.cost is not None:
            parts.append(f"${self.usage.cost:.2f}")
        if self.session and self.elapsed_s >= RATED_FROM_S:
            parts.append(f"{self.rate() * 3600:.0f}/h")
        if self.session and (left_s := self.left_s(total)):
            parts.append(f"{timedelta(seconds=int(left_s))} left")
        return ", ".join(parts)

    def state(self, total: int) -> dict[str, Any]:
        """Return the counts, rate, time left and usage."""
        left_s, usage = self.left_s(total), self.usage
        return {
            "finished": self.finished,
            "scored": self.scored,
            "solved": self.solved,
            "failures": self.failures,
            "session": self.session,
            "elapsed_s": round(self.elapsed_s, 3),
            "per_hour": round(self.rate() * 3600, 1),
            "left_s": None if left_s is None else round(left_s, 1),
            "requests": usage.requests,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cost": usage.cost,
        }

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
        return RunSummary(
            total=total,
            finished=self.finished,
            scored=self.scored,
            solved=self.solved,
            mean_reward=self._rewards / self.scored if self.scored else None,
            failures=self.failures,
            infra_retries=self._infra_retries,
            trainable=self._trainable if self._exact else None,
            split=self._split if self._exact else None,
            elapsed_s=round(self.elapsed_s, 3),
            rollouts_per_hour=round(self.rate() * 3600, 1),
            timings={
                f"{stage}_s": {"p50": spread.percentile(0.50), "p95": spread.percentile(0.95), "max": spread.largest}
                for stage, spread in self._timings.items()
                if spread.largest >= 0
            },
            usage=replace(self.usage),
            cost_per_solved=self.usage.cost / self.solved if self.usage.cost is not None and self.solved else None,
            waited_s=round(self.waited_s, 3),
            sandbox_s={name: round(each.sandbox_s, 3) for name, each in used.items()},
            cost={name: round(each.cost, 6) for name, each in used.items() if each.cost is not None},
            stopped=stopped,
            out_dir=out_dir,
        )


_NOT_OF_THE_AGENT = (FailureKind.INFRA, FailureKind.IMAGE, FailureKind.MODEL)
"""Failures of our infrastructure, of images and of the model's endpoint."""


class Progress(Protocol):
    """Displays the progress of a run."""

    def begin(self, total: int, tally: Standing) -> None:
        """Begin; `tally` holds the results of earlier sessions."""

    def update(self, tally: Standing) -> None:
        """Show the state. Called whenever the state changes; for rollouts, also every second."""

    def end(self, tally: Standing) -> None:
        """End the display. Called after success and failure."""


class NoProgress:
    """Shows nothing."""

    def begin(self, total: int, tally: Standing) -> None:
        """Show nothing."""

    def update(self, tally: Standing) -> None:
        """Show nothing."""

    def end(self, tally: Standing) -> None:
        """Show nothing."""
