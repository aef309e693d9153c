"""The formats `gemma4` and `functiongemma`: `call:NAME{key:value,…}` between marks, with a token around each text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hermes_core.agents.parsers.base import ParsedCall, WritableCall
from hermes_core.agents.parsers.jsontext import Item
from hermes_core.agents.parsers.literals import Literals, NotRead
from hermes_core.agents.parsers.scan import MarkedText, Marks, TextParser

_HEAD = re.compile(r"\s*+call:\s*+([^\s{}<>|:]{1,256}+)\s*+\{")
_KEY = re.compile(r"[^\s{}\[\]:,<>|\"]{1,256}+")
_PLAIN_KEY = re.compile(r"[\w.$-]{1,256}+")


def gemma4() -> TextParser:
    """Return the parser of Gemma 4. A text value can hold anything except its end token. Keys have no quotes."""
    return GEMMA4.parser("gemma4")


def functiongemma() -> TextParser:
    """Return the parser of FunctionGemma: the format of Gemma 4 with other tokens.

    Source: Google's page on the model's formatting.
    """
    return FUNCTION_GEMMA.parser("functiongemma")


@dataclass(frozen=True)
class FormatTokens:
    """The tokens of one version of the format."""

    opening: str
    closing: str
    quote: str

    def parser(self, name: str) -> TextParser:
        """Return the parser of this version."""
        return TextParser(name, self.marks.compile(), self.read, self.write)

    @property
    def marks(self) -> Marks:
        """Return the marks of this version."""
        return Marks(re.escape(self.opening), re.escape(self.closing))

    @cached_property
    def _literals(self) -> Literals:
        return Literals({self.quote: re.compile(re.escape(self.quote))}, _KEY)

    @cached_property
    def _closing(self) -> re.Pattern[str]:
        return re.compile(rf"\s*+{re.escape(self.closing)}")

    def write(self, calls: Sequence[WritableCall]) -> str:
        """Write one call after the other."""
        return "".join(
            f"{self.opening}call:{call.name}{self._write_value(call.arguments)}{self.closing}" for call in calls
        )

    def read(self, source: MarkedText, mark: re.Match[str]) -> tuple[list[Item], int]:
        """Read the call after the mark."""
        head = _HEAD.match(source.text, mark.end())
        if head is None:
            return source.report_broken(mark.start(), mark.end(), "the call is not of the form call:NAME{key:value}")
        try:
            arguments, end = self._literals.members(source, head.end(), "}", ":")
        except NotRead as error:
            return source.report_broken(mark.start(), max(error.position, head.end()), str(error), head[1])
        closing = self._closing.match(source.text, end)
        end = closing.end() if closing else end
        return [ParsedCall(head[1], arguments, source.text[mark.start() : end], mark.start())], end

    def _write_value(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, Mapping):
            pairs = (f"{self._key(key)}:{self._write_value(inner)}" for key, inner in sorted(value.items()))
            return "{" + ",".join(pairs) + "}"
        if isinstance(value, list | tuple):
            return "[" + ",".join(map(self._write_value, value)) + "]"
        return json.dumps(value)

    def _key(self, key: str) -> str:
        return key if _PLAIN_KEY.fullmatch(key) else self._write_value(key)


GEMMA4 = FormatTokens("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = FormatTokens("<start_function_call>", "<end_function_call>", "<escape>")
