"""The formats that write each argument as a tag with a bare text as its value. Each format is one `Layout`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from hermes_core.agents.parsers.arguments import read_arguments
from hermes_core.agents.parsers.base import ParsedCall, WritableCall
from hermes_core.agents.parsers.jsontext import Item
from hermes_core.agents.parsers.scan import THINKING, MarkedText, Marks, TextParser
from hermes_core.agents.parsers.typed import Schema, convert, decode, property_schema


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _qwen_text(value: Any) -> str:
    return _json(value) if isinstance(value, Mapping | list | tuple) else str(value)


def _is_text(value: Any) -> str:
    """Return `true` or `false`, as DeepSeek writes whether a value is text."""
    return "true" if isinstance(value, str) else "false"


def _kimi_type(value: Any) -> str:
    """Return Kimi K3's name for the type of a value."""
    words = {str: "string", bool: "boolean", type(None): "null", int: "number", float: "number"}
    return words.get(type(value), "object" if isinstance(value, Mapping) else "array")


@dataclass(frozen=True)
class Layout:
    """The templates with which a format writes calls. The patterns that read the format are made from them, too.

    `{…}` stands for parts that differ from call to call. A text that is read may have more white space between tags, or
    none.
    """

    argument: str
    """One argument: `{key}`, `{value}`, and `{kind}` if the format writes the value's type."""
    call: str
    """One call: `{name}`, `{arguments}`, and `{number}` if the format counts the calls."""
    wrap: str = "{call}"
    """The text around each call."""
    section: str = "{calls}"
    """The text around all calls of an answer."""
    joint: str = "\n"
    """The text between two calls."""
    whole: str = "{object}"
    """All arguments as one JSON object, a form that models use now and then."""
    text: Callable[[Any], str] = _json
    """Writes a value that is no string."""
    kind: Callable[[Any], str] = _kimi_type
    """Returns the `{kind}` of a value. The kinds `string` and `true` mean that the value is text; all others mean that
    it is JSON."""
    encoded: bool = False
    """Whether `"` and `&` are encoded in names and keys."""
    lines: bool = False
    """Whether each value is on lines of its own."""
    quotes: tuple[str, str] | None = None
    """Quotes that may be around a value. They are written only around a value that would be read as quoted itself."""
    margin: str = ""
    """A pattern of the text that must come before a tag for it to show that the value before it was not closed."""
    aside: str = ""
    """A pattern of the format's other marks, which are not content."""

    def parser(self, name: str) -> TextParser:
        """Return the parser of this format."""
        return TextParser(name, self.shape.marks.compile(), self.read, self.write)

    def write(self, calls: Sequence[WritableCall]) -> str:
        """Write the calls as the format's chat template does."""
        written = [_fill(self.wrap, call=self._call(call, number)) for number, call in enumerate(calls, 1)]
        return _fill(self.section, calls=self.joint.join(written))

    def _call(self, call: WritableCall, number: int) -> str:
        encode = _encode if self.encoded else str
        arguments = (
            _fill(
                self.argument,
                key=encode(key),
                kind=self.kind(value),
                value=self._quote(value if isinstance(value, str) else self.text(value)),
            )
            for key, value in call.arguments.items()
        )
        return _fill(self.call, name=encode(call.name), number=str(number), arguments="".join(arguments))

    def _quote(self, text: str) -> str:
        if self.quotes is None or self.strip_frame(text) == text:
            return text
        opening, closing = self.quotes
        return f"{opening}{text}{closing}"

    def strip_frame(self, text: str) -> str:
        """Return a value without the line breaks or quotes that are between the value and its tags."""
        if self.lines:
            return text.removeprefix("\n").removesuffix("\n")
        if self.quotes is not None:
            opening, closing = self.quotes
            quoted = text.strip()
            if quoted.startswith(opening) and quoted.removeprefix(opening).endswith(closing):
                return quoted.removeprefix(opening).removesuffix(closing)
        return text

    def read(self, source: MarkedText, mark: re.Match[str]) -> tuple[list[Item], int]:
        """Read one call; see `scan.Reader`."""
        named = mark[0].endswith(self.shape.opening)
        head = self.shape.head.match(source.text, mark.end()) if named else None
        if head is None:
            return source.report_broken(mark.start(), mark.end(), "the call does not begin with a tool's name")
        name = head["name"].strip("\"'")
        return _Arguments(source, self, _decode(name) if self.encoded else name).read(mark.start(), head.end())

    @cached_property
    def shape(self) -> Shape:
        """Return the patterns that read this format."""
        return _shape(self)


