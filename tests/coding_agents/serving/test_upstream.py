"""Requests that are passed on to a provider's own API: what it gets, what the program gets, and what is recorded."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anthropic
import hermes_agents
import httpx
import openai
import pytest
from hermes_agents.program import AgentProgram, CommandAgent, ProgramAgent
from hermes_agents.serving.bounds import Bounds
from hermes_agents.serving.upstream import Upstream
from hermes_testing.scripted_server import Fault, Reply, ScriptedServer, call

from hermes_core.agents.base import AgentSettings, StopReason
from hermes_core.agents.endpoint.prices import TokenPrices
from hermes_core.errors import ConfigError, ModelError
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from tests.coding_agents.serving.slot import TASK, Slot, slot
from tests.support.http_server import listening

KEY = "the-key-of-the-driver"
PATHS = {"anthropic": "/v1/messages", "responses": "/v1/responses"}
PRICES = {"m": TokenPrices(prompt=1.0, cached=0.1, completion=10.0)}

ASKED = (
    b'{ "model":"m","max_tokens" : 100.0, "stream":%s,"temperature":0.25,"thinking":{"type":"adaptive"},\n'
    b'"messages":[{"role":"user","content":[{"type":"text","text":"Fix the bug in calc.py. \\u00e9\xc3\xa9",'
    b'"cache_control":{"type":"ephemeral"}}]}], "context_management":{"edits":[]},"not_known_yet":1e3 }'
)
ANSWER: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "m-20990101",
    "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": "c2lnbmVk"},
        {"type": "redacted_thinking", "data": "aGlkZGVu"},
        {"type": "text", "text": "I look.", "citations": None},
        {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {"command": "ls"}, "caller": {"type": "direct"}},
    ],
    "stop_reason": "tool_use",
    "usage": {
        "input_tokens": 10,
        "cache_creation_input_tokens": 200,
        "cache_read_input_tokens": 3000,
        "output_tokens": 40,
        "service_tier": "standard",
    },
}
TOOL = {"name": "bash", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}


def stream_of(answer: dict[str, Any], end: bool = True) -> bytes:
    """The events of Anthropic's API for an answer, one delta for each block."""
    begun = {**answer, "content": [], "stop_reason": None, "usage": {**answer["usage"], "output_tokens": 1}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}, {"type": "ping"}]
    for index, block in enumerate(answer["content"]):
        at = {"index": index}
        empty = {"thinking": "", "signature": "", "text": "", "input": {}}
        start = {**block, **{key: empty[key] for key in empty.keys() & block.keys()}}
        events.append({"type": "content_block_start", **at, "content_block": start})
        deltas = {
            "thinking": [
                {"type": "thinking_delta", "thinking": "Hm."},
                {"type": "signature_delta", "signature": "c2lnbmVk"},
            ],
            "text": [{"type": "text_delta", "text": "I "}, {"type": "text_delta", "text": "look."}],
            "tool_use": [{"type": "input_json_delta", "partial_json": each} for each in ("", '{"comm', 'and": "ls"}')],
        }
        events += [{"type": "content_block_delta", **at, "delta": each} for each in deltas.get(block["type"], ())]
        events.append({"type": "content_block_stop", **at})
    if end:
        usage = {"output_tokens": answer["usage"]["output_tokens"]}
        events.append({"type": "message_delta", "delta": {"stop_reason": answer["stop_reason"]}, "usage": usage})
        events.append({"type": "message_stop"})
    return b"".join(b"event: %s\ndata: %s\n\n" % (e["type"].encode(), json.dumps(e).encode()) for e in events)


Prepared = tuple[int, bytes, dict[str, str]]
"""A status, a body and more headers."""


@dataclass
class Provider:
    """Answers with prepared bytes, and keeps what it was sent."""

    answers: list[Prepared]
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    held: asyncio.Event | None = None
    """What answers wait for."""

    async def answer(self, request: Any) -> Any:
        from aiohttp import web

        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((request.path_qs, headers, await request.read()))
        if self.held is not None:
            await self.held.wait()
        status, body, more = self.answers[min(len(self.requests), len(self.answers)) - 1]
        kind = "text/event-stream; charset=utf-8" if body.startswith(b"event:") else "application/json"
        return web.Response(status=status, body=body, headers={"content-type": kind, **more})


