"""The formats that tag each argument and write its value as bare text: `glm45`, `glm47` and `qwen3_coder`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_core.agents.parsers.base import ParsedCall, WritableCall
from hermes_core.agents.parsers.jsontext import Item
from hermes_core.agents.parsers.scan import THINKING, Marks, Reader, Source, TextParser
from hermes_core.agents.parsers.typed import Schema, property_schema, typed


def glm45() -> TextParser:
    """Return the parser of GLM 4.5 and 4.6.

    They write `<tool_call>NAME`, `<arg_key>K</arg_key>` and `<arg_value>V</arg_value>`, `</tool_call>`.
    """

    def body(call: WritableCall) -> str:
        pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{_glm_text(v)}</arg_value>\n" for k, v in call.arguments.items())
        return f"<tool_call>{call.name}\n{''.join(pairs)}</tool_call>"

    return _parser("glm45", GLM_MARKS, read_glm, body)


def glm47() -> TextParser:
    """Return the parser of GLM 4.7: the same without line breaks."""

    def body(call: WritableCall) -> str:
        pairs = (f"<arg_key>{k}</arg_key><arg_value>{_glm_text(v)}</arg_value>" for k, v in call.arguments.items())
        return f"<tool_call>{call.name}{''.join(pairs)}</tool_call>"

    return _parser("glm47", GLM_MARKS, read_glm, body)


def qwen3_coder() -> TextParser:
    """Return the parser of Qwen3-Coder.

    It writes `<tool_call><function=NAME><parameter=K>V</parameter></function></tool_call>`, each on a line of its own.
    """

    def body(call: WritableCall) -> str:
        pairs = (f"<parameter={k}>\n{_qwen_text(v)}\n</parameter>\n" for k, v in call.arguments.items())
        return f"<tool_call>\n<function={call.name}>\n{''.join(pairs)}</function>\n</tool_call>"

    return _parser("qwen3_coder", QWEN_MARKS, read_qwen, body)


@dataclass(frozen=True)
class Shape:
    """How a format tags calls and arguments."""

    head: re.Pattern[str]
    """Matches the tool's name, from the opening mark on."""
    key: re.Pattern[str]
    """Matches an argument's name, up to where its value begins."""
    inner_key: re.Pattern[str]
    """Matches an argument's name where it shows that the value before it was not closed."""
    inner_head: re.Pattern[str]
    """Matches the beginning of another call where it shows that the value before it was not closed."""
    closing: re.Pattern[str]
    """Matches what closes a value, at any place."""
    proper_closing: re.Pattern[str]
    """Matches what closes a value, if something that may follow a value comes next."""
    end: re.Pattern[str]
    """Matches what ends a call, from the end of its last argument on."""
    any_end: re.Pattern[str]
    """Matches what ends a call, at any place."""
    last_end: re.Pattern[str]
    """Matches what ends a call, if only another call or nothing follows."""
    lines: bool
    """Whether each value is on lines of its own."""


GLM_MARKS = Marks("<tool_call>", "</tool_call>")
QWEN_MARKS = Marks(r"<tool_call>(?:\s*+<function=)?|<function=", "</tool_call>|</function>")

_GLM = Shape(
    head=re.compile(r"\s*+([^\s<>{}]{1,256}+)(?=\s*+<)"),
    key=re.compile(r"\s*+<arg_key>([^<]{1,256}+)</arg_key>\s*+<arg_value>"),
    inner_key=re.compile(r"<arg_key>([^<]{1,256}+)</arg_key>\s*+<arg_value>"),
    inner_head=re.compile(r"<tool_call>\s*+[^\s<>{}]{1,256}+\s*+<arg_key>"),
    closing=re.compile("</arg_value>"),
    proper_closing=re.compile(r"</arg_value>(?=\s*+(?:<arg_key>|</?tool_call>|\Z))"),
    end=re.compile(r"\s*+</tool_call>"),
    any_end=re.compile("</tool_call>"),
    last_end=re.compile(r"</tool_call>(?=\s*+(?:<tool_call>\s*+[^\s<>{}]{1,256}+\s*+<(?:arg_key|/tool_call)>|\Z))"),
    lines=False,
)

_QWEN = Shape(
    head=re.compile(r"([^>\s]{1,256}+)\s*+>"),
    key=re.compile(r"\s*+<parameter=([^>\n]{1,256}+)>"),
    inner_key=re.compile(r"(?<=\n)<parameter=([^>\n]{1,256}+)>"),
    inner_head=re.compile(r"(?<=\n)(?:<tool_call>\s*+)?<function=[^>\s]{1,256}+>\s*+<parameter="),
    closing=re.compile("</parameter>"),
    proper_closing=re.compile(r"</parameter>(?=\s*+(?:<parameter=|</?function\b|</?tool_call>|\Z))"),
    end=re.compile(r"\s*+</function>(?:\s*+</tool_call>)?|\s*+</tool_call>"),
    any_end=re.compile("</function>|</tool_call>"),
    last_end=re.compile(
        r"(?<=\n)</function>(?=(?:\s*+</tool_call>)?\s*+"
        r"(?:(?:<tool_call>\s*+)?<function=[^>\s]{1,256}+>\s*+<(?:parameter=|/function>)|\Z))"
    ),
    lines=True,
)


