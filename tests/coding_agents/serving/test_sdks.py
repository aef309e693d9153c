"""The official SDKs read every answer, in each dialect, as one value and as a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import openai
import pytest
from google import genai
from google.genai import types
from hermes_agents.serving.bounds import Bounds

from hermes_core.agents.endpoint.errors import ContextLengthExceeded
from hermes_core.agents.replies import ModelReply
from tests.coding_agents.serving.slot import TASK, Slot, call, reply, slot

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
FUNCTION = {"name": "bash", "description": "Run a command.", "parameters": SCHEMA}


@dataclass(frozen=True)
class Read:
    """What an SDK made of an answer."""

    text: str
    thinking: str
    calls: list[tuple[str, Any]]
    end: str
    tokens: tuple[int, int, int]
    """Of the prompt, from the cache, of the answer."""
    ids: list[str]


@asynccontextmanager
async def chat_client(one: Slot) -> AsyncIterator[Any]:
    http = openai.DefaultAsyncHttpxClient(verify=False)  # no certificates are read, which takes most of a test's time
    options: dict[str, Any] = {"api_key": one.gateway.key, "max_retries": 0, "http_client": http}
    async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", **options) as client:
        yield client


async def ask_chat(one: Slot, streamed: bool) -> Read:
    request: dict[str, Any] = {
        "model": "any",
        "messages": [{"role": "user", "content": TASK}],
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    async with chat_client(one) as client:
        if streamed:
            async with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
                thinking = ""
                async for event in stream:
                    if event.type == "chunk" and event.chunk.choices:
                        thinking += getattr(event.chunk.choices[0].delta, "reasoning_content", None) or ""
                answer = stream.current_completion_snapshot  # the final one is refused if it was cut off
        else:
            answer = await client.chat.completions.create(**request)
            thinking = getattr(answer.choices[0].message, "reasoning_content", None) or ""
    (choice,), usage = answer.choices, answer.usage
    calls = choice.message.tool_calls or []
    return Read(
        choice.message.content or "",
        thinking,
        [(each.function.name, each.function.arguments) for each in calls],
        choice.finish_reason,
        (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens),
        [each.id for each in calls],
    )


async def ask_responses(one: Slot, streamed: bool) -> Read:
    request: dict[str, Any] = {"model": "any", "input": TASK, "tools": [{"type": "function", **FUNCTION}]}
    async with chat_client(one) as client:
        if streamed:
            done = []
            async with client.responses.stream(**request) as stream:
                async for event in stream:
                    if event.type == "response.output_item.done":
                        done.append(event.item.to_dict())
                    if event.type in ("response.completed", "response.incomplete"):
                        answer = event.response
            assert [item["id"] for item in done] == [item.id for item in answer.output]
        else:
            answer = await client.responses.create(**request)
    items, usage = answer.output, answer.usage
    calls = [item for item in items if item.type == "function_call"]
    return Read(
        answer.output_text,
        "".join(part.text for item in items if item.type == "reasoning" for part in item.summary),
        [(each.name, each.arguments) for each in calls],
        answer.incomplete_details.reason if answer.incomplete_details else answer.status,
        (usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens),
        [each.call_id for each in calls],
    )


@asynccontextmanager
async def anthropic_client(one: Slot) -> AsyncIterator[Any]:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    options: dict[str, Any] = {"api_key": one.gateway.key, "max_retries": 0, "http_client": http}
    async with anthropic.AsyncAnthropic(base_url=one.url, **options) as client:
        yield client


async def ask_anthropic(one: Slot, streamed: bool) -> Read:
    request: dict[str, Any] = {
        "model": "any",
        "max_tokens": 1000,
        "messages": [{"role": "user", "content": TASK}],
        "tools": [{"name": "bash", "description": "Run a command.", "input_schema": SCHEMA}],
    }
    async with anthropic_client(one) as client:
        if streamed:
            async with client.messages.stream(**request) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await client.messages.create(**request)
    blocks, usage = answer.content, answer.usage
    calls = [block for block in blocks if block.type == "tool_use"]
    return Read(
        "".join(block.text for block in blocks if block.type == "text"),
        "".join(block.thinking for block in blocks if block.type == "thinking"),
        [(each.name, json.dumps(each.input)) for each in calls],
        answer.stop_reason,
        (usage.input_tokens + usage.cache_read_input_tokens, usage.cache_read_input_tokens, usage.output_tokens),
        [each.id for each in calls],
    )


@asynccontextmanager
async def gemini_client(one: Slot) -> AsyncIterator[Any]:
    async with httpx.AsyncClient(verify=False) as http:
        options = types.HttpOptions(base_url=one.url, httpx_async_client=http, client_args={"verify": False})
        yield genai.Client(api_key=one.gateway.key, http_options=options).aio


async def ask_gemini(one: Slot, streamed: bool) -> Read:
    function = types.FunctionDeclaration(name="bash", description="Run a command.", parameters_json_schema=SCHEMA)
    config = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[function])])
    async with gemini_client(one) as client:
        if streamed:
            stream = await client.models.generate_content_stream(model="any", contents=TASK, config=config)
            answers = [answer async for answer in stream]
        else:
            answers = [await client.models.generate_content(model="any", contents=TASK, config=config)]
    parts = [part for answer in answers for part in answer.candidates[0].content.parts]
    calls = [part.function_call for part in parts if part.function_call]
    (end,) = [reason for answer in answers if (reason := answer.candidates[0].finish_reason)]
    usage = answers[-1].usage_metadata
    written = usage.candidates_token_count + usage.thoughts_token_count
    assert usage.total_token_count == usage.prompt_token_count + written
    return Read(
        "".join(part.text for part in parts if part.text and not part.thought),
        "".join(part.text for part in parts if part.text and part.thought),
        [(each.name, json.dumps(each.args)) for each in calls],
        end,
        (usage.prompt_token_count, usage.cached_content_token_count, written),
        [each.id for each in calls],
    )


Ask = Callable[[Slot, bool], Coroutine[Any, Any, Read]]
DIALECTS: dict[str, Ask] = {
    "chat": ask_chat,
    "responses": ask_responses,
    "anthropic": ask_anthropic,
    "gemini": ask_gemini,
}
ENDS = {
    "chat": ("stop", "tool_calls", "length", "content_filter"),
    "responses": ("completed", "completed", "max_output_tokens", "content_filter"),
    "anthropic": ("end_turn", "tool_use", "max_tokens", "refusal"),
    "gemini": ("STOP", "STOP", "MAX_TOKENS", "SAFETY"),
}
LONG = "é\N{SNOWMAN}\U0001f600 " * 3000
LS, CAT = '{"command": "ls"}', '{"command": "cat calc.py"}'
ANSWERS: dict[str, tuple[ModelReply, int]] = {
    "text": (reply("Done."), 0),
    "empty": (reply(""), 0),
    "long": (reply(LONG, thinking=LONG), 0),
    "call": (reply("", call("bash", LS)), 1),
    "parallel calls": (reply("I look.", call("bash", LS, "a"), call("bash", CAT, "b"), thinking="Hm."), 1),
    "cut": (reply("I wou", end="length"), 2),
    "withheld": (reply("", end="content_filter"), 3),
}

every_dialect = pytest.mark.parametrize("dialect", DIALECTS)
streamed_or_not = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@every_dialect
@streamed_or_not
@pytest.mark.parametrize("kind", ANSWERS)
async def test_an_answer_is_read_as_it_was_sampled(dialect: str, streamed: bool, kind: str) -> None:
    answer, end = ANSWERS[kind]
    async with slot(answer) as one:
        read = await DIALECTS[dialect](one, streamed)
    assert (read.text, read.thinking) == (answer.content, answer.reasoning or "")
    assert read.calls == [(each.name, each.text) for each in answer.calls]
    assert read.end == ENDS[dialect][end]
    assert read.tokens == (100, 30, 20)
    assert len(set(read.ids)) == len(answer.calls)
    (request,) = one.model.requests
    assert request["messages"] == [{"role": "user", "content": TASK}]
    assert request["tools"] == [{"type": "function", "function": FUNCTION}]


@every_dialect
@streamed_or_not
async def test_arguments_that_were_cut_off_are_not_repaired(dialect: str, streamed: bool) -> None:
    cut = '{"command": "rm -rf /tmp/x'
    async with slot(reply("", call("bash", cut), end="length")) as one:
        if dialect == "anthropic" and streamed:  # the SDK reads what is there of unfinished JSON: look at the stream
            async with anthropic_client(one) as client:
                stream = await client.messages.create(
                    model="any", max_tokens=100, messages=[{"role": "user", "content": TASK}], stream=True
                )
                deltas = [event.delta async for event in stream if event.type == "content_block_delta"]
            assert "".join(each.partial_json for each in deltas) == cut
            return
        read = await DIALECTS[dialect](one, streamed)
    assert read.end == ENDS[dialect][2]
    if dialect in ("anthropic", "gemini"):
        assert json.loads(read.calls[0][1]) == {"__unparsedToolInput": {"raw": cut}}
    else:
        assert read.calls == [("bash", cut)]


@every_dialect
async def test_a_stream_is_read_whose_answer_takes_long(dialect: str) -> None:
    async def slow(_: Any) -> ModelReply:
        await asyncio.sleep(0.3)  # for some signs of life
        return ANSWERS["parallel calls"][0]

    async with slot(slow, bounds=Bounds(quiet_s=0.02, keep_alive_s=0.02)) as one:
        read = await DIALECTS[dialect](one, True)
    assert (read.text, [each[0] for each in read.calls]) == ("I look.", ["bash", "bash"])


TOO_LONG = {
    "chat": (openai.BadRequestError, "maximum context length", "context_length_exceeded"),
    "responses": (openai.BadRequestError, "maximum context length", "context_length_exceeded"),
    "anthropic": (anthropic.BadRequestError, "prompt is too long", None),
    "gemini": (genai.errors.ClientError, "exceeds the maximum number of tokens", 400),
}


@every_dialect
@streamed_or_not
async def test_a_conversation_that_is_too_long_is_refused_in_the_dialects_own_words(
    dialect: str, streamed: bool
) -> None:
    kind, words, code = TOO_LONG[dialect]
    async with slot(ContextLengthExceeded("40000 tokens")) as one:
        with pytest.raises(kind, match=words) as refused:
            await DIALECTS[dialect](one, streamed)
    assert refused.value.response.headers["x-should-retry"] == "false"
    if code is not None:
        assert refused.value.code == code


async def test_an_error_in_a_stream_of_gemini_that_has_begun_is_raised() -> None:
    async def slow(_: Any) -> ModelReply:
        await asyncio.sleep(0.1)
        raise ContextLengthExceeded("40000 tokens")

    async with slot(slow, bounds=Bounds(quiet_s=0.02, keep_alive_s=0.02)) as one:
        with pytest.raises(genai.errors.ClientError, match="exceeds the maximum number of tokens"):
            await ask_gemini(one, True)


@every_dialect
async def test_a_wrong_key_is_refused_in_the_dialects_form(dialect: str) -> None:
    async with slot(reply("Done.")) as one:
        one.gateway.key += "x"
        with pytest.raises((openai.AuthenticationError, anthropic.AuthenticationError, genai.errors.ClientError)):
            wrong = Slot(_Keyed(one.gateway, "another slot's"), one.model, one.task, one.url)
            await DIALECTS[dialect](wrong, True)
    assert not one.model.requests


@dataclass(frozen=True)
class _Keyed:
    gateway: Any
    key: str


async def test_models_and_counts_are_answered_here() -> None:
    async with slot(reply("Done.")) as one:
        async with chat_client(one) as client:
            assert [model.id for model in (await client.models.list()).data] == ["ours"]
            assert (await client.models.retrieve("gpt-9")).id == "ours"
            with pytest.raises(openai.NotFoundError):
                await client.embeddings.create(model="any", input="x")
        async with anthropic_client(one) as client:
            assert [model.id for model in (await client.models.list()).data] == ["ours"]
            messages = [{"role": "user", "content": "x" * 4000}]
            counted = await client.messages.count_tokens(model="any", messages=messages)
            assert 500 <= counted.input_tokens <= 2000
            with pytest.raises(anthropic.NotFoundError):
                await client.beta.files.list()
        async with gemini_client(one) as client:
            assert [model.name async for model in await client.models.list()] == ["models/ours"]
            assert (await client.models.get(model="gemini-9")).name == "models/ours"
            assert 500 <= (await client.models.count_tokens(model="any", contents="x" * 4000)).total_tokens <= 2000
            with pytest.raises(genai.errors.ClientError, match="NOT_FOUND"):
                await client.models.embed_content(model="any", contents="x")
    assert not one.model.requests
