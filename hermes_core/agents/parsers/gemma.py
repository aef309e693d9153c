"""The format `gemma4`: `<|tool_call>call:NAME{key:value,…}<tool_call|>`, with strings between `<|"|>` tokens."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hermes_core.agents.parsers.base import ParsedCall, WritableCall
from hermes_core.agents.parsers.jsontext import Item
from hermes_core.agents.parsers.scan import Marks, Source, TextParser

_QUOTE = '<|"|>'
_HEAD = re.compile(r"\s*+call:\s*+([^\s{}<>|:]{1,256}+)\s*+\{")
_KEY = re.compile(r"\s*+([^\s{}\[\]:,<>|\"]{1,256}+)\s*+:\s*+")
_PLAIN_KEY = re.compile(r"[\w.$-]{1,256}+")
_BARE = re.compile(r"[^\s,{}\[\]<>]{1,64}+")
_CLOSING = re.compile(r"\s*+(?:<tool_call\|>)?")
_SPACE = re.compile(r"\s*+")
_WORDS = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}
_MAX_DEPTH = 50

MARKS = Marks(r"<\|tool_call>", r"<tool_call\|>")


class _NotRead(Exception):
    """The text is not a value of this format; says at which position."""

    def __init__(self, position: int, problem: str) -> None:
        super().__init__(problem)
        self.position = position


def gemma4() -> TextParser:
    """Return the parser of Gemma 4. A text can hold anything except the token that ends it. Keys have no quotes."""
    return TextParser("gemma4", MARKS.compiled(), read_gemma, write)


def write(calls: Sequence[WritableCall]) -> str:
    """Write one call after the other."""
    return "".join(f"<|tool_call>call:{call.name}{_written(call.arguments)}<tool_call|>" for call in calls)


def read_gemma(source: Source, mark: re.Match[str]) -> tuple[list[Item], int]:
    """Read the call after the mark."""
    head = _HEAD.match(source.text, mark.end())
    if head is None:
        return source.broken(mark.start(), mark.end(), "the call is not of the form call:NAME{key:value}")
    try:
        arguments, end = _mapping(source.text, head.end(), 1)
    except _NotRead as error:
        return source.broken(mark.start(), max(error.position, head.end()), str(error), head[1])
    end = _CLOSING.match(source.text, end).end()  # type: ignore[union-attr]  # it matches anywhere
    return [ParsedCall(head[1], arguments, source.text[mark.start() : end], mark.start())], end


def _mapping(text: str, position: int, depth: int) -> tuple[dict[str, Any], int]:
    """Return the mapping whose opening brace is before `position`, and the position after it."""
    values: dict[str, Any] = {}
    position = _space(text, position)
    while not text.startswith("}", position):
        key = _KEY.match(text, position)
        if text.startswith(_QUOTE, position):
            name, position = _string(text, position)
            position = _expect(text, position, ":")
        elif key is not None:
            name, position = key[1], key.end()
        else:
            raise _NotRead(position, "an argument has no name")
        values[name], position = _value(text, position, depth)
        position = _next(text, position, "}")
    return values, position + 1


def _list(text: str, position: int, depth: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    position = _space(text, position)
    while not text.startswith("]", position):
        value, position = _value(text, position, depth)
        values.append(value)
        position = _next(text, position, "]")
    return values, position + 1


def _value(text: str, position: int, depth: int) -> tuple[Any, int]:
    if depth > _MAX_DEPTH:
        raise _NotRead(position, "the arguments are nested too deep")
    position = _space(text, position)
    if text.startswith(_QUOTE, position):
        return _string(text, position)
    if text.startswith("{", position):
        return _mapping(text, position + 1, depth + 1)
    if text.startswith("[", position):
        return _list(text, position + 1, depth + 1)
    bare = _BARE.match(text, position)
    if bare is None:
        raise _NotRead(position, "an argument has no value")
    if bare[0] in _WORDS:
        return _WORDS[bare[0]], bare.end()
    try:
        number = json.loads(bare[0], parse_constant=float)
    except ValueError:
        raise _NotRead(position, f"a text has to stand between {_QUOTE}") from None
    if not isinstance(number, int | float) or not math.isfinite(number):
        raise _NotRead(position, f"{bare[0]} is not a number")
    return number, bare.end()


def _string(text: str, position: int) -> tuple[str, int]:
    begin = position + len(_QUOTE)
    end = text.find(_QUOTE, begin)
    if end < 0:
        raise _NotRead(begin, "a text has no end")
    return text[begin:end], end + len(_QUOTE)


def _next(text: str, position: int, closing: str) -> int:
    """Return the position after a comma, or at the closing bracket."""
    position = _space(text, position)
    return position if text.startswith(closing, position) else _expect(text, position, ",")


def _expect(text: str, position: int, sign: str) -> int:
    position = _space(text, position)
    if not text.startswith(sign, position):
        raise _NotRead(position, f"the arguments are not of the form {{key:value}}: {sign!r} is missing")
    return _space(text, position + 1)


def _space(text: str, position: int) -> int:
    return _SPACE.match(text, position).end()  # type: ignore[union-attr]  # it matches anywhere


def _written(value: Any) -> str:
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, Mapping):
        pairs = ((key if _PLAIN_KEY.fullmatch(key) else _written(key), inner) for key, inner in sorted(value.items()))
        return "{" + ",".join(f"{key}:{_written(inner)}" for key, inner in pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value)
