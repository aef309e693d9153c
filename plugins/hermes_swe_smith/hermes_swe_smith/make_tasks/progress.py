"""Shows how far the making is: live on a terminal, plain lines in a pipe, JSON lines for other programs."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol, TextIO

from hermes_core import UnknownNameError, UsageError

EVERY_S = 2.0


@dataclass
class Standing:
    """How far it is."""

    stage: str = "starting"
    """What is being done: a few words."""
    total: int = 0
    """How many tasks are wanted."""
    kept: int = 0
    """How many there are."""
    tried: int = 0
    """How many changes were tried, those of earlier sessions included."""


class Progress(Protocol):
    """A display."""

    def show(self, standing: Standing, *, last: bool = False) -> None:
        """Show the state. Called whenever it changes; `last` at the end, also after a failure."""


class NoProgress:
    """Shows nothing."""

    def show(self, standing: Standing, *, last: bool = False) -> None:
        """Show nothing."""


class PlainProgress:
    """Prints a line when another stage begins, and now and then."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._began = time.monotonic()
        self._next, self._line, self._stage = 0.0, "", ""

    def show(self, standing: Standing, *, last: bool = False) -> None:
        """Print a line, if it is time and says something else."""
        line = line_of(standing)
        now = time.monotonic()
        if line == self._line or not (last or standing.stage != self._stage or now >= self._next):
            return
        self._next, self._line, self._stage = now + EVERY_S, line, standing.stage
        with contextlib.suppress(OSError):
            self._stream.write(f"{_clock(now - self._began)} {line}\n")
            self._stream.flush()


class LiveProgress:
    """One line on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.status import Status

        self._status = Status("", console=Console(file=stream))
        self._began = False

    def show(self, standing: Standing, *, last: bool = False) -> None:
        """Change the line."""
        from rich.text import Text

        self._status.update(Text(line_of(standing)))
        if not self._began:
            self._began = True
            self._status.start()
        if last:
            self._status.stop()
            self._status.console.print(Text(line_of(standing)))


class JsonProgress:
    """Writes a line of JSON when another stage begins, every two seconds, and at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._began = time.monotonic()
        self._next, self._stage = 0.0, ""

    def show(self, standing: Standing, *, last: bool = False) -> None:
        """Write a line, if it is time."""
        now = time.monotonic()
        if not (last or standing.stage != self._stage or now >= self._next):
            return
        event = "end" if last else "progress" if self._stage else "begin"
        self._next, self._stage = now + EVERY_S, standing.stage
        state = {"event": event, "time": round(time.time(), 3), "elapsed_s": round(now - self._began, 3)}
        with contextlib.suppress(OSError):
            self._stream.write(json.dumps({**state, **asdict(standing)}) + "\n")
            self._stream.flush()


def progress_for(form: str, stream: TextIO) -> Progress:
    """Return the display for `auto`, `plain`, `json`, `json:FD` or `none`.

    Raises:
        UsageError: there is no such form, or the descriptor is not open.
    """
    name, _, descriptor = form.partition(":")
    if name == "json" and descriptor:
        try:
            return JsonProgress(open(int(descriptor), "w", encoding="utf-8", closefd=False))
        except (ValueError, OSError) as error:
            raise UsageError(f"--progress {form}: there is no open descriptor {descriptor!r}") from error
    if form == "auto":
        return LiveProgress(stream) if stream.isatty() else PlainProgress(stream)
    forms: dict[str, Callable[[TextIO], Progress]] = {"plain": PlainProgress, "json": JsonProgress}
    if form == "none":
        return NoProgress()
    if form not in forms:
        raise UnknownNameError("form of progress", form, ["auto", *forms, "json:FD", "none"])
    return forms[form](stream)


def line_of(standing: Standing) -> str:
    """Return `12/50 tasks, 40 changes tried: trying changes`."""
    return f"{standing.kept}/{standing.total} tasks, {standing.tried} changes tried: {standing.stage}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes}:{seconds:02}"
