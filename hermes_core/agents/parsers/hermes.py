"""The formats that put a JSON object between tags: `hermes`, `qwen` (Qwen 2.5 and 3) and `longcat`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from hermes_core.agents.parsers.base import ParseProblem, WritableCall
from hermes_core.agents.parsers.jsontext import Item, extent, read_call, skip_space
from hermes_core.agents.parsers.scan import Marks, Reader, Source, TextParser


def hermes() -> TextParser:
    """Return the parser of Hermes 2 and 3, and of many models tuned like them.

    They write `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
    """
    return _tagged("hermes", "tool_call")


def qwen() -> TextParser:
    """Return the parser of Qwen 2.5 and Qwen 3, which write the same format."""
    return _tagged("qwen", "tool_call")


def longcat() -> TextParser:
    """Return the parser of the same format with `<longcat_tool_call>` tags."""
    return _tagged("longcat", "longcat_tool_call")


def _tagged(name: str, tag: str) -> TextParser:
    def write(calls: Sequence[WritableCall]) -> str:
        return "\n".join(f"<{tag}>\n{json_call(call)}\n</{tag}>" for call in calls)

    return TextParser(name, Marks(f"<{tag}>", f"</{tag}>").compiled(), json_reader(f"</{tag}>"), write)


def json_call(call: WritableCall, key: str = "arguments") -> str:
    """Return the call as one JSON object."""
    return json.dumps({"name": call.name, key: dict(call.arguments)}, ensure_ascii=False)


def json_reader(closing: str) -> Reader:
    """Return a reader of the object, or objects, between two tags. A missing closing tag does no harm."""
    closed = re.compile(rf"\s*+{re.escape(closing)}")

    def read(source: Source, mark: re.Match[str]) -> tuple[list[Item], int]:
        items, end = read_objects(source, mark.start(), mark.end())
        tag = closed.match(source.text, end)
        if not items or tag is None:
            return items, end
        return [*items[:-1], replace(items[-1], raw=source.text[items[-1].start : tag.end()])], tag.end()

    return read


_NEXT = re.compile(r'\s*+[,;]?\s*+(?=\{\s*+"(?:name|id|type|arguments|parameters)")')
_ANEW = re.compile(r'(?:[,;]\s*+|\n[ \t]*+)(?=\{\s*+"name"\s*+:\s*+"([^"\\]{1,256}+)")')


def read_objects(source: Source, start: int, position: int) -> tuple[list[Item], int]:
    """Read call objects, one after the other or a list, from `position` on. The first one's text begins at `start`.

    A broken object loses only itself, if a tool's name shows where the next one begins.
    """
    text = source.text
    items: list[Item] = []
    here = skip_space(text, position)
    listed = text.startswith("[", here)
    if listed:
        here = skip_space(text, here + 1)
        if text.startswith("]", here):
            return [], here + 1
    if not text.startswith("{", here):
        return source.broken(start, position, "the call is not a JSON object")
    while True:
        found = extent(text, here)
        if found.whole:
            items.append(read_call(text, start, here, found.end))
            following = _NEXT.match(text, found.end)
            if following is None:
                break
            start = here = following.end()
        else:
            problem, here = _broken_object(source, start, here, found.end)
            items.append(problem)
            start = here
            if not text.startswith("{", here):
                return items, here
    bracket = skip_space(text, found.end)
    return items, bracket + 1 if listed and text.startswith("]", bracket) else found.end


def _broken_object(source: Source, start: int, here: int, position: int) -> tuple[Item, int]:
    """Return the problem of an object that has no end, and where the next object, or else the next mark, begins."""
    mark = source.next_mark(position)
    limit = mark.start() if mark else len(source.text)
    for found in _ANEW.finditer(source.text, position, limit):
        if found[1] in source.tools:
            return _without_end(source, start, here, found.start()), found.end()
    return _without_end(source, start, here, limit), limit


def _without_end(source: Source, start: int, here: int, end: int) -> Item:
    if source.explains(here, end):
        return read_call(source.text, start, here, end)
    return ParseProblem("the call is not valid JSON", source.text[start:end], start)
