"""The formats that put calls as JSON objects between tags. Each is one `Tags`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from hermes_core.agents.parsers.base import ParseProblem, WritableCall
from hermes_core.agents.parsers.jsontext import Form, Item, call_object, extent, read_call, skip_space
from hermes_core.agents.parsers.scan import MarkedText, Marks, TextParser


def json_call(call: WritableCall, key: str = "arguments") -> str:
    """Return the call as one JSON object."""
    return json.dumps({"name": call.name, key: dict(call.arguments)}, ensure_ascii=False)


def _cohere_form(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object of a Cohere call with the usual names of its fields, and without the id."""
    if "tool_name" not in value:
        return call_object(value)
    return {"name": value["tool_name"], **{key: value[key] for key in ("arguments", "parameters") if key in value}}


def _inkling_form(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object of an Inkling call with the usual name of the field for the arguments."""
    return {"name": value.get("name"), "arguments": value["args"]} if "args" in value else call_object(value)


def _apertus_form(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object of an Apertus call, whose only key is the tool's name, in the usual form."""
    if len(value) != 1:
        return call_object(value)
    ((name, arguments),) = value.items()
    return {"name": name, "arguments": arguments}


def _cohere_object(number: int, call: WritableCall) -> Mapping[str, Any]:
    return {"tool_call_id": str(number), "tool_name": call.name, "parameters": dict(call.arguments)}


@dataclass(frozen=True)
class Tags:
    """The marks of a format around its objects, and the names of the objects' fields."""

    opening: str
    """A pattern of the mark before the objects."""
    closing: str
    """A pattern of the mark after the objects, which may be missing."""
    write: Callable[[Sequence[WritableCall]], str]
    """Writes the calls as the format's chat template does."""
    form: Form = call_object
    """Returns an object of the format in the usual form."""
    aside: str = ""
    """A pattern of the format's other marks, which are not content."""

    def parser(self, name: str) -> TextParser:
        """Return the parser of this format."""
        return TextParser(name, self.marks.compile(), self.read, self.write)

    @property
    def marks(self) -> Marks:
        """Return the marks of this format."""
        return Marks(self.opening, "|".join(filter(None, (self.closing, self.aside))))

    def read(self, source: MarkedText, mark: re.Match[str]) -> tuple[list[Item], int]:
        """Read the object, or objects, between two tags; see `scan.Reader`."""
        items, end = read_objects(source, mark.start(), mark.end(), self.form)
        tag = self._closing_pattern.match(source.text, end)
        if not items or tag is None:
            return items, end
        return [*items[:-1], replace(items[-1], raw=source.text[items[-1].start : tag.end()])], tag.end()

    @cached_property
    def _closing_pattern(self) -> re.Pattern[str]:
        return re.compile(rf"\s*+(?:{self.closing})")


def _one_by_one(before: str, after: str, key: str = "arguments", joint: str = "\n") -> Callable[..., str]:
    return lambda calls: joint.join(f"{before.format(name=c.name)}{json_call(c, key)}{after}" for c in calls)


def _list(before: str, after: str, each: Callable[[int, WritableCall], Any] | None = None) -> Callable[..., str]:
    form = each or (lambda number, call: {"name": call.name, "arguments": dict(call.arguments)})
    return lambda calls: before + json.dumps([*map(form, range(len(calls)), calls)], ensure_ascii=False) + after


# The format is `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
HERMES = Tags("<tool_call>", "</tool_call>", _one_by_one("<tool_call>\n", "\n</tool_call>"))
hermes = partial(HERMES.parser, "hermes")
qwen = partial(HERMES.parser, "qwen")
LONGCAT = Tags(
    "<longcat_tool_call>", "</longcat_tool_call>", _one_by_one("<longcat_tool_call>\n", "\n</longcat_tool_call>")
)
longcat = partial(LONGCAT.parser, "longcat")
# The format of `hermes`, with `<response>` tags around the content. Source: vLLM's parser of this name, and its tests.
ernie45 = partial(replace(HERMES, aside="</?response>").parser, "ernie45")
# Granite 3; Granite 4 writes as `hermes`. Source: vLLM's parsers `granite` and `granite4`, and their tests.
GRANITE = Tags(r"<\|tool_call\|>|<tool_call>", "</tool_call>", _list("<|tool_call|>", ""))
granite = partial(GRANITE.parser, "granite")
# The Granite model for calls with 20 billion parameters. Source: vLLM's parser of this name.
GRANITE_20B = Tags("<function_call>", "(?!)", _one_by_one("<function_call> ", ""))
granite_20b_fc = partial(GRANITE_20B.parser, "granite_20b_fc")
# `functools[…]`, or the list between marks. Source: vLLM's parser of this name; the tokens of the model's template.
PHI = Tags(r"\bfunctools(?=\s*+\[)|<\|tool_call\|>", r"<\|/tool_call\|>", _list("functools", ""), aside=r"<\|end\|>")
phi4_mini_json = partial(PHI.parser, "phi4_mini_json")
# Also Jamba. Source: the tests of vLLM's parsers.
HUNYUAN_A13B = Tags("<tool_calls>", "</tool_calls>", _list("<tool_calls>", "</tool_calls>"), aside="</?answer>")
hunyuan_a13b = partial(HUNYUAN_A13B.parser, "hunyuan_a13b")
# The ids are not kept, because they only count the calls. Source: the chat template of Command R7B.
COHERE = Tags(
    r"<\|START_ACTION\|>",
    r"<\|END_ACTION\|>",
    _list("<|START_ACTION|>", "<|END_ACTION|>", _cohere_object),
    _cohere_form,
    r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>",
)
cohere = partial(COHERE.parser, "cohere")
# The tool's name is an object's only key. Source: vLLM's parser of this name.
APERTUS = Tags(
    r"<\|tools_prefix\|>",
    r"<\|tools_suffix\|>",
    _list("<|tools_prefix|>", "<|tools_suffix|>", lambda _, call: {call.name: dict(call.arguments)}),
    _apertus_form,
)
apertus = partial(APERTUS.parser, "apertus")
# Source: the chat template of Nemotron Nano 9B v2.
NEMOTRON = Tags("<TOOLCALL>", "</TOOLCALL>", _list("<TOOLCALL>", "</TOOLCALL>"))
nemotron_nano_v2 = partial(NEMOTRON.parser, "nemotron_nano_v2")
# A message to a function, or a mark of its own in later versions. Source: SGLang's detector.
GIGACHAT = Tags(
    r"\bfunction call<\|role_sep\|>|<\|function_call\|>",
    r"<\|message_sep\|>",
    _one_by_one("function call<|role_sep|>\n", "<|message_sep|>"),
    aside=r"assistant<\|role_sep\|>",
)
gigachat3 = partial(GIGACHAT.parser, "gigachat3")
# InternLM 2 and Intern-S1. Source: the format that SGLang's detector describes.
INTERN = Tags(
    r"<\|action_start\|>\s*+<\|plugin\|>",
    r"<\|action_end\|>",
    _one_by_one("<|action_start|> <|plugin|>\n", "<|action_end|>", "parameters"),
)
interns1 = partial(INTERN.parser, "interns1")
# Source: the format that SGLang's detector describes.
INKLING = Tags(
    r"(?:<\|message_model\|>[^<]*+)?<\|content_invoke_tool_json\|>",
    r"<\|end_message\|>",
    _one_by_one("<|message_model|>{name}<|content_invoke_tool_json|>", "<|end_message|>", "args", ""),
    _inkling_form,
    r"<\|message_model\|>|<\|content_text\|>",
)
inkling = partial(INKLING.parser, "inkling")

_NEXT = re.compile(r'\s*+[,;]?\s*+(?=\{\s*+"(?:name|id|type|arguments|parameters)")')
_NEXT_LISTED = re.compile(r'\s*+[,;]\s*+(?=\{\s*+")')
_NAMED = r'"(?:tool_)?name"\s*+:\s*+"([^"\\]{1,256}+)"|"([^"\\]{1,256}+)"\s*+:\s*+\{'
_ANEW = re.compile(
    rf'(?:[,;]\s*+|\n[ \t]*+)(?=\{{\s*+(?:"tool_call_id"\s*+:\s*+"[^"\\]{{0,64}}+"\s*+,\s*+)?(?:{_NAMED}))'
)
"""Matches the text before a call that follows a broken one. The match counts only if this call names a tool."""


def read_objects(source: MarkedText, start: int, position: int, form: Form = call_object) -> tuple[list[Item], int]:
    """Read call objects, which follow each other or form a list, from `position` on.

    If an object is broken, the objects after it are still read, if a tool's name shows where the next one begins.

    Args:
        start: the position at which the text of the first call begins, such as that of a tag before the object.
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
        return source.report_broken(start, position, "the call is not a JSON object")
    while True:
        found = extent(text, here)
        if found.whole:
            items.append(read_call(text, start, here, found.end, form))
            following = _NEXT.match(text, found.end) or (_NEXT_LISTED.match(text, found.end) if listed else None)
            if following is None:
                break
            start = here = following.end()
        else:
            problem, here = _report_unfinished_object(source, start, here, found.end, form)
            items.append(problem)
            start = here
            if not text.startswith("{", here):
                return items, here
    bracket = skip_space(text, found.end)
    return items, bracket + 1 if listed and text.startswith("]", bracket) else found.end


def _report_unfinished_object(source: MarkedText, start: int, here: int, position: int, form: Form) -> tuple[Item, int]:
    """Return the problem of an object that has no end, and the position of the next object, or else of the next
    mark."""
    mark = source.next_mark(position)
    limit = mark.start() if mark else len(source.text)
    for found in _ANEW.finditer(source.text, position, limit):
        if (found[1] or found[2]) in source.tools:
            return _without_end(source, start, here, found.start(), form), found.end()
    return _without_end(source, start, here, limit, form), limit


def _without_end(source: MarkedText, start: int, here: int, end: int, form: Form) -> Item:
    if source.explains(here, end):
        return read_call(source.text, start, here, end, form)
    return ParseProblem("the call is not valid JSON", source.text[start:end], start)
