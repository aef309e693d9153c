"""The formats that put marks around a tool's name and a JSON object: `deepseek_v3`, `deepseek_v3_1` and `kimi_k2`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from hermes_core.agents.parsers.base import ParsedCall, ParseProblem, WritableCall
from hermes_core.agents.parsers.jsontext import Item, extent, skip_space
from hermes_core.agents.parsers.scan import THINKING, MarkedText, Marks, Reader, TextParser
from hermes_core.agents.replies import decode_arguments

NAME = r"[^\s<>{}\[\]\"'`|｜,;]{1,256}+"
"""A pattern of a tool's name, or of an id: characters that can't belong to the marks around it."""


def deepseek_v3() -> TextParser:
    """Return the parser of DeepSeek V3 and R1.

    The models write `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, and the arguments in a fenced block.
    """

    def write(calls: Sequence[WritableCall]) -> str:
        return _deepseek_section(
            f"function<｜tool▁sep｜>{call.name}\n```json\n{json_arguments(call)}\n```" for call in calls
        )

    return TextParser("deepseek_v3", DEEPSEEK_MARKS.compile(), read_fenced_deepseek, write)


def deepseek_v3_1() -> TextParser:
    """Return the parser of DeepSeek V3.1: `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`."""

    def write(calls: Sequence[WritableCall]) -> str:
        return _deepseek_section(f"{call.name}<｜tool▁sep｜>{json_arguments(call)}" for call in calls)

    return TextParser("deepseek_v3_1", DEEPSEEK_MARKS.compile(), read_deepseek, write)


def kimi_k2() -> TextParser:
    """Return the parser of Kimi K2.

    The model writes `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`.

    The text before the arguments is the call's id, and is kept unchanged.
    """

    def write(calls: Sequence[WritableCall]) -> str:
        bodies = (
            f"<|tool_call_begin|>{getattr(call, 'id', None) or f'functions.{call.name}:{index}'}"
            f"<|tool_call_argument_begin|>{json_arguments(call)}<|tool_call_end|>"
            for index, call in enumerate(calls)
        )
        return f"<|tool_calls_section_begin|>{''.join(bodies)}<|tool_calls_section_end|>"

    return TextParser("kimi_k2", KIMI_MARKS.compile(), read_kimi, write)


def json_arguments(call: WritableCall) -> str:
    """Return the call's arguments as JSON."""
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def read_arguments(
    source: MarkedText, start: int, position: int, *, name: str, closing: re.Pattern[str], identifier: str | None = None
) -> tuple[list[Item], int]:
    """Read the arguments of the call `name`, from `position` on. If a mark comes first, the call has no arguments.

    Args:
        closing: matches the text that may follow the arguments. It has to match at any position, perhaps nothing.
    """
    text = source.text
    here = skip_space(text, position)
    found = extent(text, here) if text.startswith(("{", '"'), here) else None
    if found is not None and found.whole:
        inside = end = found.end
    else:
        mark = source.next_mark(position)
        inside = end = mark.start() if mark else len(text)
        if mark is None and not text[here:inside].strip():
            return source.report_broken(start, position, "the answer ended before the call's arguments", name)
    behind = closing.match(text, inside)
    end = behind.end() if behind else inside
    raw = text[start:end]
    if found is not None and not found.whole and not source.explains(here, inside):
        return [ParseProblem("the arguments are not valid JSON", raw, start, name)], end
    arguments, error, repaired = decode_arguments(text[here:inside])
    if arguments is None:
        return [ParseProblem(str(error), raw, start, name)], end
    return [ParsedCall(name, arguments, raw, start, identifier, repaired)], end


DEEPSEEK_MARKS = Marks(
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>|<｜tool▁calls▁begin｜>|<｜tool▁calls▁end｜>|<｜tool▁sep｜>"
)
KIMI_MARKS = Marks(
    r"<\|tool_call_begin\|>",
    r"<\|tool_call_end\|>|<\|tool_call_argument_begin\|>|<\|tool_calls?_section_(?:begin|end)\|>",
)
_DEEPSEEK_HEAD = re.compile(rf"\s*+({NAME})\s*+<｜tool▁sep｜>\s*+")
_FENCED_HEAD = re.compile(rf"({NAME})\s*+(```(?:json)?\s*+)?")
_DEEPSEEK_CLOSING = re.compile(r"(?:\s*+```)?(?:\s*+<｜tool▁call▁end｜>)?")


