"""The rollouts of a run at a glance: one small row per record, kept in a file beside the records."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import re
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

from pydantic import ConfigDict, Field, TypeAdapter

from hermes_core.agents.base import CallError, CallRecord
from hermes_core.errors import UsageError
from hermes_core.records.conversation import calls_of
from hermes_core.records.jsonable import Redact, json_line, redact_value
from hermes_core.records.record import Record, parse_outline
from hermes_core.records.run_files import open_to_read, open_to_write
from hermes_core.records.store import TRAJECTORIES, read_run, record_in, runs_below
from hermes_core.records.summary import SOLVED
from hermes_core.records.tokens import SPELT

FORMAT = 5
"""The version of the index file. An index file of another version is replaced by a new one."""

MESSAGE_SHOWN = 400
"""Maximum number of characters of a failure's message in a row. The record has the whole message."""

ERROR_SHOWN = 120
"""Maximum number of characters of a tool error's message in a row."""

_VARYING = re.compile(r"(?<!\w)'[^']*'(?!\w)|\"[^\"]*\"|[^\s/]*/\S*|\d+")
"""The parts that differ between errors of the same kind: quoted values, paths and numbers."""

_TAIL = 4096
"""Number of bytes at the end of the indexed part of the records that must be unchanged for the index to be valid."""

_BUFFER = 1 << 18
"""Bytes to read at a time when all lines are read, because lines are longer than Python's default buffer."""

LIMITS = frozenset({"max_turns", "length", "context_length", "time_limit"})
"""The stop reasons of an agent that reached a limit, and did not stop by itself."""


class ToolUse(NamedTuple):
    """How often one tool was called in a rollout, and how the calls ended."""

    calls: Annotated[int, Field(ge=1)]
    seconds: float
    failed: Mapping[str, int]
    """Number of failed calls by kind of error."""
    errors: Mapping[str, int]
    """Number of failed calls by message, as `error_of` returns it."""
    exits: Mapping[str, int]
    """Number of commands with a non-zero exit, by exit code. These calls did not fail: failing tests exit so, too."""


class Row(NamedTuple):
    """One rollout: the values that tables show, and the place of its record."""

    line: int
    """The line number of its record in the file of records, from 1."""
    offset: int
    size: int
    trajectory_id: str
    item_id: str
    group: str
    rollout_index: int
    agent: str
    backend: str
    model: str | None
    reward: float | None
    stop_reason: str | None
    failure_kind: str | None
    failure_stage: str | None
    failure_message: str | None
    turns: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost: float | None
    started: float | None
    seconds: float
    waited_s: float
    calls: int
    tools: Mapping[str, ToolUse]

    @property
    def name(self) -> str:
        """Return the rollout's name for people: `ITEM/INDEX`."""
        return f"{self.item_id}/{self.rollout_index}"

    @property
    def key(self) -> tuple[str, str, int]:
        """Return the values that identify the rollout in its run: item id, group and rollout index."""
        return self.item_id, self.group, self.rollout_index

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the model read and wrote."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def solved(self) -> bool:
        """Return whether the reward counts as solved."""
        return self.reward is not None and self.reward >= SOLVED