@dataclass(frozen=True)
class Shape:
    """The patterns that read a format."""

    marks: Marks
    opening: str
    """The last character before the tool's name."""
    head: re.Pattern[str]
    """Matches the tool's name, from the opening mark on."""
    key: re.Pattern[str]
    """Matches an argument's name, up to where its value begins."""
    inner_key: re.Pattern[str]
    """Matches an argument's name at a place that shows that the value before it was not closed."""
    inner_head: re.Pattern[str]
    """Matches the beginning of another call at a place that shows that the value before it was not closed."""
    closing: re.Pattern[str]
    """Matches a value's closing tag, at any place."""
    proper_closing: re.Pattern[str]
    """Matches a value's closing tag, if a text follows that may come after a value."""
    end: re.Pattern[str]
    """Matches the end of a call, from the end of its last argument on."""
    any_end: re.Pattern[str]
    """Matches the end of a call, at any place."""
    last_end: re.Pattern[str]
    """Matches the end of a call, if only another call or nothing follows."""
    whole: re.Pattern[str]
    """Matches the text before an object with all arguments."""
    whole_end: re.Pattern[str]
    """Matches the text after an object with all arguments, as far as this text is present."""


_SUFFIX = r"(?::\w{1,32}+)?"
"""A pattern of the text that a tag may have in place of `{suffix}`. This text is read, and never written."""
_FIELD = re.compile(r"\{(\w+)\}")
_PIECE = re.compile(r"\{(\w+)\}|(\s+)|[^\s{]+")


