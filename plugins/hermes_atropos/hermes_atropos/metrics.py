"""The metrics of a run since they were last logged: rewards, failures, tool errors, tokens, seconds by stage."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from hermes_core import SOLVED, STAGES, Group, Rolled

MAX_ERRORS = 50
"""Maximum number of tool errors whose texts are listed; the others are only counted."""

ARGUMENTS_SHOWN, ERROR_SHOWN = 80, 150
"""Maximum number of characters of a listed tool error."""


class Metrics:
    """Collects values until `take`. The metrics have the names that hermes-agent's environment gives them.

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
        """Return whether there are values that `take` has not returned yet."""
        return bool(self._counts or self._values)

    def add_group(self, group: Group) -> None:
        """Count a group that has ended, complete or not."""
        self._count("groups" if group.whole else "groups_short")
        self._count("rollouts_replaced", len(group.failed) if group.whole else 0)

    def count_returned_item(self) -> None:
        """Count an item that is rolled out again, because sandboxes or the model failed its group."""
        self._count("items_put_back")

    def count_same_score(self) -> None:
        """Count a group that is not sent because all its scores are equal."""
        self._count("groups_same_score")

    def count_too_long(self) -> None:
        """Count a group that is not sent because a sequence is longer than the trainer accepts."""
        self._count("groups_too_long")

    def count_failed_evaluation(self) -> None:
        """Count an evaluation that raised an error."""
        self._count("evaluations_failed")

    def add(self, rolled: Rolled, tool_errors: Iterable[Any], turns: int) -> None:
        """Add the values of a rollout that has ended."""
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
                arguments, message = error.arguments[:ARGUMENTS_SHOWN], error.error[:ERROR_SHOWN]
                self._errors.append(f"[turn {error.turn}] {error.tool_name}({arguments}) -> {message}")

    def take(self, api: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Return the metrics since the last call: the mean of each value, and the counts.

        Args:
            api: `TrainerApi.counts`, which count from the start.
        """
        metrics: dict[str, Any] = {name: fmean(values) for name, values in sorted(self._values.items())}
        metrics |= sorted(self._counts.items())
        if "rollouts" in metrics:
            metrics["rollouts_count"] = metrics.pop("rollouts")  # the name is that of Atropos' table
        metrics.setdefault("tool_errors_count", 0)
        metrics.setdefault("failures_infra", 0)
        if self._errors:
            metrics["tool_error_details"] = "\n".join(self._errors)
        metrics |= {f"api_{name}": count for name, count in sorted((api or {}).items())}
        self._begin()
        return {f"{self._kind}/{name}": value for name, value in metrics.items()}

    def _count(self, name: str, by: int = 1) -> None:
        self._counts[name] += by
        self.totals[name] += by

    def _value(self, name: str, value: float) -> None:
        self._values.setdefault(name, []).append(float(value))


def lengths(trained: Sequence[int], limit: int) -> dict[str, float]:
    """Return Atropos' metrics of the numbers of trained tokens: mean, deviation, largest, smallest.

    Args:
        trained: the number of trained tokens of each sequence.
        limit: the trainer's limit for a sequence, in tokens. If it is positive, the share of sequences that are longer
            than 95% of the limit is a metric, too.
    """
    if not trained:
        return {}
    name = "train/completion_lengths"
    metrics = {name: fmean(trained), f"{name}_std": pstdev(trained), f"{name}_max": max(trained)}
    metrics[f"{name}_min"] = min(trained)
    if limit > 0:
        metrics[f"{name}_p95"] = fmean(tokens > 0.95 * limit for tokens in trained)
    return metrics


def keep_plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that JSON can hold: texts and finite numbers."""
    return {key: value for key, value in metrics.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
