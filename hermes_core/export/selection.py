"""Chooses the rollouts of a run to export, and reads their records one at a time, without secrets."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

from hermes_core.errors import UsageError
from hermes_core.records.conversation import digest, has_reasoning, prompt_length, token_count
from hermes_core.records.index import RecordedRun, Row, row_of
from hermes_core.records.jsonable import Redact
from hermes_core.records.plain_text import text_of, without_what_differs
from hermes_core.records.record import Record
from hermes_core.records.select import Filters
from hermes_core.records.store import read_run

T = TypeVar("T")

Refuses = Callable[[Record], str | None]
"""Returns the reason why a format can't hold a record, or None."""


class ExportFilters(Filters):
    """Which rollouts are exported. All conditions must hold.

    Raises:
        UnknownNameError: there is no such kind of failure.
        UsageError: a limit is less than 1, or conditions exclude each other.
    """

    failures: tuple[str, ...] = ()
    """Only rollouts with this failure: infra, image, setup, model, verifier or cancelled; `any` is each of them, and
    `none` is no failure, which is the default of tables."""
    max_tokens: int | None = None
    """Only rollouts of at most this many tokens, prompt included."""
    has_reasoning: bool = False
    """Only rollouts with reasoning in at least one answer."""
    per_item: int | None = None
    """At most this many rollouts (or pairs) of one item: those with the highest rewards, then the first."""
    deduplicate: bool = False
    """Only the first of rollouts that have the same conversation."""

    def model_post_init(self, context: object, /) -> None:
        """Also refuse limits that leave nothing."""
        super().model_post_init(context)
        for name in ("per_item", "max_tokens"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise UsageError(f"{name} is {limit}", hint="give a number from 1 on, or leave it out")

    def refuse_record(self, record: Record) -> str | None:
        """Return a condition that a record does not meet, or None. Checks only conditions that the row can't decide."""
        if self.has_reasoning and not has_reasoning(record):
            return "no reasoning"
        if self.max_tokens is not None:
            count = token_count(record)
            if count is None:
                return "number of tokens not known"
            if count > self.max_tokens:
                return "too many tokens"
        return None


class Candidate(NamedTuple):
    """The part of a record that is kept in memory: enough to choose and to count it."""

    row: Row
    models: tuple[str, ...]
    prompt: bytes
    """The digest of the prompt, without parts that differ between rollouts of one task, such as the slot's folder."""
    conversation: bytes
    """The digest of the messages."""


@dataclass
class Selection:
    """The chosen rollouts of a run, in the order written."""

    run: RecordedRun
    chosen: list[Candidate] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of rollouts that are left out, by reason."""
    lost: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The rewards of the rollouts that are left out, by reason."""
    pairs: list[tuple[Candidate, Candidate]] = field(default_factory=list)
    """Pairs of a better and a worse chosen rollout, for a format of pairs."""

    def records(self) -> Iterator[Record]:
        """Read the chosen records, one at a time."""
        return (self.run.record(candidate.row) for candidate in self.chosen)

    def write_each(self, write: Callable[..., int]) -> int:
        """Call `write` with each chosen record, or with both records of a pair, and return the sum of the results.
        Records that `write` refuses, because a message or a schema has a form that no endpoint would send, are left
        out."""
        count = 0
        held: list[Candidate] = []
        units: Sequence[tuple[Candidate, ...]] = self.pairs or [(candidate,) for candidate in self.chosen]
        for candidates in units:
            try:
                count += write(*(self.run.record(candidate.row) for candidate in candidates))
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                continue
            held += candidates
        self.keep(held, "values that the format can't hold")
        return count

    def keep(self, kept: list[Candidate], reason: str) -> None:
        """Keep only these of the chosen rollouts, and leave out the others for this reason."""
        offsets = {candidate.row.offset for candidate in kept}
        for candidate in self.chosen:
            if candidate.row.offset not in offsets:
                self.leave_out(reason, candidate.row.reward)
        self.chosen = kept

    def leave_out(self, reason: str, reward: float | None) -> None:
        """Count a rollout that is left out."""
        self.left_out[reason] += 1
        if reward is not None:
            self.lost[reason].append(reward)

    @cached_property
    def tools(self) -> list[str]:
        """Return the names of all tools that were called, sorted."""
        return sorted({name for candidate in self.chosen for name in candidate.row.tools})

    @cached_property
    def items(self) -> dict[str, int]:
        """Return each chosen item's place, from 0, in the order in which items first occur."""
        ids = dict.fromkeys(candidate.row.item_id for candidate in self.chosen)
        return {item_id: number for number, item_id in enumerate(ids)}


def open_run(path: Path, redact: Redact | None = None) -> RecordedRun:
    """Open a run to export it. An export names its source, so a run's folder must have its `run.json`.

    Args:
        path: the run's folder, or a file of records such as the Atropos adapter writes.

    Raises:
        UsageError: there is no run, or it can't be read.
    """
    if path.is_dir():
        read_run(path)
    return RecordedRun(path, redact or str)  # with any redactor, tokens that spell a removed secret are left out


def select(run: RecordedRun, filters: ExportFilters, refuses: Refuses) -> Selection:
    """Choose rollouts, in the order in which their records were written. Keeps a few small values of each rollout.

    Args:
        refuses: returns the reason why the format can't hold a record, or None.
    """
    filters.check(run)
    selection = Selection(run)
    for row in sorted(run.rows.values(), key=lambda row: row.offset):
        outcome = _candidate(run, row, filters, refuses)
        if isinstance(outcome, Candidate):
            selection.chosen.append(outcome)
        else:
            selection.leave_out(outcome, row.reward)
    if filters.deduplicate:
        first: dict[bytes, Candidate] = {}
        kept = [
            candidate
            for candidate in selection.chosen
            if first.setdefault(candidate.conversation, candidate) is candidate
        ]
        selection.keep(kept, "duplicate")
    if filters.per_item is not None:
        best = best_of_each(selection.chosen, filters.per_item, lambda candidate: candidate.row)
        selection.keep(best, "over the limit per item")
    return selection


def best_of_each(values: Iterable[T], limit: int, row_in: Callable[[T], Row]) -> list[T]:
    """Return at most `limit` values of each item, in unchanged order: those with the highest rewards, among equal
    rewards the first."""
    by_item: dict[str, list[tuple[float, int]]] = {}
    ordered = list(values)
    for place, value in enumerate(ordered):
        row = row_in(value)
        by_item.setdefault(row.item_id, []).append((math.inf if row.reward is None else -row.reward, place))
    kept = {place for places in by_item.values() for _, place in sorted(places)[:limit]}
    return [value for place, value in enumerate(ordered) if place in kept]


def _candidate(run: RecordedRun, row: Row, filters: ExportFilters, refuses: Refuses) -> Candidate | str:
    """Return a rollout as a candidate, or the reason to leave it out. Its record is read only if its row fits."""
    if reason := filters.refuse(row):
        return reason
    record = run.record(row)
    if reason := filters.refuse_record(record) or refuses(record):
        return reason
    models = dict.fromkeys(turn.model for turn in record.turns if turn.model)
    prompt = record.messages[: prompt_length(record.messages)]
    return Candidate(
        row_of(record, row.line, row.offset, row.size),  # a new row, because the record's secrets are removed
        models=tuple(models) or ((record.model,) if record.model else ()),
        prompt=digest([{**each, "content": without_what_differs(text_of(each["content"]))} for each in prompt]),
        conversation=digest(record.messages),
    )
