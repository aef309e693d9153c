"""The APIs of providers to which programs' requests can be passed on: their URLs, requests and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from hermes_agents.serving.anthropic import read_answer
from hermes_agents.serving.dialects import BadRequest, ModelRequest, mappings, string
from hermes_agents.serving.responses import read_item
from hermes_core import BadCompletion, HttpRefusal, Message
from hermes_core.agents.canonical import join_texts
from hermes_core.agents.replies import count

Body = Mapping[str, Any]


class ProviderApi(Protocol):
    """The API of one provider. It has the same name as its dialect."""

    name: str
    url: str
    """The provider's URL, without `/v1`."""
    path: str
    headers: Sequence[str]
    """The program's headers that are passed on."""

    def authorization(self, key: str) -> dict[str, str]:
        """Return the headers that name the key."""
        ...

    def trial(self, model: str) -> dict[str, Any]:
        """Return a request with a very short answer."""
        ...

    def drop_remote_work(self, body: Body) -> tuple[Body, list[str]]:
        """Return a request without the tools and servers that the provider would run outside of the slot, and the names
        of the removed parts. If there are no such parts, the same object is returned.

        Raises:
            BadRequest: the provider would have to fetch a file or an image for this request.
        """
        ...

    def collect_stream(self, events: Iterable[Body]) -> Body:
        """Return the whole answer of a stream.

        Raises:
            HttpRefusal: the stream ended with an error.
            BadCompletion: the stream has no end.
        """
        ...

    def completion(self, answer: Body) -> dict[str, Any]:
        """Return an answer as a chat completion. Its message is equal to the message that is read from a later request
        with this answer.

        Raises:
            HttpRefusal: the answer is an error.
            BadCompletion: the answer is no completion.
        """
        ...


class AnthropicApi:
    """Anthropic's Messages."""

    name, url, path = "anthropic", "https://api.anthropic.com", "/v1/messages"
    headers: Sequence[str] = ("accept", "anthropic-beta", "anthropic-version", "user-agent")
    _elsewhere = ("mcp_servers", "container")
    """Keys of a request that make the provider call servers or run code."""
    _of_the_program = ("bash_", "computer_", "memory_", "text_editor_", "tool_search_tool_")
    """Types of tools that the provider defines and the program runs, or that only search among the other tools."""
    _statuses: Mapping[str, int] = {
        "invalid_request_error": 400,
        "authentication_error": 401,
        "billing_error": 402,
        "permission_error": 403,
        "not_found_error": 404,
        "request_too_large": 413,
        "rate_limit_error": 429,
        "timeout_error": 504,
        "overloaded_error": 529,
    }
    _reasons: Mapping[str, str] = {
        "max_tokens": "length",
        "model_context_window_exceeded": "length",
        "refusal": "content_filter",
        "tool_use": "tool_calls",
    }
    _growing: Mapping[str, str] = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}

    def authorization(self, key: str) -> dict[str, str]:
        """Return the headers with the key and the API's version."""
        return {"x-api-key": key, "anthropic-version": "2023-06-01"}

    def trial(self, model: str) -> dict[str, Any]:
        """Return a request for one token."""
        return {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}

    def drop_remote_work(self, body: Body) -> tuple[Body, list[str]]:
        """Return the request without the provider's tools and the keys in `_elsewhere`, and the names of these."""
        for message in mappings(body.get("messages")):
            _check_sources(message.get("content"))
        tools, dropped = _split_tools(body.get("tools"), self._is_run_here)
        keys = [key for key in self._elsewhere if body.get(key)]
        if not dropped and not keys:
            return body, []
        kept = {key: value for key, value in body.items() if key not in keys}
        return _with(kept, "tools", tools), [*dropped, *keys]

    def _is_run_here(self, tool: Body) -> bool:
        kind = string(tool.get("type"))
        return kind in ("", "custom") or kind.startswith(self._of_the_program)

    def collect_stream(self, events: Iterable[Body]) -> Body:
        """Return the message of a stream."""
        message: dict[str, Any] = {}
        blocks: dict[int, dict[str, Any]] = {}
        for event in events:
            kind, index = event.get("type"), event.get("index")
            if kind == "error":
                raise self._refusal(event)
            if kind == "message_start":
                message = dict(_mapping(event.get("message")))
            elif kind == "content_block_start" and isinstance(index, int):
                blocks[index] = dict(_mapping(event.get("content_block")))
            elif kind == "content_block_delta" and index in blocks:
                self._grow(blocks[index], _mapping(event.get("delta")))
            elif kind == "message_delta":
                message |= _mapping(event.get("delta"))
                message["usage"] = {**_mapping(message.get("usage")), **_mapping(event.get("usage"))}
            elif kind == "message_stop":
                return {**message, "content": [blocks[index] for index in sorted(blocks)]}
        raise _stream_error()

    def _grow(self, block: dict[str, Any], delta: Body) -> None:
        """Add a delta to its block. The arguments of a call stay the text that the model wrote."""
        kind = string(delta.get("type"))
        if (key := self._growing.get(kind)) is not None:
            block[key] = string(block.get(key)) + string(delta.get(key))
        elif kind == "input_json_delta":
            block["input"] = string(block.get("input")) + string(delta.get("partial_json"))

    def _refusal(self, answer: Body) -> HttpRefusal:
        kind = string(_mapping(answer.get("error")).get("type"))
        return HttpRefusal(self._statuses.get(kind, 500), answer)

    def completion(self, answer: Body) -> dict[str, Any]:
        """Return a message as a completion."""
        if answer.get("type") == "error":
            raise self._refusal(answer)
        if not isinstance(answer.get("content"), list):
            raise _no_answer("Messages")
        usage = _mapping(answer.get("usage"))
        cached = _count(usage, "cache_read_input_tokens")
        prompt = _count(usage, "input_tokens") + cached + _count(usage, "cache_creation_input_tokens")
        message = read_answer(mappings(answer["content"]), ModelRequest())
        reason = self._reasons.get(string(answer.get("stop_reason")), "stop")
        return _completion(answer, message, reason, (prompt, cached, _count(usage, "output_tokens"), None))


