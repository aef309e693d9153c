"""OpenAI's Responses API, in the form that Codex uses: each request has the whole conversation, and the server stores
nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from hermes_agents.serving.chat import openai_error, openai_models
from hermes_agents.serving.dialects import (
    Aim,
    BadRequest,
    Event,
    ModelRequest,
    RequestRefusal,
    WrittenAnswer,
    content,
    function_call,
    function_tool,
    image_part,
    mappings,
    pieces,
    placeholder,
    sse,
    string,
    text_part,
    whole_number,
    write_arguments,
)
from hermes_core import Message
from hermes_core.agents.canonical import join_texts

_KNOWN = frozenset(
    {"input", "instructions", "tools", "stream", "model", "max_output_tokens", "tool_choice", "previous_response_id"}
)
_ABOUT_NOTHING = frozenset(
    {"store", "metadata", "client_metadata", "user", "parallel_tool_calls", "service_tier", "include", "background"}
    | {"prompt_cache_key", "prompt_cache_retention", "safety_identifier", "stream_options", "conversation"}
)
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""The parameters of the function that stands for a tool whose input is a text."""
_JOIN = "__"
_OUTPUTS = {"function_call_output", "custom_tool_call_output"}


class ResponsesDialect:
    """Reads and writes Responses.

    The model is offered a tool of a namespace as the function `NAMESPACE__TOOL`, and a tool whose input is a text as a
    function with one argument, `input`. Their calls are written back in the forms that the program knows.
    """

    name = "responses"
    headers = ("authorization",)

    def aim(self, path: str, query: str) -> Aim | None:
        """Return the aim of a POST to this path; None if the dialect has no such path."""
        return Aim() if path == "/responses" else None

    def models(self, model: str, *, one: bool) -> dict[str, Any]:
        """Return the description of the model, or a list with it."""
        return openai_models(model, one=one)

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """Read a request."""
        for key in ("previous_response_id", "background", "conversation"):
            if body.get(key):
                raise BadRequest(f"{key} is not supported: nothing is stored here, so send the whole input")
        asked = ModelRequest(
            stream=body.get("stream") is True,
            model=string(body.get("model")) or None,
            max_tokens=whole_number(body.get("max_output_tokens")),
            no_calls=body.get("tool_choice") == "none",
        )
        asked.settings = {
            key: value
            for key, value in body.items()
            if key not in _KNOWN and key not in _ABOUT_NOTHING and value is not None
        }
        if body.get("tool_choice") not in (None, "none", "auto"):
            asked.settings["tool_choice"] = body["tool_choice"]
        for tool in mappings(body.get("tools")):
            _read_tool(tool, asked)
        if instructions := string(body.get("instructions")):
            asked.messages.append({"role": "system", "content": instructions})
        given = body.get("input")
        if isinstance(given, str):
            asked.messages.append({"role": "user", "content": string(given)})
        for item in mappings(given):
            read_item(item, asked)
        if not any(message["role"] != "system" for message in asked.messages):
            raise BadRequest("input must be a text or a list of items")
        return asked

    def whole(self, answer: WrittenAnswer, asked: ModelRequest) -> dict[str, Any]:
        """Return a response."""
        status = "incomplete" if answer.cut or answer.withheld else "completed"
        return _response(answer, asked, status, [item for item, _ in _items(answer, asked)], _usage(answer))

    def stream(self, answer: WrittenAnswer, asked: ModelRequest) -> bytes:
        """Return the events of a response."""
        return sse(self._events(answer, asked))

    def _events(self, answer: WrittenAnswer, asked: ModelRequest) -> Iterator[Event]:
        """Yield a response's events: its beginning, each item with its parts, and the complete response."""
        numbers = count()

        def event(kind: str, **data: Any) -> Event:
            return kind, {"type": kind, "sequence_number": next(numbers), **data}

        begun = _response(answer, asked, "in_progress", [], None)
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        for index, (item, deltas) in enumerate(_items(answer, asked)):
            place = {"output_index": index, "item_id": item["id"]}
            yield event("response.output_item.added", output_index=index, item=_begin_item(item))
            for kind, data in deltas:
                yield event(kind, **place, **data)
            yield event("response.output_item.done", output_index=index, item=item)
        response = self.whole(answer, asked)
        yield event(f"response.{response['status']}", response=response)

    def refusal(self, refusal: RequestRefusal) -> dict[str, Any]:
        """Return an error in OpenAI's form."""
        return openai_error(refusal)

    def keep_alive(self, asked: ModelRequest) -> bytes:
        """Return the stream's first event, which every program accepts again if its id is the same. A comment would not
        be enough, because Codex does not accept one as a sign of life."""
        if asked.passed_on:
            return b": keepalive\n\n"
        begun = {"id": f"resp_{asked.id}", "object": "response", "status": "in_progress", "output": []}
        return sse([("response.created", {"type": "response.created", "sequence_number": 0, "response": begun})])

    def late_refusal(self, refusal: RequestRefusal, asked: ModelRequest) -> bytes:
        """Return the event of a response that failed."""
        error = openai_error(refusal)["error"]
        failed = {"code": error["code"], "message": error["message"]}
        response = {"id": f"resp_{asked.id}", "object": "response", "status": "failed", "error": failed, "output": []}
        return sse([("response.failed", {"type": "response.failed", "sequence_number": 0, "response": response})])


