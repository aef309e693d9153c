"""The format `mistral`: the calls after `[TOOL_CALLS]`, for all versions of Mistral's tokenizers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hermes_core.agents.parsers.arguments import NAME, json_arguments, read_arguments
from hermes_core.agents.parsers.base import WritableCall
from hermes_core.agents.parsers.hermes import read_objects
from hermes_core.agents.parsers.jsontext import Item, skip_space
from hermes_core.agents.parsers.scan import MarkedText, Marks, TextParser

_HEAD = re.compile(rf"\s*+({NAME})\s*+(?:\[CALL_ID\]\s*+({NAME})\s*+)?(?:\[ARGS\])?")
_NOTHING = re.compile("")

OPENER = r"\[TOOL_CALLS\]"


def mistral() -> TextParser:
    """Return the parser of Mistral.

    Up to version 7: `[TOOL_CALLS][{"name": …, "arguments": …}]`. From 11 on: `[TOOL_CALLS]NAME[ARGS]{…}`.

    Ids are kept if present: `"id"` in the objects, `[CALL_ID]` after the name.
    """
    return TextParser("mistral", Marks(OPENER).compile(), read_mistral, write)


def write(calls: Sequence[WritableCall]) -> str:
    """Write the calls in the form of version 11 and later."""
    return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{json_arguments(call)}" for call in calls)


def read_mistral(source: MarkedText, mark: re.Match[str]) -> tuple[list[Item], int]:
    """Read the list of calls, or the one call, after the mark."""
    here = skip_space(source.text, mark.end())
    if source.text.startswith(("[", "{"), here):
        return read_objects(source, mark.start(), here)
    head = _HEAD.match(source.text, here)
    if head is None:
        return source.report_broken(mark.start(), mark.end(), "the call has no name")
    return read_arguments(source, mark.start(), head.end(), name=head[1], closing=_NOTHING, identifier=head[2])
