"""Google's Gemini API, in the form that Gemini CLI uses. A request's address names the model, and says whether the
answer is a stream."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from hermes_agents.serving.dialects import (
    Aim,
    BadRequest,
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
from hermes_core.agents.canonical import join_texts

_ADDRESS = re.compile(r"/models/(?P<model>.+):(?P<method>generateContent|streamGenerateContent|countTokens)")
_SSE, _ARRAY = "text/event-stream", "application/json"
"""The content types of streams: server-sent events, and, for programs that don't ask for `alt=sse`, a JSON array."""
_KNOWN = frozenset({"model", "stream", "contents", "systemInstruction", "tools", "toolConfig", "generationConfig"})
_ABOUT_NOTHING = frozenset({"generateContentRequest", "labels"})
_TYPES = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})
_VALUES = frozenset({"default", "example", "enum"})
"""Keys of a schema whose values are not schemas."""
_NO_KINDS = frozenset({"thought", "thoughtSignature", "partMetadata", "videoMetadata", "mediaResolution"})
"""Keys of a part that do not determine the part's kind."""
_SNAKE = re.compile(r"_([a-z])")
_STATUS: Mapping[RefusalKind, str] = {"key": "UNAUTHENTICATED", "unknown_path": "NOT_FOUND"}

Called = dict[str, deque[str]]
"""The ids of the last answer's calls, by the names of their tools."""


class GeminiDialect:
    """Reads and writes `generateContent` and `streamGenerateContent`.

    The JSON is in the form of protocol buffers: fields may be named `likeThis` or `like_this`. Programs may leave out
    the ids of calls even if the answer had them. Results are then matched with calls by name and order.
    """

    name = "gemini"
    headers = ("x-goog-api-key", "x-goog-api-client")

    def aim(self, path: str, query: str) -> Aim | None:
        """Return the aim of a POST to this path, which names the model and says whether the answer is a stream; None if
        the dialect has no such path."""
        if (found := _ADDRESS.fullmatch(path)) is None:
            return None
        if found["method"] == "countTokens":
            return Aim({"model": found["model"]}, lambda tokens: {"totalTokens": tokens})
        streamed = found["method"] == "streamGenerateContent"
        kind = _SSE if "alt=sse" in query.split("&") else _ARRAY
        return Aim({"model": found["model"], "stream": kind if streamed else None})

    def models(self, model: str, *, one: bool) -> dict[str, Any]:
        """Return the description of the model, or a list with it."""
        about = {"name": f"models/{model}", "displayName": model, "supportedGenerationMethods": ["generateContent"]}
        return about if one else {"models": [about]}

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """Read a request."""
        body = _fields(body)
        body = {**_fields(body.get("generateContentRequest")), **body}  # the place of the request in `countTokens`
        if body.get("cachedContent"):
            raise BadRequest("cachedContent is not supported: nothing is stored here, so send the whole contents")
        generation = _fields(body.get("generationConfig"))
        calling = _fields(_fields(body.get("toolConfig")).get("functionCallingConfig"))
        stream = body.get("stream")
        asked = ModelRequest(
            stream=stream in (_SSE, _ARRAY),
            model=string(body.get("model")) or None,
            max_tokens=whole_number(generation.pop("maxOutputTokens", None)),
            no_calls=calling.get("mode") == "NONE",
            stream_type=string(stream) or _SSE,
        )
        more = {key: value for key, value in body.items() if key not in _KNOWN and key not in _ABOUT_NOTHING}
        asked.settings = {key: value for key, value in {**generation, **more}.items() if value is not None}
        if calling.get("mode", "AUTO") not in ("AUTO", "NONE"):
            asked.settings["toolConfig"] = calling
        if system := join_texts([string(part.get("text")) for part in _parts(body.get("systemInstruction"))]):
            asked.messages.append({"role": "system", "content": system})
        called: Called = {}
        said = mappings(body.get("contents"))
        for each in said:
            _read_content(each, asked, called)
        if not said:
            raise BadRequest("contents: at least one content is required")
        for tool in mappings(body.get("tools")):
            _read_tool(tool, asked)
        return asked

    def whole(self, answer: WrittenAnswer, asked: ModelRequest) -> dict[str, Any]:
        """Return a response."""
        return {**_response(answer, list(_answer_parts(answer)), _reason(answer)), "usageMetadata": _usage(answer)}

    def stream(self, answer: WrittenAnswer, asked: ModelRequest) -> bytes:
        """Return responses that each have a part of the answer. The last response has the finish reason and the
        usage."""
        *parts, last = [piece for part in _answer_parts(answer) for piece in _pieces(part)] or [{"text": ""}]
        responses = [_response(answer, [part]) for part in parts]
        responses.append({**_response(answer, [last], _reason(answer)), "usageMetadata": _usage(answer)})
        if asked.stream_type == _ARRAY:
            return json.dumps(responses).encode()
        return sse(("", response) for response in responses)

    def refusal(self, refusal: RequestRefusal) -> dict[str, Any]:
        """Return an error in Google's form."""
        said = refusal.message
        if refusal.kind == "too_long":
            said = f"The input token count exceeds the maximum number of tokens allowed: {said}"
        status = _STATUS.get(refusal.kind, "INVALID_ARGUMENT")
        return {"error": {"code": refusal.status, "message": said, "status": status}}

    def keep_alive(self, asked: ModelRequest) -> bytes:
        """Return an empty line. Google's own libraries can't read comments."""
        return b"\n"

    def late_refusal(self, refusal: RequestRefusal, asked: ModelRequest) -> bytes:
        """Return an error that is not an event, which is the form that Google sends and its libraries expect."""
        error = self.refusal(refusal)
        return json.dumps([error] if asked.stream_type == _ARRAY else error).encode()


