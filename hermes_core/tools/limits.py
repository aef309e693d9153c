"""Limits for a model's calls: time limits, and the size of output, of which head and tail are kept."""

from __future__ import annotations

from hermes_core.tools.base import CallContext

OUTPUT_CHARS = 50_000
"""Maximum number of characters of output in one answer."""

HEAD_SHARE = 0.4
"""The share of kept output that is from the output's start. It is small because errors are usually at the end."""

OUTPUT_BYTES = 256 << 10
"""Number of bytes of a command's output to ask for: half from its head, half from its tail. Each half is larger than
the part that `cut_output` keeps (at most 4 bytes per character), so the slot's own notice between them is always cut
out."""

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
    """Return the output as text of at most `limit` characters, and the number of bytes left out.

    Bytes that are not UTF-8 become U+FFFD; a character is never cut in the middle.

    Args:
        data: the output; or if it has been cut before, its head and tail around a notice.
        total_bytes: the size of the whole output, if `data` is only a part.
        limit: at least 200, including the notice about what was left out.
    """
    # Each invalid byte becomes one character for now, so that the bytes left out can be counted exactly.
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
    """Return text that was decoded with `surrogateescape`, with U+FFFD in place of bytes that were not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _notice(omitted: int, unit: str, limit: int) -> str:
    return f"\n\n[... {omitted} {unit} omitted: output is limited to {limit} characters ...]\n\n"


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))
