"""The formats that write calls as Python does: `pythonic`, `llama4_pythonic`, `lfm2` and `olmo3`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hermes_core.agents.parsers.base import ParsedCall, ParseProblem, WritableCall
from hermes_core.agents.parsers.hermes import read_objects
from hermes_core.agents.parsers.jsontext import Item, skip_space
from hermes_core.agents.parsers.literals import Literals, NotRead
from hermes_core.agents.parsers.llama import leads
from hermes_core.agents.parsers.scan import MarkedText, Marks, Reader, TextParser

_NAME = r"[^\s()\[\]{}<>|,:=;'\"`]{1,256}+"
_HEAD = re.compile(rf"\s*+({_NAME})\s*+\(")
_BETWEEN = re.compile(r"\s*+[,;]?\s*+")
_ANEW = re.compile(rf"(?:[,;]\s*+|\n\s*+|\[)(?=({_NAME})\()")
_TOO_MANY = "too many calls are broken: neither this one nor the rest of the answer was read"
_KEY = re.compile(r"[^\s(){}\[\]:=,<>'\"*]{1,256}+")
_PLAIN_KEY = re.compile(r"[^\W\d]\w{0,255}+")


def _ends_at(quote: str) -> re.Pattern[str]:
    """Return a pattern of a closing quote: no backslash escapes it, and it is no apostrophe inside a word."""
    apostrophe = r"(?!(?<=\w')\w)" if quote == "'" else ""
    return re.compile(rf"(?<!\\)(?:\\\\)*+{quote}{apostrophe}")


_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}


def _unescape(text: str) -> str:
    return _ESCAPE.sub(_meaning, text) if "\\" in text else text


def _meaning(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2] or escape[3]
    if code is None:
        letter = escape[4]
        return _LETTERS.get(letter, letter if letter in "\\'\"" else f"\\{letter}")
    number = int(code, 16)
    return chr(number) if number <= 0x10FFFF else escape[0]


PYTHON = Literals({quote: _ends_at(quote) for quote in ('"""', "'''", "'", '"')}, _KEY, _unescape, "**")

OPENER = rf"\[(?=\s*+{_NAME}\(\s*+(?:[\w.$-]{{1,256}}+\s*+=|\)|\*\*|['\"]))"
LLAMA_MARKS = Marks(r"<\|python_start\|>", r"<\|python_end\|>")
LFM_MARKS = Marks(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>")
OLMO_MARKS = Marks("<function_calls>", "</function_calls>")


def pythonic() -> TextParser:
    """Return the parser of Llama 3.2 and ToolACE, which write `[f(key="value"), g()]` without marks.

    Source: Meta's page on Llama 3.2's prompt format.
    """
    return TextParser("pythonic", Marks(OPENER).compile(), read_bare, _make_writer(json_like=False))


def llama4_pythonic() -> TextParser:
    """Return the parser of Llama 4's calls in Python: the format `pythonic`, perhaps behind `<|python_start|>`.

    Source: the tests of vLLM's parser of this name.
    """
    marks = Marks(f"{LLAMA_MARKS.opener}|{OPENER}", LLAMA_MARKS.others)
    read = _either(read_marked, read_bare)
    return TextParser("llama4_pythonic", marks.compile(), read, _make_writer(json_like=False))


def lfm2() -> TextParser:
    """Return the parser of LFM2 and LFM2.5: the list between `<|tool_call_start|>` and `<|tool_call_end|>`.

    Their chat templates do not escape quotes in texts, so an apostrophe inside a word does not end a text.

    Source: the chat template of LFM2.5.
    """
    write = _make_writer(json_like=False, around=("<|tool_call_start|>[", "]<|tool_call_end|>"))
    return TextParser("lfm2", LFM_MARKS.compile(), read_marked, write)


def olmo3() -> TextParser:
    """Return the parser of OLMo 3: a call on each line between `<function_calls>` tags.

    The model may write JSON's `true`, `false` and `null`. Source: the tests of vLLM's parser of this name.
    """
    write = _make_writer(json_like=True, around=("<function_calls>", "</function_calls>"), joint="\n")
    return TextParser("olmo3", OLMO_MARKS.compile(), read_marked, write)


def read_marked(source: MarkedText, mark: re.Match[str]) -> tuple[list[Item], int]:
    """Read the calls after a mark. Some of these models write JSON objects instead, which are read, too."""
    here = skip_space(source.text, mark.end())
    inside = skip_space(source.text, here + 1) if source.text.startswith("[", here) else here
    if source.text.startswith("{", inside):
        return read_objects(source, mark.start(), here)
    return _calls(source, mark.start(), here)


def read_bare(source: MarkedText, mark: re.Match[str]) -> tuple[list[Item], int]:
    """Read the text in brackets at a mark, if it is a list of calls.

    It is a list of calls if it names a tool, or if it could be read and only reasoning comes before it in the answer.
    Anything else is an example in prose, or a link.
    """
    items, end = _calls(source, mark.start(), mark.start())
    known = items[0].name in source.tools
    readable = all(isinstance(item, ParsedCall) for item in items)
    return (items if known or (readable and leads(source.text, mark.start())) else []), end


def _either(marked: Reader, bare: Reader) -> Reader:
    return lambda source, mark: (marked if mark[0].startswith("<") else bare)(source, mark)


def _calls(source: MarkedText, start: int, position: int) -> tuple[list[Item], int]:
    """Read calls, perhaps in brackets, from `position` on. The first call's text begins at `start`.

    After a broken call, the other calls are still read, if a tool's name shows where the next one begins.
    """
    text = source.text
    items: list[Item] = []
    listed = text.startswith("[", position)
    position += listed
    while (head := _HEAD.match(text, position)) is not None:
        name = head[1]
        try:
            arguments, end = PYTHON.members(source, head.end(), ")", "=")
            items.append(ParsedCall(name, arguments, text[start:end], start))
        except NotRead as error:
            if source.gives_up():
                return [*items, ParseProblem(_TOO_MANY, text[start:], start, name)], len(text)
            end = _anew(source, max(error.position, head.end()))
            items.append(ParseProblem(str(error), text[start:end], start, name))
        start = position = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]  # it matches anywhere
        if listed and text.startswith("]", end):
            return items, end + 1
    return (
        (items, end)
        if items
        else source.report_broken(start, position, "the calls are not of the form NAME(key=value)")
    )


def _anew(source: MarkedText, position: int) -> int:
    """Return the position of the next call after a broken one, or else of the next mark."""
    mark = source.next_mark(position)
    limit = mark.start() if mark else len(source.text)
    known = (found for found in _ANEW.finditer(source.text, position, limit) if found[1] in source.tools)
    found = next(known, None)
    return found.start() if found else limit


def _make_writer(
    *, json_like: bool, around: tuple[str, str] = ("[", "]"), joint: str = ", "
) -> Callable[[Sequence[WritableCall]], str]:
    def text(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False) if json_like else repr(value)

    def arguments(call: WritableCall) -> Iterable[str]:
        odd = {}
        for key, value in call.arguments.items():
            if _PLAIN_KEY.fullmatch(key):
                yield f"{key}={text(value)}"
            else:
                odd[key] = value
        if odd:
            yield f"**{text(odd)}"

    def write(calls: Sequence[WritableCall]) -> str:
        return joint.join(f"{call.name}({', '.join(arguments(call))})" for call in calls).join(around)

    return write
