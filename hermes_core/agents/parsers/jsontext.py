"""JSON inside other text: finds the end of a value, and reads calls that are written as JSON objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hermes_core.agents.parsers.base import ParsedCall, ParseProblem
from hermes_core.agents.replies import decode_arguments

Item = ParsedCall | ParseProblem
Form = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Returns a call's object in the usual form: with `name`, and `arguments` or `parameters`."""

_STRING = r'"(?:[^"\\]++|\\.)*+"'
_MEMBER = rf"\s*+{_STRING}\s*+:\s*+"
_SCALAR = rf"(?:{_STRING}|[-+.\w]++)\s*+"
_MEMBERS = rf"(?>(?:{_MEMBER}{_SCALAR}(?:,|(?=\}})))*)(?:{_MEMBER}(?=[{{\[])|\s*+(?=\}}))"
_ELEMENTS = rf"(?>(?:\s*+{_SCALAR}(?:,|(?=\])))*)\s*+(?=[{{\[\]])"

# The patterns match from one bracket to the next, and capture the second one. All their quantifiers are possessive, so
# no text makes them backtrack far.
# Groups whose last repetition may fail half-way are atomic instead: Python before 3.11.5 resumes at the wrong place.
_OPENED = {
    "{": re.compile(rf"{_MEMBERS}([{{\[}}])", re.DOTALL),
    "[": re.compile(rf"{_ELEMENTS}([{{\[\]])", re.DOTALL),
}
_CLOSED = {
    "{": re.compile(rf"\s*+(?:,{_MEMBERS}|(?=\}}))([{{\[}}])", re.DOTALL),
    "[": re.compile(rf"\s*+(?:,{_ELEMENTS}|(?=\]))([{{\[\]])", re.DOTALL),
}
_TEXT = re.compile(_STRING, re.DOTALL)
_SPACE = re.compile(r"\s*+")
_NAME_KEY = re.compile(r'"(?:tool_)?name"\s*+:\s*+"([^"\\\s]{1,256})"')
_BESIDE_NAME = frozenset({"name", "id", "type", "call_id", "index"})


class Extent(NamedTuple):
    """The end of a JSON value. If the value has no end, `end` is the position from which to search for the next
    value."""

    end: int
    whole: bool


def extent(text: str, start: int) -> Extent:
    """Find the end of the object, list or string that begins at `start`.

    The search follows the grammar only closely enough never to run past a broken value into the text after it. The
    decoder decides whether the text is JSON. If a search fails and the next one begins at the returned position, and so
    on, all of them together take linear time: two searches that pass the same place differ in what they take for the
    inside of a string, so the next misplaced bracket ends one of them.
    """
    if text[start] == '"':
        string = _TEXT.match(text, start)
        return Extent(string.end(), True) if string else Extent(start + 1, False)
    stack = [text[start]]
    position, rules = start + 1, _OPENED
    while stack:
        step = rules[stack[-1]].match(text, position)
        if step is None:
            return Extent(position, False)
        position, bracket = step.end(), step[1]
        if bracket in "{[":
            stack.append(bracket)
            rules = _OPENED
        else:
            stack.pop()
            rules = _CLOSED
    return Extent(position, True)


def skip_space(text: str, position: int) -> int:
    """Return the next position that is not white space."""
    return _SPACE.match(text, position).end()  # type: ignore[union-attr]  # it matches anywhere


def call_object(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object with the call's name and arguments: `value` itself, or its field `function`, as in OpenAI's
    form."""
    inner = value.get("function")
    return inner if isinstance(inner, Mapping) and "name" not in value else value


def read_call(text: str, start: int, begin: int, end: int, form: Form = call_object) -> Item:
    """Read the call that is written as the object `text[begin:end]`: `{"name": …, "arguments" or "parameters": …}`.

    Args:
        start: the position of the mark before the object, with which the call's text begins.
        form: returns an object of the format in the usual form.
    """
    raw = text[start:end]
    found, error, repaired = decode_arguments(text[begin:end])
    if found is None:
        what = str(error).replace("the arguments", "the call", 1).replace("are", "is", 1)
        return ParseProblem(what, raw, start, name_in(raw))
    value = form(found)
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return ParseProblem('the call has no "name"', raw, start)
    key_of_arguments = next((key for key in ("arguments", "parameters") if key in value), None)
    if key_of_arguments is None and value.keys() - _BESIDE_NAME:
        return ParseProblem('the call has no "arguments"', raw, start, name)
    arguments, error, fixed = decode_arguments(value[key_of_arguments] if key_of_arguments else None)
    if arguments is None:
        return ParseProblem(str(error), raw, start, name)
    encoded = key_of_arguments is not None and isinstance(value[key_of_arguments], str)
    return ParsedCall(name.strip(), arguments, raw, start, _identifier(value), repaired or fixed or encoded)


def name_in(raw: str) -> str:
    """Return the tool's name in a call that is broken elsewhere; empty if it can't be found."""
    found = _NAME_KEY.search(raw)
    return found[1] if found else ""


def _identifier(value: Mapping[str, Any]) -> str | None:
    identifier = value.get("id")
    return identifier if isinstance(identifier, str) and identifier else None
