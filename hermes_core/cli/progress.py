"""The progress display of a run: live on a terminal, plain lines in a pipe, JSON lines for other programs."""

from __future__ import annotations

import contextlib
import io
import json
import select
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from hermes_core.envs.summary import RATED_FROM_S, NoProgress, Progress, Tally
from hermes_core.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

LINE_EVERY_S = 2.0
"""Minimum seconds between two plain lines; the last one is always printed."""


class PlainProgress:
    """Prints a line now and then: done, solved, failed, rate, time left."""

    def __init__(self, stream: TextIO, title: str = "", every_s: float = LINE_EVERY_S) -> None:
        self._stream = stream
        self._prefix = f"{title}: " if title else ""
        self._every_s = every_s
        self._total = 0
        self._shown: tuple[int, int] | None = None
        self._next = 0.0

    def begin(self, total: int, tally: Tally) -> None:
        """Print a line with the number of rollouts to do."""
        self._total = total
        earlier = f", {_done(tally)} of them done before" if _done(tally) else ""
        self._write(f"{total} rollout{'' if total == 1 else 's'}{earlier}")
        self._next = time.monotonic() + self._every_s

    def update(self, tally: Tally) -> None:
        """Print a line, if the last one is old enough and says something else."""
        if time.monotonic() >= self._next and self._shown != (tally.finished, tally.failed):
            self._write_status(tally)
            self._next = time.monotonic() + self._every_s

    def end(self, tally: Tally) -> None:
        """Print the last line."""
        if self._shown != (tally.finished, tally.failed):
            self._write_status(tally)

    def _write_status(self, tally: Tally) -> None:
        self._shown = tally.finished, tally.failed
        self._write(status_line(tally, self._total))

    def _write(self, line: str) -> None:
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

    def begin(self, total: int, tally: Tally) -> None:
        """Show the bar."""
        self._total = total
        self._task = self._display.add_task("starting", total=total, completed=_done(tally))
        self._display.start()

    def update(self, tally: Tally) -> None:
        """Move the bar."""
        if self._task is not None:
            done, text = _done(tally), counts(tally, self._total)
            self._display.update(self._task, completed=done, description=text)

    def end(self, tally: Tally) -> None:
        """Leave the bar in its final state."""
        self.update(tally)
        self._display.stop()


class JsonProgress:
    """Writes a line of JSON every two seconds, and one at the start and at the end. If its reader is slow, lines
    are left out; if it goes away, all are."""

    def __init__(self, stream: TextIO, title: str = "", every_s: float = LINE_EVERY_S) -> None:
        self._stream = stream
        self._named = {"run": title} if title else {}
        self._every_s = every_s
        self._total = 0
        self._next = 0.0

    def begin(self, total: int, tally: Tally) -> None:
        """Write the first line."""
        self._total = total
        self._write("begin", tally)

    def update(self, tally: Tally) -> None:
        """Write a line, if the last one is old enough."""
        if time.monotonic() >= self._next:
            self._write("progress", tally)

    def end(self, tally: Tally) -> None:
        """Write the last line."""
        self._write("end", tally)

    def _write(self, event: str, tally: Tally) -> None:
        self._next = time.monotonic() + self._every_s
        left_s, usage = tally.left_s(self._total), tally.usage
        state = {
            "event": event,
            **self._named,
            "time": round(time.time(), 3),
            "total": self._total,
            "finished": tally.finished,
            "scored": tally.scored,
            "solved": tally.solved,
            "failures": tally.failures,
            "session": tally.session,
            "elapsed_s": round(tally.elapsed_s, 3),
            "per_hour": round(tally.rate() * 3600, 1),
            "left_s": None if left_s is None else round(left_s, 1),
            "requests": usage.requests,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cost": usage.cost,
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


def status_line(tally: Tally, total: int) -> str:
    """Return `12/24 done, 10 solved, 1 failed, 431/h, 0:01:40 left`."""
    return ", ".join(filter(None, (f"{_done(tally)}/{total} done", counts(tally, total))))


def counts(tally: Tally, total: int) -> str:
    """Return solved, failed by kind, cost, rate and time left, as far as they are known."""
    parts = [f"{tally.solved} solved"] if tally.scored or not tally.finished else []
    if tally.failed:
        kinds = ", ".join(f"{count} {kind}" for kind, count in tally.failures.items() if kind != "cancelled")
        parts.append(f"{tally.failed} failed ({kinds})")
    if tally.usage.cost is not None:
        parts.append(f"${tally.usage.cost:.2f}")
    if tally.session and tally.elapsed_s >= RATED_FROM_S:
        parts.append(f"{tally.rate() * 3600:.0f}/h")
    if tally.session and (left_s := tally.left_s(total)):
        parts.append(f"{_clock(left_s)} left")
    return ", ".join(parts)


def _done(tally: Tally) -> int:
    return tally.finished + tally.failed


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
