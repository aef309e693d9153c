"""The formats that put calls as JSON objects between tags. Each is one `Tags`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hermes_core.agents.parsers.base import ParseProblem, WritableCall
from hermes_core.agents.parsers.jsontext import Form, Item, call_object, extent, read_call, skip_space
from hermes_core.agents.parsers.scan import Marks, Source, TextParser


def hermes() -> TextParser:
    """Return the parser of Hermes 2 and 3, and of many models tuned like them.

    They write `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
    """
    return HERMES.parser("hermes")


def qwen() -> TextParser:
    """Return the parser of Qwen 2.5 and Qwen 3, which write the same format."""
    return HERMES.parser("qwen")


def longcat() -> TextParser:
    """Return the parser of the same format with `<longcat_tool_call>` tags."""
    return LONGCAT.parser("longcat")


def ernie45() -> TextParser:
    """Return the parser of ERNIE 4.5: the same as `hermes`, with `<response>` tags around what is said.

    Source: vLLM's parser of this name, and its tests.
    """
    return ERNIE.parser("ernie45")


def granite() -> TextParser:
    """Return the parser of Granite 3: a list behind `<|tool_call|>` or `<tool_call>`. Granite 4 writes as `hermes`.

    Source: vLLM's parsers `granite` and `granite4`, and their tests.
    """
    return GRANITE.parser("granite")


def phi4_mini_json() -> TextParser:
    """Return the parser of Phi 4 mini: `functools[…]`, or the list between `<|tool_call|>` and `<|/tool_call|>`.

    Source: vLLM's parser of this name; the tokens of the model's template.
    """
    return PHI.parser("phi4_mini_json")


def hunyuan_a13b() -> TextParser:
    """Return the parser of Hunyuan A13B: a list between `<tool_calls>` tags. Source: the tests of vLLM's parser."""
    return HUNYUAN_A13B.parser("hunyuan_a13b")


def cohere() -> TextParser:
    """Return the parser of Cohere's Command R7B, Command A and later.

    They write `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}]<|END_ACTION|>`. The ids only
    count the calls, so they are not kept. Source: the chat template of Command R7B.
    """
    return COHERE.parser("cohere")


def apertus() -> TextParser:
    """Return the parser of Apertus, whose objects have the tool's name as their only key: `[{"NAME": {…}}]`.

    Source: vLLM's parser of this name.
    """
    return APERTUS.parser("apertus")


def json_call(call: WritableCall, key: str = "arguments") -> str:
    """Return the call as one JSON object."""
    return json.dumps({"name": call.name, key: dict(call.arguments)}, ensure_ascii=False)


def _hermes_calls(calls: Sequence[WritableCall], tag: str) -> str:
    return "\n".join(f"<{tag}>\n{json_call(call)}\n</{tag}>" for call in calls)


def _list(objects: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(list(objects), ensure_ascii=False)


def _plain(call: WritableCall) -> Mapping[str, Any]:
    return {"name": call.name, "arguments": dict(call.arguments)}


def _cohere_form(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object of a call of Cohere with the names that others use, and without the id."""
    if "tool_name" not in value:
        return call_object(value)
    return {"name": value["tool_name"], **{key: value[key] for key in ("arguments", "parameters") if key in value}}


def _apertus_form(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object whose only key is the tool's name in the form of others."""
    if len(value) != 1:
        return call_object(value)
    ((name, arguments),) = value.items()
    return {"name": name, "arguments": arguments}


def _cohere_object(number: int, call: WritableCall) -> Mapping[str, Any]:
    return {"tool_call_id": str(number), "tool_name": call.name, "parameters": dict(call.arguments)}


@dataclass(frozen=True)
class Tags:
    """How a format marks its objects, and what it calls their fields."""

    opening: str
    """A pattern of what comes before the objects."""
    closing: str
    """A pattern of what comes after them. Its absence does no harm."""
    write: Callable[[Sequence[WritableCall]], str]
    """Writes the calls as the format's chat template does."""
    form: Form = call_object
    """Returns an object of the format in the usual form."""
    aside: str = ""
    """A pattern: other marks of the format. They are not content."""

    def parser(self, name: str) -> TextParser:
        """Return the parser of this format."""
        return TextParser(name, self.marks.compiled(), self.read, self.write)

    @property
    def marks(self) -> Marks:
        """Return the marks of this format."""
        return Marks(self.opening, "|".join(filter(None, (self.closing, self.aside))))

    def read(self, source: Source, mark: re.Match[str]) -> tuple[list[Item], int]:
        """Read the object, or objects, between two tags; see `scan.Reader`."""
        items, end = read_objects(source, mark.start(), mark.end(), self.form)
        tag = self._closed.match(source.text, end)
        if not items or tag is None:
            return items, end
        return [*items[:-1], replace(items[-1], raw=source.text[items[-1].start : tag.end()])], tag.end()

    @cached_property
    def _closed(self) -> re.Pattern[str]:
        return re.compile(rf"\s*+(?:{self.closing})")


HERMES = Tags("<tool_call>", "</tool_call>", lambda calls: _hermes_calls(calls, "tool_call"))
LONGCAT = Tags("<longcat_tool_call>", "</longcat_tool_call>", lambda calls: _hermes_calls(calls, "longcat_tool_call"))
ERNIE = replace(HERMES, aside="</?response>")
GRANITE = Tags(
    r"<\|tool_call\|>|<tool_call>", "</tool_call>", lambda calls: "<|tool_call|>" + _list([*map(_plain, calls)])
)
PHI = Tags(
    r"\bfunctools(?=\s*+\[)|<\|tool_call\|>",
    r"<\|/tool_call\|>",
    lambda calls: "functools" + _list([*map(_plain, calls)]),
    aside=r"<\|end\|>",
)
HUNYUAN_A13B = Tags(
    "<tool_calls>",
    "</tool_calls>",
    lambda calls: f"<tool_calls>{_list([*map(_plain, calls)])}</tool_calls>",
    aside="</?answer>",
)
COHERE = Tags(
    r"<\|START_ACTION\|>",
    r"<\|END_ACTION\|>",
    lambda calls: (
        "<|START_ACTION|>"
        + _list([_cohere_object(number, call) for number, call in enumerate(calls)])
        + "<|END_ACTION|>"
    ),
    _cohere_form,
    r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>",
)
APERTUS = Tags(
    r"<\|tools_prefix\|>",
    r"<\|tools_suffix\|>",
    lambda calls: "<|tools_prefix|>" + _list([{c.name: dict(c.arguments)} for c in calls]) + "<|tools_suffix|>",
    _apertus_form,
)

_NEXT = re.compile(r'\s*+[,;]?\s*+(?=\{\s*+"(?:name|id|type|arguments|parameters)")')
_NEXT_LISTED = re.compile(r'\s*+[,;]\s*+(?=\{\s*+")')
_NAMED = r'"(?:tool_)?name"\s*+:\s*+"([^"\\]{1,256}+)"|"([^"\\]{1,256}+)"\s*+:\s*+\{'
_ANEW = re.compile(
    rf'(?:[,;]\s*+|\n[ \t]*+)(?=\{{\s*+(?:"tool_call_id"\s*+:\s*+"[^"\\]{{0,64}}+"\s*+,\s*+)?(?:{_NAMED}))'
)
"""Where a call begins after a broken one. It counts only if it names a tool."""


def read_objects(source: Source, start: int, position: int, form: Form = call_object) -> tuple[list[Item], int]:
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
            items.append(read_call(text, start, here, found.end, form))
            following = _NEXT.match(text, found.end) or (_NEXT_LISTED.match(text, found.end) if listed else None)
            if following is None:
                break
            start = here = following.end()
        else:
            problem, here = _broken_object(source, start, here, found.end, form)
            items.append(problem)
            start = here
            if not text.startswith("{", here):
                return items, here
    bracket = skip_space(text, found.end)
    return items, bracket + 1 if listed and text.startswith("]", bracket) else found.end


def _broken_object(source: Source, start: int, here: int, position: int, form: Form) -> tuple[Item, int]:
    """Return the problem of an object that has no end, and where the next object, or else the next mark, begins."""
    mark = source.next_mark(position)
    limit = mark.start() if mark else len(source.text)
    for found in _ANEW.finditer(source.text, position, limit):
        if (found[1] or found[2]) in source.tools:
            return _without_end(source, start, here, found.start(), form), found.end()
    return _without_end(source, start, here, limit, form), limit


def _without_end(source: Source, start: int, here: int, end: int, form: Form) -> Item:
    if source.explains(here, end):
        return read_call(source.text, start, here, end, form)
    return ParseProblem("the call is not valid JSON", source.text[start:end], start)
