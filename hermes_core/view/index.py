"""The rollouts of a run at a glance: one small row per record, kept in a file beside the records."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hermes_core.envs.plain import json_value
from hermes_core.envs.record import Record, parse_line, parse_outline
from hermes_core.envs.store import TRAJECTORIES, read_run
from hermes_core.envs.summary import SOLVED
from hermes_core.errors import UsageError

FORMAT = 3
"""The version of the index file. An index of another version is made again."""

MESSAGE_SHOWN = 400
"""Maximum number of characters of a failure's message in a row. The record has all of it."""

ERROR_SHOWN = 120
"""The same for the message of a tool's error."""

_VARYING = re.compile(r"(?<!\w)'[^']*'(?!\w)|\"[^\"]*\"|[^\s/]*/\S*|\d+")
"""What differs between errors that are alike: quoted values, paths and numbers."""

_TAIL = 4096
"""The number of bytes before the end of what was indexed that must be unchanged for the index to be used."""

_BUFFER = 1 << 18
"""Bytes to read at a time when all lines are read. Lines are longer than Python's own buffer."""

LIMITS = frozenset({"max_turns", "length", "context_length", "time_limit"})
"""The stop reasons that are limits: the agent was stopped, and did not stop by itself."""


class ToolUse(NamedTuple):
    """How often one tool was called in a rollout, and how the calls ended."""

    calls: int
    seconds: float
    failed: Mapping[str, int]
    """Number of failed calls by kind of error."""
    errors: Mapping[str, int]
    """Number of failed calls by message, as `error_of` returns it."""
    exits: Mapping[str, int]
    """Number of commands with a non-zero exit by exit code. Their calls did not fail: tests that fail exit so, too."""


class Row(NamedTuple):
    """One rollout: what tables show, and where its record is."""

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
        """Return what identifies the rollout in its run."""
        return self.item_id, self.group, self.rollout_index

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the model read and wrote."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def solved(self) -> bool:
        """Return whether the reward counts as solved."""
        return self.reward is not None and self.reward >= SOLVED