class ResponsesApi:
    """OpenAI's Responses."""

    name, url, path = "responses", "https://api.openai.com", "/v1/responses"
    headers: Sequence[str] = ("accept", "openai-beta", "user-agent")
    _of_the_program = ("", "function", "custom", "namespace", "tool_search")
    """Types of tools that the program runs, or that only search among the other tools."""
    _passing: Mapping[str, int] = {
        "": 500,
        "server_error": 500,
        "rate_limit_exceeded": 429,
        "insufficient_quota": 429,
        "server_is_overloaded": 503,
        "slow_down": 503,
    }
    """The HTTP status for each error of a response that is not about the request, by the error's code."""

    def authorization(self, key: str) -> dict[str, str]:
        """Return the key's header."""
        return {"authorization": f"Bearer {key}"}

    def trial(self, model: str) -> dict[str, Any]:
        """Return a request for the smallest number of tokens that the API accepts."""
        return {"model": model, "input": "Hello", "max_output_tokens": 16, "store": False}

    def drop_remote_work(self, body: Body) -> tuple[Body, list[str]]:
        """Return the request without tools of the provider, which may also be among the input's items."""
        kept, dropped = self._without(body)
        items = body.get("input")
        if not isinstance(items, list):
            return kept, dropped
        others = []
        for item in items:
            other, names = self._without(item) if isinstance(item, Mapping) else (item, [])
            others.append(other)
            dropped += names
            for part in (each for key in ("content", "output") for each in mappings(_mapping(item).get(key))):
                _check_part(part)
        return ({**kept, "input": others} if dropped else body), dropped

    def _without(self, part: Body) -> tuple[Body, list[str]]:
        tools, dropped = _split_tools(part.get("tools"), self._is_run_here)
        return (_with(part, "tools", tools) if dropped else part), dropped

    def _is_run_here(self, tool: Body) -> bool:
        return string(tool.get("type")) in self._of_the_program and all(
            map(self._is_run_here, mappings(tool.get("tools")))
        )

    def collect_stream(self, events: Iterable[Body]) -> Body:
        """Return the response with which a stream ends. If it lacks its items, as with some endpoints, they are added
        from the events before it."""
        items = []
        for event in events:
            kind = event.get("type")
            if kind == "error":
                raise self._refusal(event.get("error") or event)
            if kind == "response.output_item.done":
                items.append(_mapping(event.get("item")))
            elif kind in ("response.completed", "response.incomplete", "response.failed"):
                response = _mapping(event.get("response"))
                return {**response, "output": response.get("output") or items}
        raise _stream_error()

    def _refusal(self, error: Any) -> HttpRefusal:
        return HttpRefusal(self._passing.get(string(_mapping(error).get("code")), 400), {"error": error})

    def completion(self, answer: Body) -> dict[str, Any]:
        """Return a response as a completion."""
        if answer.get("status") == "failed":
            raise self._refusal(answer.get("error"))
        if not isinstance(answer.get("output"), list):
            raise _no_answer("Responses")
        asked = ModelRequest()
        for item in mappings(answer["output"]):
            read_item(item, asked)
        message = next(iter(one_message_each(asked.messages)), {"role": "assistant", "content": ""})
        usage = _mapping(answer.get("usage"))
        details = [_mapping(usage.get(f"{side}_tokens_details")) for side in ("input", "output")]
        why = _mapping(answer.get("incomplete_details")).get("reason")
        reason = {"max_output_tokens": "length", "content_filter": "content_filter"}.get(string(why))
        counts = (
            *(_count(usage, "input_tokens"), _count(details[0], "cached_tokens")),
            *(_count(usage, "output_tokens"), _count(details[1], "reasoning_tokens")),
        )
        return _completion(answer, message, reason or ("tool_calls" if "tool_calls" in message else "stop"), counts)


