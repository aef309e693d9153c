"""Chooses the rollouts of a run to export, and reads their records one at a time, without secrets."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hermes_core.errors import FailureKind, UnknownNameError, UsageError
from hermes_core.records.conversation import calls_of, digest, has_reasoning, prompt_length, token_count
from hermes_core.records.index import Row, row_of
from hermes_core.records.jsonable import Redact
from hermes_core.records.plain_text import text_of, without_what_differs
from hermes_core.records.record import Record
from hermes_core.records.run_files import open_to_read
from hermes_core.records.store import TRAJECTORIES, read_run, record_in
from hermes_core.records.summary import SOLVED
from hermes_core.records.tokens import SPELT

T = TypeVar("T")

NO_FAILURE = "none"
"""The name of rollouts without a failure, among the kinds of failures."""

FAILURES = (NO_FAILURE, *(str(kind) for kind in FailureKind))
"""What `ExportFilters.failures` can name."""

Refuses = Callable[[Record], str | None]
"""Returns why a format can't hold a record, or None."""

_REDACTED = "[redacted: "
"""What a `Redactor` writes before the name of a secret."""


@dataclass(frozen=True)
class ExportFilters:
    """Which rollouts are exported. All conditions must hold.

    Raises:
        UnknownNameError: there is no such kind of failure.
        UsageError: a limit is less than 1.
    """

    solved: bool = False
    """Only rollouts with a reward of 1.0 or more."""
    min_reward: float | None = None
    """Only rollouts with at least this reward."""
    failures: tuple[str, ...] = ()
    """Only rollouts with these kinds of failure; `none` is a rollout without one. Empty is the format's default."""
    max_tokens: int | None = None
    """Only rollouts of at most this many tokens, prompt included."""
    has_reasoning: bool = False
    """Only rollouts with reasoning in at least one answer."""
    per_item: int | None = None
    """At most this many rollouts (or pairs) of one item: those with the highest rewards, then the first."""
    deduplicate: bool = False
    """Only the first of rollouts that have the same conversation."""

    def __post_init__(self) -> None:
        for name in self.failures:
            if name not in FAILURES:
                raise UnknownNameError("kind of failure", name, FAILURES)
        for name in ("per_item", "max_tokens"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise UsageError(f"{name} is {limit}", hint="give a number from 1 on, or leave it out")

    def refuses(self, record: Record) -> str | None:
        """Return the condition that a record does not meet, or None."""
        kind = str(record.failure.kind) if record.failure else NO_FAILURE
        if self.failures and kind not in self.failures:
            return "without a failure" if kind == NO_FAILURE else f"failure: {kind}"
        if self.has_reasoning and not has_reasoning(record):
            return "no reasoning"
        if self.max_tokens is not None:
            count = token_count(record)
            if count is None:
                return "number of tokens not known"
            if count > self.max_tokens:
                return "too many tokens"
        return None

    def rewards(self, reward: float | None) -> bool:
        """Return whether the reward meets the conditions for rewards."""
        if reward is None:
            return not self.solved and self.min_reward is None
        return not (self.solved and reward < SOLVED) and not (self.min_reward is not None and reward < self.min_reward)


class Candidate(NamedTuple):
    """What is remembered of a record between two readings: enough to choose it and to count it."""

    row: Row
    models: tuple[str, ...]
    prompt: bytes
    """The digest of its prompt, without what differs between rollouts of one task, such as the slot's folder."""
    conversation: bytes
    """The digest of its messages."""


class RunReader:
    """The records of one run. A context manager, which holds the file open: a resumed run may replace it meanwhile.

    Args:
        path: the run's folder, or a file of records, as the Atropos adapter writes.
        redact: removes secrets from every text.

    Raises:
        UsageError: there is no run, or it can't be read.
    """

    def __init__(self, path: Path, redact: Redact | None = None) -> None:
        self.path = path
        alone = path.is_file()
        about = {"configuration": {}, "configuration_hash": None} if alone else read_run(path)
        self.about: dict[str, Any] = about if redact is None else redacted(about, redact)
        """The content of `run.json`; a file of records has none."""
        self.sha256 = hashlib.sha256()
        """The hash of the records that `records` has yielded."""
        self._records = path if alone else path / TRAJECTORIES
        self._redact = redact
        try:
            self._file = open_to_read(self._records)
        except OSError as error:
            raise UsageError(
                f"{self._records} can't be read: {error.strerror}", hint="name the folder of a run"
            ) from error

    def __enter__(self) -> RunReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def name(self) -> str:
        """Return the name of the run's folder or file."""
        return self.path.resolve().name.removesuffix(".jsonl")

    def records(self) -> Iterator[tuple[int, Record]]:
        """Read all records in the order written, each with its offset. A torn last line is left out.

        Raises:
            UsageError: a line is not a record, or was written by a newer version.
        """
        self._file.seek(0)
        offset = 0
        for number, line in enumerate(self._file, 1):
            if line.endswith(b"\n"):
                self.sha256.update(line)
                yield offset, self._read(line, f"{self._records}, line {number}")
            offset += len(line)

    def at(self, offset: int) -> Record:
        """Return the record whose line begins here."""
        self._file.seek(offset)
        return self._read(self._file.readline(), f"{self._records}, byte {offset}")

    def _read(self, line: bytes, place: str) -> Record:
        record = record_in(line, place, self._clean)
        if record.sequences and _REDACTED.encode() in line and _REDACTED in json.dumps(list(record.messages)):
            return replace(record, sequences=(), tokens_refused=SPELT)
        return record

    def _clean(self, value: dict[str, Any]) -> dict[str, Any]:
        """Remove secrets from a line's values. If there was one, its tokens would spell it, so they are left out."""
        if self._redact is None:
            return value
        numbers = {key: value[key] for key in ("sequences", "tokens", "masks", "logprobs") if key in value}
        texts = {key: part for key, part in value.items() if key not in numbers}
        clean: dict[str, Any] = redacted(texts, self._redact)
        if clean == texts:
            return value
        spelt = {"tokens_refused": SPELT} if any(numbers.values()) else {}
        return {**clean, **{key: [] if key == "sequences" else None for key in numbers}, **spelt}


def redacted(value: Any, redact: Redact) -> Any:
    """Return JSON values without secrets."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact(key): redacted(part, redact) for key, part in value.items()}
    if isinstance(value, list):
        return [redacted(part, redact) for part in value]
    return value


@dataclass
class Selection:
    """The chosen rollouts of a run, in the order written."""

    run: RunReader
    filters: ExportFilters
    chosen: list[Candidate]
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of rollouts that are left out, by reason."""
    lost: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The rewards of those rollouts, by reason."""
    pairs: list[tuple[Candidate, Candidate]] = field(default_factory=list)
    """Pairs of a better and a worse chosen rollout, for a format of pairs."""
    superseded: int = 0
    """Number of records that a later one of the same rollout replaces. They are not counted anywhere else."""

    def records(self) -> Iterator[Record]:
        """Read the chosen records, one at a time."""
        return (self.run.at(candidate.row.offset) for candidate in self.chosen)

    def write_each(self, write: Callable[..., int]) -> int:
        """Give each chosen record, or both of a pair, to `write`, and return the sum of what it returns. Those that it
        can't write, because a part of a message or a schema is not as an endpoint would send it, are left out."""
        count = 0
        held: list[Candidate] = []
        units: Sequence[tuple[Candidate, ...]] = self.pairs or [(candidate,) for candidate in self.chosen]
        for candidates in units:
            try:
                count += write(*(self.run.at(candidate.row.offset) for candidate in candidates))
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                continue
            held += candidates
        self.keep(held, "values that the format can't hold")
        return count

    def keep(self, kept: list[Candidate], reason: str) -> None:
        """Leave out the other chosen rollouts for this reason."""
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
        """Return the items with their numbers, in the order in which they come."""
        ids = dict.fromkeys(candidate.row.item_id for candidate in self.chosen)
        return {item_id: number for number, item_id in enumerate(ids)}


def select(run: RunReader, filters: ExportFilters, refuses: Refuses, *, by_reward: bool = True) -> Selection:
    """Choose rollouts. Reads the run once, and keeps a few small values of each record.

    Args:
        refuses: tells which records the format can't hold.
        by_reward: apply the conditions for rewards and the limit per item. Pairs apply them to the chosen rollout.
    """
    last: dict[tuple[str, str, int], Candidate | tuple[str, float | None]] = {}
    superseded = 0
    for offset, record in run.records():
        key = (record.item_id, record.group, record.rollout_index)
        superseded += key in last
        reason = filters.refuses(record) or refuses(record)
        if reason is None and by_reward and not filters.rewards(record.reward):
            reason = "reward too low, or none"
        last.pop(key, None)  # so that the order is that of the records that count
        last[key] = _candidate(offset, record) if reason is None else (reason, record.reward)
    candidates = [outcome for outcome in last.values() if isinstance(outcome, Candidate)]
    selection = Selection(run, filters, candidates, superseded=superseded)
    for outcome in last.values():
        if not isinstance(outcome, Candidate):
            selection.leave_out(*outcome)
    if filters.deduplicate:
        selection.keep(_first_of_each(selection.chosen), "duplicate")
    if filters.per_item is not None and by_reward:
        best = best_of_each(selection.chosen, filters.per_item, lambda candidate: candidate.row)
        selection.keep(best, "over the limit per item")
    return selection


def _first_of_each(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates without those whose conversation came before."""
    first: dict[bytes, Candidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.conversation, candidate)
    return list(first.values())


def best_of_each(values: Iterable[T], limit: int, row_in: Callable[[T], Row]) -> list[T]:
    """Return at most `limit` values of each item: those with the highest rewards, then the first. Their order stays."""
    by_item: dict[str, list[tuple[float, int]]] = {}
    ordered = list(values)
    for place, value in enumerate(ordered):
        row = row_in(value)
        by_item.setdefault(row.item_id, []).append((math.inf if row.reward is None else -row.reward, place))
    kept = {place for places in by_item.values() for _, place in sorted(places)[:limit]}
    return [value for place, value in enumerate(ordered) if place in kept]


def _candidate(offset: int, record: Record) -> Candidate:
    models = dict.fromkeys(turn.model for turn in record.turns if turn.model)
    prompt = record.messages[: prompt_length(record.messages)]
    return Candidate(
        row_of(replace(record, calls=tuple(calls_of(record))), offset, 0),
        models=tuple(models) or ((record.model,) if record.model else ()),
        prompt=digest([{**each, "content": without_what_differs(text_of(each["content"]))} for each in prompt]),
        conversation=digest(record.messages),
    )
