"""Limits for a model's calls: time limits, and output cut to its head and tail."""

from __future__ import annotations

from hermes_core.tools.base import CallContext

OUTPUT_CHARS = 50_000
"""Maximum number of characters of output in one answer."""

HEAD_SHARE = 0.4
"""The share of the kept output that comes from its start. Errors are usually at the end."""

OUTPUT_BYTES = 256 << 10
"""Number of bytes of a command's output to ask for. Half is its head, half its tail. Either half is more than
`cut_output` keeps of that end (at most 4 bytes per character), so the slot's own notice never shows."""

DEFAULT_TIMEOUT_S = 180.0
"""Time limit of a command if neither the model nor the caller sets one."""


def time_limit(ctx: CallContext, requested_s: float | None) -> tuple[float, str | None]:
    """Return the effective time limit in seconds, and a note to the model if it is shorter than requested."""
    if requested_s is None:
        return (DEFAULT_TIMEOUT_S if ctx.timeout_s is None else ctx.timeout_s), None
    if ctx.timeout_s is None or requested_s <= ctx.timeout_s:
        return requested_s, None
    return ctx.timeout_s, f"a timeout of {requested_s:g} s was asked for, and the limit here is {ctx.timeout_s:g} s"


def cut_output(data: bytes, total_bytes: int | None = None, limit: int = OUTPUT_CHARS) -> tuple[str, int]:
    """Return the output as text of at most `limit` characters, and how many bytes were left out.

    Bytes that are not UTF-8 become U+FFFD; a character is never cut in the middle.

    Args:
        data: the output, or its head and tail around a notice if it had been cut before.
        total_bytes: how much was written, if `data` is not all of it.
        limit: at least 200, including the notice about what was left out.
    """
    # Let each invalid byte be one character for now, so that what is left out can be counted exactly.
    text = data.decode("utf-8", "surrogateescape")
    if len(text) <= limit:
        return printable(text), max(0, (total_bytes or 0) - len(data))
    room = limit - len(_notice(max(total_bytes or 0, len(data)), "characters", limit))
    head, tail = text[: int(room * HEAD_SHARE)], text[len(text) - (room - int(room * HEAD_SHARE)) :]
    dropped = max(total_bytes or 0, len(data)) - _bytes(head) - _bytes(tail)
    if total_bytes is None or total_bytes <= len(data):
        notice = _notice(len(text) - len(head) - len(tail), "characters", limit)
    else:
        notice = _notice(dropped, "bytes", limit)
    return f"{printable(head)}{notice}{printable(tail)}", dropped


def printable(text: str) -> str:
    """Return text that was decoded with `surrogateescape`, with U+FFFD for what was not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _notice(omitted: int, unit: str, limit: int) -> str:
    return f"\n\n[... {omitted} {unit} omitted: output is limited to {limit} characters ...]\n\n"


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))
