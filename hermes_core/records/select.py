"""Chooses rollouts of a run: by what they came to, by what they did, and by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hermes_core.agents.base import StopReason
from hermes_core.errors import LISTED, FailureKind, UnknownNameError, UsageError
from hermes_core.records.index import LIMITS, RecordedRun, Row

LEAST_ID = 6
"""The least number of characters of a trajectory's id that name it."""


@dataclass(frozen=True)
class Filters:
    """What a rollout must have come to, and must have done. None is no condition."""

    solved: bool | None = None
    failure: str | None = None
    """A kind of failure; `any` is every failure."""
    stop: str | None = None
    """A stop reason; `limit` is every limit."""
    min_reward: float | None = None
    max_reward: float | None = None
    tool: str | None = None
    """A tool that was called."""
    failed_tool: str | None = None
    """A tool of which a call failed."""

    def choose(self, run: RecordedRun) -> list[Row]:
        """Return the rollouts that meet all conditions. There may be none, for example if none failed.

        Raises:
            UsageError: a name stands for nothing: it is in no rollout of the run, and can be in none.
        """
        rows = list(run.rows.values())
        if rows:
            tools = {name for row in rows for name in row.tools}
            stops = {row.stop_reason for row in rows if row.stop_reason}
            failures = {row.failure_kind for row in rows if row.failure_kind}
            _check("stopped with", self.stop, stops, {*map(str, StopReason), "limit"})
            _check("failed with", self.failure, failures, {*map(str, FailureKind), "any"})
            _check("called", self.tool, tools)
            _check("called", self.failed_tool, tools)
        return [row for row in rows if self._lets_through(row)]

    def _lets_through(self, row: Row) -> bool:
        reward, least, most = row.reward, self.min_reward, self.max_reward
        return (
            self.solved in (None, row.solved)
            and self.failure in (None, row.failure_kind, "any" if row.failure_kind else None)
            and self.stop in (None, row.stop_reason, "limit" if row.stop_reason in LIMITS else None)
            and (least is None or (reward is not None and reward >= least))
            and (most is None or (reward is not None and reward <= most))
            and (self.tool is None or self.tool in row.tools)
            and (self.failed_tool is None or bool(self.failed_tool in row.tools and row.tools[self.failed_tool].failed))
        )


def _check(did: str, name: str | None, there: Iterable[str], known: Iterable[str] = ()) -> None:
    """Refuse a name that is neither there, which is in the run, nor known."""
    names = sorted(there)
    possible = {*names, *known}
    if name is None or name in possible:
        return
    close = difflib.get_close_matches(name, possible, n=1, cutoff=0.5)
    raise UsageError(
        f"no rollout of this run {did} {name!r}; there are: {', '.join(names[:LISTED]) or 'none'}",
        hint=f"did you mean {close[0]!r}?" if close else None,
    )


def named(names: Sequence[str], rows: Sequence[Row], run: RecordedRun) -> list[Row]:
    """Return those of the rows that the arguments name, each once.

    A name is an item, one rollout of it (`ITEM/INDEX`), the beginning of a rollout's id, or a pattern (`leap-*`).

    Raises:
        UnknownNameError: one of them names no rollout of the run.
        UsageError: one of them names some, but the filters leave none.
    """
    found = {row.key: row for name in names for row in _named(name, rows, run)}
    return list(found.values())


def _named(name: str, rows: Sequence[Row], run: RecordedRun) -> list[Row]:
    if found := _matching(name, rows):
        return found
    if _matching(name, list(run.rows.values())):
        raise UsageError(f"no rollout of {name} fits the filters", hint="leave out filters")
    raise _unknown(name, run)


def _unknown(name: str, run: RecordedRun) -> UnknownNameError:
    """Return the error for a name of nothing in the run. If only the number is wrong, it says which there are."""
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
