"""Writes `.eval` logs, which Inspect reads: a zip of JSON that can be read while it grows.

Inspect's own writers don't fit. Only `write_eval_log` is public, and takes all samples at once; the recorder that
Inspect itself uses is private, and copies the whole file for each batch. This module needs no part of Inspect.
"""

from __future__ import annotations

import copy
import fcntl
import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from hermes_core.errors import OutputError
from hermes_core.export import eval_sample
from hermes_core.export.eval_sample import Json
from hermes_core.records.index import RecordedRun, Row
from hermes_core.records.jsonable import json_value
from hermes_core.records.plain_text import moment
from hermes_core.records.run_files import make_folder, open_to_read, open_to_write
from hermes_core.records.statistics import by_item, mean_pass_at_k, sizes_of_k, totals
from hermes_core.records.store import SUMMARY, is_running

BATCH = 200
"""Minimum number of samples that are written between two times at which readers see the new ones."""

SHARE = 0.1
"""The same minimum as a share of the samples in the log: each time, the zip's directory, which grows with the number of
samples, is written again."""

PART = 20
"""Number of samples in one part of a running log's list, if samples come one by one. A viewer reads each part."""

LARGEST = 1 << 28
"""Maximum number of bytes of a member of a log that can be continued."""

_START, _HEADER, _SUMMARIES = "_journal/start.json", "header.json", "summaries.json"
_WRITTEN = "_journal/hermes-rl.json"
"""The member that holds how far the records were read, so that the log can be continued."""