PROVIDERS: Mapping[str, ProviderApi] = {each.name: each for each in (AnthropicApi(), ResponsesApi())}


def one_message_each(messages: Iterable[Message]) -> list[Message]:
    """Return messages in which each answer is joined into one message, because a provider may send the parts of an
    answer in any order."""
    found: list[Message] = []
    for message in messages:
        if message["role"] == "assistant" and found and found[-1]["role"] == "assistant":
            found[-1] = _together(found[-1], message)
        else:
            found.append(message)
    return found


def _together(first: Message, second: Message) -> Message:
    whole = {**first, **second}
    for key in ("content", "reasoning_content"):
        texts = [text for each in (first, second) if isinstance(text := each.get(key), str) and text]
        if texts or key == "content":
            whole[key] = join_texts(texts)
    if calls := [call for each in (first, second) for call in each.get("tool_calls", ())]:
        whole["tool_calls"] = calls
    return whole


def _split_tools(tools: Any, is_run_here: Callable[[Body], bool]) -> tuple[list[Body], list[str]]:
    """Return the tools that a program runs, and the names of the other tools."""
    kept, dropped = [], []
    for tool in mappings(tools):
        if is_run_here(tool):
            kept.append(tool)
        else:
            dropped.append(string(tool.get("type")))
    return kept, dropped


def _with(body: Body, key: str, tools: Sequence[Body]) -> Body:
    """Return a part of a request with these tools. If there are none, the key is left out, because providers refuse an
    empty list."""
    if tools:
        return {**body, key: tools}
    return {name: value for name, value in body.items() if name not in (key, "tool_choice")}


def _check_sources(content: Any) -> None:
    """Check that the provider need not fetch a part of a message, because a slot could send data to other hosts in this
    way."""
    for block in mappings(content):
        source = _mapping(block.get("source"))
        if source.get("type") in ("url", "file"):
            raise _fetches()
        if block.get("type") == "tool_result" or source:
            _check_sources(source.get("content") if source else block.get("content"))


def _check_part(part: Body) -> None:
    """Check that the provider need not fetch a part of an item."""
    url = part.get("image_url")
    if part.get("file_url") or part.get("file_id") or (isinstance(url, str) and not url.startswith("data:")):
        raise _fetches()


def _fetches() -> BadRequest:
    return BadRequest("what a message shows must be in the request: the provider fetches nothing for a slot")


def _completion(
    answer: Body, message: Message, reason: str, counts: tuple[int, int, int, int | None]
) -> dict[str, Any]:
    prompt, cached, completion, reasoning = counts
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
    choice = {"message": message, "finish_reason": reason}
    return {"model": answer.get("model"), "choices": [choice], "usage": usage}


def _stream_error() -> BadCompletion:
    return BadCompletion("the endpoint broke its answer off", hint="look at the provider's status page")


def _no_answer(api: str) -> BadCompletion:
    return BadCompletion(
        f"the endpoint's answer is not one of the API {api}", hint="check that the base URL is that of such an API"
    )


def _mapping(value: Any) -> Body:
    return value if isinstance(value, Mapping) else {}


def _count(counts: Body, key: str) -> int:
    return count(counts.get(key)) or 0