def _response(answer: WrittenAnswer, parts: list[dict[str, Any]], reason: str | None = None) -> dict[str, Any]:
    candidate = {"index": 0, "content": {"role": "model", "parts": parts}}
    ended = {"finishReason": reason} if reason else {}
    return {"candidates": [{**candidate, **ended}], "modelVersion": answer.model, "responseId": answer.id}


def _reason(answer: WrittenAnswer) -> str:
    if answer.cut:
        return "MAX_TOKENS"
    return "SAFETY" if answer.withheld else "STOP"


def _usage(answer: WrittenAnswer) -> dict[str, Any]:
    """Return the counts of tokens. In this dialect, the candidates' count does not include the thoughts."""
    reply = answer.reply
    thoughts = min(reply.reasoning_tokens or 0, reply.completion_tokens)
    return {
        "promptTokenCount": reply.prompt_tokens,
        "cachedContentTokenCount": reply.cached_tokens or 0,
        "candidatesTokenCount": reply.completion_tokens - thoughts,
        "thoughtsTokenCount": thoughts,
        "totalTokenCount": reply.prompt_tokens + reply.completion_tokens,
    }


def _answer_parts(answer: WrittenAnswer) -> Iterator[dict[str, Any]]:
    """Yield the parts of an answer."""
    reply = answer.reply
    if reply.reasoning:
        yield {"text": reply.reasoning, "thought": True}
    if reply.content:
        yield {"text": reply.content}
    for index, call in enumerate(reply.calls):
        arguments = read_arguments(call.text)
        yield {"functionCall": {"id": answer.call_id(index), "name": call.name, "args": arguments}}


