"""The format `auto`: each call is read in the format that its marks are of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hermes_core.agents.parsers import arguments, gemma, harmony, hermes, llama, mistral, xml
from hermes_core.agents.parsers.base import ParsedText, ToolSchemas, WritableCall
from hermes_core.agents.parsers.jsontext import Item, skip_space
from hermes_core.agents.parsers.scan import Marks, Reader, Source, TextParser


@dataclass(frozen=True)
class AutoParser:
    """Reads marked calls by their marks. An answer without marks may be bare JSON, as Llama writes it."""

    name: str
    marked: TextParser
    bare: TextParser

    def parse(self, text: str, tools: ToolSchemas = ()) -> ParsedText:
        """Take one answer apart; see `base.Parser`."""
        parsed = self.marked.parse(text, tools)
        if parsed.calls or parsed.problems:
            return parsed
        bare = self.bare.parse(text, tools)
        return bare if bare.calls or bare.problems else parsed

    def render(self, calls: Sequence[WritableCall]) -> str:
        """Return the calls in the `hermes` format."""
        return self.marked.render(calls)


def auto() -> AutoParser:
    """Return a parser of all other formats. What follows `<tool_call>` decides which format it is."""
    marked = TextParser("auto", _MARKS.compiled(), _read, hermes.hermes().write, _MARKS.thinking)
    return AutoParser("auto", marked, llama.llama3_json())


_BY_MARK: dict[str, Reader] = {
    "<longcat_tool_call>": hermes.json_reader("</longcat_tool_call>"),
    "[TOOL_CALLS]": mistral.read_mistral,
    "<｜tool▁call▁begin｜>": arguments.read_deepseek,
    "<|tool_call_begin|>": arguments.read_kimi,
    "<|tool_call>": gemma.read_gemma,
    "<|python_tag|>": llama.read_llama,
    "<|python_start|>": llama.read_llama,
}

_FORMATS = (
    Marks("|".join(map(re.escape, _BY_MARK)), "</longcat_tool_call>"),
    gemma.MARKS,
    harmony.MARKS,
    xml.QWEN_MARKS,
    arguments.DEEPSEEK_MARKS,
    arguments.KIMI_MARKS,
    llama.TAG_MARKS,
)
_MARKS = Marks("|".join(m.opener for m in _FORMATS), "|".join(m.others for m in _FORMATS), harmony.MARKS.thinking)
_read_json = hermes.json_reader("</tool_call>")


def _read(source: Source, mark: re.Match[str]) -> tuple[list[Item], int]:
    if mark[0] in _BY_MARK:
        return _BY_MARK[mark[0]](source, mark)
    if mark[0].endswith("to="):
        return harmony.read_harmony(source, mark)
    if mark[0] != "<tool_call>":
        return xml.read_qwen(source, mark)
    is_json = source.text.startswith(("{", "["), skip_space(source.text, mark.end()))
    return (_read_json if is_json else xml.read_glm)(source, mark)
