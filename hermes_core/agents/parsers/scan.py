"""The scanner that all formats share: it goes from mark to mark, separates the reasoning, and has calls read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hermes_core.agents.parsers.base import ParsedCall, ParsedText, ParseProblem, ToolSchemas, WritableCall
from hermes_core.agents.parsers.jsontext import Item
from hermes_core.agents.parsers.typed import Parameters, parameters_of

THINKING = {
    "<think>": "</think>",
    "<longcat_think>": "</longcat_think>",
    "[THINK]": "[/THINK]",
    "<|channel>thought\n": "<channel|>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",
    "<think:opensource>": "</think:opensource>",
}
"""The marks around reasoning. If the prompt has the opening mark, the answer has only the closing one."""

END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<｜end▁of▁sentence｜>",
    "<|observation|>",
    "<|user|>",
    "</longcat_s>",
    "[EOS]",
    "</s>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|return|>",
    "<|end_of_text|>",
    "<|end_of_msg|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|assistant_end|>",
    "<start_function_response>",
    "<seed:eos>",
    "<|eos|>",
    "[e~[",
    "<|message_sep|>",
    "<|end_message|>",
    "<|calls|>",
    "<|flush|>",
)
"""Tokens that servers may leave at the end of an answer."""


@dataclass(frozen=True)
class Marks:
    """The marks of a format: those that begin calls, and all others that can occur in a text."""

    opener: str
    """A pattern of the marks that begin a call."""
    others: str = ""
    """A pattern of closing tags and section tags, which end a broken call and are not content."""
    thinking: Mapping[str, str] = field(default_factory=lambda: THINKING)
    """The marks around reasoning."""

    def compile(self) -> re.Pattern[str]:
        """Return one pattern of all marks, with a group for each kind of mark."""
        think, unthink = ("|".join(map(re.escape, marks)) for marks in (self.thinking, self.thinking.values()))
        others = f"|(?P<other>{self.others})" if self.others else ""
        return re.compile(f"(?P<open>{self.opener}){others}|(?P<think>{think})|(?P<unthink>{unthink})")


_EXPLAINED = 100


class MarkedText:
    """A text that is being read, with the marks of its format and the parameters of each tool."""

    def __init__(self, text: str, marks: re.Pattern[str], tools: Parameters) -> None:
        self.text = text
        self.tools = tools
        self._without_end = 0
        self._broken = 0
        self._marks = marks
        self._found: dict[re.Pattern[str], tuple[int, re.Match[str] | None]] = {}

    def search(self, pattern: re.Pattern[str], position: int) -> re.Match[str] | None:
        """Return the first match from `position` on. The match is remembered, so further searches for the same pattern
        cost nothing until `position` is behind the match."""
        since, found = self._found.get(pattern, (len(self.text) + 1, None))
        if position < since or (found is not None and position > found.start()):
            found = pattern.search(self.text, position)
            self._found[pattern] = position, found
        return found

    def next_mark(self, position: int) -> re.Match[str] | None:
        """Return the next mark from `position` on."""
        return self.search(self._marks, position)

    def explains(self, begin: int, end: int) -> bool:
        """Return whether to search for the fault in an object or string that seems to have no end.

        After the first hundred, this is no longer done, because it takes time and nobody reads thousands of
        explanations. An object or string that may be complete is examined anyway.
        """
        self._without_end += 1
        closing = "}" if self.text[begin] == "{" else '"'
        return self._without_end <= _EXPLAINED or self.text[begin:end].rstrip().endswith(closing)

    def gives_up(self) -> bool:
        """Count a broken call, and return whether the text has too many of them for its rest to be read."""
        self._broken += 1
        return self._broken > _EXPLAINED

    def report_broken(self, start: int, position: int, message: str, name: str = "") -> tuple[list[Item], int]:
        """Return a reader's result for a call that begins at `start` and can't be read from `position` on.

        The call's text ends before the next mark, or, if this is a closing mark, after it.
        """
        mark = self.next_mark(position)
        end = len(self.text) if mark is None else mark.end() if mark.lastgroup == "other" else mark.start()
        return [ParseProblem(message, self.text[start:end], start, name)], end


Reader = Callable[[MarkedText, re.Match[str]], tuple[list[Item], int]]
"""Reads the calls after an opening mark. Returns the calls and problems, and the position at which the text goes on.

