"""The metrics of a run between two logs: rewards, failures, tool errors, tokens, seconds by stage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from hermes_core import Group, Rolled
from hermes_core.records.record import STAGES
from hermes_core.records.summary import SOLVED

MAX_ERRORS = 50
"""Maximum number of tool errors that are listed one by one."""

ARGUMENTS_SHOWN, ERROR_SHOWN = 80, 150


class Metrics:
    """Adds up values until `take`. The names of the metrics are those of the original.

    Args:
        kind: the prefix of the metrics: `train` or `eval`.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.totals: Counter[str] = Counter()
        """Counts since the start: `groups`, `groups_short`, `rollouts`, `refused`, `failures_infra`, and so on."""
        self._begin()

    def _begin(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._counts: Counter[str] = Counter()
        self._errors: list[str] = []

    @property
    def pending(self) -> bool:
        """Return whether there is something to report."""
        return bool(self._counts or self._values)

    def add_group(self, group: Group) -> None:
        """Count a group that ended, complete or not."""
        self._count("groups" if group.whole else "groups_short")
        self._count("rollouts_replaced", len(group.failed) if group.whole else 0)

    def put_back(self) -> None:
        """Count an item that will be rolled out again, because its group was incomplete for reasons other than the
        item."""
        self._count("items_put_back")

    def same_score(self) -> None:
        """Count a group whose scores are all the same, if that is not wanted."""
        self._count("groups_same_score")

    def too_long(self) -> None:
        """Count a group with a sequence that is longer than the trainer accepts."""
        self._count("groups_too_long")

    def evaluation_failed(self) -> None:
        """Count an evaluation that raised while the training continued."""
        self._count("evaluations_failed")

    def add(self, rolled: Rolled, tool_errors: Iterable[Any], turns: int) -> None:
        """Add a rollout that ended."""
        record = rolled.record
        self._count("rollouts")
        if record.failure is not None:
            self._count(f"failures_{record.failure.kind}")
        elif rolled.mask_sample:
            self._count("refused")
        if record.reward is not None:
            self._value("reward", record.reward)
            self._value("solved", float(record.reward >= SOLVED))
            self._value("turns", turns)
        for sequence in rolled.sequences:
            self._value("tokens", len(sequence.tokens))
            self._value("tokens_trained", sequence.trained)
        if len(rolled.sequences) > 1:
            self._count("conversations_split")
        for stage in STAGES:
            if (seconds := record.timings.get(f"{stage}_s")) is not None:
                self._value(f"seconds_{stage}", seconds)
        for error in tool_errors:
            self._count("tool_errors_count")
            if len(self._errors) < MAX_ERRORS:
                arguments, said = error.arguments[:ARGUMENTS_SHOWN], error.error[:ERROR_SHOWN]
                self._errors.append(f"[turn {error.turn}] {error.tool_name}({arguments}) -> {said}")

    def take(self, api: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Return the metrics since the last time.

        Args:
            api: `TrainerApi.counts`, since the start.
        """
        told: dict[str, Any] = {name: fmean(values) for name, values in sorted(self._values.items())}
        told |= sorted(self._counts.items())
        if "rollouts" in told:
            told["rollouts_count"] = told.pop("rollouts")  # the name is that of Atropos' table
        told.setdefault("tool_errors_count", 0)
        told.setdefault("failures_infra", 0)
        if self._errors:
            told["tool_error_details"] = "\n".join(self._errors)
        told |= {f"api_{name}": count for name, count in sorted((api or {}).items())}
        self._begin()
        return {f"{self._kind}/{name}": value for name, value in told.items()}

    def _count(self, name: str, by: int = 1) -> None:
        self._counts[name] += by
        self.totals[name] += by

    def _value(self, name: str, value: float) -> None:
        self._values.setdefault(name, []).append(float(value))


def lengths(trained: Sequence[int], limit: int) -> dict[str, float]:
    """Return what Atropos tells of the tokens that are trained on, by its names.

    Args:
        trained: how many of each sequence.
        limit: of the trainer for a sequence; below 1 if it named none.
    """
    if not trained:
        return {}
    name = "train/completion_lengths"
    told = {name: fmean(trained), f"{name}_std": pstdev(trained), f"{name}_max": max(trained)}
    told[f"{name}_min"] = min(trained)
    if limit > 0:
        told[f"{name}_p95"] = fmean(tokens > 0.95 * limit for tokens in trained)
    return told


def plain_only(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return those that JSON can hold: no tables, and no numbers that are none."""
    return {key: value for key, value in told.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
