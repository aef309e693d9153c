"""The formats `llama3_json`, `llama4_json` and `xlam`: calls as bare JSON objects. Prose may hold such objects, too."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hermes_core.agents.parsers.base import WritableCall
from hermes_core.agents.parsers.hermes import json_call, read_objects
from hermes_core.agents.parsers.jsontext import Item, call_object, extent, skip_space
from hermes_core.agents.parsers.scan import THINKING, MarkedText, Marks, TextParser
from hermes_core.agents.replies import decode_arguments

_OBJECT = r'\{\s*+"(?:name|type|function|parameters|arguments|id)"\s*+:'
_BARE = rf"\[(?=\s*+{_OBJECT})|(?={_OBJECT})\{{"
# Llama 4 writes text that precedes its calls between the two marks, and the calls behind the second mark.
TAG_MARKS = Marks(
    r"<\|python_tag\|>|<\|python_start\|>(?!\s*+[^\s\[{<][^<]*+<\|python_end\|>)(?:\s*+<\|python_end\|>)?"
    rf"|<\|python_end\|>(?=\s*+{_OBJECT})",
    r"<\|python_(?:start|end)\|>",
)
XLAM_MARKS = Marks(rf"(?:```(?:json)?\s*+)?\[(?=\s*+{_OBJECT})")
_NAMED = re.compile(r'\{\s*+"name"\s*+:\s*+"([^"\\]{1,256}+)"')
_FENCE = re.compile(r"\s*+```")
_BEFORE_CALLS = tuple(THINKING.values())


def llama3_json() -> TextParser:
    """Return the parser of Llama 3.1 and later.

    The models write `{"name": …, "parameters": {…}}`, with or without `<|python_tag|>` before it, and `;` between
    several calls.
    """
    return _llama("llama3_json")


def llama4_json() -> TextParser:
    """Return the parser of Llama 4: the objects of `llama3_json`, perhaps after `<|python_start|>…<|python_end|>`."""
    return _llama("llama4_json")


def xlam() -> TextParser:
    """Return the parser of xLAM 2: a bare list, perhaps in a fenced block.

    Source: the tests of vLLM's parser of this name.
    """
    return TextParser("xlam", XLAM_MARKS.compile(), read_xlam, lambda calls: f"[{', '.join(map(json_call, calls))}]")


def _llama(name: str) -> TextParser:
    return TextParser(name, Marks(f"{TAG_MARKS.opener}|{_BARE}", TAG_MARKS.others).compile(), read_llama, write)


def write(calls: Sequence[WritableCall]) -> str:
    """Write one object after the other."""
    return "; ".join(json_call(call, "parameters") for call in calls)


def read_llama(source: MarkedText, mark: re.Match[str]) -> tuple[list[Item], int]:
    """Read the objects at a mark, if they are calls. After a tag such as `<|python_tag|>` they must be calls."""
    if mark[0].startswith("<"):
        return read_objects(source, mark.start(), mark.end())
    return _read_bare(source, mark.start(), mark.start())


def read_xlam(source: MarkedText, mark: re.Match[str]) -> tuple[list[Item], int]:
    """Read the list at a mark, if it is a list of calls."""
    items, end = _read_bare(source, mark.start(), mark.end() - 1)
    fence = _FENCE.match(source.text, end) if mark[0].startswith("`") else None
    return items, fence.end() if items and fence else end


def _read_bare(source: MarkedText, start: int, here: int) -> tuple[list[Item], int]:
    """Read the object or the list of objects at position `here`, if these objects are calls.

    At the beginning of the answer an object with a name and arguments is a call. Anywhere else it has to name a tool,
    because an example in prose is no call.

    Args:
        start: the position at which the text of the first call begins: `here`, or the position of a code fence before
            it.
    """
    text = source.text
    first = skip_space(text, here + 1) if text[here] == "[" else here
    found = extent(text, first)
    leading = leads(text, start)
    if found.whole:
        value, _, _ = decode_arguments(text[first : found.end])
        is_call = value is not None and _is_call(value, source, leading)
    else:
        named = _NAMED.match(text, first)
        is_call = named is not None and (leading or named[1] in source.tools)
    return read_objects(source, start, here) if is_call else ([], found.end)


def leads(text: str, position: int) -> bool:
    """Return whether only reasoning and white space come before a position."""
    while position and text[position - 1].isspace():
        position -= 1
    return position == 0 or text.endswith(_BEFORE_CALLS, 0, position)


def _is_call(value: Mapping[str, object], source: MarkedText, leading: bool) -> bool:
    call = call_object(value)
    name, has_arguments = call.get("name"), "arguments" in call or "parameters" in call
    if not isinstance(name, str):
        return False
    known = name in source.tools
    return (known and leading) or (has_arguments and (known or leading))
