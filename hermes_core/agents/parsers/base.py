"""What a tool-call parser is: text and tools in; content, reasoning, calls and problems out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from hermes_core.agents.replies import ToolCall, encodable

ToolSchemas = Sequence[Mapping[str, Any]]
"""Tools in the OpenAI function form: `{"type": "function", "function": {"name": …, "parameters": …}}`."""


@dataclass(frozen=True)
class ParsedCall:
    """One call that could be read."""

    name: str
    arguments: dict[str, Any]
    raw: str = ""
    """The call as the model wrote it, its markers included."""
    start: int = 0
    """Where `raw` begins in the text."""
    id: str | None = None
    """The call's id, where the format carries one."""
    repaired: bool = False
    """Whether it could only be read leniently: raw line breaks in a JSON string, a missing closing tag of a value, …"""
    ended: bool = True
    """False where the text ended before the call did, and each argument is whole but others may be missing."""


@dataclass(frozen=True)
class ParseProblem:
    """One attempt at a call that could not be read, and was not made."""

    message: str
    """What is wrong with it, for the model."""
    raw: str
    """What the model wrote."""
    start: int = 0
    """Where `raw` begins in the text."""
    name: str = ""
    """The tool, as far as that could be read."""
    thought: ParsedCall | None = None
    """The call, if all that is wrong with it is that it stands inside of thinking that was never closed."""


@dataclass(frozen=True)
class ParsedText:
    """One answer of a model, taken apart. Every call and problem is in the order of the text."""

    content: str
    """What is neither call nor reasoning. An answer without any of them is left as it is, but for end tokens."""
    reasoning: str | None = None
    """What the model thought; calls in there are not made."""
    calls: tuple[ParsedCall, ...] = ()
    problems: tuple[ParseProblem, ...] = ()

    def tool_calls(self, turn: int, *, cut: bool = False, end_thinking: bool = False) -> tuple[ToolCall, ...]:
        """Calls and problems as the agent loop takes them (`Reply.calls`), in the order of the text.

        A problem becomes a call without arguments: the loop tells the model what was wrong, and counts it.

        Args:
            turn: the number of this answer, from which calls without an id get one.
            cut: whether the answer was cut off at the limit on its length: its last call, if it
                has no end, is then a problem.
            end_thinking: whether a call inside of thinking that was never closed ends it, and is made.
        """
        made: list[ToolCall] = []
        taken: set[str] = set()
        found: tuple[ParsedCall | ParseProblem, ...] = (*self.calls, *self.problems)
        if end_thinking:
            found = tuple((isinstance(item, ParseProblem) and item.thought) or item for item in found)
        items = sorted(found, key=lambda item: item.start)
        for index, item in enumerate(items):
            given = item.id if isinstance(item, ParsedCall) else None
            identifier = given if given and given not in taken else made_up_id(turn, index)
            taken.add(identifier)
            made.append(_tool_call(item, identifier, cut=cut and index == len(items) - 1))
        return tuple(made)


@runtime_checkable
class Parser(Protocol):
    """Reads the calls out of a model's text. It keeps nothing from one text to the next; one serves all rollouts."""

    name: str

    def parse(self, text: str, tools: ToolSchemas) -> ParsedText:
        """Take one whole answer apart. Never raises, whatever the text; takes time linear in its length.

        Args:
            text: what the model generated, decoded with its special tokens.
            tools: what the model was offered. Their schemas type the values where the format has no types of its own.
        """
        ...


class WritableCall(Protocol):
    """A call to write: a `ParsedCall`, or anything with these two."""

    @property
    def name(self) -> str:
        """The tool."""
        ...

    @property
    def arguments(self) -> Any:
        """Its arguments, as a mapping."""
        ...


def made_up_id(turn: int, index: int) -> str:
    """An id for a call without one: nine letters and digits, which Mistral's templates insist on."""
    return f"call{_base36(turn):0>3}{_base36(index):0>2}"


def _base36(number: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return (_base36(number // 36) if number >= 36 else "") + digits[number % 36]


def _tool_call(item: ParsedCall | ParseProblem, identifier: str, *, cut: bool) -> ToolCall:
    name = encodable(item.name)
    if isinstance(item, ParseProblem):
        problem = item.message
    elif cut and not item.ended:
        problem = "the call has no end"
    else:
        try:
            text = encodable(json.dumps(item.arguments, ensure_ascii=False))
            return ToolCall(identifier, name, text, item.arguments, repaired=item.repaired)
        except RecursionError:  # read from a shallower place
            problem = "the arguments are nested too deep"
    if cut:
        problem = f"the call was cut off at the limit on the length of one answer ({problem}): make it shorter"
    error = encodable(f"{problem}. Make the call again, whole and in the right form.")
    return ToolCall(identifier, name, encodable(item.raw), None, error, repaired=True)