@asynccontextmanager
async def passing(api: str, url: str, bounds: Bounds | None = None, **settings: Any) -> AsyncIterator[Slot]:
    """A slot whose requests are passed on to the API at this URL."""
    own = {"model": "m", "base_url": url, "api_key": KEY, "max_retry_wait_s": 0.01, **settings}
    upstream = Upstream(AgentSettings(**own), api)
    try:
        async with slot(model=upstream, bounds=bounds, prices={"ours": PRICES["m"]}) as one:
            yield one
    finally:
        await upstream.aclose()


@asynccontextmanager
async def before(*answers: Prepared, api: str = "anthropic") -> AsyncIterator[Any]:
    """A slot before a provider with prepared answers; gives both."""
    provider = Provider(list(answers))
    async with listening({f"POST {PATHS[api]}": provider.answer}) as url, passing(api, url) as one:
        yield one, provider


async def post(one: Slot, body: bytes | dict[str, Any], api: str = "anthropic", **headers: str) -> httpx.Response:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(verify=False, timeout=30) as client:
        named = {"x-api-key": one.gateway.key, "content-type": "application/json", **headers}
        return await client.post(f"{one.url}{PATHS[api]}?beta=true&x=%2F", content=sent, headers=named)


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": TASK}], **more}


whole: Prepared = (200, json.dumps(ANSWER).encode(), {})
streamed_or_not = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@streamed_or_not
async def test_a_request_and_its_answer_are_passed_on_byte_for_byte(streamed: bool) -> None:
    body = ASKED % (b"true" if streamed else b"false")
    answer = stream_of(ANSWER) if streamed else json.dumps(ANSWER, indent=1).encode()
    async with before((200, answer, {})) as (one, provider):
        headers = {
            "anthropic-beta": "context-1m",
            "anthropic-version": "2023-06-01",
            "user-agent": "claude",
            "x-own": "1",
        }
        got = await post(one, body, **headers, cookie="a=b", authorization=f"Bearer {one.gateway.key}")
        secret = one.gateway.key
    assert (got.status_code, got.content) == (200, answer)
    [(target, sent, received)] = provider.requests
    assert (target, received) == ("/v1/messages?beta=true&x=%2F", body)
    assert sent["x-api-key"] == KEY and sent["anthropic-beta"] == "context-1m" and sent["user-agent"] == "claude"
    assert not sent.keys() & {"x-own", "cookie", "authorization"} and secret not in str(sent)


@streamed_or_not
async def test_what_is_passed_on_is_recorded_as_usual(streamed: bool) -> None:
    body = ASKED % (b"true" if streamed else b"false")
    async with before((200, stream_of(ANSWER) if streamed else json.dumps(ANSWER).encode(), {})) as (one, _):
        await post(one, body)
        result, counts = one.task.result, one.gateway.counts
    question, answer, _ = result.messages
    assert question == {"role": "user", "content": "Fix the bug in calc.py. éé"}
    assert (answer["content"], answer["reasoning_content"]) == ("I look.", "Hm.")
    [made] = result.calls
    assert (made.id, made.name, json.loads(made.arguments)) == ("toolu_1", "bash", {"command": "ls"})
    [turn] = result.turns
    assert (turn.model, turn.stop_reason, turn.prompt_tokens, turn.cached_tokens) == (
        "m-20990101",
        "tool_calls",
        3210,
        3000,
    )
    assert turn.sampling == {
        **{"temperature": 0.25, "thinking": {"type": "adaptive"}},
        **{"context_management": {"edits": []}, "not_known_yet": 1000.0},
    }
    assert result.usage.completion_tokens == 40
    assert result.usage.cost == pytest.approx((210 * 1.0 + 3000 * 0.1 + 40 * 10.0) / 1e6)
    assert (counts["answered"], counts["root"], counts["overridden"], counts["unknown_blocks"]) == (1, 1, 0, 0)


async def test_a_body_that_is_compressed_is_passed_on_plain() -> None:
    body = ASKED % b"false"
    async with before(whole) as (one, provider):
        assert (await post(one, gzip.compress(body), **{"content-encoding": "gzip"})).status_code == 200
    assert provider.requests[0][2] == body and "content-encoding" not in provider.requests[0][1]


async def test_a_conversation_goes_on_from_what_the_provider_said() -> None:
    """Its thinking comes back with its signature, and goes to the provider as it is."""
    end = {**ANSWER, "content": [{"type": "text", "text": "Done."}], "stop_reason": "end_turn"}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "calc.py"}]}
    async with before((200, stream_of(ANSWER), {}), (200, json.dumps(end).encode(), {})) as (one, provider):
        await post(one, asked(stream=True, tools=[TOOL]))
        history = [*asked()["messages"], {"role": "assistant", "content": ANSWER["content"]}, result]
        await post(one, asked(messages=history, tools=[TOOL]))
        assert one.gateway.stop_reason is StopReason.FINISHED
        assert [each.place for each in one.gateway.log] == ["root", "continues"]
    assert json.loads(provider.requests[1][2])["messages"][1]["content"] == ANSWER["content"]
    assert [message["content"] for message in one.task.result.messages] == [TASK, "I look.", "calc.py", "Done."]


