"""The base class of tool-call parsers, which split a model's text into content, reasoning, calls and problems."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from hermes_core.agents.replies import ToolCall, sayable

ToolSchemas = Sequence[Mapping[str, Any]]
"""Tools in the OpenAI function form: `{"type": "function", "function": {"name": …, "parameters": …}}`."""


@dataclass(frozen=True)
class ParsedCall:
    """A call that the parser could read."""

    name: str
    arguments: dict[str, Any]
    raw: str = ""
    """The call as the model wrote it, including its markers."""
    start: int = 0
    """Where `raw` begins in the text."""
    id: str | None = None
    """The call's id, if the format has ids."""
    repaired: bool = False
    """Whether the call was malformed but could be read leniently: raw line breaks in a JSON string, a missing closing
    tag of a value, and so on."""
    ended: bool = True
    """False if the text ended before the call's end. The arguments are complete, but further ones may be missing."""


@dataclass(frozen=True)
class ParseProblem:
    """An attempted call that could not be read, and so was not made."""

    message: str
    """The fault of the call, written for the model."""
    raw: str
    """The text that the model wrote."""
    start: int = 0
    """Where `raw` begins in the text."""
    name: str = ""
    """The tool's name, if it could be read."""
    thought: ParsedCall | None = None
    """The call, if its only problem is that it stands inside thinking that was never closed."""


@dataclass(frozen=True)
class ParsedText:
    """One answer of a model, split into its parts. Calls and problems are in the order of the text."""

    content: str
    """The text that is neither call nor reasoning. An answer without calls and reasoning is left unchanged, except for
    end tokens."""
    reasoning: str | None = None
    """The model's reasoning. Calls inside it are not made."""
    calls: tuple[ParsedCall, ...] = ()
    problems: tuple[ParseProblem, ...] = ()

    def tool_calls(self, turn: int, *, cut: bool = False, end_thinking: bool = False) -> tuple[ToolCall, ...]:
        """Return calls and problems in the form of the agent loop (`ModelReply.calls`), in the order of the text.

        A problem becomes a call without arguments: the loop tells the model the fault, and counts the call.

        Args:
            turn: the number of this answer. A call without an id gets an id made from this number.
            cut: whether the answer was cut off at the length limit. Then a last call without an end is a problem.
            end_thinking: whether a call inside thinking that was never closed ends the thinking, and is made.
        """
        made: list[ToolCall] = []
        taken: set[str] = set()
        found: tuple[ParsedCall | ParseProblem, ...] = (*self.calls, *self.problems)
        if end_thinking:
            found = tuple((isinstance(item, ParseProblem) and item.thought) or item for item in found)
        items = sorted(found, key=lambda item: item.start)
        for index, item in enumerate(items):
            call_id = item.id if isinstance(item, ParsedCall) else None
            identifier = call_id if call_id and call_id not in taken else make_call_id(turn, index)
            taken.add(identifier)
            made.append(_tool_call(item, identifier, cut=cut and index == len(items) - 1))
        return tuple(made)


@runtime_checkable
class Parser(Protocol):
    """Base class of parsers, which read the calls in a model's text. A parser keeps no state between texts; one
    instance serves all rollouts."""

    name: str

    def parse(self, text: str, tools: ToolSchemas) -> ParsedText:
        """Split one whole answer into its parts. Never raises, for any text; takes time linear in its length.

        Args:
            text: the model's answer, decoded with its special tokens.
            tools: the tools that the model was offered. If the format has no types, the tools' schemas decide the types
                of values.
        """
        ...


class WritableCall(Protocol):
    """A call to write: a `ParsedCall`, or any object with these two attributes."""

    @property
    def name(self) -> str:
        """Return the tool's name."""
        ...

    @property
    def arguments(self) -> Any:
        """Return the arguments as a mapping."""
        ...


def make_call_id(turn: int, index: int) -> str:
    """Return an id for a call that has none: nine letters and digits, the form that Mistral's templates require."""
    return f"call{_base36(turn):0>3}{_base36(index):0>2}"


def _base36(number: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return (_base36(number // 36) if number >= 36 else "") + digits[number % 36]


def _tool_call(item: ParsedCall | ParseProblem, identifier: str, *, cut: bool) -> ToolCall:
    name = sayable(item.name)
    if isinstance(item, ParseProblem):
        problem = item.message
    elif cut and not item.ended:
        problem = "the call has no end"
    else:
        try:
            text = sayable(json.dumps(item.arguments, ensure_ascii=False))
            return ToolCall(identifier, name, text, item.arguments, repaired=item.repaired)
        except RecursionError:  # the parser read this text with fewer frames on the stack
            problem = "the arguments are nested too deep"
    if cut:
        problem = f"the call was cut off at the limit on the length of one answer ({problem}): make it shorter"
    error = sayable(f"{problem}. Make the call again, whole and in the right form.")
    return ToolCall(identifier, name, sayable(item.raw), None, error, repaired=True)
