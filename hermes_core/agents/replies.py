"""Reads a chat completion, which is an SDK object or a plain dict, into a `ModelReply`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from hermes_core.agents.base import Message, Part
from hermes_core.agents.endpoint.errors import BadCompletion, context_exceeded, is_about_context


@dataclass(frozen=True)
class ToolCall:
    """One tool call by the model.

    `arguments` is None if the text of the arguments could not be read; `error` then tells the model why, and what to
    do.
    """

    id: str
    name: str
    text: str
    """The arguments as the model wrote them."""
    arguments: Mapping[str, Any] | None
    error: str | None = None
    repaired: bool = False
    """Whether the arguments could only be read leniently: JSON in JSON, raw line breaks in a string."""

    def as_message_part(self) -> dict[str, Any]:
        """Return the call in the form for the assistant's message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.text}}


@dataclass(frozen=True)
class ModelReply:
    """One answer of the model."""

    content: str
    calls: tuple[ToolCall, ...]
    reasoning: str | None
    reasoning_details: Any
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    """How many of the prompt's tokens came from the endpoint's cache; None if the endpoint does not report it."""
    reasoning_tokens: int | None = None
    """How many of the answer's tokens are reasoning; None if the endpoint does not report it."""
    model: str | None = None
    """The model that answered, as the endpoint names it."""
    sampling: Mapping[str, Any] | None = None
    """The sampling parameters that were sent; None if they are the requested ones."""
    cost: float | None = None
    """The price of the answer in US dollars, from endpoints that report it, such as OpenRouter."""
    weight_version: str | None = None
    """The version of the policy's weights, from endpoints that name it, such as SGLang."""
    parts: list[Part] = field(default_factory=list)
    """See `TurnRecord.parts`."""
    number: int | None = None
    """The answer's number in an `ExactSession`, which keeps the tokens of its answers; None for other servers."""

    def as_message(self) -> Message:
        """Return the answer in the form for the conversation, including its reasoning."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.reasoning_details:
            message["reasoning_details"] = self.reasoning_details
        if self.calls:
            message["tool_calls"] = [call.as_message_part() for call in self.calls]
        return message


def read_reply(completion: Any, turn: int) -> ModelReply:
    """Return the model's answer in a chat completion.

    Args:
        completion: an SDK object, or a dict of the same shape; only its first choice is used. A `ModelReply`, which
            comes from a server that parses its model's text itself, is returned unchanged.
        turn: the number of this answer. A call without an id gets an id made from this number.

    Raises:
        BadCompletion: `completion` is not a chat completion, has no choices, or was broken off.
    """
    if isinstance(completion, ModelReply):
        return completion
    choices = get(completion, "choices")
    message = get(choices[0], "message") if isinstance(choices, Sequence) and choices else None
    if message is None or isinstance(choices, str):
        _refuse(completion)
    finish_reason = get(choices[0], "finish_reason")
    if finish_reason == "abort":
        raise BadCompletion("the endpoint broke its answer off", hint="look at the server's own log")
    usage, model = get(completion, "usage"), get(completion, "model")
    return ModelReply(
        content=_text(get(message, "content")),
        calls=_calls(get(message, "tool_calls"), turn, cut=finish_reason == "length"),
        reasoning=_reasoning(message),
        reasoning_details=_plain(get(message, "reasoning_details")),
        finish_reason=finish_reason if isinstance(finish_reason, str) else None,
        prompt_tokens=count(get(usage, "prompt_tokens")) or 0,
        completion_tokens=count(get(usage, "completion_tokens")) or 0,
        cached_tokens=count(get(get(usage, "prompt_tokens_details"), "cached_tokens")),
        reasoning_tokens=count(get(get(usage, "completion_tokens_details"), "reasoning_tokens")),
        model=sayable(model) if isinstance(model, str) and model else None,
        cost=_amount(get(usage, "cost")),
        weight_version=weight_version(completion, get(completion, "metadata"), get(completion, "sglext")),
    )


def count_tokens(completion: Any) -> int:
    """Return the number of tokens of a chat completion and its prompt, as the completion reports it; else 0."""
    usage = get(completion, "usage")
    return sum(count(get(usage, key)) or 0 for key in ("prompt_tokens", "completion_tokens"))


class DecodedArguments(NamedTuple):
    """The arguments of a call, or the error that the model gets. The other of these two fields is None."""

    arguments: dict[str, Any] | None
    error: str | None
    repaired: bool
    """See `ToolCall.repaired`; True if there is an error."""


def decode_arguments(raw: Any) -> DecodedArguments:
    """Read a call's arguments: a mapping, JSON text, or JSON text that was encoded again. None and an empty text mean
    that there are no arguments. Never raises."""
    value, repaired = raw, False
    for encodings in range(3):
        if value is None or (isinstance(value, str) and not value.strip()):
            return DecodedArguments({}, None, repaired)
        if not isinstance(value, str):
            break
        repaired = repaired or encodings > 0
        try:
            value = _STRICT.decode(value)
        except (ValueError, RecursionError) as strict:
            problem = f"the arguments are not valid JSON: {strict}"
            if not _CONTROL.search(value):
                return DecodedArguments(None, problem, True)
            try:
                value, repaired = _LENIENT.decode(value), True
            except (ValueError, RecursionError):
                return DecodedArguments(None, problem, True)
    if not isinstance(value, Mapping):
        return DecodedArguments(None, f"the arguments must be a JSON object, not {_json_type(value)}", True)
    return DecodedArguments({str(key): item for key, item in value.items()}, None, repaired)


def sayable(text: str) -> str:
    """Return the text in a form that can be sent and recorded. U+FFFD replaces each code that some endpoint refuses or
    UTF-8 cannot hold: NUL, control characters from 127 on, lone surrogates, and codes that are no characters."""
    return text if is_sayable(text) else _UNSAYABLE.sub("\ufffd", text)


def is_sayable(text: str) -> bool:
    """Return whether `sayable` leaves the text as it is."""
    if text.isascii():  # most texts, and ten times as fast
        return "\0" not in text and "\x7f" not in text
    # Search in pieces, so that a thread with a long text does not block all others.
    return not any(_UNSAYABLE.search(text, begin, begin + _PIECE) for begin in range(0, len(text), _PIECE))


def sayable_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message whose content is `sayable`: a text, or a list of parts with texts."""

    def clean(content: Any) -> Any:
        if isinstance(content, list):
            return [{**part, "text": clean(part["text"])} if get(part, "text") else part for part in content]
        return sayable(content) if isinstance(content, str) else content

    return {**message, "content": clean(message["content"])} if message.get("content") else dict(message)