async def test_another_model_is_asked_for_ours() -> None:
    async with before(whole) as (one, provider):
        await post(one, asked(model="claude-haiku-9", top_k=5))
        [logged] = one.gateway.log
    assert logged.model == "claude-haiku-9"
    assert json.loads(provider.requests[0][2]) == asked(top_k=5)
    assert list(json.loads(provider.requests[0][2])) == ["model", "max_tokens", "messages", "top_k"]


FOREIGN: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "anthropic": (
        {
            "tools": [
                {"type": "web_search_20250305", "name": "web_search"},
                TOOL,
                {"type": "bash_20250124", "name": "bash"},
            ],
            "mcp_servers": [{"type": "url", "url": "https://example.org"}],
        },
        {"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]},
        ["web_search_20250305", "mcp_servers"],
    ),
    "anthropic, nothing else": (
        {"tools": [{"type": "code_execution_20250522", "name": "c"}], "tool_choice": {"type": "auto"}},
        {},
        ["code_execution_20250522"],
    ),
    "responses": (
        {
            "tools": [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {}}],
            "input": [
                {"role": "user", "content": TASK},
                {"type": "additional_tools", "tools": [{"type": "mcp", "server_url": "https://example.org"}]},
                {
                    "type": "additional_tools",
                    "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "shell"}]}],
                },
                {"type": "additional_tools", "tools": [{"type": "custom", "name": "exec"}]},
            ],
        },
        {
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
            "input": [
                {"role": "user", "content": TASK},
                {"type": "additional_tools"},
                {"type": "additional_tools"},
                {"type": "additional_tools", "tools": [{"type": "custom", "name": "exec"}]},
            ],
        },
        ["web_search", "mcp", "namespace"],
    ),
}
RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "model": "m",
    "status": "completed",
    "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]}],
    "usage": {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 30}, "output_tokens": 20},
}


@pytest.mark.parametrize("kind", FOREIGN)
async def test_what_the_provider_would_do_elsewhere_is_left_out_and_recorded(kind: str) -> None:
    given, kept, dropped = FOREIGN[kind]
    api = kind.partition(",")[0]
    base = asked() if api == "anthropic" else {"model": "m", "input": TASK}
    answer = ANSWER if api == "anthropic" else RESPONSE
    async with before((200, json.dumps(answer).encode(), {}), api=api) as (one, provider):
        assert (await post(one, {**base, **given}, api)).status_code == 200
        [logged] = one.gateway.log
    assert json.loads(provider.requests[0][2]) == {**base, **kept}
    assert logged.dropped_tools == dropped


def image(source: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image", "source": source}


LINK = image({"type": "url", "url": "https://example.org/x.png"})
FETCHED: dict[str, tuple[str, bytes]] = {
    name: (api, json.dumps(body).encode())
    for name, (api, body) in {
        "image": ("anthropic", asked(messages=[{"role": "user", "content": [LINK]}])),
        "file": ("anthropic", asked(messages=[{"role": "user", "content": [image({"type": "file", "file_id": "f"})]}])),
        "in a result": (
            "anthropic",
            asked(
                messages=[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [LINK]}]}]
            ),
        ),
        "in a document": (
            "anthropic",
            asked(
                messages=[
                    {
                        "role": "user",
                        "content": [{"type": "document", "source": {"type": "content", "content": [LINK]}}],
                    }
                ]
            ),
        ),
        "image of responses": (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://example.org/x"}]}]},
        ),
        "file of responses": (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "https://example.org/x"}]}]},
        ),
        "in an output": (
            "responses",
            {
                "input": [
                    {"role": "user", "content": "x"},
                    {
                        "type": "function_call_output",
                        "call_id": "c",
                        "output": [{"type": "input_file", "file_id": "f"}],
                    },
                ]
            },
        ),
        "another dialect": ("responses", {"input": "x"}),
        "a stored conversation": ("responses", {"input": "x", "previous_response_id": "r"}),
    }.items()
} | {
    "a key twice": (
        "anthropic",
        b'{"tools": [{"type": "web_search_20250305"}], "tools": [], ' + json.dumps(asked()).encode()[1:],
    )
}


