"""Anthropic's Messages API, in the form that Claude Code uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hermes_agents.serving.dialects import (
    Aim,
    BadRequest,
    Event,
    ModelRequest,
    RefusalKind,
    RequestRefusal,
    WrittenAnswer,
    content,
    function_call,
    function_tool,
    image_part,
    mappings,
    pieces,
    placeholder,
    read_arguments,
    sse,
    string,
    text_part,
    whole_number,
    write_arguments,
)
from hermes_core import Message
from hermes_core.agents.canonical import join_texts

_KNOWN = frozenset({"messages", "system", "tools", "stream", "model", "max_tokens", "tool_choice"})
_ABOUT_NOTHING = frozenset({"metadata", "service_tier", "cache_control"})
_BILLING = "x-anthropic-billing-header"
"""The beginning of a system block that Claude Code writes for the provider. The block may differ in each request."""
_KINDS: Mapping[RefusalKind, str] = {
    "key": "authentication_error",
    "unknown_path": "not_found_error",
    "too_large": "request_too_large",
}


class AnthropicDialect:
    """Reads and writes Messages."""

    name = "anthropic"
    headers = ("x-api-key", "anthropic-version")

    def aim(self, path: str, query: str) -> Aim | None:
        """Return the aim of a POST to this path; None if the dialect has no such path."""
        if path == "/messages/count_tokens":
            return Aim(counted=lambda tokens: {"input_tokens": tokens})
        return Aim() if path == "/messages" else None

    def models(self, model: str, *, one: bool) -> dict[str, Any]:
        """Return the description of the model, or a list with it."""
        about = {"type": "model", "id": model, "display_name": model, "created_at": "2025-01-01T00:00:00Z"}
        return about if one else {"data": [about], "has_more": False, "first_id": model, "last_id": model}

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """Read a request."""
        choice = body.get("tool_choice")
        kind = choice.get("type") if isinstance(choice, Mapping) else None
        asked = ModelRequest(
            stream=body.get("stream") is True,
            model=string(body.get("model")) or None,
            max_tokens=whole_number(body.get("max_tokens")),
            no_calls=kind == "none",
        )
        asked.settings = {
            key: value
            for key, value in body.items()
            if key not in _KNOWN and key not in _ABOUT_NOTHING and value is not None
        }
        if kind not in (None, "none", "auto") or (
            isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use")
        ):
            asked.settings["tool_choice"] = choice
        if system := _system(body.get("system")):
            asked.messages.append({"role": "system", "content": system})
        said = mappings(body.get("messages"))
        for message in said:
            _read_message(message, asked)
        if not said:
            raise BadRequest("messages: at least one message is required")
        for tool in mappings(body.get("tools")):
            kind = string(tool.get("type"))
            if kind in ("", "custom") or "input_schema" in tool:
                name = string(tool.get("name"))
                asked.tools.append(function_tool(name, tool.get("description"), tool.get("input_schema")))
            else:
                asked.dropped.append(kind)
        return asked

    def whole(self, answer: WrittenAnswer, asked: ModelRequest) -> dict[str, Any]:
        """Return a message."""
        blocks = [
            {**block, "input": read_arguments(block["input"])} if block["type"] == "tool_use" else block
            for block in _blocks(answer)
        ]
        return {**_frame(answer), "content": blocks, "stop_reason": _stop(answer), "usage": _usage(answer)}

    def stream(self, answer: WrittenAnswer, asked: ModelRequest) -> bytes:
        """Return the events of a message."""
        return sse(self._events(answer))

    def _events(self, answer: WrittenAnswer) -> Iterator[Event]:
        """Yield a message's events: its beginning, each block with its deltas, and its end."""

        def event(kind: str, **data: Any) -> Event:
            return kind, {"type": kind, **data}

        usage = _usage(answer)
        yield event("message_start", message={**_frame(answer), "usage": {**usage, "output_tokens": 0}})
        for index, block in enumerate(_blocks(answer)):
            begun, deltas = _split_block(block)
            yield event("content_block_start", index=index, content_block=begun)
            for delta in deltas:
                yield event("content_block_delta", index=index, delta=delta)
            yield event("content_block_stop", index=index)
        yield event("message_delta", delta={"stop_reason": _stop(answer), "stop_sequence": None}, usage=usage)
        yield event("message_stop")

    def refusal(self, refusal: RequestRefusal) -> dict[str, Any]:
        """Return an error in Anthropic's form."""
        said = f"prompt is too long: {refusal.message}" if refusal.kind == "too_long" else refusal.message
        kind = _KINDS.get(refusal.kind, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": said}}

    def keep_alive(self, asked: ModelRequest) -> bytes:
        """Return the event of a ping."""
        return sse([("ping", {"type": "ping"})])

    def late_refusal(self, refusal: RequestRefusal, asked: ModelRequest) -> bytes:
        """Return the event of an error."""
        return sse([("error", self.refusal(refusal))])


def _frame(answer: WrittenAnswer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _stop(answer: WrittenAnswer) -> str:
    if answer.cut:
        return "max_tokens"
    if answer.withheld:
        return "refusal"
    return "tool_use" if answer.reply.calls else "end_turn"


def _usage(answer: WrittenAnswer) -> dict[str, Any]:
    """Return the counts of tokens. In this dialect, `input_tokens` excludes the tokens from the cache."""
    reply = answer.reply
    cached = min(reply.cached_tokens or 0, reply.prompt_tokens)
    return {
        "input_tokens": reply.prompt_tokens - cached,
        "output_tokens": reply.completion_tokens,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def _blocks(answer: WrittenAnswer) -> Iterator[dict[str, Any]]:
    """Yield the blocks of an answer, with the input of calls as the text that the model wrote."""
    reply = answer.reply
    if reply.reasoning:
        yield {"type": "thinking", "thinking": reply.reasoning, "signature": f"hermes_{answer.id}"}
    if reply.content:
        yield {"type": "text", "text": reply.content}
    for index, call in enumerate(reply.calls):
        yield {"type": "tool_use", "id": answer.call_id(index), "name": call.name, "input": call.text}


def _split_block(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the block with which a stream begins a block, and the deltas that complete it."""
    if block["type"] == "tool_use":
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(block["input"])]
        return {**block, "input": {}}, deltas
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
    thinking = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])]
    signed = {"type": "signature_delta", "signature": block["signature"]}
    return {**block, "thinking": "", "signature": ""}, [*thinking, signed]


def _system(raw: Any) -> str:
    texts = [raw] if isinstance(raw, str) else [part.get("text") for part in mappings(raw)]
    return join_texts([string(text) for text in texts if isinstance(text, str) and not text.startswith(_BILLING)])


def _read_message(raw: Mapping[str, Any], asked: ModelRequest) -> None:
    """Add a message to the request. It may become several in OpenAI's form: results of tools, then the user's text."""
    role, said = string(raw.get("role")) or "user", raw.get("content")
    blocks = mappings(said) if isinstance(said, list) else [text_part(string(said))]
    if role == "assistant":
        asked.messages.append(read_answer(blocks, asked))
        return
    if role == "system":
        asked.messages.append({"role": "system", "content": _system(said)})
        return
    parts: list[dict[str, Any]] = []
    results = [block for block in blocks if block.get("type") == "tool_result"]
    for block in results:
        identifier, inner = string(block.get("tool_use_id")), block.get("content")
        if block.get("is_error"):
            asked.failed.add(identifier)
        told = content([_part(part, asked) for part in mappings(inner)]) if isinstance(inner, list) else string(inner)
        asked.messages.append({"role": "tool", "tool_call_id": identifier, "content": told})
    parts = [_part(block, asked) for block in blocks if block.get("type") != "tool_result"]
    if parts or not results:
        asked.messages.append({"role": "user", "content": content(parts)})


def read_answer(blocks: Sequence[Mapping[str, Any]], asked: ModelRequest) -> Message:
    """Return the blocks of an answer as a message."""
    texts, thinking, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            arguments = write_arguments(block.get("input"))
            calls.append(function_call(string(block.get("id")), string(block.get("name")), arguments))
        elif kind == "thinking":
            thinking.append(string(block.get("thinking")))
        elif kind == "redacted_thinking":
            asked.unknown["redacted_thinking"] += 1
        else:
            texts.append(_part(block, asked))
    answer: Message = {"role": "assistant", "content": content(texts)}
    if any(thinking):
        answer["reasoning_content"] = join_texts(thinking)
    if calls:
        answer["tool_calls"] = calls
    return answer


def _part(block: Mapping[str, Any], asked: ModelRequest) -> dict[str, Any]:
    kind = string(block.get("type"))
    if isinstance(block.get("text"), str):
        return text_part(string(block["text"]))
    source = block.get("source")
    if kind == "image" and isinstance(source, Mapping):
        if isinstance(url := source.get("url"), str):
            return image_part(url, asked)
        if isinstance(data := source.get("data"), str):
            return image_part(f"data:{string(source.get('media_type')) or 'image/png'};base64,{data}", asked)
    if kind == "document" and isinstance(source, Mapping) and source.get("type") == "text":
        return text_part(string(source.get("data")))
    return placeholder(kind, asked)