class Run:
    """The rows of a run, and its records one at a time.

    Args:
        path: the folder of a run, or a file of records.

    Raises:
        UsageError: there are no records, or a line is not a record, or was written by a newer version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = records_of(path)
        self.rows: dict[tuple[str, str, int], Row] = {}
        """The last record of each rollout, in the order in which rollouts were first written."""
        self._end = 0
        self._tail = 0
        self._stamp = (0, 0)
        with _without_collection():
            with self._open() as file:
                self._load(file)
            self.refresh()

    @property
    def about(self) -> Mapping[str, Any]:
        """Return the run's settings and versions (`run.json`); empty if there are none, as for a file of records."""
        try:
            return read_run(self.records.parent) if self.records.name == TRAJECTORIES else {}
        except UsageError:
            return {}

    def refresh(self) -> bool:
        """Read what was appended since the last time.

        Returns whether the earlier rows still hold. They do not if a resumed run has rewritten the file; then it was
        read again from the beginning.
        """
        with self._open(_BUFFER) as file:
            status = os.fstat(file.fileno())
            stamp = (status.st_ino, status.st_size)
            if stamp == self._stamp:
                return True
            holds = self._tail_of(file, self._end) == self._tail
            if not holds:
                self.rows.clear()
                self._end = 0
            grown = self._read_on(file)
            self._tail = self._tail_of(file, self._end)
            self._stamp = stamp
        if grown:
            self._save()
        return holds

    def record(self, row: Row) -> dict[str, Any]:
        """Return the rollout's record as JSON values of the current version."""
        with self._open() as file:
            file.seek(row.offset)
            line = file.read(row.size)
        try:
            return Record.from_json(parse_line(line, str(self.records))).to_json()
        except ValueError as error:
            raise UsageError(f"{self.records} has changed", hint="run the command again") from error

    def checksum(self, end: int) -> int:
        """Return a checksum of the last bytes before `end`: the same for as long as the records only grow."""
        with self._open() as file:
            return self._tail_of(file, end)

    def _open(self, buffer: int = -1) -> BinaryIO:
        try:
            return self.records.open("rb", buffer)
        except OSError as error:
            inside = sorted(str(path.parent) for path in self.path.glob(f"*/{TRAJECTORIES}"))
            hint = f"name a run in it: {', '.join(inside)}" if inside else "name the folder of a run"
            raise UsageError(f"{self.records} can't be read: {error.strerror}", hint=hint) from error

    def _read_on(self, file: BinaryIO) -> bool:
        """Take in the whole lines after those that were read; return whether there are any."""
        begin = self._end
        file.seek(begin)
        for line in file:
            if not line.endswith(b"\n"):  # still being written, or torn by a crash
                break
            try:
                row = _row(parse_outline(line, str(self.records)), self._end, len(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UsageError(
                    f"{self.records}, byte {self._end}: no record of a rollout", hint="remove that line to go on"
                ) from error
            self.rows[row.key] = row
            self._end += len(line)
        return self._end > begin

    @staticmethod
    def _tail_of(file: BinaryIO, end: int) -> int:
        """Return a checksum of the last bytes before `end`, which tells a file that grew from one that was replaced."""
        begin = max(0, end - _TAIL)
        file.seek(begin)
        return zlib.crc32(file.read(end - begin), end)

    # ------------------------------------------------------------------ the file

    @property
    def _index_path(self) -> Path:
        return self.records.with_name(f".{self.records.name}.index")

    def _load(self, file: BinaryIO) -> None:
        """Take over the rows of the index file, if they are of the records that are here now."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            held = json_value(self._index_path.read_bytes())
            status = os.fstat(file.fileno())
            unchanged = held["end"] < status.st_size or held["changed"] == status.st_mtime_ns
            if held["format"] == FORMAT and unchanged and self._tail_of(file, held["end"]) == held["tail"]:
                rows = [_loaded(values) for values in held["rows"]]
                self.rows = {row.key: row for row in rows}
                self._end, self._tail = held["end"], held["tail"]

    def _save(self) -> None:
        """Write the index file. Without the right to write it, the run is read again the next time."""
        beside = self._index_path.with_suffix(f".{os.getpid()}")
        held = {
            "format": FORMAT,
            "end": self._end,
            "tail": self._tail,
            "changed": self.records.stat().st_mtime_ns,
            "rows": list(self.rows.values()),
        }
        try:
            beside.write_bytes(json.dumps(held, separators=(",", ":")).encode())
            beside.replace(self._index_path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()


def records_of(path: Path) -> Path:
    """Return the file of records of a run: the one in its folder, or `path` itself."""
    return path / TRAJECTORIES if path.is_dir() else path


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Collect no garbage for a while. Rows have no cycles, and to go through all of them again and again takes longer
    than to make them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _loaded(values: list[Any]) -> Row:
    values[-1] = {name: ToolUse(*use) for name, use in values[-1].items()}
    return Row._make(values)


def _row(value: Mapping[str, Any], offset: int, size: int) -> Row:
    """Return the row of a record, of which the outline is enough if it is of version 2 or later."""
    if value.get("version", 1) == 1:
        value = Record.from_json(value).to_json()
    failure, usage = value["failure"] or {}, value["usage"] or {}
    started, ended = value["started"], value["ended"]
    known = started is not None and ended is not None
    message = failure.get("message")
    return Row(
        offset=offset,
        size=size,
        trajectory_id=value["trajectory_id"],
        item_id=str(value["item_id"]),
        group=value["group"],
        rollout_index=value["rollout_index"],
        agent=value["agent"],
        backend=value["backend"],
        model=value["model"],
        reward=value["reward"],
        stop_reason=value["stop_reason"],
        failure_kind=failure.get("kind"),
        failure_stage=failure.get("stage"),
        failure_message=message and message[:MESSAGE_SHOWN],
        turns=_turns(value),
        prompt_tokens=usage.get("prompt_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or 0,
        cached_tokens=usage.get("cached_tokens") or 0,
        cost=usage.get("cost"),
        started=started,
        seconds=round(ended - started if known else sum(filter(None, value["timings"].values())), 3),
        waited_s=value["waited_s"] or 0.0,
        calls=value["tool_calls"]["attempted"],
        tools=_tools(value["calls"]),
    )


def _turns(value: Mapping[str, Any]) -> int:
    """Return the number of the model's answers, also of a record of version 1, which has no `turns`."""
    messages = value.get("messages", ())
    return len(value["turns"]) or sum(message.get("role") == "assistant" for message in messages)


def _tools(calls: list[Mapping[str, Any]]) -> dict[str, ToolUse]:
    """Return the use of each tool."""
    used: dict[str, ToolUse] = {}
    for call in calls:
        count, seconds, failed, errors, exits = used.get(call["name"]) or ToolUse(0, 0.0, {}, {}, {})
        if call["started"] is not None and call["ended"] is not None:
            seconds += call["ended"] - call["started"]
        if error := call["error"]:
            failed = _one_more(failed, str(error["kind"]))
            errors = _one_more(errors, error_of(error))
        elif call["exit_code"]:
            exits = _one_more(exits, str(call["exit_code"]))
        used[call["name"]] = ToolUse(count + 1, seconds, failed, errors, exits)
    return {name: use._replace(seconds=round(use.seconds, 3)) for name, use in used.items()}


def _one_more(counts: Mapping[str, int], name: str) -> dict[str, int]:
    return {**counts, name: counts.get(name, 0) + 1}


def error_of(error: Mapping[str, Any]) -> str:
    """Return what a failed call's error says, the same for errors that are alike: its first line without the hint, and
    without quoted values, paths and numbers."""
    first = str(error["message"]).strip().partition("\n")[0].partition(" (")[0]
    return _VARYING.sub("…", first[:MESSAGE_SHOWN])[:ERROR_SHOWN] or str(error["kind"])
