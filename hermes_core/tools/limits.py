"""What a model may use of time and of words: time limits, and output cut to its head and tail."""

from __future__ import annotations

from hermes_core.tools.base import CallContext

OUTPUT_CHARS = 50_000
"""The most characters of output in one answer."""

HEAD_SHARE = 0.4
"""How much of what is kept comes from the start: errors tend to stand at the end."""

OUTPUT_BYTES = 256 << 10
"""What to ask of a command's output. Half of it is its head, half its tail, and either half is more than
`cut_output` keeps of that end (at most 4 bytes a character), so that the slot's own notice never shows."""

DEFAULT_TIMEOUT_S = 180.0
"""The time limit of a command when neither the model nor the caller names one."""


def time_limit(ctx: CallContext, requested_s: float | None) -> tuple[float, str | None]:
    """The time limit that holds, in seconds, and a note to the model where it is less than it asked for."""
    if requested_s is None:
        return (DEFAULT_TIMEOUT_S if ctx.timeout_s is None else ctx.timeout_s), None
    if ctx.timeout_s is None or requested_s <= ctx.timeout_s:
        return requested_s, None
    return ctx.timeout_s, f"a timeout of {requested_s:g} s was asked for, and the limit here is {ctx.timeout_s:g} s"


def cut_output(data: bytes, total_bytes: int | None = None, limit: int = OUTPUT_CHARS) -> tuple[str, bool]:
    """Output as text of at most `limit` characters, and whether something was left out.

    Bytes that are not UTF-8 become U+FFFD; a character is never cut in the middle.

    Args:
        data: the output, or its head and tail around a notice when it had been cut before.
        total_bytes: how much was written, if `data` is not all of it.
        limit: at least 200; the notice of what was left out counts.
    """
    # Every invalid byte becomes one character for now, so that what is left out can be counted exactly.
    text = data.decode("utf-8", "surrogateescape")
    if len(text) <= limit:
        return printable(text), total_bytes is not None and total_bytes > len(data)
    room = limit - len(_notice(max(total_bytes or 0, len(data)), "characters", limit))
    head, tail = text[: int(room * HEAD_SHARE)], text[len(text) - (room - int(room * HEAD_SHARE)) :]
    if total_bytes is None or total_bytes <= len(data):
        notice = _notice(len(text) - len(head) - len(tail), "characters", limit)
    else:
        notice = _notice(total_bytes - _bytes(head) - _bytes(tail), "bytes", limit)
    return f"{printable(head)}{notice}{printable(tail)}", True


def printable(text: str) -> str:
    """Text decoded with `surrogateescape`, with U+FFFD for what was not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _notice(omitted: int, unit: str, limit: int) -> str:
    return f"\n\n[... {omitted} {unit} omitted: output is limited to {limit} characters ...]\n\n"


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))
