"""The format `gpt_oss`: OpenAI's harmony, in which an answer is several messages, each to a channel or a function."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hermes_core.agents.parsers.arguments import NAME, json_arguments, read_arguments
from hermes_core.agents.parsers.base import WritableCall
from hermes_core.agents.parsers.jsontext import Item
from hermes_core.agents.parsers.scan import THINKING, MarkedText, Marks, TextParser

_ANALYSIS = "<|channel|>analysis<|message|>"
_HEAD = re.compile(
    rf"({NAME})\s*+(?:<\|channel\|>\s*+\w*+)?\s*+(?:<\|constrain\|>)?\s*+\w*+\s*+<\|message\|>", re.ASCII
)
_CLOSING = re.compile(r"(?:\s*+<\|call\|>)?")

MARKS = Marks(
    r"(?:<\|start\|>assistant\s*+)?(?:<\|channel\|>\w++\s++)?\bto=(?=[\w.-]+\s*+<\||functions\.)",
    r"<\|start\|>(?:assistant)?|<\|channel\|>(?!analysis<\|message\|>)\w*+(?:\s*+<\|message\|>)?"
    r"|<\|(?:message|end|call|return|constrain)\|>",
    {**THINKING, _ANALYSIS: "<|end|>"},
)


def gpt_oss() -> TextParser:
    """Return the parser of gpt-oss.

    The model writes ` to=functions.NAME<|channel|>commentary json<|message|>{…}<|call|>` after `<|start|>assistant`.
    """
    return TextParser("gpt_oss", MARKS.compile(), read_harmony, write, MARKS.thinking)


def write(calls: Sequence[WritableCall]) -> str:
    """Write one message for each call."""
    return "<|start|>assistant".join(
        f" to=functions.{call.name}<|channel|>commentary json<|message|>{json_arguments(call)}<|call|>"
        for call in calls
    )


def read_harmony(source: MarkedText, mark: re.Match[str]) -> tuple[list[Item], int]:
    """Read the message after the name of its recipient."""
    head = _HEAD.match(source.text, mark.end())
    if head is None:
        return source.report_broken(mark.start(), mark.end(), "the call has no message")
    name = head[1].removeprefix("functions.")
    return read_arguments(source, mark.start(), head.end(), name=name, closing=_CLOSING)