class RunLog:
    """The log of a run. `update` adds the run's new rollouts, also while the run goes on.

    The rollouts of an item are its epochs. A rollout without a reward has an error, and no score. A sample is converted
    and written one at a time.

    Args:
        path: the log file. A log that an earlier `RunLog` wrote for the same records is continued.

    Raises:
        OutputError: the log can't be written.
    """

    def __init__(self, run: RecordedRun, path: Path) -> None:
        self.run = run
        self.path = path
        self._forget()
        try:
            make_folder(path.parent)
            self._file = _Growing(path)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._zip = self._continue() or self._begin()
        except OSError as error:
            self._file.close()
            raise self._unwritable(error) from error

    def update(self, progress: Callable[[int, int], None] | None = None) -> bool:
        """Add the samples of new records. Return whether the log is finished, because the run has ended.

        Args:
            progress: called with the numbers of rollouts in the log and in the run.

        Raises:
            OutputError: the log can't be written.
            UsageError: a record can't be read.
        """
        running = is_running(self.run.records.parent)  # before reading: the run may end meanwhile
        if not self.run.refresh():
            self._start_over()
        # In the file's order, so that after an interruption all records before `_done` are in the log.
        new = sorted((row for row in self.run.rows.values() if row.offset >= self._done), key=lambda row: row.offset)
        if new:
            for row in self.run.rows.values():  # in this order, so that continuing a log gives the same numbers
                self._number(row)
        try:
            rows = iter(new)
            while batch := list(islice(rows, max(BATCH, int(SHARE * len(self._summaries))))):
                self._write(batch)
                if progress is not None:
                    progress(len(self._summaries), max(len(self._summaries), len(self.run.rows)))
            if not running and not self._finished:
                self._finish()
        except OSError as error:
            raise self._unwritable(error) from error
        return not running

    def close(self) -> None:
        """Close the file."""
        self._zip.close()  # not followed by a commit: the file has its directory already
        self._file.close()

    def _unwritable(self, error: OSError) -> OutputError:
        return OutputError(
            f"can't write {self.path}: {error.strerror}", hint="free some space, or choose another folder"
        )

    # ------------------------------------------------------------------ the beginning

    def _forget(self) -> None:
        """Reset what this object knows of the log's contents."""
        self._epochs: dict[tuple[str, str, int], int] = {}
        self._taken: set[tuple[str, int]] = set()
        self._summaries: list[Json] = []
        self._part: list[Json] = []
        """The summaries in the last part of the list. The part is written again until it has `PART` summaries."""
        self._parts = 1
        self._done = 0
        """Number of bytes at the start of the records' file whose rollouts are in the log."""
        self._finished = False

    def _begin(self) -> zipfile.ZipFile:
        """Begin a new log, and discard the old contents of the file."""
        self._forget()
        self._file.begin_at(0)
        log = _writer(self._file)
        self._write_member(log, _START, {"version": 2, "eval": _specification(self.run), "plan": _plan(self.run)})
        self._commit(log)
        return log

    def _start_over(self) -> None:
        self._zip.close()
        self._zip = self._begin()

    def _continue(self) -> zipfile.ZipFile | None:
        """Open the existing log if it was made from the same records; else return None."""
        with suppress(Exception), self._file.reader() as file, zipfile.ZipFile(file) as there:
            # A log that causes any error here was not written by this class.
            if max(member.file_size for member in there.filelist) > LARGEST:
                return None
            written = json.loads(there.read(_WRITTEN))
            start = json.loads(there.read(_START))
            same = written["checksum"] == self.run.checksum(written["end"])
            if same and start["eval"] == json.loads(json.dumps(_specification(self.run))):
                parts = [json.loads(there.read(f"_journal/summaries/{n + 1}.json")) for n in range(written["parts"])]
                self._summaries = [summary for part in parts for summary in part]
                self._part, self._parts, self._done = parts[-1], len(parts), written["end"]
                self._finished = _HEADER in there.namelist()
                self._file.begin_at(there.start_dir)
                log = _writer(self._file)
                log.filelist, log.NameToInfo = there.filelist, there.NameToInfo
                return log
        return None

    # ------------------------------------------------------------------ the samples

    def _write(self, rows: Iterable[Row]) -> None:
        """Write a batch of samples, and make the batch visible to readers."""
        log, summaries, end = self._zip, [], self._done
        began = _began(self.run)
        for row in rows:
            sample = eval_sample.sample(self.run.record(row).to_json(), self._epochs[row.key], began)
            self._write_member(log, f"samples/{sample['id']}_epoch_{sample['epoch']}.json", sample)
            summaries.append(eval_sample.summary(sample))
            end = max(end, row.offset + row.size)
        for name in (_HEADER, _SUMMARIES):  # the log of a resumed run is no longer finished
            self._drop(log, name)
        self._finished = False
        self._done = end
        self._summaries += summaries
        if self._part and len(self._part) + len(summaries) > PART:
            self._part = []
            self._parts += 1
        self._part += summaries
        self._write_member(log, f"_journal/summaries/{self._parts}.json", self._part)
        self._commit(log)

    def _number(self, row: Row) -> None:
        """Give a rollout its number within its item: its index plus 1, or the next free number."""
        if row.key not in self._epochs:
            epoch = row.rollout_index + 1
            while (row.item_id, epoch) in self._taken:
                epoch += 1
            self._epochs[row.key] = epoch
            self._taken.add((row.item_id, epoch))

    def _finish(self) -> None:
        log, rows = self._zip, list(self.run.rows.values())
        last = {(summary["id"], summary["epoch"]): summary for summary in self._summaries}
        self._write_member(log, _SUMMARIES, list(last.values()))
        self._write_member(log, "reductions.json", [])
        self._write_member(log, _HEADER, _header(self.run, rows))
        self._finished = True
        self._commit(log)

    # ------------------------------------------------------------------ members

    def _write_member(self, log: zipfile.ZipFile, name: str, value: Any) -> None:
        """Write a member in place of any member with the same name."""
        self._drop(log, name)
        log.writestr(name, json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")))

    @staticmethod
    def _drop(log: zipfile.ZipFile, name: str) -> None:
        """Take a member out of the directory."""
        if name in log.NameToInfo:
            log.filelist.remove(log.NameToInfo.pop(name))

    def _commit(self, log: zipfile.ZipFile) -> None:
        """Write the zip's directory, so that readers find the members written since the last commit."""
        written = {"end": self._done, "checksum": self.run.checksum(self._done), "parts": self._parts}
        self._write_member(log, _WRITTEN, written)
        # Closing a copy writes the directory. The log itself stays open, and overwrites the directory next time.
        copy.copy(log).close()
        self._file.commit(log.start_dir)


class _Growing:
    """A file that others read while a zip is written to it. `commit` makes all written data visible in one step.

    A reader that reads the zip's directory in several steps may get parts of two directories, and has to begin again:
    a new directory overwrites the old one, because a log that kept all of them would grow with the square of the number
    of samples.

    Raises:
        OSError: the file can't be written, or another process has it open.
    """

    def __init__(self, path: Path) -> None:
        self._fd = open_to_write(path, os.O_RDWR)
        self.begin_at(0)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise

    def begin_at(self, base: int) -> None:
        """Keep the first `base` bytes, and write after them."""
        self._base = base
        self._pending = io.BytesIO()

    def reader(self) -> BinaryIO:
        """Open the visible part for reading."""
        return open(self._fd, "rb", closefd=False)

    def tell(self) -> int:
        return self._base + self._pending.tell()

    def seek(self, offset: int) -> int:
        return self._base + self._pending.seek(offset - self._base)

    def write(self, data: bytes) -> int:
        return self._pending.write(data)

    def flush(self) -> None:
        pass

    def commit(self, base: int) -> None:
        """Write all buffered data, in one call if the system allows. Later writes replace the bytes after `base`."""
        with self._pending.getbuffer() as pending:
            written = 0
            while written < len(pending):
                written += os.pwrite(self._fd, pending[written:], self._base + written)
        os.ftruncate(self._fd, self._base + written)
        self.begin_at(base)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _writer(file: _Growing) -> zipfile.ZipFile:
    # ZipFile calls `tell`, `seek`, `write` and `flush`, and neither reads nor closes the file.
    return zipfile.ZipFile(cast("IO[bytes]", file), "w", zipfile.ZIP_DEFLATED, compresslevel=1)


# ---------------------------------------------------------------------- a log's data about its run


def log_name(run: RecordedRun) -> str:
    """Return the file name of a run's log. Inspect reads the time, the task and an id from this name."""
    began = datetime.fromisoformat(moment(_began(run))).astimezone().isoformat(timespec="seconds")
    parts = (began.replace(":", "-"), _task(run), _id(run))
    return "_".join(re.sub(r"[^\w.+-]|_", "-", part) for part in parts) + ".eval"


def _began(run: RecordedRun) -> float:
    """Return the time when the run began, in seconds since the epoch."""
    started: Any = run.about.get("started")
    with suppress(TypeError, ValueError, OverflowError):  # missing, or not a time
        return datetime.fromisoformat(started).timestamp()
    known = [row.started for row in run.rows.values() if row.started is not None]
    return min(known, default=0.0)


def _task(run: RecordedRun) -> str:
    configuration = run.configuration
    return str(configuration.get("environment") or run.records.name.removesuffix(".jsonl"))


def _id(run: RecordedRun) -> str:
    """Return an id made from the run's configuration and place, the same each time the log is made."""
    return f"{run.about.get('configuration_hash', '')}{zlib.crc32(str(run.records.resolve()).encode()):08x}"


def _specification(run: RecordedRun) -> Json:
    about, configuration, began = run.about, run.configuration, _began(run)
    return {
        **{key: _id(run) for key in ("eval_id", "run_id", "task_id")},
        "created": moment(began),
        "task": _task(run),
        "task_version": 0,
        "task_attribs": {},
        "task_args": {name: value for name, value in (configuration.get("env") or {}).items() if value is not None},
        "solver": configuration.get("agent"),
        "dataset": {"name": _task(run), "shuffled": False},
        "model": (configuration.get("agent_settings") or {}).get("model") or configuration.get("agent") or "none",
        "model_args": {},
        "config": {"epochs": configuration.get("group_size") or 1},
        "packages": about.get("versions") or {},
        "metadata": {key: about[key] for key in ("seed", "concurrency") if about.get(key) is not None}
        | {key: configuration[key] for key in ("backend", "profile", "isolation") if configuration.get(key)},
        "scorers": [{"name": "reward"}],
        # A model wrote most of the text, so the viewer shows all text as plain text, never as HTML or a link.
        "viewer": {"trust_content": False, "task_samples_view": _LIST},
    }


_SHOWN = ("sampleStatus", "sampleId", "epoch", "score__reward__reward", "error", "limit", "tokens", "duration", "input")
_EMPTY = ("target", "answer")
_LIST = {
    "name": "hermes-rl",
    "multiline": False,
    "columns": [{"id": name, "visible": name not in _EMPTY} for name in (*_SHOWN, *_EMPTY)],
}
"""The columns of the list of samples: reward and error come first, and columns that are always empty are hidden."""


def _plan(run: RecordedRun) -> Json:
    configuration = run.configuration
    solver = {"solver": configuration.get("agent") or "agent", "params": configuration.get("agent_settings") or {}}
    return {"name": "hermes-rl", "steps": [solver], "config": {}}


def _header(run: RecordedRun, rows: list[Row]) -> Json:
    """Return the header that ends a finished log, with the run's outcome."""
    figures, items = totals(rows), by_item(rows)
    specification = _specification(run)
    specification["dataset"] |= {"samples": len(items), "sample_ids": list(items)}
    estimates = {f"pass@{k}": mean_pass_at_k(items.values(), k) for k in sizes_of_k(items.values())}
    metrics = {"mean": figures.mean_reward, "solved": figures.solved / figures.scored if figures.scored else None}
    metrics |= {name: estimate[0] for name, estimate in estimates.items() if estimate is not None}
    score = {
        "name": "reward",
        "scorer": "reward",
        "params": {},
        "scored_samples": figures.scored,
        "unscored_samples": figures.rollouts - figures.scored,
        "metrics": {
            name: {"name": name, "value": value, "params": {}} for name, value in metrics.items() if value is not None
        },
    }
    if not figures.rewarded:
        specification["scorers"] = []
    usage: dict[str, Json] = {}
    for row in rows:
        if row.tokens:
            each = usage.setdefault(row.model or row.agent, {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0})
            each["input_tokens"] += row.prompt_tokens
            each["output_tokens"] += row.completion_tokens
            each["total_tokens"] += row.tokens
    began = _began(run)
    ended = max((row.started + row.seconds for row in rows if row.started is not None), default=began)
    return {
        "version": 2,
        "status": "success" if _complete(run) else "cancelled",
        "eval": specification,
        "plan": _plan(run),
        "results": {
            "total_samples": figures.rollouts,
            "completed_samples": figures.finished,
            "scores": [score] if figures.rewarded else [],
        },
        "stats": {"started_at": moment(began), "completed_at": moment(ended), "model_usage": usage},
    }


def _complete(run: RecordedRun) -> bool:
    """Return whether every rollout of the run was tried. A file of records without a run's folder is complete."""
    if not run.about:
        return True
    with suppress(OSError, ValueError, AttributeError), open_to_read(run.records.parent / SUMMARY) as file:
        return json_value(file.read()).get("stopped") is None
    return False
