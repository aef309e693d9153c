"""The format `minimax_m3`: a tag for each argument, and for each member of an object or list in an argument."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hermes_core.agents.parsers.base import ParsedCall, WritableCall
from hermes_core.agents.parsers.jsontext import Item
from hermes_core.agents.parsers.literals import NotRead
from hermes_core.agents.parsers.scan import MarkedText, Marks, TextParser
from hermes_core.agents.parsers.typed import Schema, convert, member_schema

_SIGN = "]<]minimax[>["
"""The token before each tag. A value can hold anything except this token."""
_S = re.escape(_SIGN) + r"\s*+"
_HEAD = re.compile(r'([^"<>\s]{1,256}+)"\s*+>')
_TAG = re.compile(rf"{_S}<(/?)([^<>\n]{{1,256}}+)>")
_END = re.compile(rf"\s*+{_S}</invoke>")
_MAX_DEPTH = 50

MARKS = Marks(rf'{_S}<tool_call>(?:\s*+{_S}<invoke\s++name=")?|{_S}<invoke\s++name="', rf"{_S}</(?:invoke|tool_call)>")


def minimax_m3() -> TextParser:
    """Return the parser of MiniMax M3.

    Objects are written as tags inside of tags, lists as `<item>` tags. Source: the tests of vLLM's parser, and
    SGLang's detector.
    """
    return TextParser("minimax_m3", MARKS.compile(), read, write)


def write(calls: Sequence[WritableCall]) -> str:
    """Write the calls in one section."""
    written = (f'{_SIGN}<invoke name="{call.name}">{_tags(call.arguments)}{_SIGN}</invoke>\n' for call in calls)
    return f"{_SIGN}<tool_call>\n{''.join(written)}{_SIGN}</tool_call>"


def read(source: MarkedText, mark: re.Match[str]) -> tuple[list[Item], int]:
    """Read one call."""
    start = mark.start()
    head = _HEAD.match(source.text, mark.end()) if mark[0].endswith('"') else None
    if head is None:
        return source.report_broken(start, mark.end(), "the call does not begin with a tool's name")
    root = source.tools.get(head[1], {})
    pairs: list[tuple[str, Any]] = []
    position = head.end()
    try:
        while (tag := _opening(source, position)) is not None:
            value, position = _value(source, tag, member_schema(root, tag[2], root), root, 1)
            pairs.append((tag[2], value))
    except NotRead as error:
        return source.report_broken(start, error.position, str(error), head[1])
    end = _END.match(source.text, position)
    if end is None:
        return source.report_broken(start, position, "the call has no end, or something else than arguments", head[1])
    return [ParsedCall(head[1], _group(pairs), source.text[start : end.end()], start)], end.end()


def _opening(source: MarkedText, position: int) -> re.Match[str] | None:
    """Return the opening tag that follows at this position, perhaps after white space; None if anything else
    follows."""
    tag = source.search(_TAG, position)
    return tag if tag and not tag[1] and not source.text[position : tag.start()].strip() else None


def _value(source: MarkedText, tag: re.Match[str], schema: Schema | None, root: Schema, depth: int) -> tuple[Any, int]:
    """Return the value of a tag, and the position after its closing tag."""
    if depth > _MAX_DEPTH:
        raise NotRead(tag.start(), "the arguments are nested too deep")
    members: list[tuple[str, Any]] = []
    begin = position = tag.end()
    while (inner := _opening(source, position)) is not None:
        value, position = _value(source, inner, member_schema(schema or {}, inner[2], root), root, depth + 1)
        members.append((inner[2], value))
    closing = source.search(_TAG, position)
    if closing is None or closing[1] == "" or closing[2] != tag[2]:
        raise NotRead(tag.end(), f"the value of {tag[2]!r} has no end")
    if not members:
        return convert(source.text[begin : closing.start()], schema, root), closing.end()
    if source.text[position : closing.start()].strip():
        raise NotRead(position, f"{tag[2]!r} has text beside tags")
    return _container(members), closing.end()


def _container(members: Sequence[tuple[str, Any]]) -> Any:
    """Return a list if all members have the key `item`, else an object."""
    items = [value for key, value in members if key == "item"]
    return items if len(items) == len(members) else _group(members)


def _group(members: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members by key. A key that occurs more than once gets the list of its values."""
    values: dict[str, list[Any]] = {}
    for key, value in members:
        values.setdefault(key, []).append(value)
    return {key: several if len(several) > 1 else several[0] for key, several in values.items()}


def _tags(members: Mapping[str, Any]) -> str:
    return "".join(f"{_SIGN}<{key}>{_write_value(value)}{_SIGN}</{key}>" for key, value in members.items())


def _write_value(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        return _tags(value)
    if isinstance(value, list | tuple) and value:
        return "".join(_tags({"item": each}) for each in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
