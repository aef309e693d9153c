"""Words and figures for people. Every text that a model, a sandbox or a dataset wrote goes through `safe_text`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

from hermes_core.printing import printable

NONE = "-"
"""The sign for a missing value."""

REWARDLESS = "finished; the environment gives no rewards"
"""The outcome of rollouts that ended without a failure and without a reward."""


def safe_text(text: object, style: str = "") -> Text:
    """Return the text for the terminal. Control characters become visible, and rich's markup has no effect."""
    return Text(printable(str(text)), style=style)


def line(text: object, style: str = "") -> Text:
    """Like `safe_text`, but in one line."""
    return safe_text(" ".join(str(text).split()), style)


class Indented:
    """A text that is indented as a whole, including lines that the terminal's width makes. Unlike rich's padding, this
    adds no spaces at the ends of lines."""

    def __init__(self, text: Text, indent: int) -> None:
        self.text = text
        self.indent = indent

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        narrower = options.update(width=max(20, options.max_width - self.indent))
        for segments in console.render_lines(self.text, narrower, pad=False):
            yield Segment(" " * self.indent)
            yield from segments
            yield Segment.line()


def figure(value: float | None, digits: int = 1) -> str:
    """Return a number as text with this many digits after the point."""
    return NONE if value is None else f"{value:.{digits}f}"


def count(number: int) -> str:
    """Return a count in at most five characters: `812`, `5.1k`, `1.2M`."""
    for size, unit in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def money(dollars: float | None) -> str:
    """Return US dollars as text: `$12.30`; less than one dollar with three significant digits, `$0.0105`."""
    if dollars is None:
        return NONE
    if not 0 < dollars < 1:
        return f"${dollars:.2f}"
    return f"${dollars:.{2 - math.floor(math.log10(dollars))}f}"


def duration(seconds: float | None) -> str:
    """Return a duration as text: `0.21 s`, `12.3 s`, `4 min 05 s`, `2 h 03 min`."""
    if seconds is None:
        return NONE
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def counts_text(counts: Mapping[str, int]) -> str:
    """Return counts by name as text: `12 infra, 3 model`."""
    return ", ".join(f"{number} {name}" for name, number in counts.items()) or "none"
