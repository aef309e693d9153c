"""The output folder of a run: `trajectories.jsonl`, `run.json` and `summary.json`; begins, locks and resumes runs."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from hermes_core.errors import FailureKind, OutputError, UsageError
from hermes_core.records.jsonable import json_text, json_value
from hermes_core.records.record import Record, parse_line
from hermes_core.records.run_files import LineFile, open_to_read, open_to_write
from hermes_core.records.summary import RunSummary, Tally
from hermes_core.validation import problem_text

log = logging.getLogger(__name__)

TRAJECTORIES, RUN, SUMMARY, LOCK = "trajectories.jsonl", "run.json", "summary.json", ".lock"
RESULTS, TABLE, QUARANTINE = "validation.json", "validation.md", "quarantine.json"
"""Files that a validation writes beside its runs: all results, a table for people, and the items to leave out."""
SUPERSEDED = "superseded.jsonl"
"""The file of records from earlier sessions whose rollouts a resumed session does again."""

Changes = Callable[[str, Mapping[str, Any]], list[str] | None]
"""Called with an item's id and the fields of the item that a record has kept. Returns the names of fields that have
changed since; None if there is no such item."""

_NAMED = 5
"""Maximum number of items that a message names."""


class OutputFolder:
    """A run's folder, locked for as long as this object is open.

    Each record is appended as a whole line in one write, so after `kill -9` at most the last line is incomplete; a
    resumed run removes an incomplete line. Each rollout has one line: when a resumed run does failed rollouts again,
    their lines are first moved to `superseded.jsonl`. A run that ends without a record leaves no files.

    Args:
        new: whether `path` must not exist yet.

    Raises:
        UsageError: the folder can't be made or written, or another run writes to it.
        FileExistsError: the folder exists, and `new` is set.
    """

    def __init__(self, path: Path, *, new: bool = False) -> None:
        self.path = path
        self._lock = -1
        self._records = LineFile(path / TRAJECTORIES, f"free some space, then continue with --out {path} --resume")
        self._begun = False
        self._made: list[Path] = []
        try:
            self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
            self._had_lock = (path / LOCK).exists()
            path.mkdir(parents=True, exist_ok=not new)
            self._lock = open_to_write(path / LOCK, os.O_RDWR)
        except OSError as error:
            if new and isinstance(error, FileExistsError):
                raise
            self._remove_folders()
            raise self._unusable(error) from error
        if not self._take_lock():
            os.close(self._lock)
            raise UsageError(f"another run is writing to {path}", hint="wait for it, or choose another folder")

    @classmethod
    def begin(cls, parent: Path, name: str) -> OutputFolder:
        """Make a folder for a run that begins now: `NAME-YYYYMMDD-HHMMSS`, then a number if this name is taken.

        Raises:
            UsageError: the folder can't be made.
        """
        plain = re.sub(r"[^\w.-]+", "-", name)
        stem = f"{plain}-{datetime.now():%Y%m%d-%H%M%S}"
        path, number = parent / stem, 1
        while True:
            try:
                return cls(path, new=True)
            except FileExistsError:  # another run began in this second
                number += 1
                path = parent / f"{stem}-{number}"

    @classmethod
    def choose(cls, path: str | Path | None, parent: str | Path | None, name: str) -> OutputFolder | None:
        """Return the folder at `path`, or a new folder in `parent`, or None if neither is given. Raise as `begin` and
        the class do."""
        if path is not None:
            return cls(Path(path))
        return None if parent is None else cls.begin(Path(parent), name)

    def _take_lock(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have removed the file after it was opened here; then the lock protects nothing.
            return os.fstat(self._lock).st_ino == (self.path / LOCK).stat().st_ino
        except OSError:
            return False

    def _unusable(self, error: OSError) -> UsageError:
        return UsageError(f"can't use {self.path} as the output folder: {error.strerror}", hint="choose another name")

    def open(
        self,
        configuration: Mapping[str, Any],
        about: Mapping[str, Any],
        tally: Tally,
        *,
        resume: bool,
        again: Collection[FailureKind] | None = None,
        changes: Changes | None = None,
    ) -> None:
        """Start a run in the folder, or continue the folder's run.

        Args:
            configuration: everything that affects the run's records; it must be the same when the run is resumed.
            about: other information for `run.json` (versions, seed, …).
            tally: earlier records that stay are added to it.
            again: failed rollouts of these kinds are done again; None is all kinds.
            changes: compares the dataset's items with those in the records that stay; None compares nothing.

        Raises:
            UsageError: the folder has a run and `resume` is not set; or the run has another configuration, whose
                differing keys are named; or the run has records of items that are not in the dataset or have changed;
                or a line in the middle of its records is not a record; or its files can't be written.
        """
        trajectories = self.path / TRAJECTORIES
        try:
            held = trajectories.stat().st_size if trajectories.exists() else 0
            if held and not resume:
                hint = "add --resume to go on with it, or name another folder"
                raise UsageError(f"{self.path} already holds a run", hint=hint)
            if held:
                self._check_same(configuration)
            elif resume:
                log.warning("%s holds no run to resume: a new run begins there", self.path)
            self._begun = not held
            if held:
                self._recover(trajectories, tally, again, changes)
            self._records.open()
        except OSError as error:
            raise self._unusable(error) from error
        self._write_run(configuration, about, resumed=bool(held))

    def append(self, line: bytes) -> None:
        """Write the whole line of one record; see `LineFile.append`."""
        self._records.append(line)

    def sync(self) -> None:
        """Wait until all appended lines are on the disk. Call this in a thread, because it can take a while."""
        self._records.sync()

    def write_summary(self, summary: RunSummary) -> None:
        """Replace `summary.json`, in one step."""
        write_json(self.path / SUMMARY, summary.to_dict())

    def close(self) -> None:
        """Close the files and release the lock. Remove a run that was begun here and has no record. Idempotent."""
        self._records.close()
        if self._lock >= 0:
            if not self._records.size:
                self._remove_traces()
            os.close(self._lock)
        self._lock = -1

    def _remove_traces(self) -> None:
        """Remove the files and folders that this object made, because no record was written."""
        own = [TRAJECTORIES, RUN, SUMMARY] if self._begun else []
        own += [] if self._had_lock else [LOCK]
        with contextlib.suppress(OSError):
            for name in own:
                (self.path / name).unlink(missing_ok=True)
        self._remove_folders()

    def _remove_folders(self) -> None:
        """Remove those folders made for this run that are empty."""
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()

    def _check_same(self, configuration: Mapping[str, Any]) -> None:
        run = read_run(self.path)
        if run["configuration_hash"] == configuration_hash(configuration):
            return
        here, asked = dict(_leaves(run["configuration"])), dict(_leaves(configuration))
        differing = sorted(key for key in here.keys() | asked.keys() if here.get(key) != asked.get(key))
        changes = ", ".join(f"{key} ({here.get(key)!r} there, {asked.get(key)!r} now)" for key in differing)
        raise UsageError(
            f"the run in {self.path} has another configuration: {changes}",
            hint="give the same options to resume it, or choose another folder",
        )

    def _recover(
        self,
        trajectories: Path,
        tally: Tally,
        again: Collection[FailureKind] | None,
        changes: Changes | None,
    ) -> None:
        """Read the folder's records, and keep one line for each rollout that is not done again."""
        size = trajectories.stat().st_size
        if (self.path / SUPERSEDED).exists():
            for record in _read(self.path / SUPERSEDED):
                tally.count_usage(record)
        kept: set[int] = set()
        gone: dict[str, None] = {}
        changed: dict[str, list[str]] = {}
        number = 0
        for number, line, end in _lines(trajectories):
            place = f"{trajectories}, line {number}"
            try:
                record = Record.from_json(parse_line(line, place))
            except ValueError as error:
                if end != size:
                    raise _no_record(place, error) from error
                log.warning("%s: the last line is torn, as after a crash; its rollout runs again", self.path)
                continue
            key = (record.item_id, record.rollout_index)
            changed_now = [] if changes is None else changes(record.item_id, record.item)
            if changed_now is None:
                gone[record.item_id] = None
            failed = record.failure is not None and (again is None or record.failure.kind in again)
            if not failed and not tally.was_done_before(key):
                kept.add(number)
                tally.add(record, earlier=True)
                if changed_now:
                    changed.setdefault(record.item_id, changed_now)
            else:
                tally.count_usage(record)
        if gone:
            raise self._without_items(list(gone))
        if changed:
            raise self._with_others(changed)
        if number != len(kept):
            self._keep_only(kept, trajectories)

    def _without_items(self, gone: list[str]) -> UsageError:
        named = ", ".join(gone[:_NAMED]) + (", …" if len(gone) > _NAMED else "")
        return UsageError(
            f"the run in {self.path} has rollouts of {len(gone)} items that the dataset no longer has: {named}",
            hint="resume with the dataset that it began with, which may have grown, or choose another folder",
        )

    def _with_others(self, changed: Mapping[str, list[str]]) -> UsageError:
        named = ", ".join(f"{item_id} ({', '.join(changed[item_id])})" for item_id in [*changed][:_NAMED])
        more = ", …" if len(changed) > _NAMED else ""
        return UsageError(
            f"the run in {self.path} has rollouts of {len(changed)} items that have changed since: {named}{more}",
            hint="resume with the dataset that it began with, which may have grown, or choose another folder",
        )

    def _keep_only(self, numbers: set[int], trajectories: Path) -> None:
        """Keep the lines with these numbers, and move the others to `superseded.jsonl`. If the process is killed
        meanwhile, the others are in both files until the run is resumed."""
        kept = trajectories.with_name(f".{TRAJECTORIES}.new")
        with (
            os.fdopen(open_to_write(kept, os.O_TRUNC), "wb") as keeping,
            os.fdopen(open_to_write(self.path / SUPERSEDED, os.O_APPEND), "ab") as rest,
        ):
            for number, line, _ in _lines(trajectories):
                if number in numbers or line.endswith(b"\n"):
                    (keeping if number in numbers else rest).write(line)
            for file in (rest, keeping):
                file.flush()
                os.fsync(file.fileno())
        kept.replace(trajectories)

    def _write_run(self, configuration: Mapping[str, Any], about: Mapping[str, Any], *, resumed: bool) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        run = {
            "configuration": configuration,
            "configuration_hash": configuration_hash(configuration),
            **about,
            "started": now,
            "resumed": [],
        }
        if resumed:
            earlier = read_run(self.path)
            run["started"] = earlier.get("started")
            run["resumed"] = [*earlier.get("resumed", []), now]
        write_json(self.path / RUN, run)