def get(thing: Any, key: str) -> Any:
    """Return a field of an SDK object or of a mapping; None if there is no such field."""
    return thing.get(key) if isinstance(thing, Mapping) else getattr(thing, key, None)


def weight_version(*places: Any) -> str | None:
    """Return the version of the policy's weights that the first of these parts of an answer names; None if no part
    names a version."""
    named = (get(place, "weight_version") for place in places)
    return next((sayable(str(each)) for each in named if isinstance(each, str | int)), None)


def _calls(raw: Any, turn: int, *, cut: bool) -> tuple[ToolCall, ...]:
    calls: list[ToolCall] = []
    taken: set[str] = set()
    items = list(raw) if isinstance(raw, Sequence) and not isinstance(raw, str) else []
    for index, item in enumerate(items):
        call = _call(item, cut=cut and index == len(items) - 1)
        if not call.id or call.id in taken:
            call = ToolCall(f"call_{turn}_{index}", call.name, call.text, call.arguments, call.error, call.repaired)
        taken.add(call.id)
        calls.append(call)
    return tuple(calls)


def _call(item: Any, *, cut: bool) -> ToolCall:
    """Return one call.

    Args:
        cut: whether the answer's length limit may have cut this call off. If the arguments are complete, it did not.
    """
    function = get(item, "function")
    identifier, given, raw = get(item, "id"), get(function, "name"), get(function, "arguments")
    name = sayable(given) if isinstance(given, str) else ""
    text = raw if isinstance(raw, str) else json.dumps(_plain(raw if raw is not None else {}), default=str)
    arguments, error, repaired = decode_arguments(raw)
    if cut and (arguments is None or not text.strip()):
        arguments, error = None, "the call was cut off at the limit on the length of one answer: make it shorter"
    if error is not None:
        error = f"{error}. Call {name or 'the tool'} again with one JSON object as its arguments."
    return ToolCall(
        id=identifier if isinstance(identifier, str) else "",
        name=name,
        text=sayable(text),
        arguments=arguments,
        error=error,
        repaired=repaired,
    )


def _reasoning(message: Any) -> str | None:
    """Return the model's reasoning, from any of the fields that endpoints use for it."""
    for key in ("reasoning_content", "reasoning"):
        value = get(message, key)
        if isinstance(value, str) and value:
            return sayable(value)
    details = get(message, "reasoning_details")
    if not isinstance(details, Sequence) or isinstance(details, str):
        return None
    texts = [text for text in (get(detail, "text") for detail in details) if isinstance(text, str) and text]
    return sayable("\n".join(texts)) or None


def _text(content: Any) -> str:
    """Return the text of a message's content, which is a string, a list of parts, or nothing."""
    if isinstance(content, str):
        return sayable(content)
    if not isinstance(content, Sequence):
        return ""
    parts = (part if isinstance(part, str) else get(part, "text") for part in content)
    return sayable("".join(part for part in parts if isinstance(part, str)))


def _plain(value: Any) -> Any:
    """Return a value in which all SDK objects are replaced by plain data."""
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return sayable(value) if isinstance(value, str) else value


def count(value: Any) -> int | None:
    """Return the value if it can be a count; None if it is anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _amount(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    return float(value) if known else None


def _json_type(value: Any) -> str:
    words: dict[type, str] = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return words.get(type(value), type(value).__name__)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_NO_CHARACTERS = "".join(chr(plane + last) for plane in range(0, 0x110000, 0x10000) for last in (0xFFFE, 0xFFFF))
_PIECE = 1 << 16
"""Number of characters that `is_sayable` searches at a time."""
_UNSAYABLE = re.compile(f"[\0\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef{_NO_CHARACTERS}]")

_STRICT = json.JSONDecoder(parse_constant=_no_constant)
_LENIENT = json.JSONDecoder(parse_constant=_no_constant, strict=False)
_CONTROL = re.compile(r"[\x00-\x1f]")
"""Control characters, which the lenient parser accepts in a string and the strict one does not."""


def _refuse(completion: Any) -> NoReturn:
    places = ("error", "base_resp", "message")  # some endpoints answer with HTTP 200 even when they fail
    problem = (
        completion if isinstance(completion, str) else next(filter(None, (get(completion, p) for p in places)), "")
    )
    detail = f": it says {str(problem)[:300]}" if problem else ""
    if is_about_context(detail):
        raise context_exceeded(str(get(completion, "model") or ""), detail)
    raise BadCompletion(
        f"the endpoint's answer is not a chat completion with choices{detail}",
        hint="check that the base URL is that of an OpenAI-compatible API; it usually ends in /v1",
    )