@pytest.mark.parametrize("kind", FETCHED)
async def test_what_leads_out_of_the_slot_is_refused(kind: str) -> None:
    api, body = FETCHED[kind]
    async with before(whole, api="anthropic" if kind == "another dialect" else api) as (one, provider):
        refused = await post(one, body, api)
    assert (refused.status_code, refused.headers["x-should-retry"]) == (400, "false")
    assert not provider.requests


async def test_data_in_a_message_is_passed_on() -> None:
    shown = [
        image({"type": "base64", "media_type": "image/png", "data": "aGk="}),
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}},
    ]
    used = {"type": "tool_use", "id": "t", "name": "bash", "input": {"source": {"type": "url"}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": TASK}, *shown]},
        {"role": "assistant", "content": [used]},
    ]
    async with before(whole) as (one, _):
        assert (await post(one, asked(messages=messages))).status_code == 200


async def test_the_same_request_again_gets_the_answer_that_was_lost() -> None:
    async with before(whole) as (one, provider):
        go = provider.held = asyncio.Event()
        lost = asyncio.create_task(post(one, asked()))
        while not provider.requests:
            await asyncio.sleep(0.01)
        lost.cancel()
        again = asyncio.create_task(post(one, asked()))
        while one.gateway.counts["calls"] < 2:
            await asyncio.sleep(0.01)
        go.set()
        assert (await again).json()["content"] == ANSWER["content"]
        assert one.gateway.counts["replayed"] == 1 and len(provider.requests) == 1
        await post(one, asked(top_k=1))
        await post(one, asked())  # its answer has arrived
    assert len(provider.requests) == 3


def error(kind: str, said: str = "Wait") -> bytes:
    return json.dumps({"type": "error", "error": {"type": kind, "message": said}}).encode()


PASSING: dict[str, Prepared] = {
    "429": (429, error("rate_limit_error"), {}),
    "429 with a time": (429, error("rate_limit_error"), {"retry-after": "0"}),
    "500": (500, error("api_error"), {}),
    "529": (529, error("overloaded_error"), {}),
    "overloaded in the stream": (
        200,
        stream_of(ANSWER, end=False) + b"event: error\ndata: " + error("overloaded_error") + b"\n\n",
        {},
    ),
    "a stream without its end": (200, stream_of(ANSWER, end=False), {}),
    "half an event": (200, stream_of(ANSWER)[:-20], {}),
    "an answer of another type": (200, json.dumps(ANSWER).encode(), {}),
    "no JSON": (200, b"event: message_start\ndata: {\n\n", {}),
}


@pytest.mark.parametrize("kind", PASSING)
async def test_trouble_that_passes_is_waited_out(kind: str) -> None:
    good = stream_of(ANSWER)
    async with before(PASSING[kind], PASSING[kind], (200, good, {})) as (one, provider):
        got = await post(one, asked(stream=True))
        assert one.gateway.failure is None and one.gateway.counts["answered"] == 1
    assert (got.status_code, got.content, len(provider.requests)) == (200, good, 3)


FOR_GOOD: dict[str, tuple[Prepared, str, StopReason]] = {
    "401": ((401, error("authentication_error"), {}), "refused the API key", StopReason.MODEL_ERROR),
    "404": ((404, error("not_found_error"), {}), "/v1 does not know the model", StopReason.MODEL_ERROR),
    "no credit": (
        (400, error("invalid_request_error", "Your credit balance is too low to access the API."), {}),
        "no quota left",
        StopReason.MODEL_ERROR,
    ),
    "overflow": (
        (400, error("invalid_request_error", "prompt is too long: 9 tokens > 8 maximum"), {}),
        "",
        StopReason.CONTEXT_LENGTH,
    ),
    "refused": ((400, error("invalid_request_error", "messages: odd"), {}), "", StopReason.REFUSED),
}


@pytest.mark.parametrize("kind", FOR_GOOD)
async def test_trouble_for_good_ends_the_agent_with_one_call(kind: str) -> None:
    answer, said, reason = FOR_GOOD[kind]
    async with before(whole, answer) as (one, provider):
        await post(one, asked(tools=[TOOL]))
        history = [*asked()["messages"], {"role": "assistant", "content": ANSWER["content"]}]
        more = [
            *history,
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}]},
        ]
        if reason is StopReason.MODEL_ERROR and kind != "no credit":
            one.model.endpoint.circuit.proven = False  # else a key that was good once is waited for
        refused = await post(one, asked(messages=more, tools=[TOOL]))
        assert (refused.status_code, refused.headers["x-should-retry"]) == (400, "false")
        assert one.gateway.stop_reason is reason
        assert (said in str(one.gateway.failure)) if said else one.gateway.failure is None
        if kind == "overflow":
            assert "prompt is too long" in refused.text
    assert len(provider.requests) == 2 and KEY not in refused.text