def _deepseek_reader(*, fenced: bool) -> Reader:
    """Return a reader of both versions. If a call has no visible arguments, `fenced` decides which version it has."""

    def read(source: MarkedText, mark: re.Match[str]) -> tuple[list[Item], int]:
        head = _DEEPSEEK_HEAD.match(source.text, mark.end())
        if head is None:
            return source.report_broken(mark.start(), mark.end(), "the call has no tool's name and separator")
        name, position = head[1], head.end()
        block = _FENCED_HEAD.match(source.text, position)
        if block is not None and (fenced or block[2]):
            name, position = block[1], block.end()
        return read_arguments(source, mark.start(), position, name=name, closing=_DEEPSEEK_CLOSING)

    return read


read_fenced_deepseek = _deepseek_reader(fenced=True)
read_deepseek = _deepseek_reader(fenced=False)


def _deepseek_section(bodies: Iterable[str]) -> str:
    calls = "\n".join(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>" for body in bodies)
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


_SOLAR_HEAD = re.compile(rf"[^<]{{0,64}}+<\|tool_call:name\|>\s*+({NAME})\s*+<\|tool_call:args\|>")
_SOLAR_CLOSING = re.compile(r"(?:\s*+<\|tool_call:end\|>)?")
SOLAR_MARKS = Marks(
    r"<\|tool_call:begin\|>",
    r"<\|tool_call(?::end|s)\|>|<\|begin\|>assistant|<\|(?:content|end|calls|flush)\|>",
    {**THINKING, "<|think|>": "<|end|>"},
)


def solar_open() -> TextParser:
    """Return the parser of Solar Open.

    The model writes `<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{…}<|tool_call:end|>`. Source: the
    tokens of the model's template.
    """

    def write(calls: Sequence[WritableCall]) -> str:
        bodies = (
            f"<|tool_call:begin|>{index}<|tool_call:name|>{call.name}<|tool_call:args|>{json_arguments(call)}"
            "<|tool_call:end|>"
            for index, call in enumerate(calls)
        )
        return f"<|tool_calls|>{''.join(bodies)}<|calls|>"

    return TextParser("solar_open", SOLAR_MARKS.compile(), read_solar, write, SOLAR_MARKS.thinking)


def read_solar(source: MarkedText, mark: re.Match[str]) -> tuple[list[Item], int]:
    """Read one call of Solar Open."""
    head = _SOLAR_HEAD.match(source.text, mark.end())
    if head is None:
        return source.report_broken(mark.start(), mark.end(), "the call has no name and arguments")
    return read_arguments(source, mark.start(), head.end(), name=head[1], closing=_SOLAR_CLOSING)


_KIMI_HEAD = re.compile(rf"\s*+({NAME})\s*+<\|tool_call_argument_begin\|>")
_KIMI_NAME = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
_KIMI_ALIKE = re.compile(r"(?:functions|call)[._]?(.+?)[:_]?\d*")
_KIMI_CLOSING = re.compile(r"(?:\s*+<\|tool_call_end\|>)?")


def read_kimi(source: MarkedText, mark: re.Match[str]) -> tuple[list[Item], int]:
    """Read one call of Kimi K2."""
    head = _KIMI_HEAD.match(source.text, mark.end())
    name = _kimi_name(head[1], source) if head else ""
    if head is None or not name:
        return source.report_broken(mark.start(), mark.end(), "the call has no id and arguments")
    return read_arguments(source, mark.start(), head.end(), name=name, closing=_KIMI_CLOSING, identifier=head[1])


def _kimi_name(identifier: str, source: MarkedText) -> str:
    """Return the tool's name in a call's id.

    Kimi copies the form of the ids in its prompt: `functions_NAME_0`, `call_NAME_0` and `functionsNAME0` occur. An id
    is read in one of these forms only if the result is the name of a tool.
    """
    proper, alike = _KIMI_NAME.fullmatch(identifier), _KIMI_ALIKE.fullmatch(identifier)
    if proper and proper[1] not in source.tools and alike and alike[1] in source.tools:
        return alike[1]
    return proper[1] if proper else ""