_UNTHINK = re.compile("|".join(map(re.escape, THINKING.values())))


def _parser(name: str, marks: Marks, read: Reader, body: Callable[[WritableCall], str]) -> TextParser:
    def write(calls: Sequence[WritableCall]) -> str:
        return "\n".join(body(call) for call in calls)

    return TextParser(name, marks.compiled(), read, write)


def _reader(shape: Shape) -> Reader:
    def read(source: Source, mark: re.Match[str]) -> tuple[list[Item], int]:
        head = shape.head.match(source.text, mark.end())
        if head is None or (shape.lines and mark[0] == "<tool_call>"):
            return source.broken(mark.start(), mark.end(), "the call does not begin with a tool's name")
        return _Arguments(source, shape, head[1].strip("\"'")).read(mark.start(), head.end())

    return read


read_glm = _reader(_GLM)
read_qwen = _reader(_QWEN)


class _Arguments:
    """The arguments of one call, while they are read."""

    def __init__(self, source: Source, shape: Shape, name: str) -> None:
        self.source = source
        self.shape = shape
        self.name = name
        self.tool: Schema = source.tools.get(name, {})
        self.given: dict[str, Any] = {}
        self.repaired = False

    def read(self, start: int, position: int) -> tuple[list[Item], int]:
        """Read the call that begins at `start` and whose first argument is at `position`."""
        text = self.source.text
        while found := self.shape.key.match(text, position):
            key = found[1].strip().strip("\"'")
            value = self._value(found.end())
            if value is None:
                return self.source.broken(start, found.end(), f"the value of {key!r} has no end", self.name)
            raw, position = value
            self.given[key] = typed(raw, property_schema(self.tool, key), self.tool)
        closed = self.shape.end.match(text, position)
        if closed is None:
            mark = self.source.next_mark(position)
            left = text[position : mark.start() if mark else len(text)]
            if not self.given or left.strip():
                message = "the call has no end, or something else than arguments"
                return self.source.broken(start, position, message, self.name)
        end = closed.end() if closed else position
        call = ParsedCall(
            self.name, self.given, text[start:end], start, repaired=self.repaired, ended=closed is not None
        )
        return [call], end

    def _value(self, position: int) -> tuple[str, int] | None:
        """Return the value that begins at `position`, and the position after it; None if no end can be found.

        A value may hold any of the tags as text. A closing tag ends it only if another argument or the end of the call
        follows.
        """
        text, shape = self.source.text, self.shape
        first = self.source.search(shape.closing, position)
        proper = self.source.search(shape.proper_closing, position)
        end = self._missing_end(position, first, proper)
        if end is not None:
            thought = self.source.search(_UNTHINK, position)
            if thought is not None and thought.start() < end:
                return None  # a draft in the reasoning, which ended before it did
            self.repaired = True
            return _unframed(text, position, end, shape.lines), end
        closing = proper or first
        if closing is None:
            return None
        if first is not None and closing is not first:
            head = self.source.search(shape.inner_head, first.end())
            closing = first if head is not None and head.start() < closing.start() else closing
        return _unframed(text, position, closing.start(), shape.lines), closing.end()

    def _missing_end(self, position: int, first: re.Match[str] | None, proper: re.Match[str] | None) -> int | None:
        """Return the end of a value that nothing closes: before the next argument, the next call, or this call's end.

        The next closing tag, if there is one, then belongs to another argument. None if the value is closed.
        """
        shape, length = self.shape, len(self.source.text)
        limit = first.start() if first else length
        last = self.source.search(shape.last_end, position)
        if last is not None and last.start() < limit:
            limit, first = last.start(), None
        if first is None or proper is None or first.start() == proper.start():
            key = self.source.search(shape.inner_key, position)
            if key is not None and key.start() < limit and self._is_next(key[1].strip()):
                limit, first = key.start(), None
            head = self.source.search(shape.inner_head, position)
            if head is not None and head.start() < limit:
                limit, first = head.start(), None
        if first is not None:
            return None
        end = self.source.search(shape.any_end, position)
        if end is not None and end.start() <= limit:
            return end.start()
        return limit if limit < length else None

    def _is_next(self, key: str) -> bool:
        """Return whether this can be the tool's next argument."""
        properties = self.tool.get("properties")
        return key not in self.given and (not isinstance(properties, Mapping) or key in properties)


def _unframed(text: str, begin: int, end: int, lines: bool) -> str:
    """Return the value without the line breaks between it and its tags."""
    if lines:
        begin += text.startswith("\n", begin, end)
        end -= text.endswith("\n", begin, end)
    return text[begin:end]


def _glm_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _qwen_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping | list | tuple) else str(value)