def _response(
    answer: WrittenAnswer, asked: ModelRequest, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None
) -> dict[str, Any]:
    incomplete = status == "incomplete"
    reason = {"reason": "content_filter" if answer.withheld else "max_output_tokens"}
    return {
        "id": f"resp_{asked.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "incomplete_details": reason if incomplete else None,
        "instructions": None,
        "metadata": {},
        "model": answer.model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "none" if asked.no_calls else "auto",
        "tools": [],
        "top_p": None,
        "store": False,
        "usage": usage,
    }


def _usage(answer: WrittenAnswer) -> dict[str, Any]:
    reply = answer.reply
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens or 0},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens or 0},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


Deltas = list[tuple[str, dict[str, Any]]]


def _items(answer: WrittenAnswer, asked: ModelRequest) -> list[tuple[dict[str, Any], Deltas]]:
    """Return the items of an answer, each with its events between the first and the last one in a stream."""
    reply, items = answer.reply, []
    if reply.reasoning:
        items.append(_reasoning(answer, reply.reasoning))
    if reply.content or not (reply.calls or reply.reasoning):
        items.append(_text(answer, reply.content))
    for index, call in enumerate(reply.calls):
        items.append(_call(answer.call_id(index), call.name, call.text, asked))
    return items


def _reasoning(answer: WrittenAnswer, text: str) -> tuple[dict[str, Any], Deltas]:
    part = {"type": "summary_text", "text": text}
    item = {
        "id": f"rs_{answer.id}",
        "type": "reasoning",
        "summary": [part],
        "encrypted_content": f"hermes_{answer.id}",
    }
    kind, at = "response.reasoning_summary", {"summary_index": 0}
    return item, [
        (f"{kind}_part.added", {**at, "part": {**part, "text": ""}}),
        *((f"{kind}_text.delta", {**at, "delta": piece}) for piece in pieces(text)),
        (f"{kind}_text.done", {**at, "text": text}),
        (f"{kind}_part.done", {**at, "part": part}),
    ]


def _text(answer: WrittenAnswer, text: str) -> tuple[dict[str, Any], Deltas]:
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    status = "incomplete" if answer.cut and not answer.reply.calls else "completed"
    item = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "status": status, "content": [part]}
    at: dict[str, Any] = {"content_index": 0}
    return item, [
        ("response.content_part.added", {**at, "part": {**part, "text": ""}}),
        *(("response.output_text.delta", {**at, "delta": piece, "logprobs": []}) for piece in pieces(text)),
        ("response.output_text.done", {**at, "text": text, "logprobs": []}),
        ("response.content_part.done", {**at, "part": part}),
    ]


def _call(identifier: str, name: str, arguments: str, asked: ModelRequest) -> tuple[dict[str, Any], Deltas]:
    kind, own = asked.names.get(name, ("", name))
    custom, _, namespace = kind.partition(_JOIN)
    item = {"id": f"fc_{identifier}", "type": "function_call", "status": "completed", "call_id": identifier}
    if namespace:
        item["namespace"] = namespace
    if custom and (text := _custom_input(arguments)) is not None:
        kind = "response.custom_tool_call_input"
        item |= {"id": f"ctc_{identifier}", "type": "custom_tool_call", "name": own, "input": text}
        return item, [
            *((f"{kind}.delta", {"delta": piece}) for piece in pieces(text)),
            (f"{kind}.done", {"input": text}),
        ]
    item |= {"name": own, "arguments": arguments}
    kind = "response.function_call_arguments"
    return item, [
        *((f"{kind}.delta", {"delta": piece}) for piece in pieces(arguments)),
        (f"{kind}.done", {"name": own, "arguments": arguments}),
    ]


