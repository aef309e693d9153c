"""The parts that all dialects share: requests that were read, and answers and refusals to write."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from hermes_core import Message, ModelReply
from hermes_core.agents.canonical import join_texts

Event = tuple[str, Mapping[str, Any] | str]
"""A server-sent event: its name, which is empty for an event without one, and its data."""

Tool = dict[str, Any]
"""A tool in the OpenAI function form."""

_UNPARSED = "__unparsedToolInput"
"""The key under which Claude Code keeps arguments that are not JSON."""


class BadRequest(Exception):
    """A request that can't be answered. The message says why."""


@dataclass
class ModelRequest:
    """The content of a request, in the OpenAI form."""

    id: str = field(default_factory=lambda: secrets.token_hex(12))
    """A random id, for streams in which an answer needs an id before it is sampled."""
    messages: list[Message] = field(default_factory=list)
    tools: list[Tool] = field(default_factory=list)
    stream: bool = False
    model: str | None = None
    max_tokens: int | None = None
    no_calls: bool = False
    """Whether the answer is to have no calls (`tool_choice` is `none`)."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The request's sampling settings. They are recorded and have no effect, because the run decides how to sample."""
    dropped: list[str] = field(default_factory=list)
    """Tools that were removed from the request because the provider would have run them."""
    failed: set[str] = field(default_factory=set)
    """The ids of the calls whose results the request marks as errors."""
    unknown: Counter[str] = field(default_factory=Counter)
    """The number of blocks of each unknown kind, which were replaced by a note."""
    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Tools that have other names or forms in this dialect, by the names that the model sees."""
    include_usage: bool = True
    """Whether a stream ends with the counts of tokens."""
    passed_on: bool = False
    """Whether a provider answers the request, in its own form and with its own ids."""
    stream_type: str = "text/event-stream"
    """The type of the content of a stream."""


@dataclass(frozen=True)
class WrittenAnswer:
    """An answer of the model for the agent, which gets it whole or as a stream, and again if it was lost."""

    id: str
    """A random id. The ids of the answer's calls and blocks, which agents send back, contain it."""
    created: int
    """When the answer was sampled, in seconds since the epoch."""
    model: str
    """The name of the run's model, whatever model the agent requested."""
    reply: ModelReply
    written: bytes | None = None
    """The body of a provider's own answer, which the agent gets unchanged; None if the dialect writes the answer."""

    def call_id(self, index: int) -> str:
        """Return the id of a call that the agent gets."""
        return f"call_{self.id}_{index}"

    @property
    def cut(self) -> bool:
        """Return whether the answer was cut off at its maximum length."""
        return self.reply.finish_reason == "length"

    @property
    def withheld(self) -> bool:
        """Return whether the endpoint withheld the answer."""
        return self.reply.finish_reason == "content_filter"


RefusalKind = Literal["invalid", "too_long", "key", "unknown_path", "too_large"]
_STATUS: Mapping[RefusalKind, int] = {
    "invalid": 400,
    "too_long": 400,
    "key": 401,
    "unknown_path": 404,
    "too_large": 413,
}


@dataclass(frozen=True)
class RequestRefusal:
    """A permanent refusal, after which an agent ends or shortens its conversation."""

    message: str
    kind: RefusalKind = "invalid"

    @property
    def status(self) -> int:
        """Return the refusal's HTTP status."""
        return _STATUS.get(self.kind, 400)


@dataclass(frozen=True)
class Aim:
    """The meaning of a request's address."""

    said: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request that the address contains, in the form of the body's fields."""
    counted: Callable[[int], dict[str, Any]] | None = None
    """Set if the request only wants the number of the prompt's tokens: a function that makes the answer's JSON value
    from this number."""