def _encode(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _decode(text: str) -> str:
    return text.replace("&quot;", '"').replace("&amp;", "&")


def _fill(template: str, **values: str) -> str:
    return _FIELD.sub(lambda field: values.get(field[1], ""), template)


def _pattern(written: str) -> str:
    """Return a pattern that matches a template of a format. The template's fields become groups."""
    written = written.strip()
    made = []
    for piece in _PIECE.finditer(written):
        field, space = piece.groups()
        following = re.escape(written[piece.end() : piece.end() + 1].strip())
        if field is None:
            literal = re.escape(piece[0]).replace("><", r">\s*+<")
            made.append(literal if space is None else r"\s++" if space == " " else r"\s*+")
        elif field == "name":
            made.append(
                rf"\s*+(?P<name>[^\s{following}]{{1,256}}+)\s*+"
                if following
                else r"\s*+(?P<name>[^\s<>{}]{1,256}+)(?=\s*+<)"
            )
        elif field == "key":
            made.append(rf"\s*+(?P<key>[^\n{following}]{{1,256}}+)\s*+")
        elif field == "suffix":
            made.append(_SUFFIX)
        else:
            made.append(rf"(?P<{field}>\w{{0,32}}+)")
    return "".join(made)


def _around(template: str, field: str) -> tuple[str, str]:
    """Return patterns of the texts before and after a field of a template."""
    before, _, after = template.partition(f"{{{field}}}")
    return _pattern(before), _pattern(after)


def _any(*patterns: str) -> str:
    return "(?:" + "|".join(filter(None, patterns)) + ")"


def _optional(pattern: str) -> str:
    return rf"(?:\s*+{pattern})?" if pattern else ""


def _shape(layout: Layout) -> Shape:
    start, _, named = layout.call.partition("{name}")
    tail, _, finish = named.partition("{arguments}")
    opening, name, end = _pattern(start), _pattern("{name}" + tail), _pattern(finish)
    wrap, wrap_end = _around(layout.wrap, "call")
    section, section_end = _around(layout.section, "calls")
    key, closing = _around(layout.argument, "value")
    key_opening = _pattern(layout.argument.partition("{key}")[0])
    whole, whole_end = _around(layout.whole, "object")
    unnamed = re.sub(r"P<[a-z]+>", ":", name)
    call = _any(rf"{wrap}\s*+{opening}" if wrap else "", opening) + unnamed
    ends = [each for each in (wrap_end, section_end) if each]
    return Shape(
        marks=Marks(
            "|".join(
                filter(
                    None,
                    (
                        section and section + _optional(wrap) + _optional(opening),
                        wrap and wrap + _optional(opening),
                        opening,
                    ),
                )
            ),
            "|".join(filter(None, (end, *ends, layout.aside))),
        ),
        opening=start[-1],
        head=re.compile(name),
        key=re.compile(rf"\s*+{key}"),
        inner_key=re.compile(layout.margin + key),
        inner_head=re.compile(rf"{layout.margin}{call}\s*+{key_opening}"),
        closing=re.compile(closing),
        proper_closing=re.compile(rf"{closing}(?=\s*+(?:{_any(key_opening, opening, wrap, section, end, *ends)}|\Z))"),
        end=re.compile("|".join((rf"\s*+{end}{_optional(wrap_end)}", *(rf"\s*+{each}" for each in ends)))),
        any_end=re.compile(_any(end, *ends)),
        last_end=re.compile(
            rf"{layout.margin}{end}(?={_optional(wrap_end)}{_optional(section_end)}\s*+"
            rf"(?:\Z|(?:{section}\s*+)?{call}\s*+{_any(key_opening, end)}))"
        ),
        whole=re.compile(rf"{_optional(whole)}\s*+(?=\{{)"),
        whole_end=re.compile(_optional(whole_end) + _optional(end) + _optional(wrap_end)),
    )


GLM = Layout(
    argument="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    call="<tool_call>{name}\n{arguments}</tool_call>",
)
_GLM47 = Layout(
    argument="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
    call="<tool_call>{name}{arguments}</tool_call>",
)
HUNYUAN = Layout(
    argument="<arg_key{suffix}>{key}</arg_key{suffix}>\n<arg_value{suffix}>{value}</arg_value{suffix}>\n",
    call="<tool_call{suffix}>{name}<tool_sep{suffix}>\n{arguments}</tool_call{suffix}>",
    section="<tool_calls{suffix}>\n{calls}\n</tool_calls{suffix}>",
)
QWEN = Layout(
    argument="<parameter={key}>\n{value}\n</parameter>\n",
    call="<function={name}>\n{arguments}</function>",
    wrap="<tool_call>\n{call}\n</tool_call>",
    text=_qwen_text,
    lines=True,
    margin=r"(?<=\n)",
)
_MIMO = Layout(
    argument="<parameter={key}>{value}</parameter>\n",
    call="<function={name}>\n{arguments}</function>",
    wrap="<tool_call>\n{call}\n</tool_call>",
    margin=r"(?<=\n)",
)
SEED = Layout(
    argument="<parameter={key}>{value}</parameter>\n",
    call="<function={name}>\n{arguments}</function>",
    wrap="<seed:tool_call>\n{call}\n</seed:tool_call>",
    text=_qwen_text,
    margin=r"(?<=\n)",
)
MINIMAX = Layout(
    argument='<parameter name="{key}">{value}</parameter>\n',
    call='<invoke name="{name}">\n{arguments}</invoke>',
    section="<minimax:tool_call>\n{calls}\n</minimax:tool_call>",
    margin=r"(?<=\n)",
)
# MiniMax's format in another section. Source: SGLang's detector.
DOTS = replace(MINIMAX, section="<dots_function_call>\n{calls}\n</dots_function_call>")


def _make_marked_layout(mark: str, section: str) -> Layout:
    return Layout(
        argument=f'<{mark}parameter name="{{key}}" string="{{kind}}">{{value}}</{mark}parameter>\n',
        call=f'<{mark}invoke name="{{name}}">\n{{arguments}}</{mark}invoke>',
        section=f"<{mark}{section}>\n{{calls}}\n</{mark}{section}>",
        kind=_is_text,
        aside=f"</?{mark}(?:function|tool)_calls>",
    )


# The tags contain a special mark, and say which values are text. Source: the chat template that DeepSeek describes for
# V3.2; SGLang's detectors of DeepSeek V4 and GigaChat 3.5.
DSML = _make_marked_layout("｜DSML｜", "function_calls")
DSML4 = _make_marked_layout("｜DSML｜", "tool_calls")
GCML = _make_marked_layout("｜GCML｜", "tool_calls")
# Source: SGLang's detector.
MINICPM = Layout(
    argument='<param name="{key}">{value}</param>',
    call='<function name="{name}">{arguments}</function>',
    quotes=("<![CDATA[", "]]>"),
)
KIMI3 = Layout(
    argument='<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>',
    call='<|open|>call tool="{name}" index="{number}"<|sep|>{arguments}<|close|>call<|sep|>',
    section="<|open|>tools<|sep|>{calls}<|close|>tools<|sep|>",
    joint="",
    whole='<|open|>json type="object"<|sep|>{object}<|close|>json<|sep|>',
    encoded=True,
    aside=r"<\|(?:open|close)\|>(?:response|message)<\|sep\|>",
)
STEP3 = Layout(
    argument='<steptml:parameter name="{key}">{value}</steptml:parameter>',
    call='<steptml:invoke name="{name}">{arguments}</steptml:invoke>',
    wrap="<｜tool_call_begin｜>function<｜tool_sep｜>{call}<｜tool_call_end｜>",
    section="<｜tool_calls_begin｜>{calls}<｜tool_calls_end｜>",
    joint="",
)

# GLM 4.5 and 4.6. Laguna, Ling 3 and Spark 2.5 write the same format, with line breaks or without.
glm45 = partial(GLM.parser, "glm45")
glm47 = partial(_GLM47.parser, "glm47")
# The published models write `:opensource` into each tag. Source: vLLM's and SGLang's parsers of `hy_v3` and `hunyuan`.
hunyuan = partial(HUNYUAN.parser, "hunyuan")
# Qwen3-Coder, Qwen 3.5 and later, Nemotron 3 and Step 3.5.
qwen3_coder = partial(QWEN.parser, "qwen3_coder")
# Source: the format that SGLang's `mimo` detector describes.
mimo = partial(_MIMO.parser, "mimo")
# Source: the chat templates of the models.
seed_oss = partial(SEED.parser, "seed_oss")
minimax_m2 = partial(MINIMAX.parser, "minimax_m2")
kimi_k3 = partial(KIMI3.parser, "kimi_k3")
dots = partial(DOTS.parser, "dots")
deepseek_v3_2 = partial(DSML.parser, "deepseek_v3_2")
deepseek_v4 = partial(DSML4.parser, "deepseek_v4")
gigachat35 = partial(GCML.parser, "gigachat35")
minicpm5 = partial(MINICPM.parser, "minicpm5")
# Source: the formats that vLLM's and SGLang's parsers of `step3` read.
step3 = partial(STEP3.parser, "step3")

_UNTHINK = re.compile("|".join(map(re.escape, THINKING.values())))


class _Arguments:
    """The arguments of one call, while they are read."""

    def __init__(self, source: MarkedText, layout: Layout, name: str) -> None:
        self.source = source
        self.layout = layout
        self.shape = layout.shape
        self.name = name
        self.tool: Schema = source.tools.get(name, {})
        self.given: dict[str, Any] = {}
        self.repaired = False

    def read(self, start: int, position: int) -> tuple[list[Item], int]:
        """Read the call that begins at `start` and whose first argument is at `position`."""
        text = self.source.text
        whole = self.shape.whole.match(text, position)
        if whole is not None:
            return read_arguments(self.source, start, whole.end(), name=self.name, closing=self.shape.whole_end)
        while found := self.shape.key.match(text, position):
            key = self._key(found)
            value = self._value(found.end())
            if value is None:
                return self.source.report_broken(start, found.end(), f"the value of {key!r} has no end", self.name)
            raw, position = value
            self.given[key] = self._convert(key, raw, found.groupdict().get("kind"))
        closed = self.shape.end.match(text, position)
        if closed is None:
            mark = self.source.next_mark(position)
            left = text[position : mark.start() if mark else len(text)]
            if not self.given or left.strip():
                message = "the call has no end, or something else than arguments"
                return self.source.report_broken(start, position, message, self.name)
        end = closed.end() if closed else position
        call = ParsedCall(
            self.name, self.given, text[start:end], start, repaired=self.repaired, ended=closed is not None
        )
        return [call], end

    def _value(self, position: int) -> tuple[str, int] | None:
        """Return the value that begins at `position`, and the position after it; None if no end can be found.

        A value may contain any of the tags as text. A closing tag ends the value only if another argument or the end of
        the call follows.
        """
        text, shape = self.source.text, self.shape
        first = self.source.search(shape.closing, position)
        proper = self.source.search(shape.proper_closing, position)
        end = self._missing_end(position, first, proper)
        if end is not None:
            thought = self.source.search(_UNTHINK, position)
            if thought is not None and thought.start() < end:
                return None  # a draft in the reasoning, which ended before the call
            self.repaired = True
            return self.layout.strip_frame(text[position:end]), end
        closing = proper or first
        if closing is None:
            return None
        if first is not None and closing is not first:
            head = self.source.search(shape.inner_head, first.end())
            closing = first if head is not None and head.start() < closing.start() else closing
        return self.layout.strip_frame(text[position : closing.start()]), closing.end()

    def _missing_end(self, position: int, first: re.Match[str] | None, proper: re.Match[str] | None) -> int | None:
        """Return the end of a value without a closing tag, which is before the next argument, the next call, or the end
        of this call; None if the value has a closing tag.

        If the value has none, the next closing tag, if any, belongs to another argument.
        """
        shape, length = self.shape, len(self.source.text)
        limit = first.start() if first else length
        last = self.source.search(shape.last_end, position)
        if last is not None and last.start() < limit:
            limit, first = last.start(), None
        if first is None or proper is None or first.start() == proper.start():
            key = self.source.search(shape.inner_key, position)
            if key is not None and key.start() < limit and self._is_next(self._key(key)):
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

    def _key(self, found: re.Match[str]) -> str:
        key = found["key"].strip().strip("\"'")
        return _decode(key) if self.layout.encoded else key

    def _convert(self, key: str, raw: str, kind: str | None) -> Any:
        """Return the value by the type that the call names, or, if it names no type, by the tool's schema."""
        if kind in ("string", "true"):
            return raw
        return convert(raw, property_schema(self.tool, key), self.tool) if kind is None else decode(raw.strip())

    def _is_next(self, key: str) -> bool:
        """Return whether this key can be the tool's next argument."""
        properties = self.tool.get("properties")
        return key not in self.given and (not isinstance(properties, Mapping) or key in properties)
