"""OpenAI's Chat Completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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

_KNOWN = frozenset(
    {"messages", "tools", "stream", "model", "max_tokens", "max_completion_tokens", "tool_choice", "stream_options"}
)
_ABOUT_NOTHING = frozenset({"store", "metadata", "user", "parallel_tool_calls", "service_tier"})
"""Keys of a request that do not change the answer."""
_ROLES = {"developer": "system", "function": "tool"}
_REASONS = {"length": "length", "content_filter": "content_filter"}
_CODES = {"too_long": "context_length_exceeded", "key": "invalid_api_key", "unknown_path": "not_found"}


class ChatDialect:
    """Reads and writes Chat Completions."""

    name = "chat"
    headers = ("authorization",)

    def aim(self, path: str, query: str) -> Aim | None:
        """Return the aim of a POST to this path; None if the dialect has no such path."""
        return Aim() if path == "/chat/completions" else None

    def models(self, model: str, *, one: bool) -> dict[str, Any]:
        """Return the description of the model, or a list with it."""
        return openai_models(model, one=one)

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """Read a request."""
        asked = ModelRequest(
            stream=body.get("stream") is True,
            model=string(body.get("model")) or None,
            max_tokens=whole_number(body.get("max_completion_tokens")) or whole_number(body.get("max_tokens")),
            no_calls=body.get("tool_choice") == "none",
        )
        options = body.get("stream_options")
        asked.include_usage = isinstance(options, Mapping) and options.get("include_usage") is True
        asked.settings = {
            key: value
            for key, value in body.items()
            if key not in _KNOWN and key not in _ABOUT_NOTHING and value is not None
        }
        if body.get("tool_choice") not in (None, "none", "auto"):
            asked.settings["tool_choice"] = body["tool_choice"]
        asked.messages = [_message(message, asked) for message in mappings(body.get("messages"))]
        if not asked.messages:
            raise BadRequest("messages must be a list of messages")
        for tool in mappings(body.get("tools")):
            function = tool.get("function")
            if tool.get("type", "function") == "function" and isinstance(function, Mapping):
                name = string(function.get("name"))
                asked.tools.append(function_tool(name, function.get("description"), function.get("parameters")))
            else:
                asked.dropped.append(string(tool.get("type")) or "?")
        return asked

    def whole(self, answer: WrittenAnswer, asked: ModelRequest) -> dict[str, Any]:
        """Return a completion."""
        reply = answer.reply
        message: dict[str, Any] = {"role": "assistant", "content": reply.content or None}
        if reply.reasoning is not None:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [
                function_call(answer.call_id(index), call.name, call.text) for index, call in enumerate(reply.calls)
            ]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(answer)}
        return {**_frame(answer, "chat.completion"), "choices": [choice], "usage": usage(answer)}

    def stream(self, answer: WrittenAnswer, asked: ModelRequest) -> bytes:
        """Return the chunks of a completion."""
        return sse(self._events(answer, asked))

    def _events(self, answer: WrittenAnswer, asked: ModelRequest) -> Iterator[Event]:
        """Yield the chunks: the role, thinking and text, the calls, the finish reason, the usage."""
        frame, reply = _frame(answer, "chat.completion.chunk"), answer.reply

        def chunk(delta: dict[str, Any], reason: str | None = None) -> Event:
            return "", {**frame, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}

        yield chunk({"role": "assistant", "content": ""})
        for piece in pieces(reply.reasoning or ""):
            yield chunk({"reasoning_content": piece})
        for piece in pieces(reply.content):
            yield chunk({"content": piece})
        for index, call in enumerate(reply.calls):
            yield chunk({"tool_calls": [{"index": index, **function_call(answer.call_id(index), call.name, "")}]})
            for piece in pieces(call.text):
                yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        yield chunk({}, _reason(answer))
        if asked.include_usage:
            yield "", {**frame, "choices": [], "usage": usage(answer)}
        yield "", "[DONE]"

    def refusal(self, refusal: RequestRefusal) -> dict[str, Any]:
        """Return an error in OpenAI's form."""
        return openai_error(refusal)

    def keep_alive(self, asked: ModelRequest) -> bytes:
        """Return a comment of the event stream."""
        return b": keepalive\n\n"

    def late_refusal(self, refusal: RequestRefusal, asked: ModelRequest) -> bytes:
        """Return an error in place of the next chunk."""
        return sse([("", openai_error(refusal))])


def openai_models(name: str, *, one: bool) -> dict[str, Any]:
    """Return the description of a model, or a list with it, in OpenAI's form."""
    model = {"id": name, "object": "model", "created": 0, "owned_by": "hermes-rl"}
    return model if one else {"object": "list", "data": [model]}


def openai_error(refusal: RequestRefusal) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = "authentication_error" if refusal.kind == "key" else "invalid_request_error"
    said = refusal.message
    if refusal.kind == "too_long":
        said = f"This model's maximum context length is exceeded. Please reduce the length of the messages. {said}"
    return {
        "error": {
            "message": said,
            "type": kind,
            "param": None,
            "code": _CODES.get(refusal.kind, "invalid_request_error"),
        }
    }


def usage(answer: WrittenAnswer) -> dict[str, Any]:
    """Return the counts of tokens in OpenAI's form."""
    reply = answer.reply
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens or 0},
        "completion_tokens_details": {"reasoning_tokens": reply.reasoning_tokens or 0},
    }


def _frame(answer: WrittenAnswer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}


def _reason(answer: WrittenAnswer) -> str:
    return _REASONS.get(answer.reply.finish_reason or "", "tool_calls" if answer.reply.calls else "stop")


def _message(raw: Mapping[str, Any], asked: ModelRequest) -> Message:
    role = string(raw.get("role")) or "user"
    message: Message = {"role": _ROLES.get(role, role), "content": _content(raw.get("content"), asked)}
    if message["role"] == "tool":
        message["tool_call_id"] = string(raw.get("tool_call_id"))
    if message["role"] != "assistant":
        return message
    for key in ("reasoning_content", "reasoning"):
        if thinking := string(raw.get(key)):
            message["reasoning_content"] = thinking
            break
    calls = []
    for call in mappings(raw.get("tool_calls")):
        function = call.get("function")
        if isinstance(function, Mapping):
            arguments = write_arguments(function.get("arguments"))
            calls.append(function_call(string(call.get("id")), string(function.get("name")), arguments))
    if calls:
        message["tool_calls"] = calls
    return message


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
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else image
    return image_part(url, asked) if isinstance(url, str) else placeholder(string(part.get("type")), asked)
