"""The format `auto`: the marks of each call show in which format it is read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hermes_core.agents.parsers import arguments, gemma, harmony, hermes, llama, mistral, nested, pythonic, xml
from hermes_core.agents.parsers.base import ParsedText, ToolSchemas, WritableCall
from hermes_core.agents.parsers.jsontext import Item
from hermes_core.agents.parsers.scan import MarkedText, Marks, Reader, TextParser


@dataclass(frozen=True)
class _Format:
    """A format that is recognised by its marks."""

    signs: tuple[str, ...]
    """Each text that has a call in this format contains at least one of these texts."""
    marks: Marks
    read: Reader


def _make_format(layout: xml.Layout, *signs: str) -> _Format:
    return _Format(signs, layout.shape.marks, layout.read)


def _objects(tags: hermes.Tags, *signs: str, follows: str = "") -> _Format:
    return _Format(signs, Marks(f"(?:{tags.opening}){follows}", tags.marks.others), tags.read)


_JSON_NEXT = r"(?=\s*+[\[{])"
_FORMATS = (
    _objects(hermes.HERMES, "<tool_call>", follows=_JSON_NEXT),
    _objects(hermes.HUNYUAN_A13B, "<tool_calls>", follows=_JSON_NEXT),
    _make_format(xml.HUNYUAN, "<tool_sep"),
    _Format(
        ("<tool_call>",),
        Marks(rf"{xml.GLM.shape.marks.opener}(?!\s*+<function=)", xml.GLM.shape.marks.others),
        xml.GLM.read,
    ),
    _make_format(xml.QWEN, "<function="),
    _make_format(xml.SEED, "<seed:tool_call>"),
    _make_format(xml.DOTS, "<dots_function_call>"),
    _make_format(xml.MINICPM, "<function name="),
    _make_format(xml.GCML, "<｜GCML｜"),
    _make_format(xml.MINIMAX, "<invoke name=", "<minimax:tool_call>"),
    _make_format(xml.DSML, "<｜DSML｜"),
    _make_format(xml.KIMI3, "<|sep|>"),
    _make_format(xml.STEP3, "<steptml:", "<｜tool_call"),
    _Format(("]<]minimax[>[",), nested.MARKS, nested.read),
    _objects(hermes.LONGCAT, "<longcat_tool_call>"),
    _objects(hermes.PHI, "functools", "<|tool_call|>"),
    _objects(hermes.COHERE, "<|START_ACTION|>"),
    _objects(hermes.APERTUS, "<|tools_prefix|>"),
    _objects(hermes.NEMOTRON, "<TOOLCALL>"),
    _objects(hermes.GIGACHAT, "<|role_sep|>", "<|function_call|>"),
    _objects(hermes.GRANITE_20B, "<function_call>", follows=_JSON_NEXT),
    _objects(hermes.INTERN, "<|plugin|>"),
    _objects(hermes.INKLING, "<|content_invoke_tool_json|>"),
    _Format(("<|tool_call:begin|>",), arguments.SOLAR_MARKS, arguments.read_solar),
    _Format(("[TOOL_CALLS]",), Marks(mistral.OPENER), mistral.read_mistral),
    _Format(("<｜tool▁call",), arguments.DEEPSEEK_MARKS, arguments.read_deepseek),
    _Format(("<|tool_call",), arguments.KIMI_MARKS, arguments.read_kimi),
    _Format(("<|tool_call>",), gemma.GEMMA4.marks, gemma.GEMMA4.read),
    _Format(("<start_function_call>",), gemma.FUNCTION_GEMMA.marks, gemma.FUNCTION_GEMMA.read),
    _Format(("<|message|>", "<|channel|>", "<|call|>", "to=functions."), harmony.MARKS, harmony.read_harmony),
    _Format(
        ("<|python_start|>",),
        Marks(r"<\|python_start\|>(?=\s*+\[\s*+[^\s{\]])", r"<\|python_end\|>"),
        pythonic.read_marked,
    ),
    _Format(("<|python_",), llama.TAG_MARKS, llama.read_llama),
    _Format(("<|tool_call_start|>",), pythonic.LFM_MARKS, pythonic.read_marked),
    _Format(("<function_calls>",), pythonic.OLMO_MARKS, pythonic.read_marked),
)
"""All formats with marks. If the opening marks of several formats fit, the first of them reads the call."""


@dataclass(frozen=True)
class AutoParser:
    """Reads each call in the format of its marks. An answer without marks is read as bare JSON or Python, as Llama
    writes them."""

    name: str
    bare: tuple[TextParser, ...]

    def parse(self, text: str, tools: ToolSchemas = ()) -> ParsedText:
        """Split one answer into its parts; see `Parser.parse`."""
        there = tuple(number for number, each in enumerate(_FORMATS) if any(sign in text for sign in each.signs))
        parsed = _parser_of(there).parse(text, tools)
        if parsed.calls or parsed.problems:
            return parsed
        found = (each.parse(text, tools) for each in self.bare)
        return next((each for each in found if each.calls or each.problems), parsed)

    def render(self, calls: Sequence[WritableCall]) -> str:
        """Return the calls in the `hermes` format."""
        return hermes.HERMES.write(calls)


def auto() -> AutoParser:
    """Return a parser that reads all other formats."""
    return AutoParser("auto", (llama.llama3_json(), pythonic.pythonic()))


@lru_cache(maxsize=256)
def _parser_of(numbers: tuple[int, ...]) -> TextParser:
    """Return one parser for these formats of `_FORMATS`. Searching for fewer formats takes less time, and a text has
    the marks of only a few."""
    formats = {f"format{number}": _FORMATS[number] for number in numbers}
    marks = Marks(
        "|".join(f"(?P<{name}>{each.marks.opener})" for name, each in formats.items()) or r"(?!)",
        "|".join(dict.fromkeys(each.marks.others for each in formats.values() if each.marks.others)),
        {**harmony.MARKS.thinking, **arguments.SOLAR_MARKS.thinking},
    )

    def read(source: MarkedText, mark: re.Match[str]) -> tuple[list[Item], int]:
        name = next(name for name in formats if mark[name] is not None)
        return formats[name].read(source, mark)

    return TextParser("auto", marks.compile(), read, hermes.HERMES.write, marks.thinking)
