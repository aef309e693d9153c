"""Reads the body of a model call, within limits. A program in a slot sent it, so it may contain anything."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, NoReturn

from hermes_agents.serving.dialects import BadRequest, Dialect, ModelRequest, RequestRefusal, Tool
from hermes_agents.serving.upstream import Passage
from hermes_core import Message, ToolCall
from hermes_core.agents.canonical import Canonical, canonical, canonical_arguments, digest, strip_spaces
from hermes_core.agents.replies import decode_arguments, is_sayable, sayable
from hermes_core.validation import each_once

_MOST_VALUES = 1_000_000
"""Maximum number of values in the JSON of one request. Each value takes time and about 60 bytes of memory."""
_MOST_MESSAGES = 10_000
_DEEPEST = 100
"""Maximum depth of the schemas of tools, because the endpoint's JSON parser may have a limit, too."""
_REASON = 200
"""Maximum number of characters of the reason why a body is refused."""
_ESCAPED = re.compile(r"\\u(?:0000|007f|00[89]|d[89a-f]|fd[de]|fff[ef])", re.IGNORECASE)
"""Matches the beginning of each escape of a character that `sayable` replaces. A few other escapes match, too."""


@dataclass(frozen=True)
class Request:
    """A request that was read."""

    asked: ModelRequest
    forms: Sequence[Canonical]
    """The canonical forms of the request's messages."""
    tools: str
    """The request's tools as JSON."""
    digest: str
    """A hash that is the same for all requests that get the same answer."""
    size: int
    """The length of the body in bytes."""
    passage: Passage | None = None
    """Set if the request is passed on to a provider."""

    @property
    def characters(self) -> int:
        """Return the approximate number of characters of the prompt, without images."""
        said = sum(len(form.text) + len(form.thinking) + sum(map(len, sum(form.calls, ()))) for form in self.forms)
        return said + (len(self.tools) if self.asked.tools else 0)


class GivenCall(NamedTuple):
    """A tool call in an answer that an agent was given."""

    number: int
    """The call's number among all tool calls of the slot."""
    call: ToolCall
    """The call in the form in which the server gave it."""


Passing = Callable[[ModelRequest, bytes, Mapping[str, Any]], Passage]
"""Makes a `Passage` from a request that was read, its body, and the body's JSON value. Raises `BadRequest`."""


def read_request(
    body: bytes, more: Mapping[str, Any], dialect: Dialect, given: Mapping[str, GivenCall], passing: Passing | None
) -> Request | RequestRefusal:
    """Read a request. The function has no state, so it can run in a thread.

    Args:
        more: the fields of the request that its address contains.
        given: the calls that agents of the slot were given, by the ids that agents got for them.
        passing: makes the `Passage` of a request that is passed on; None if it is not passed on.
    """
    if body.count(b",") + body.count(b"[") + body.count(b"{") > _MOST_VALUES:
        return RequestRefusal("the body has too many values", "too_large")
    try:
        value, said = _read_json(body, unambiguous=passing is not None)
        if not isinstance(value, dict):
            return RequestRefusal("the body must be a JSON object")
        asked = dialect.read({**said, **more})
        if len(asked.messages) > _MOST_MESSAGES:
            return RequestRefusal(f"the conversation has more than {_MOST_MESSAGES} messages", "too_large")
        passage = passing(asked, body, value) if passing is not None else None
        _take_own_calls(asked, given)
        forms = [canonical(message) for message in asked.messages]
        tools = _write_tools(asked.tools)
        identity = passage.digest if passage else digest(forms, tools, asked.max_tokens, asked.no_calls)
        return Request(asked, forms, tools, identity, len(body), passage)
    except (BadRequest, ValueError, RecursionError) as error:
        return RequestRefusal(f"the request can't be read: {str(error)[:_REASON]}")


