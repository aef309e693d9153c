"""Makes text that may come from a sandbox safe to print: the terminal shows control characters and never obeys them."""

from __future__ import annotations

import click

# Control characters except tab and newline, and characters that change the direction of text, because a terminal obeys
# them; and lone surrogates, which can't be printed at all.
_OBEYED = [n for n in range(0xA0) if not 0x20 <= n < 0x7F and chr(n) not in "\t\n"] + [
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),
]
_SHOWN = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _OBEYED}


def printable(text: str) -> str:
    """Return the text with each character that a terminal would obey written out: an escape becomes `\\x1b`."""
    return text.translate(_SHOWN)


def say(text: str, *, err: bool = False) -> None:
    """Print one or several lines, after `printable`."""
    click.echo(printable(text), err=err)