def is_running(path: Path) -> bool:
    """Return whether a run is writing to the folder now."""
    try:
        with open_to_read(path / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # freed at once, for runs that begin now
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def runs_below(path: Path) -> str:
    """Return a hint for a path that is no run: a text with the runs below it, such as those of a validation."""
    inside = sorted(str(place.parent) for place in path.glob(f"*/{TRAJECTORIES}"))
    return f"name a run in it: {', '.join(inside)}" if inside else "name the folder of a run"


def read_run(path: Path) -> dict[str, Any]:
    """Return the folder's `run.json`.

    Raises:
        UsageError: there is no such file, or hermes-rl did not write it.
    """
    try:
        with open_to_read(path / RUN) as file:
            return _RunFile.model_validate(json_value(file.read())).model_dump(exclude_unset=True)
    except (OSError, ValueError) as error:
        why = problem_text(error) if isinstance(error, ValidationError) else getattr(error, "strerror", error)
        raise UsageError(f"{path} has no usable {RUN}: {why}", hint=runs_below(path)) from error


class _Configuration(BaseModel):
    """The keys of a run's configuration that are checked here; there are others."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    environment: str | None = None
    env: dict[str, Any] | None = None
    agent: str | None = None
    agent_settings: dict[str, Any] | None = None
    group_size: int | None = None
    rollout_timeout: float | None = None


class _RunFile(BaseModel):
    """The keys of `run.json` that are checked here; there are others."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    configuration: _Configuration
    configuration_hash: str | None
    versions: dict[str, Any] = {}
    seed: int | None = None
    started: str | None = None
    resumed: list[str] = []
    merged: list[dict[str, Any]] = []


def records(path: Path) -> Iterator[Record]:
    """Read the folder's records in the order written, one at a time. An incomplete last line is left out.

    Raises:
        UsageError: the file can't be read, or a line is not a record or was written by a newer version.
    """
    trajectories = path / TRAJECTORIES
    try:
        yield from _read(trajectories)
    except OSError as error:
        raise UsageError(f"{trajectories} can't be read: {error.strerror}", hint="check the folder") from error


def record_in(
    line: bytes,
    place: str,
    clean: Callable[[dict[str, Any]], dict[str, Any]] = lambda value: value,
    parse: Callable[[bytes, str], dict[str, Any]] = parse_line,
) -> Record:
    """Return the record in a complete line.

    Args:
        place: the file and line number, for messages.
        clean: called with the line's JSON values; returns the values to use, for example without secrets.
        parse: `parse_line` or `parse_outline`.

    Raises:
        UsageError: the line is not a record, or was written by a newer version.
    """
    try:
        return Record.from_json(clean(parse(line, place)))
    except ValueError as error:
        raise _no_record(place, error) from error


def _read(file: Path) -> Iterator[Record]:
    """Read the records of one file, without an incomplete last line. Raise as `record_in`."""
    for number, line, _ in _lines(file):
        if line.endswith(b"\n"):
            yield record_in(line, f"{file}, line {number}")


def read_records(path: Path | str) -> Iterator[dict[str, Any]]:
    """Like `records`, but return JSON values. Records of older versions are converted to the current version."""
    return (record.to_json() for record in records(Path(path)))


def _no_record(place: str, why: ValueError) -> UsageError:
    return UsageError(f"{place}: no record of a rollout: {why}", hint="remove that line to go on")


def configuration_hash(configuration: Mapping[str, Any]) -> str:
    """Return a hash that is the same for equal configurations, in any process."""
    text = json.dumps(configuration, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _lines(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """Yield each line with its number and the offset at which it ends."""
    end = 0
    with open_to_read(path) as lines:
        for number, line in enumerate(lines, 1):
            end += len(line)
            yield number, line, end


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested mapping by their dotted keys."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON so that a reader sees either the old content or the new."""
    write_text(path, json_text(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text so that a reader sees either the old content or the new.

    Raises:
        OutputError: the disk is full or fails.
    """
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees either the old content or the new. Its folder is made if it is missing.

    Raises:
        OutputError: the disk is full or fails.
    """
    beside = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_to_write(beside, os.O_TRUNC), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise OutputError(
            f"can't write {path}: {error.strerror}", hint="free some space, or choose another folder"
        ) from error