An empty list says that the mark opened no call, and is content."""


@dataclass(frozen=True)
class TextParser:
    """A parser (`base.Parser`) made of a format's marks, a reader and a writer."""

    name: str
    marks: re.Pattern[str]
    read: Reader
    write: Callable[[Sequence[WritableCall]], str]
    thinking: Mapping[str, str] = field(default_factory=lambda: THINKING)

    def parse(self, text: str, tools: ToolSchemas = ()) -> ParsedText:
        """Split one answer into its parts; see `Parser.parse`."""
        source = MarkedText(text[: _end(text)], self.marks, parameters_of(tools))
        return _Scan(source, len(source.text) < len(text.rstrip()), self.thinking).run(self.read)

    def render(self, calls: Sequence[WritableCall]) -> str:
        """Return the calls in the form in which the model's chat template writes them."""
        return self.write(calls)


class _Scan:
    """One pass over one text."""

    def __init__(self, source: MarkedText, trimmed: bool, thinking: Mapping[str, str]) -> None:
        self.source = source
        self.thinking = thinking
        self.plain = not trimmed
        """Whether the text up to this point is only content."""
        self.outside: list[str] = []
        self.reasoning: list[str] = []
        self.items: list[Item] = []
        self.problems: list[ParseProblem] = []
        self.since = 0
        """The position after the last reasoning."""

    def run(self, read: Reader) -> ParsedText:
        text, begin, position = self.source.text, 0, 0
        while (mark := self.source.next_mark(position)) is not None:
            position = mark.end()
            if mark.lastgroup == "open":
                found, end = read(self.source, mark)
                if not found:
                    position = max(end, position)
                    continue
                self.items += found
                self.outside.append(text[begin : mark.start()])
                position = end
            elif mark.lastgroup == "think":
                self.outside.append(text[begin : mark.start()])
                closing = self.thinking[mark[0]]
                end = text.find(closing, position)
                if end < 0:
                    self._endless(read, mark, closing)
                    begin = len(text)
                    self.plain = False
                    break
                self.reasoning.append(text[position:end])
                position = self.since = end + len(closing)
            elif mark.lastgroup == "unthink":
                self._it_was_reasoning(mark)
            else:
                self.outside.append(text[begin : mark.start()])
            self.plain = False
            begin = position
        return self._result(text if self.plain else _join([*self.outside, text[begin:]]))

    def _endless(self, read: Reader, opening: re.Match[str], closing: str) -> None:
        """Handle thinking that is never closed. Calls inside it are not made, but reported as problems."""
        text, begin, position = self.source.text, opening.end(), opening.end()
        message = f"a call inside of {opening[0].strip()} was not made: write {closing} before it"
        while (mark := self.source.next_mark(position)) is not None:
            position = mark.end()
            if mark.lastgroup != "open":
                continue
            found, end = read(self.source, mark)
            position = max(end, position)
            if found:
                self.reasoning.append(text[begin : mark.start()])
                calls = [each if isinstance(each, ParsedCall) else None for each in found]
                self.problems += [
                    ParseProblem(message, each.raw, each.start, each.name, call)
                    for each, call in zip(found, calls, strict=True)
                ]
                begin = position
        self.reasoning.append(text[begin:])

    def _it_was_reasoning(self, mark: re.Match[str]) -> None:
        """Handle a closing mark without an opening one: all text before it was reasoning, including its calls.

        No model should write a second mark of this kind. Calls that are dropped because of one are reported as
        problems.
        """
        if self.reasoning:
            self.problems += [
                ParseProblem(
                    f"a call that stands before a {mark[0]} is taken for reasoning and was not made",
                    item.raw,
                    item.start,
                    item.name,
                )
                for item in self.items
            ]
        self.reasoning.append(self.source.text[self.since : mark.start()])
        self.outside.clear()
        self.items.clear()
        self.since = mark.end()

    def _result(self, content: str) -> ParsedText:
        problems = [*self.problems, *(item for item in self.items if isinstance(item, ParseProblem))]
        calls = [item for item in self.items if isinstance(item, ParsedCall)]
        return ParsedText(content, _join(self.reasoning) or None, tuple(calls), tuple(problems))


def _join(pieces: Sequence[str]) -> str:
    return "\n".join(piece.strip() for piece in pieces if piece.strip())


def _end(text: str) -> int:
    """Return the position at which the text ends without the end tokens that a server may have left."""
    end = len(text)
    position = end
    while True:
        while position and text[position - 1].isspace():
            position -= 1
        token = next((token for token in END_TOKENS if text.endswith(token, 0, position)), None)
        if token is None:
            return end
        position -= len(token)
        end = position