class RecordedRun:
    """The rows of a run, and access to its records one at a time. The file of records stays open, so that records still
    match their rows after a resumed run has replaced the file.

    Args:
        path: the folder of a run, or a file of records.
        redact: removes secrets from every text of `about` and of the records, but not from rows.

    Raises:
        UsageError: there are no records, or a line is not a record or was written by a newer version.
    """

    def __init__(self, path: Path, redact: Redact | None = None) -> None:
        self.path = path
        self.records = records_of(path)
        self.rows: dict[tuple[str, str, int], Row] = {}
        """The last record of each rollout, in the order in which rollouts were first written."""
        self.close: Callable[[], object] = lambda: None
        """Closes the file; called automatically when this object is garbage-collected."""
        self._redact = redact
        self._lines = self._end = self._tail = 0
        self._stamp = (0, 0)
        with _without_collection():
            self._open()
            self._load()
            self.refresh()

    @property
    def name(self) -> str:
        """Return the name of the run's folder or file."""
        return self.path.resolve().name.removesuffix(".jsonl")

    @property
    def about(self) -> dict[str, Any]:
        """Return the content of `run.json`, such as settings and versions; empty without such a file, as for a single
        file of records."""
        try:
            about = read_run(self.records.parent) if self.records.name == TRAJECTORIES else {}
        except UsageError:
            return {}
        return about if self._redact is None else cast("dict[str, Any]", redact_value(about, self._redact))

    @property
    def configuration(self) -> dict[str, Any]:
        """Return the run's configuration; empty if it is not known."""
        return self.about.get("configuration") or {}

    @property
    def superseded(self) -> int:
        """Return the number of records that a later one of the same rollout replaces."""
        return self._lines - len(self.rows)

    def refresh(self) -> bool:
        """Read the records that were appended since the last time.

        Returns whether the earlier rows are still valid. If a resumed run has rewritten the file, they are not, and the
        file is read again from the beginning.
        """
        self._open()
        status = os.fstat(self._file.fileno())
        stamp = (status.st_ino, status.st_size)
        if stamp == self._stamp:
            return True
        holds = self.checksum(self._end) == self._tail
        if not holds:
            self.rows.clear()
            self._lines = self._end = 0
        grown = self._read_on()
        self._tail = self.checksum(self._end)
        self._stamp = stamp
        if grown:
            self._save()
        return holds

    def record(self, row: Row) -> Record:
        """Return the record of a rollout.

        Raises:
            UsageError: the line is not a record. (Only a part of the line was read for the row.)
        """
        line = os.pread(self._file.fileno(), row.size, row.offset)
        return record_in(line, self._place(row.line), self._clean)

    def checksum(self, end: int) -> int:
        """Return a checksum of the last bytes before `end`. It stays the same while records are only appended."""
        begin = max(0, end - _TAIL)
        return zlib.crc32(os.pread(self._file.fileno(), end - begin, begin), end)

    def sha256(self) -> str:
        """Return the hash of the part of the file that was read."""
        hashed = hashlib.sha256()
        for begin in range(0, self._end, _BUFFER):
            hashed.update(os.pread(self._file.fileno(), min(_BUFFER, self._end - begin), begin))
        return hashed.hexdigest()

    def _open(self) -> None:
        """Close the old file, and open the file that is at the path now."""
        try:
            file = open_to_read(self.records, _BUFFER)
        except OSError as error:
            raise UsageError(f"{self.records} can't be read: {error.strerror}", hint=runs_below(self.path)) from error
        self.close()
        self._file = file
        self.close = weakref.finalize(self, file.close)

    def _read_on(self) -> bool:
        """Read the complete lines after those read so far. Return whether there are any."""
        begin = self._end
        self._file.seek(begin)
        for line in self._file:
            if not line.endswith(b"\n"):  # still being written, or torn by a crash
                break
            record = record_in(line, self._place(self._lines + 1), parse=parse_outline)
            self._lines += 1
            row = row_of(record, self._lines, self._end, len(line))
            self.rows[row.key] = row
            self._end += len(line)
        return self._end > begin

    def _place(self, line: int) -> str:
        return f"{self.records}, line {line}"

    def _clean(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return a record's values without secrets. If a secret is removed from its texts here, or was removed when it
        was recorded, its tokens are left out, because they would spell the secret."""
        if self._redact is None:
            return value
        tokens = {key: value[key] for key in _TOKENS if key in value}
        texts = {key: part for key, part in value.items() if key not in tokens}
        clean: dict[str, Any] = redact_value(texts, self._redact)
        changed = clean != texts or _REDACTED in json.dumps(texts.get("messages"))
        if not (changed and any(tokens.values())):
            return {**clean, **tokens}
        return {**clean, **{key: [] if key == "sequences" else None for key in tokens}, "tokens_refused": SPELT}

    # ------------------------------------------------------------------ the file

    @property
    def _index_path(self) -> Path:
        return self.records.with_name(f".{self.records.name}.index")

    def _load(self) -> None:
        """Use the rows of the index file, if they were made from the present records."""
        with contextlib.suppress(OSError, ValueError), open_to_read(self._index_path) as index:
            held = _index_form().validate_json(index.read())
            fits = held.format == FORMAT and held.fits(os.fstat(self._file.fileno()))
            if fits and self.checksum(held.end) == held.tail:
                self.rows = {row.key: row for row in held.rows}
                self._lines = max((row.line for row in held.rows), default=0)
                self._end, self._tail = held.end, held.tail

    def _save(self) -> None:
        """Write the index file. If this is not permitted, the records are read again the next time."""
        beside = self._index_path.with_suffix(f".{os.getpid()}")
        changed = os.fstat(self._file.fileno()).st_mtime_ns
        held = _Index(FORMAT, self._end, self._tail, changed, list(self.rows.values()))
        try:
            with os.fdopen(open_to_write(beside, os.O_TRUNC), "wb") as file:
                file.write(json_line(held))
            beside.replace(self._index_path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()


_TOKENS = ("sequences", "tokens", "masks", "logprobs")
"""The keys that hold tokens in a record of any version."""

_REDACTED = "[redacted: "
"""The beginning of the text that a `Redactor` writes in place of a secret, before the secret's name."""


def records_of(path: Path) -> Path:
    """Return the file of records for a path: the file in the run's folder, or `path` itself if it is no folder."""
    return path / TRAJECTORIES if path.is_dir() else path


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Turn garbage collection off in the block. Rows have no cycles, and the collector would take longer to check them
    than it takes to make them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Index(NamedTuple):
    """The index file: the rows of the first `end` bytes of the records."""

    format: int
    end: int
    tail: int
    changed: int
    rows: list[Row]

    def fits(self, records: os.stat_result) -> bool:
        """Return whether the rows can belong to this file: it is unchanged or larger, and the rows are within `end`."""
        unchanged = self.end == records.st_size and self.changed == records.st_mtime_ns
        within = all(0 <= row.offset <= row.offset + row.size <= self.end for row in self.rows)
        return within and (unchanged or self.end < records.st_size)


@cache
def _index_form() -> TypeAdapter[_Index]:
    return TypeAdapter(_Index, config=ConfigDict(allow_inf_nan=False))


def row_of(record: Record, line: int, offset: int, size: int) -> Row:
    """Return the row of a record. For version 2 or later, the record can be an outline (see `parse_outline`)."""
    failure, usage, started, ended = record.failure, record.usage, record.started, record.ended
    spent = sum(filter(None, record.timings.values()))
    seconds = spent if started is None or ended is None else ended - started
    return Row(
        line=line,
        offset=offset,
        size=size,
        **{name: getattr(record, name) for name in _SAME},
        failure_kind=str(failure.kind) if failure else None,
        failure_stage=failure.stage if failure else None,
        failure_message=failure.message[:MESSAGE_SHOWN] if failure else None,
        turns=len(record.turns) or sum(message["role"] == "assistant" for message in record.messages),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        cost=usage.cost,
        seconds=round(seconds, 3),
        calls=record.tool_calls.attempted,
        tools=_tools(calls_of(record)),
    )


_SAME = (
    *("trajectory_id", "item_id", "group", "rollout_index", "agent", "backend", "model", "reward", "stop_reason"),
    *("started", "waited_s"),
)
"""Fields that are the same in a record and in its row."""


def _tools(calls: Iterable[CallRecord]) -> dict[str, ToolUse]:
    """Return the use of each tool."""
    used: dict[str, ToolUse] = {}
    for call in calls:
        count, seconds, failed, errors, exits = used.get(call.name) or ToolUse(0, 0.0, {}, {}, {})
        if call.started is not None and call.ended is not None:
            seconds += call.ended - call.started
        if call.error:
            failed = _one_more(failed, str(call.error.kind))
            errors = _one_more(errors, error_of(call.error))
        elif call.exit_code:
            exits = _one_more(exits, str(call.exit_code))
        used[call.name] = ToolUse(count + 1, seconds, failed, errors, exits)
    return {name: use._replace(seconds=round(use.seconds, 3)) for name, use in used.items()}


def _one_more(counts: Mapping[str, int], name: str) -> dict[str, int]:
    return {**counts, name: counts.get(name, 0) + 1}


def error_of(error: CallError) -> str:
    """Return a text that is equal for errors of the same kind: the first line of a failed call's error, without the
    hint, quoted values, paths and numbers."""
    first = error.message.strip().partition("\n")[0].partition(" (")[0]
    return _VARYING.sub("…", first[:MESSAGE_SHOWN])[:ERROR_SHOWN] or str(error.kind)