def _pieces(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pieces of a part for a stream. A call is one piece."""
    return [{**part, "text": piece} for piece in pieces(part["text"])] if "text" in part else [part]


def _fields(raw: Any) -> dict[str, Any]:
    """Return the fields of a protocol buffer's message, all named `likeThis`; empty if the value is no message."""
    if not isinstance(raw, Mapping):
        return {}
    return {_SNAKE.sub(lambda found: found[1].upper(), key): value for key, value in raw.items()}


def _parts(raw: Any) -> list[dict[str, Any]]:
    """Return the parts of a content."""
    return [_fields(part) for part in mappings(_fields(raw).get("parts"))]


def _read_tool(raw: Mapping[str, Any], asked: ModelRequest) -> None:
    """Add the functions of a tool to the request. The tool's other parts are tools that Google would run, and are
    dropped."""
    for kind, value in _fields(raw).items():
        if kind != "functionDeclarations":
            asked.dropped.append(kind)
            continue
        for function in map(_fields, mappings(value)):
            parameters = function.get("parametersJsonSchema") or _schema(function.get("parameters"))
            asked.tools.append(function_tool(string(function.get("name")), function.get("description"), parameters))


def _schema(raw: Any) -> Any:
    """Return a schema in Google's form as JSON Schema, in which the names of types are in lower case."""
    if isinstance(raw, list):
        return [_schema(each) for each in raw]
    if not isinstance(raw, Mapping):
        return raw
    schema = {key: value if key in _VALUES else _schema(value) for key, value in raw.items()}
    kind = schema.get("type")
    return {**schema, "type": kind.lower()} if isinstance(kind, str) and kind in _TYPES else schema


def _read_content(raw: Mapping[str, Any], asked: ModelRequest, called: Called) -> None:
    """Add a content to the request. It may become several messages in OpenAI's form: results of tools, then the user's
    text."""
    parts = _parts(raw)
    if raw.get("role") == "model":
        _read_answer(parts, asked, called)
        return
    results = [_fields(part["functionResponse"]) for part in parts if "functionResponse" in part]
    for result in results:
        _read_result(result, asked, called)
    said = [_part(part, asked) for part in parts if "functionResponse" not in part]
    if said or not results:
        asked.messages.append({"role": "user", "content": content(said)})


def _read_answer(parts: list[dict[str, Any]], asked: ModelRequest, called: Called) -> None:
    """Add an answer to the request. Programs may send an answer that came as a stream back as several contents in a
    row."""
    if not asked.messages or asked.messages[-1]["role"] != "assistant":
        asked.messages.append({"role": "assistant", "content": ""})
        called.clear()
    answer = asked.messages[-1]
    for part in parts:
        if "functionCall" in part:
            call, calls = _fields(part["functionCall"]), answer.setdefault("tool_calls", [])
            name = string(call.get("name"))
            identifier = string(call.get("id")) or f"call_{len(asked.messages)}_{len(calls)}"
            calls.append(function_call(identifier, name, write_arguments(call.get("args"))))
            called.setdefault(name, deque()).append(identifier)
        else:
            key = "reasoning_content" if part.get("thought") is True else "content"
            answer[key] = answer.get(key, "") + _text(part, asked)


def _read_result(raw: Mapping[str, Any], asked: ModelRequest, called: Called) -> None:
    waiting, response = called.get(string(raw.get("name"))), raw.get("response")
    identifier = string(raw.get("id")) or (waiting.popleft() if waiting else "")
    if isinstance(response, Mapping) and "error" in response:
        asked.failed.add(identifier)
    parts = [text_part(_tool_output(response)), *(_part(part, asked) for part in _parts(raw))]
    asked.messages.append({"role": "tool", "tool_call_id": identifier, "content": content(parts)})


def _tool_output(response: Any) -> str:
    """Return the output of a tool: by Google's rules, its `output` or `error`, or the whole response if it has more
    fields."""
    match response:
        case {"output": str(said)} | {"error": str(said)} if len(response) == 1:
            return said
    return json.dumps(response, ensure_ascii=False)


def _text(part: Mapping[str, Any], asked: ModelRequest) -> str:
    """Return a part as text."""
    return string(part["text"]) if "text" in part else str(placeholder(_kind(part), asked)["text"])


def _part(part: Mapping[str, Any], asked: ModelRequest) -> dict[str, Any]:
    """Return a part in OpenAI's form."""
    inline = _fields(part.get("inlineData"))
    if (kind := string(inline.get("mimeType"))).startswith("image/"):
        return image_part(f"data:{kind};base64,{string(inline.get('data'))}", asked)
    return text_part(_text(part, asked))


def _kind(part: Mapping[str, Any]) -> str:
    return next((key for key in part if key not in _NO_KINDS), "")
