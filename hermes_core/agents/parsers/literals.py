"""Values in formats other than JSON: Python's literals, and Gemma's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hermes_core.agents.parsers.jsontext import skip_space
from hermes_core.agents.parsers.scan import MarkedText

_BARE = re.compile(r"[^\s,:=(){}\[\]<>'\"]{1,64}+")
_WORDS = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}
_LISTS = {"[": "]", "(": ")"}
_MAX_DEPTH = 50


class NotRead(Exception):
    """The text is not a value of this format; `position` is the place of the fault."""

    def __init__(self, position: int, problem: str) -> None:
        super().__init__(problem)
        self.position = position


@dataclass(frozen=True)
class Literals:
    """Reads the values of a format. All methods return a value and the position after it, or raise `NotRead`."""

    quotes: Mapping[str, re.Pattern[str]]
    """For each opening quote of a text value, a pattern that finds the end of the value. A quote that begins with
    another quote comes before the shorter one."""
    key: re.Pattern[str]
    """Matches a key without quotes."""
    unescape: Callable[[str], str] = str
    """Returns the value of the text between two quotes."""
    unpack: str = ""
    """The mark before a mapping whose members belong to the mapping around it, such as Python's `**`."""

    def members(
        self, source: MarkedText, position: int, closing: str, sign: str, depth: int = 1
    ) -> tuple[dict[str, Any], int]:
        """Read keys and values up to the closing bracket. `sign` is the sign between a key and its value."""
        text = source.text
        values: dict[str, Any] = {}
        position = skip_space(text, position)
        while not text.startswith(closing, position):
            if self.unpack and text.startswith(self.unpack, position):
                begin = position + len(self.unpack)
                inner, position = self.value(source, begin, depth)
                if not isinstance(inner, Mapping):
                    raise NotRead(position, "an argument has no name")
                values.update(inner)
            else:
                name, position = self._name(source, position, sign)
                begin = _expect(text, position, sign)
                values[name], position = self.value(source, begin, depth)
            position = self._next(text, begin, position, closing)
        return values, position + 1

    def value(self, source: MarkedText, position: int, depth: int = 1) -> tuple[Any, int]:
        """Read the value that begins at `position`."""
        text = source.text
        position = skip_space(text, position)
        if depth > _MAX_DEPTH:
            raise NotRead(position, "the arguments are nested too deep")
        quote = self._quote(text, position)
        if quote:
            return self._text(source, position + len(quote), quote)
        if text.startswith("{", position):
            return self.members(source, position + 1, "}", ":", depth + 1)
        if text.startswith(tuple(_LISTS), position):
            return self._items(source, position + 1, _LISTS[text[position]], depth + 1)
        return self._scalar(text, position)

    def _items(self, source: MarkedText, position: int, closing: str, depth: int) -> tuple[list[Any], int]:
        values = []
        position = skip_space(source.text, position)
        while not source.text.startswith(closing, position):
            begin = position
            value, position = self.value(source, begin, depth)
            values.append(value)
            position = self._next(source.text, begin, position, closing)
        return values, position + 1

    def _name(self, source: MarkedText, position: int, sign: str) -> tuple[str, int]:
        quote = self._quote(source.text, position)
        if quote and sign == ":":
            return self._text(source, position + len(quote), quote)
        key = self.key.match(source.text, position)
        if key is None:
            raise NotRead(position, "an argument has no name")
        return key[0], key.end()

    def _quote(self, text: str, position: int) -> str:
        quote = self._quotes.match(text, position)
        return quote[0] if quote else ""

    @cached_property
    def _quotes(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.quotes)))

    def _next(self, text: str, begin: int, end: int, closing: str) -> int:
        """Return the position after a comma, or at the closing bracket, behind the value `text[begin:end]`.

        If neither follows, and the value is a text, the fault is reported at the text's beginning, because the quote
        that was taken for its end may belong to another text.
        """
        position = skip_space(text, end)
        if text.startswith(closing, position):
            return position
        return _expect(text, position, ",", begin if self._quote(text, begin) else position)

    def _text(self, source: MarkedText, begin: int, quote: str) -> tuple[str, int]:
        end = source.search(self.quotes[quote], begin)
        if end is None:
            raise NotRead(begin, "a text has no end")
        return self.unescape(source.text[begin : end.end() - len(quote)]), end.end()

    def _scalar(self, text: str, position: int) -> tuple[Any, int]:
        bare = _BARE.match(text, position)
        if bare is None:
            raise NotRead(position, "an argument has no value")
        if bare[0] in _WORDS:
            return _WORDS[bare[0]], bare.end()
        try:
            number = json.loads(bare[0], parse_constant=float)
        except ValueError:
            raise NotRead(position, f"a text has to stand between {list(self.quotes)[-1]}") from None
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise NotRead(position, f"{bare[0]} is not a number")
        return number, bare.end()


def _expect(text: str, position: int, sign: str, fault: int | None = None) -> int:
    """Return the position after a sign and white space. If the sign is missing, raise `NotRead` with the position
    `fault`, or else with the sign's."""
    position = skip_space(text, position)
    if not text.startswith(sign, position):
        problem = f"{sign!r} is missing after an argument's name or value"
        raise NotRead(position if fault is None else fault, problem)
    return skip_space(text, position + 1)
