"""Output as a person would see it in a terminal: as plain lines, or as a full screen."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hermes_core.sandbox.commands import WindowSize

_OTHER_SCREEN = {47, 1047, 1049}
"""Private modes (xterm's control sequences, DECSET) that give full-screen programs a screen of their own."""


_CONTROL = re.compile(
    r"(\r|\x08"  # moves to the start of the line, and to the left
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # control sequences: colours, cursor, erasing
    r"|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\|$)"  # strings, such as the window's title
    r"|\x1b[ -/]*[0-~]?)"
)
_ADDRESSED = re.compile(rb"\x1b\[[0-9;]*[Hf]|\x1b\[\?(?:47|1047|1049)h")
"""Sequences of full-screen programs: moves of the cursor to any place, and switches to another screen."""


def as_seen(text: str) -> str:
    """Return the lines of output as finally shown: without colours, and of a progress bar only the last state."""
    return "\n".join(_last_state(line) if _CONTROL.search(line) else line for line in text.split("\n"))


def _last_state(line: str) -> str:
    cells, column = list[str](), 0
    for piece in _CONTROL.split(line):
        if piece == "\r":
            column = 0
        elif piece == "\x08":
            column = max(0, column - 1)
        elif piece in ("\x1b[K", "\x1b[0K"):
            del cells[column:]
        elif piece == "\x1b[2K":
            cells.clear()
        elif not piece.startswith("\x1b"):
            cells += " " * (column - len(cells))
            cells[column : column + len(piece)] = piece
            column += len(piece)
    return "".join(cells)


def of_terminal(data: bytes, size: WindowSize) -> bytes:
    """Return a program's output as left in its terminal: lines, or the last screen of a full-screen program."""
    return render(data, size).text.encode() if _ADDRESSED.search(data) else data


@dataclass(frozen=True)
class Screen:
    """The contents of a terminal, without blanks at the ends of lines and empty lines at the end."""

    lines: tuple[str, ...]
    row: int
    """The cursor's row, counted from 0."""
    column: int

    @property
    def text(self) -> str:
        """Return the lines as one text."""
        return "\n".join(self.lines)


def render(data: bytes, size: WindowSize) -> Screen:
    """Return the screen of a terminal of this size after the output `data`, which may be any bytes. Unknown sequences
    are ignored.

    Takes about a second for a megabyte of output, so don't call it on the event loop.
    """
    import pyte

    terminal = pyte.Screen(size.columns, size.rows)
    pyte.ByteStream(_Lenient(terminal)).feed(data)
    lines = [_line(terminal.buffer[row], terminal.columns) for row in range(terminal.lines)]
    while lines and not lines[-1]:
        lines.pop()
    return Screen(tuple(lines), terminal.cursor.y, terminal.cursor.x)


def _line(cells: Any, columns: int) -> str:
    # The second cell of a wide character is empty.
    return "".join(cells[column].data for column in range(columns)).rstrip()


class _Lenient:
    """Wraps a pyte screen to accept any sequence, and to have a second screen for full-screen programs.

    pyte raises various errors on unknown sequences, such as vim's `CSI ? 4 m` and `CSI 4 J`.
    """

    def __init__(self, screen: Any) -> None:
        self._screen = screen
        self._first: tuple[Any, Any] | None = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        method = getattr(self._screen, name)

        def call(*args: Any, **options: Any) -> None:
            with contextlib.suppress(Exception):
                method(*args, **options)

        return call

    def alignment_display(self) -> None:
        """Ignore the test picture (`ESC # 8`), whose three bytes take as much time as a screen of text."""

    def set_mode(self, *modes: int, **options: Any) -> None:
        """Switch modes on. Some modes switch to the second screen, which is empty at first."""
        if options.get("private") and _OTHER_SCREEN.intersection(modes) and self._first is None:
            screen = self._screen
            self._first = (
                {row: copy.copy(cells) for row, cells in screen.buffer.items()},
                (screen.cursor.x, screen.cursor.y),
            )
            screen.erase_in_display(2)
        self.__getattr__("set_mode")(*modes, **options)

    def reset_mode(self, *modes: int, **options: Any) -> None:
        """Switch modes off. Some modes switch back to the first screen, which is unchanged."""
        if options.get("private") and _OTHER_SCREEN.intersection(modes) and self._first is not None:
            (rows, (x, y)), self._first = self._first, None
            self._screen.buffer.clear()
            self._screen.buffer.update(rows)
            self._screen.cursor.x, self._screen.cursor.y = x, y
        self.__getattr__("reset_mode")(*modes, **options)
