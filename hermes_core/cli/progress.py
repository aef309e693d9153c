"""The progress display of a run: live on a terminal, plain lines in a pipe, JSON lines for other programs."""

from __future__ import annotations

import contextlib
import io
import json
import select
import time
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


class PlainProgress:
    """Prints a line when another stage begins, and now and then: done, solved, failed, rate, time left."""

    def __init__(self, stream: TextIO, title: str = "", every_s: float = LINE_EVERY_S) -> None:
        self._stream = stream
        self._prefix = f"{title}: " if title else ""
        self._every_s = every_s
        self._total = 0
        self._shown: object = None
        self._next, self._stage = 0.0, ""

    def begin(self, total: int, tally: Standing) -> None:
        """Print a line with the number to do."""
        self._total = total
        earlier = f", {tally.done} of them done before" if tally.done else ""
        self._write(f"{total} {tally.noun}{'' if total == 1 else 's'}{earlier}")
        self._next = time.monotonic() + self._every_s

    def update(self, tally: Standing) -> None:
        """Print a line, if the last one is old enough or of another stage, and says something else."""
        if time.monotonic() >= self._next or tally.stage != self._stage:
            self.end(tally)
            self._next, self._stage = time.monotonic() + self._every_s, tally.stage

    def end(self, tally: Standing) -> None:
        """Print the last line."""
        if self._shown != tally.news:
            self._shown = tally.news
            self._write(status_line(tally, self._total))

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(f"{self._prefix}{line}\n")
            self._stream.flush()


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


class JsonProgress:
    """Writes a line of JSON every two seconds, when another stage begins, at the start and at the end. If its reader is
    slow, lines are left out; if it goes away, all are."""

    def __init__(self, stream: TextIO, title: str = "", every_s: float = LINE_EVERY_S) -> None:
        self._stream = stream
        self._named = {"run": title} if title else {}
        self._every_s = every_s
        self._total = 0
        self._next, self._stage = 0.0, ""

    def begin(self, total: int, tally: Standing) -> None:
        """Write the first line."""
        self._total = total
        self._write("begin", tally)

    def update(self, tally: Standing) -> None:
        """Write a line, if the last one is old enough or of another stage."""
        if time.monotonic() >= self._next or tally.stage != self._stage:
            self._write("progress", tally)

    def end(self, tally: Standing) -> None:
        """Write the last line."""
        self._write("end", tally)

    def _write(self, event: str, tally: Standing) -> None:
        self._next, self._stage = time.monotonic() + self._every_s, tally.stage
        state = {
            "event": event,
            **self._named,
            "time": round(time.time(), 3),
            "total": self._total,
            **tally.state(self._total),
        }
        with contextlib.suppress(OSError):
            if _takes_a_line(self._stream):
                self._stream.write(f"{json.dumps(state)}\n")
                self._stream.flush()


def _takes_a_line(stream: TextIO) -> bool:
    """Return whether a line can be written, without waiting for the reader of a full pipe."""
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
        title: the name of the run, for a command that has several.

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