class Dialect(Protocol):
    """An API that agents speak."""

    name: str

    @property
    def headers(self) -> Sequence[str]:
        """Return the headers by which programs of this dialect are recognised. The first header has the key."""
        ...

    def aim(self, path: str, query: str) -> Aim | None:
        """Return the aim of a POST to this path; None if this dialect has no such path. The path is given without the
        API's version."""
        ...

    def models(self, model: str, *, one: bool) -> dict[str, Any]:
        """Return the description of the run's model, or a list with it, as one JSON value."""
        ...

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """Read a request leniently.

        Raises:
            BadRequest: the request can't be answered.
        """
        ...

    def whole(self, answer: WrittenAnswer, asked: ModelRequest) -> dict[str, Any]:
        """Return an answer as one JSON value."""
        ...

    def stream(self, answer: WrittenAnswer, asked: ModelRequest) -> bytes:
        """Return an answer as the rest of a stream."""
        ...

    def refusal(self, refusal: RequestRefusal) -> dict[str, Any]:
        """Return a refusal as one JSON value."""
        ...

    def keep_alive(self, asked: ModelRequest) -> bytes:
        """Return a sign of life for a stream. It is never an empty event, because some programs try to parse those."""
        ...

    def late_refusal(self, refusal: RequestRefusal, asked: ModelRequest) -> bytes:
        """Return a refusal as the rest of a stream that has begun."""
        ...


def sse(events: Iterable[Event]) -> bytes:
    """Return events as bytes of a stream."""
    parts = []
    for name, data in events:
        text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
        parts.append(f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n")
    return "".join(parts).encode()


def pieces(text: str, size: int = 4096) -> Iterator[str]:
    """Yield a text in pieces for the deltas of a stream; nothing for an empty text."""
    for begin in range(0, len(text), size):
        yield text[begin : begin + size]


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """Return the mappings of a list; nothing if it is no list."""
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def string(value: Any) -> str:
    """Return the value if it is a text; else an empty text."""
    return value if isinstance(value, str) else ""


def whole_number(value: Any) -> int | None:
    """Return the value if it is a number of tokens, a positive integer; else None."""
    known = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if known else None


def content(parts: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a message with these parts in the OpenAI form: a text, unless there are images."""
    if all(part["type"] == "text" for part in parts):
        return join_texts([part["text"] for part in parts])
    return [dict(part) for part in parts]


def text_part(text: str) -> dict[str, Any]:
    """Return a text as a part of a content."""
    return {"type": "text", "text": text}


def image_part(url: str, asked: ModelRequest) -> dict[str, Any]:
    """Return an image as a part of a content, or, if the request does not contain the image itself, a note. If the
    endpoint fetched images, a slot without a network could send data to other hosts."""
    return {"type": "image_url", "image_url": {"url": url}} if url.startswith("data:") else placeholder("image", asked)


def placeholder(kind: str, asked: ModelRequest) -> dict[str, Any]:
    """Return a text in place of a part of an unknown kind, and count the kind."""
    asked.unknown[kind[:64]] += 1
    return text_part(f"[{kind[:64] or 'something'} is not shown]")


def read_arguments(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object, for dialects that want one. Arguments that are not JSON are wrapped
    in an object in Claude Code's form."""
    try:
        value = json.loads(arguments.strip() or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {_UNPARSED: {"raw": arguments}}


def write_arguments(arguments: Any) -> str:
    """Return the arguments of a call in a request as JSON text, or, if they were not JSON, the text that the model
    wrote."""
    if isinstance(arguments, Mapping) and len(arguments) == 1 and isinstance(arguments.get(_UNPARSED), Mapping):
        return string(arguments[_UNPARSED].get("raw"))
    return string(arguments) if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)


def function_tool(name: str, description: Any, parameters: Any) -> Tool:
    """Return a tool in the OpenAI form."""
    schema = dict(parameters) if isinstance(parameters, Mapping) else {"type": "object", "properties": {}}
    said = {"description": string(description)} if description else {}
    return {"type": "function", "function": {"name": name, **said, "parameters": schema}}


def function_call(identifier: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call in the OpenAI form."""
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}
