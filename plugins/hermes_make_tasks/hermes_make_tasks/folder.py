"""The output folder: the dataset, and in `making` the files with which an interrupted run goes on.

`making/attempts.jsonl` has a line for each change that was tried. Each line is written whole, in one write, so that
after `kill -9` at most the last line of a file is torn; this line is cut off. All other files are replaced in one step.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hermes_core import LineFile, UsageError, write_bytes

log = logging.getLogger("hermes_core.make_tasks")

TASKS, REPOS, MAKING, ATTEMPTS, PROJECT, RUN = (
    *("tasks.jsonl", "repos.json", "making", "attempts.jsonl", "project.json", "run.json"),
)


Value = dict[str, Any]


class Folder:
    """The folder of one run, locked for as long as it is open. It is a context manager. Its methods block.

    Raises:
        UsageError: the folder can't be written, or another process writes to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.making = path / MAKING
        self._lock = -1
        try:
            self.making.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.making / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise UsageError(
                f"another process makes tasks in {path}", hint="wait for it, or choose another --out"
            ) from error
        except OSError as error:
            raise UsageError(
                f"can't use {path} as the output folder: {error.strerror}", hint="choose another --out"
            ) from error

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._lock)

    def check_same(self, configuration: Mapping[str, Any]) -> bool:
        """Return whether the folder has a run already, and check that its options are the same.

        Raises:
            UsageError: the folder's run has other options, which the message names; or the folder has a dataset that
                was not made here.
        """
        there = self.read(RUN)
        if there is None:
            if taken := [name for name in (TASKS, REPOS) if (self.path / name).exists()]:
                raise UsageError(f"{self.path} has a {taken[0]} that was not made here", hint="choose another --out")
            self.write(RUN, configuration)
            return False
        if there != configuration and not (self.making / ATTEMPTS).exists():
            self._forget()  # the earlier run failed, or was given up, before it tried a change
            self.write(RUN, configuration)
            return False
        differing = sorted(
            key for key in there.keys() | configuration.keys() if there.get(key) != configuration.get(key)
        )
        if differing:
            changes = ", ".join(
                f"{key} ({there.get(key)!r} there, {configuration.get(key)!r} now)" for key in differing
            )
            raise UsageError(
                f"the tasks in {self.path} are made with other options: {changes}",
                hint="give the same options to go on with them, or choose another --out",
            )
        return True

    def _forget(self) -> None:
        for path in (*self.making.glob("*.json"), self.path / REPOS, *self.path.glob("repos/*.bundle")):
            path.unlink(missing_ok=True)

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the value of a JSON file in `making`; None if there is no such file.

        Raises:
            UsageError: the file can't be read.
        """
        try:
            value = json.loads((self.making / name).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.making / name} can't be read: {error}", hint="choose another --out") from error
        return value if isinstance(value, dict) else None

    def write(self, name: str, value: object, *, beside: bool = False) -> None:
        """Replace a JSON file of `making`, or of the dataset if `beside`."""
        folder = self.path if beside else self.making
        write_bytes(folder / name, json.dumps(value, indent=1).encode() + b"\n")

    def attempts(self) -> TaskLines:
        """Return the records of the changes that were tried."""
        return TaskLines(self.making / ATTEMPTS)

    def tasks(self) -> TaskLines:
        """Return the dataset's rows. Of rows from earlier sessions, only the ids are kept."""
        return TaskLines(self.path / TASKS, lambda row: {"instance_id": row.get("instance_id")})


class TaskLines:
    """A file of JSON lines. A torn last line is cut off when it is opened. Its methods block.

    Args:
        keep: returns the part of an existing line to keep in memory.
    """

    def __init__(self, path: Path, keep: Callable[[Value], Value] = lambda value: value) -> None:
        self.path = path
        self.values = [keep(value) for value in _whole_lines(path)]
        """The kept parts of the lines that the file had when it was opened."""
        self._file = LineFile(path, "free some space, and start again with the same --out")

    def append(self, value: Mapping[str, Any]) -> None:
        """Add a line.

        Raises:
            OutputError: the disk is full or fails; the written part is removed.
        """
        self._file.append(json.dumps(value).encode() + b"\n")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the values of the lines, and cut off a torn line at the end.

    Raises:
        UsageError: another line is no JSON object.
    """
    with contextlib.suppress(FileNotFoundError):
        end = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    log.warning("%s: the last line is torn, as after a crash, and is made again", path)
                    os.truncate(path, end)
                    return
                end += len(line)
                try:
                    value = json.loads(line)
                except ValueError as error:
                    raise UsageError(f"{path}, line {number}: not JSON", hint="remove that line to go on") from error
                if isinstance(value, dict):
                    yield value
