"""Chooses rollouts of a run: by their outcomes, by the tools that they called, and by name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from pydantic import BaseModel, ConfigDict

from hermes_core.agents.base import StopReason
from hermes_core.errors import LISTED, FailureKind, UnknownNameError, UsageError
from hermes_core.records.index import LIMITS, RecordedRun, Row
from hermes_core.records.summary import SOLVED

LEAST_ID = 6
"""Minimum number of first characters of a trajectory's id that can stand for the id."""

ANY_FAILURE, NO_FAILURE = "any", "none"
"""Names that can stand among the kinds of failures: any failure, and no failure."""

FAILURES = (NO_FAILURE, ANY_FAILURE, *map(str, FailureKind))
"""The values that `Filters.failures` can have."""


class Filters(BaseModel):
    """Conditions on a rollout's outcome and its tool calls. All conditions must hold.

    Raises:
        UnknownNameError: there is no such kind of failure.
        UsageError: conditions exclude each other.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    solved: bool = False
    """Only rollouts with a reward of 1.0 or more."""
    unsolved: bool = False
    """Only the other rollouts, also those without a reward."""
    failures: tuple[str, ...] = ()
    """Only rollouts with this failure: infra, image, setup, model, verifier or cancelled; `any` is each of them, and
    `none` is no failure."""
    stop: str | None = None
    """Only rollouts with this stop reason; `limit` for any limit."""
    min_reward: float | None = None
    """Only rollouts with at least this reward."""
    max_reward: float | None = None
    """Only rollouts with at most this reward."""
    tool: str | None = None
    """Only rollouts that called this tool."""
    failed_tool: str | None = None
    """Only rollouts in which a call of this tool failed."""

    def model_post_init(self, _: object, /) -> None:
        """Refuse conditions that no rollout can meet."""
        for name in self.failures:
            if name not in FAILURES:
                raise UnknownNameError("kind of failure", name, FAILURES)
        if self.solved and self.unsolved:
            raise UsageError("solved and unsolved can't be asked for together", hint="leave out one of them")

    def choose(self, run: RecordedRun) -> list[Row]:
        """Return the rollouts that meet all conditions; possibly an empty list, for example if no rollout failed. Raise
        as `check` does."""
        self.check(run)
        return [row for row in run.rows.values() if self.refuse(row) is None]

    def check(self, run: RecordedRun) -> None:
        """Check the names that depend on the run.

        Raises:
            UsageError: a tool or a stop reason is in no rollout of the run, and is not a known one.
        """
        rows = run.rows.values()
        if rows:
            tools = {name for row in rows for name in row.tools}
            stops = {row.stop_reason for row in rows if row.stop_reason}
            _check("stopped with", self.stop, stops, {*map(str, StopReason), "limit"})
            _check("called", self.tool, tools)
            _check("called", self.failed_tool, tools)

    def refuse(self, row: Row) -> str | None:
        """Return the condition that a rollout does not meet, or None."""
        kinds = {row.failure_kind, ANY_FAILURE} if row.failure_kind else {NO_FAILURE}
        if self.failures and kinds.isdisjoint(self.failures):
            return f"failure: {row.failure_kind}" if row.failure_kind else "without a failure"
        if self.stop not in (None, row.stop_reason, "limit" if row.stop_reason in LIMITS else None):
            return "another stop reason"
        if self.tool is not None and self.tool not in row.tools:
            return "without a call of the tool"
        if self.failed_tool is not None and not (self.failed_tool in row.tools and row.tools[self.failed_tool].failed):
            return "without a failed call of the tool"
        return self.refuse_reward(row.reward)

    def refuse_reward(self, reward: float | None) -> str | None:
        """Return the condition that a reward does not meet, or None."""
        value = math.nan if reward is None else reward  # NaN is neither at least nor at most any number
        if (self.solved and not value >= SOLVED) or (self.min_reward is not None and not value >= self.min_reward):
            return "reward too low, or none"
        if (self.unsolved and value >= SOLVED) or (self.max_reward is not None and not value <= self.max_reward):
            return "reward too high, or none"
        return None


def _check(did: str, name: str | None, there: Iterable[str], known: Iterable[str] = ()) -> None:
    """Refuse a name that neither occurs in the run nor is known."""
    names = sorted(there)
    possible = {*names, *known}
    if name is None or name in possible:
        return
    close = difflib.get_close_matches(name, possible, n=1, cutoff=0.5)
    raise UsageError(
        f"no rollout of this run {did} {name!r}; there are: {', '.join(names[:LISTED]) or 'none'}",
        hint=f"did you mean {close[0]!r}?" if close else None,
    )


def select_named(names: Sequence[str], rows: Sequence[Row], run: RecordedRun) -> list[Row]:
    """Return the rows that the names stand for, each once.

    A name is an item, one rollout of it (`ITEM/INDEX`), the beginning of a rollout's id, or a pattern (`leap-*`).

    Raises:
        UnknownNameError: a name stands for no rollout of the run.
        UsageError: the filters leave out all rollouts that a name stands for.
    """
    found = {row.key: row for name in names for row in _select(name, rows, run)}
    return list(found.values())


def _select(name: str, rows: Sequence[Row], run: RecordedRun) -> list[Row]:
    if found := _matching(name, rows):
        return found
    if _matching(name, list(run.rows.values())):
        raise UsageError(f"no rollout of {name} fits the filters", hint="leave out filters")
    raise _unknown(name, run)


def _unknown(name: str, run: RecordedRun) -> UnknownNameError:
    """Return the error for a name that stands for no rollout of the run. If only its index is wrong, the error lists
    the existing indexes."""
    rows, where = run.rows.values(), f"of {run.path}"
    item_id = name.rpartition("/")[0]
    if numbers := [row.rollout_index for row in rows if row.item_id == item_id]:
        hint = f"rollouts of {item_id!r}: {len(numbers)}, numbered {min(numbers)} to {max(numbers)}"
        return UnknownNameError("rollout", name, (), where=where, hint=hint)
    return UnknownNameError("item", name, sorted({row.item_id for row in rows}), where=where)


def _matching(name: str, rows: Sequence[Row]) -> list[Row]:
    return (
        [row for row in rows if row.item_id == name]
        or [row for row in rows if row.name == name]
        or [row for row in rows if len(name) >= LEAST_ID and row.trajectory_id.startswith(name)]
        or [row for row in rows if fnmatchcase(row.item_id, name) or fnmatchcase(row.name, name)]
    )