def _write_tools(tools: Sequence[Tool]) -> str:
    """Return tools as JSON.

    Raises:
        BadRequest: some endpoint could not read this JSON.
    """
    level: list[Any] = [*tools]
    for _ in range(_DEEPEST):
        level = [
            inner
            for each in level
            if isinstance(each, list | dict)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return json.dumps(tools, sort_keys=True, allow_nan=False)
    raise BadRequest(f"the schema of a tool is nested more than {_DEEPEST} times")


def _take_own_calls(asked: ModelRequest, given: Mapping[str, GivenCall]) -> None:
    """Restore the calls in a request to the form in which the model wrote them.

    Agents change ids, rewrite arguments, and reorder the calls of an answer and their results. But many chat templates
    match calls and results only by their order.
    """
    messages: list[Message] = []
    for answers, some in groupby(asked.messages, lambda message: message["role"] == "tool"):
        run = list(some)
        if answers:
            run = [
                {**each, "tool_call_id": _own_id(each["tool_call_id"], given)}
                for each in _in_order(run, "tool_call_id", given)
            ]
        for message in run:
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [_as_given(call, given) for call in _in_order(calls, "id", given)]
        messages += run
    asked.messages = messages
    asked.failed = {_own_id(each, given) for each in asked.failed}


def _own_id(told: str, given: Mapping[str, GivenCall]) -> str:
    return given[told].call.id if told in given else told


def _in_order(some: Sequence[Message], key: str, given: Mapping[str, GivenCall]) -> Sequence[Message]:
    """Return calls or results in the order in which the calls were in the answer."""
    known = all(each[key] in given for each in some)
    return sorted(some, key=lambda each: given[each[key]].number) if known else some


def _as_given(sent: Message, given: Mapping[str, GivenCall]) -> Message:
    """Return the call as the model wrote it, unless the agent has changed its meaning."""
    if (known := given.get(sent["id"])) is None:
        return sent
    function, call = sent["function"], known.call
    # opencode replaces a call that it can't make by a call of a tool of its own, whose arguments say why.
    same = function["name"] != call.name or _is_call(call, function["arguments"])
    return call.as_message_part() if same else {**sent, "id": call.id}


def _is_call(given: ToolCall, sent: str) -> bool:
    """Return whether arguments that an agent sends back come from the call `given`.

    Agents replace arguments that are not JSON, fill in optional arguments, change types and white space, or drop the
    beginning of a text, as Claude Code drops a `cd` to the current directory.
    """
    if given.arguments is None or given.text == sent:
        return True
    arguments, _, _ = decode_arguments(sent)
    try:
        return arguments is not None and _says(arguments, given.arguments)
    except RecursionError:
        return False


def _says(sent: Any, given: Any) -> bool:
    if isinstance(given, Mapping) and isinstance(sent, Mapping):
        return all(value is None or (key in sent and _says(sent[key], value)) for key, value in given.items())
    if isinstance(given, list) and isinstance(sent, list):
        return len(given) == len(sent) and all(map(_says, sent, given))
    kept, whole = _squeeze(sent), _squeeze(given)
    return whole.endswith(kept) if kept else not whole


def _squeeze(value: Any) -> bytes:
    return strip_spaces(sayable(value) if isinstance(value, str) else canonical_arguments(value))


def _read_json(body: bytes, *, unambiguous: bool) -> tuple[Any, Any]:
    """Return a body's JSON value twice: unchanged, and without characters that some endpoints refuse or that can't be
    sent.

    Args:
        unambiguous: whether to refuse an object that has a key twice, because other parsers may read the other value.

    Raises:
        ValueError, RecursionError: the body is not JSON, or is nested too deep.
    """
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    value = json.loads(text, object_pairs_hook=each_once if unambiguous else None, parse_constant=_no_constant)
    if is_sayable(text) and _ESCAPED.search(text) is None:  # true for most texts, and saves a check of each value
        return value, value
    return value, _sayable(value)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _sayable(value: Any) -> Any:
    if isinstance(value, str):
        return sayable(value)
    if isinstance(value, dict):
        return {sayable(key): _sayable(item) for key, item in value.items()}
    return [_sayable(item) for item in value] if isinstance(value, list) else value