def _begin_item(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item in the form that a stream has before the item's first delta."""
    empty: dict[str, Any] = {"summary": [], "content": [], "arguments": "", "input": ""}
    begun = {**item, **{key: empty[key] for key in empty.keys() & item.keys()}}
    return begun if item["type"] == "reasoning" else {**begun, "status": "in_progress"}


def _custom_input(arguments: str) -> str | None:
    """Return the input text in the arguments of a call, for a tool whose input is a text; None if the arguments have no
    input."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else None


def _read_tool(tool: Mapping[str, Any], asked: ModelRequest, namespace: str = "") -> None:
    kind, own = string(tool.get("type")) or "function", string(tool.get("name"))
    name = f"{namespace}{_JOIN}{own}" if namespace else own
    if kind == "namespace":
        for inner in mappings(tool.get("tools")):
            _read_tool(inner, asked, own)
    elif kind == "function":
        asked.tools.append(function_tool(name, tool.get("description"), tool.get("parameters")))
        if namespace:
            asked.names[name] = (f"{_JOIN}{namespace}", own)
    elif kind == "custom":
        said, form = string(tool.get("description")), tool.get("format")
        grammar = string(form.get("definition")) if isinstance(form, Mapping) else ""
        if grammar:
            said = f"{said}\n\nThe input must match this grammar:\n{grammar}"
        asked.tools.append(function_tool(name, said, _INPUT))
        asked.names[name] = (f"custom{_JOIN}{namespace}", own)
    else:
        asked.dropped.append(kind)


def read_item(item: Mapping[str, Any], asked: ModelRequest) -> None:
    """Add an item of the input to the request."""
    kind = string(item.get("type")) or "message"
    if kind == "message":
        role, said = string(item.get("role")) or "user", _content(item.get("content"), asked)
        if role == "assistant":
            _add_to_answer(
                asked, "content", said if isinstance(said, str) else join_texts([part["text"] for part in said])
            )
        else:
            asked.messages.append({"role": "system" if role == "developer" else role, "content": said})
    elif kind == "reasoning":
        texts = [*mappings(item.get("summary")), *mappings(item.get("content"))]
        _add_to_answer(asked, "reasoning_content", join_texts([string(part.get("text")) for part in texts]))
    elif kind in ("function_call", "custom_tool_call"):
        _answer(asked).setdefault("tool_calls", []).append(_read_call(item, kind))
    elif kind in _OUTPUTS:
        _read_output(item, asked)
    elif kind == "additional_tools":  # Codex puts tools here for models whose names it knows
        for tool in mappings(item.get("tools")):
            _read_tool(tool, asked)
    elif kind in ("item_reference", "compaction", "web_search_call"):
        asked.unknown[kind] += 1
    else:
        asked.messages.append({"role": "user", "content": placeholder(kind, asked)["text"]})


def _read_call(item: Mapping[str, Any], kind: str) -> dict[str, Any]:
    name, namespace = string(item.get("name")), string(item.get("namespace"))
    if kind == "custom_tool_call":
        arguments = json.dumps({"input": string(item.get("input"))}, ensure_ascii=False)
    else:
        arguments = write_arguments(item.get("arguments"))
    return function_call(string(item.get("call_id")), f"{namespace}{_JOIN}{name}" if namespace else name, arguments)


def _read_output(item: Mapping[str, Any], asked: ModelRequest) -> None:
    output, identifier = item.get("output"), string(item.get("call_id"))
    if isinstance(output, Mapping):
        if output.get("success") is False:
            asked.failed.add(identifier)
        output = output.get("content")
    said = _content(output, asked) if isinstance(output, list | str) or output is None else json.dumps(output)
    asked.messages.append({"role": "tool", "tool_call_id": identifier, "content": said})


def _answer(asked: ModelRequest) -> Message:
    """Return the answer to which the next item belongs. The items of an answer follow each other."""
    if not asked.messages or asked.messages[-1]["role"] != "assistant":
        asked.messages.append({"role": "assistant", "content": ""})
    return asked.messages[-1]


def _add_to_answer(asked: ModelRequest, key: str, text: str) -> None:
    answer = _answer(asked)
    follows = bool(answer.get("tool_calls")) or (key == "reasoning_content" and bool(answer["content"]))
    if follows:  # another answer begins, because our answers have thinking, text and calls in this order
        asked.messages.append(answer := {"role": "assistant", "content": ""})
    answer[key] = join_texts([each for each in (answer.get(key), text) if each])


def _content(raw: Any, asked: ModelRequest) -> Any:
    if not isinstance(raw, list):
        return string(raw)
    return content([_part(part, asked) for part in raw])


def _part(part: Any, asked: ModelRequest) -> dict[str, Any]:
    if isinstance(part, str):
        return text_part(string(part))
    if not isinstance(part, Mapping):
        return placeholder(type(part).__name__, asked)
    for key in ("text", "refusal"):
        if isinstance(part.get(key), str):
            return text_part(string(part[key]))
    url = part.get("image_url")
    return image_part(url, asked) if isinstance(url, str) else placeholder(string(part.get("type")), asked)