def sdk_client(api: str, one: Slot) -> Any:
    options: dict[str, Any] = {"api_key": one.gateway.key, "max_retries": 0}
    if api == "anthropic":
        http = anthropic.DefaultAsyncHttpxClient(verify=False)
        return anthropic.AsyncAnthropic(base_url=one.url, http_client=http, **options)
    return openai.AsyncOpenAI(
        base_url=f"{one.url}/v1", http_client=openai.DefaultAsyncHttpxClient(verify=False), **options
    )


async def converse(client: Any, api: str) -> str:
    """Ask twice with an official SDK, as streams; return the last text."""
    if api == "anthropic":
        messages: list[Any] = [{"role": "user", "content": TASK}]
        for _ in range(2):
            async with client.messages.stream(model="m", max_tokens=99, messages=messages, tools=[TOOL]) as stream:
                answer = await stream.get_final_message()
            messages.append({"role": "assistant", "content": answer.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "calc.py"}
                for block in answer.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})
        return str(answer.content[-1].text)
    items: list[Any] = [{"role": "user", "content": TASK}]
    tools = [{"type": "function", "name": "bash", "parameters": TOOL["input_schema"], "strict": False}]
    for _ in range(2):
        async with client.responses.stream(model="m", input=items, tools=tools) as stream:
            answer = await stream.get_final_response()
        items += [item.to_dict() for item in answer.output]
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "calc.py"}
            for item in answer.output
            if item.type == "function_call"
        ]
    return str(answer.output_text)


@pytest.mark.parametrize("api", PATHS)
async def test_official_sdks_speak_through_it_with_a_server_of_their_kind(api: str) -> None:
    steps = [
        Reply("I look.", [call("bash", command="ls")], "Hm.", usage=(100, 20), delay_s=0.1),
        Reply("Done.", usage=(100, 20)),
    ]
    bounds = Bounds(quiet_s=0.02, keep_alive_s=0.02)
    async with (
        ScriptedServer(steps, models=["m"], api_key=KEY) as server,
        passing(api, server.base_url, bounds) as one,
        sdk_client(api, one) as client,
    ):
        await one.model.check_endpoint()
        assert await converse(client, api) == "Done."
        assert [each.place for each in one.gateway.log] == ["root", "continues"]
        assert (one.task.result.usage.prompt_tokens, one.task.result.reasoning_per_turn) == (200, ["Hm.", None])
        assert one.gateway.stop_reason is StopReason.FINISHED
    assert server.request_count == 3


async def test_a_response_with_its_parts_in_any_order_is_one_answer() -> None:
    output = [
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "A"}],
            "encrypted_content": "x",
        },
        {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"command": "ls"}'},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "y"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "And"}]},
        {"type": "function_call", "call_id": "c2", "name": "bash", "arguments": '{"command": "pwd"}'},
    ]
    events: list[dict[str, Any]] = [{"type": "response.output_item.done", "item": item} for item in output]
    end = {**RESPONSE, "output": []}  # as some endpoints send it
    stream = b"".join(
        b"event: %s\ndata: %s\n\n" % (event["type"].encode(), json.dumps(event).encode())
        for event in [*events, {"type": "response.completed", "response": end}]
    )
    done: Prepared = (200, json.dumps(RESPONSE).encode(), {})
    async with before((200, stream, {}), done, api="responses") as (one, _):
        body: dict[str, Any] = {"model": "m", "input": [{"role": "user", "content": TASK}], "stream": True}
        assert (await post(one, body, "responses")).content == stream
        results = [{"type": "function_call_output", "call_id": each, "output": "x"} for each in ("c1", "c2")]
        await post(one, {"model": "m", "input": [*body["input"], *output, *results]}, "responses")
        assert [each.place for each in one.gateway.log] == ["root", "continues"]
    assert [made.id for made in one.task.result.calls] == ["c1", "c2"] and one.task.result.turns_used == 2


FAILED: dict[str, tuple[str, type[Exception] | None]] = {
    "server_error": ("again", None),
    "rate_limit_exceeded": ("again", None),
    "context_length_exceeded": ("ends", None),
    "invalid_prompt": ("ends", None),
}


