"""The progress display of a run: live on a terminal, plain lines in a pipe, JSON lines for other programs."""

from __future__ import annotations

import contextlib
import io
import json
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

import click

from hermes_core.errors import UnknownNameError, UsageError
from hermes_core.records.summary import NoProgress, Progress, Standing

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

LINE_EVERY_S = 2.0
"""Minimum seconds between two plain lines; the last one is always printed."""

progress_option = click.option(
    "--progress",
    default="auto",
    metavar="FORM",
    help="Progress on standard error: auto, plain, json, none, or json:FD for a descriptor [auto].",
)
"""The option whose value `progress_for` takes."""


class _LineProgress(ABC):
    """Writes a line at the start, at each new stage, at most every `every_s` seconds in between, and at the end. Stops
    when nobody reads the stream any more."""

    def __init__(self, stream: TextIO, title: str = "", every_s: float = LINE_EVERY_S) -> None:
        self._stream, self._title, self._every_s = stream, title, every_s
        self._total = 0
        self._next, self._stage = 0.0, ""

    def begin(self, total: int, tally: Standing) -> None:
        """Write the first line."""
        self._total = total
        self._write("begin", tally)

    def update(self, tally: Standing) -> None:
        """Write a line if the last line is old enough or belongs to another stage."""
        if time.monotonic() >= self._next or tally.stage != self._stage:
            self._write("progress", tally)

    def end(self, tally: Standing) -> None:
        """Write the last line."""
        self._write("end", tally)

    def _write(self, event: str, tally: Standing) -> None:
        self._next, self._stage = time.monotonic() + self._every_s, tally.stage
        with contextlib.suppress(OSError):
            if line := self._line(event, tally):
                self._stream.write(f"{line}\n")
                self._stream.flush()

    @abstractmethod
    def _line(self, event: str, tally: Standing) -> str:
        """Return the line; empty if nothing is to be written."""


class PlainProgress(_LineProgress):
    """Lines for people: done, solved, failed, rate, time left. A line without news is left out."""

    _shown: object = None

    def _line(self, event: str, tally: Standing) -> str:
        prefix, total = f"{self._title}: " if self._title else "", self._total
        if event == "begin":
            earlier = f", {tally.done} of them done before" if tally.done else ""
            return f"{prefix}{total} {tally.noun}{'' if total == 1 else 's'}{earlier}"
        if self._shown == tally.news:
            return ""
        self._shown = tally.news
        return f"{prefix}{status_line(tally, total)}"


class JsonProgress(_LineProgress):
    """Lines of JSON for programs. While a slow reader keeps the pipe full, lines are left out."""

    def _line(self, event: str, tally: Standing) -> str:
        if not _takes_a_line(self._stream):
            return ""
        state = {
            "event": event,
            **({"run": self._title} if self._title else {}),
            "time": round(time.time(), 3),
            "total": self._total,
            **tally.state(self._total),
        }
        return json.dumps(state)


class LiveProgress:
    """A moving bar on a terminal."""

    def __init__(self, stream: TextIO, title: str = "") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._total = 0
        self._display: RichProgress = Progress(
            SpinnerColumn(),
            *([TextColumn(title.ljust(6), markup=False)] if title else []),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=Console(file=stream),
            refresh_per_second=8,
        )
        self._task: TaskID | None = None

    def begin(self, total: int, tally: Standing) -> None:
        """Show the bar."""
        self._total = total
        self._task = self._display.add_task("starting", total=total, completed=tally.done)
        self._display.start()

    def update(self, tally: Standing) -> None:
        """Move the bar."""
        if self._task is not None:
            self._display.update(self._task, completed=tally.done, description=tally.counts(self._total))

    def end(self, tally: Standing) -> None:
        """Leave the bar in its final state."""
        self.update(tally)
        self._display.stop()


def _takes_a_line(stream: TextIO) -> bool:
    """Return whether writing a line would not block, as it would on a full pipe."""
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:  # no pipe
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return [events for _, events in poll.poll(0)] == [select.POLLOUT]


def progress_on(stream: TextIO, title: str = "") -> Progress:
    """Return the display that suits the stream."""
    return LiveProgress(stream, title) if stream.isatty() else PlainProgress(stream, title)


def progress_for(form: str, stream: TextIO, title: str = "") -> Progress:
    """Return the display that `--progress` names: `auto`, `plain`, `json`, `json:FD` or `none`.

    Args:
        title: the name of the run, for a command with several runs.

    Raises:
        UsageError: there is no such form, or the descriptor is not open.
    """
    name, _, descriptor = form.partition(":")
    if name == "json" and descriptor:
        try:
            return JsonProgress(open(int(descriptor), "w", encoding="utf-8", closefd=False), title)
        except (ValueError, OSError) as error:
            raise UsageError(
                f"--progress {form}: there is no open descriptor {descriptor!r}",
                hint="write `--progress json:3 3>FILE`",
            ) from error
    forms: dict[str, Callable[[TextIO, str], Progress]] = {
        "auto": progress_on,
        "plain": PlainProgress,
        "json": JsonProgress,
        "none": lambda stream, title: NoProgress(),
    }
    if form not in forms:
        raise UnknownNameError("form of progress", form, [*forms, "json:FD"])
    return forms[form](stream, title)


def status_line(tally: Standing, total: int) -> str:
    """Return `12/24 done, 10 solved, 1 failed, 431/h, 0:01:40 left`."""
    return ", ".join(filter(None, (f"{tally.done}/{total} done", tally.counts(total))))