@pytest.mark.parametrize("code", FAILED)
async def test_a_response_that_failed_is_asked_for_again_or_ends(code: str) -> None:
    said = {"code": code, "message": "Your input exceeds the context window." if "context" in code else "no"}
    failed = json.dumps({**RESPONSE, "status": "failed", "error": said}).encode()
    async with before((200, failed, {}), (200, json.dumps(RESPONSE).encode(), {}), api="responses") as (one, provider):
        got = await post(one, {"model": "m", "input": TASK}, "responses")
    again = FAILED[code][0] == "again"
    assert (got.status_code, len(provider.requests)) == ((200, 2) if again else (400, 1))


@pytest.mark.parametrize("api", PATHS)
async def test_the_check_finds_a_wrong_key_and_a_wrong_model(api: str) -> None:
    async with ScriptedServer([Reply("Hello")], models=["m"], api_key=KEY) as server:
        wrongs: list[tuple[dict[str, Any], str]] = [
            ({"api_key": "another-key"}, "refused the API key"),
            ({"model": "n"}, "does not know the model"),
        ]
        for wrong, said in wrongs:
            async with passing(api, server.base_url, check_patience_s=1, **wrong) as one:
                with pytest.raises(ModelError, match=said):
                    await one.model.check_endpoint()
        async with passing(api, server.base_url) as one:
            await one.model.check_endpoint()
    odd = ScriptedServer([Reply("Hello")], models=["m"], faults=[Fault(400, "no answers that short")])
    async with odd as server, passing(api, server.base_url) as one:
        await one.model.check_endpoint()


@pytest.mark.parametrize("api", PATHS)
async def test_the_check_finds_a_web_page(api: str) -> None:
    """It is not waited for as long as `check_patience_s`."""
    async with before((200, b"<html>Log in</html>", {}), api=api) as (one, provider):
        with pytest.raises(ModelError, match="no JSON object: it says <html>Log in"):
            await one.model.check_endpoint()
    assert len(provider.requests) == 3


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": None}, "no model"),
        ({"temperature": 0.5}, "temperature"),
        ({"max_tokens": 5, "seed": 1}, "max_tokens, seed"),
        ({"base_url": "ftp://x"}, "not the URL"),
        ({"base_url": None, "api_key": None}, "no API key"),
    ],
)
async def test_settings_that_can_not_be_kept_are_refused(wrong: dict[str, Any], said: str) -> None:
    settings: dict[str, Any] = {"model": "m", "base_url": "http://127.0.0.1:1", "api_key": KEY, **wrong}
    with pytest.raises(ConfigError, match=said):
        Upstream(AgentSettings(**settings), "anthropic")


class Asks(ProgramAgent):
    program = AgentProgram("asks", ("asks",), dialect="responses")


UNFIT: dict[str, tuple[type[ProgramAgent], dict[str, Any], str]] = {
    "exact tokens": (CommandAgent, {"command": "x", "upstream": "anthropic", "tool_call_parser": "auto"}, "no tokens"),
    "another dialect": (Asks, {"upstream": "anthropic"}, "asks in the form responses"),
    "a temperature": (Asks, {"upstream": "responses", "temperature": 0.1}, "as the program makes them"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_program_that_can_not_be_passed_on_is_refused(kind: str) -> None:
    agent, settings, said = UNFIT[kind]
    given = {"model": "m", "base_url": "http://127.0.0.1:1", **settings}
    with pytest.raises(ConfigError, match=said):
        agent(agent.config_class.model_validate(given))  # type: ignore[arg-type]


def test_anthropics_key_goes_to_anthropic_and_no_other() -> None:
    given = {"OPENAI_API_KEY": "of-openai", "OPENAI_BASE_URL": "http://o/v1", "ANTHROPIC_API_KEY": "of-anthropic"}
    environment = {**given, "HERMES_MODEL": "m", "HERMES_ENV_FILE": ""}
    runtime = Runtime(Settings.load(environment), load_entry_points=False, plugins=[hermes_agents])
    for upstream, key, url in ("anthropic", "of-anthropic", None), ("responses", "of-openai", "http://o/v1"):
        settings = runtime.agent_settings({"command": "x", "upstream": upstream}, "program")
        assert settings.api_key is not None
        assert (settings.api_key.get_secret_value(), settings.base_url, settings.model) == (key, url, "m")
    assert "of-anthropic" not in runtime.redact("the key is of-anthropic")
