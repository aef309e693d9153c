"""The server: both wire formats, exact to the last bit, with a loop that never waits for the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hermes_testing.tiny_model.engine import Engine
from hermes_testing.tiny_model.server import TinyModelServer

PROMPT = [7, 8, 9, 10]


@pytest.fixture
async def server(engine: Engine, tiny: Any) -> AsyncIterator[TinyModelServer]:
    async with TinyModelServer(engine, tiny.tokenizer) as running:
        yield running


@pytest.fixture
async def client(server: TinyModelServer) -> AsyncIterator[httpx.AsyncClient]:
    root = server.base_url.removesuffix("/v1")
    async with httpx.AsyncClient(base_url=root, trust_env=False, timeout=60) as opened:
        yield opened


async def test_vllm_s_format(client: httpx.AsyncClient, engine: Engine, tiny: Any) -> None:
    body = {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 0, "n": 3, "max_tokens": 6, "temperature": 0.7}
    answer = (await client.post("/generate", json=body)).raise_for_status().json()
    assert set(answer) == {"text", "prompt", "finish_reasons", "logprobs", "prompt_token_ids", "token_ids"}
    drawn = {each.tokens: each for each in engine.sampled}
    assert len(answer["token_ids"]) == 3
    for tokens, places, reason, text in zip(
        answer["token_ids"], answer["logprobs"], answer["finish_reasons"], answer["text"], strict=True
    ):
        given = drawn[tuple(tokens)]
        assert places == [[{str(token): logprob}] for token, logprob in zip(given.tokens, given.logprobs, strict=True)]
        assert (list(given.prompt), given.temperature, given.finish_reason) == (PROMPT, 0.7, reason)
        assert text == tiny.tokenizer.decode(tokens, skip_special_tokens=True)
    body.pop("logprobs")
    assert set((await client.post("/generate", json=body)).json()) == {"text", "prompt", "finish_reasons"}


@pytest.mark.parametrize("n", [1, 2])
async def test_sglang_s_format(client: httpx.AsyncClient, engine: Engine, tiny: Any, n: int) -> None:
    sampling = {"n": n, "max_new_tokens": 5, "temperature": 1.0}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "return_text_in_logprobs": False}
    answer = (await client.post("/generate", json=body)).raise_for_status().json()
    answers = answer if n > 1 else [answer]
    drawn = {each.tokens: each for each in engine.sampled}
    assert len(answers) == n
    for each in answers:
        given = drawn[tuple(each["output_ids"])]
        meta = each["meta_info"]
        assert meta["output_token_logprobs"] == [
            [logprob, token, None] for logprob, token in zip(given.logprobs, given.tokens, strict=True)
        ]
        assert meta["finish_reason"]["type"] == given.finish_reason
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), len(given.tokens))
    body["return_text_in_logprobs"] = True
    said = (await client.post("/generate", json={**body, "sampling_params": {"max_new_tokens": 1}})).json()
    (place,) = said["meta_info"]["output_token_logprobs"]
    assert place[2] == tiny.tokenizer.decode([place[1]])
    del body["return_logprob"]
    bare = (await client.post("/generate", json={**body, "sampling_params": {"max_new_tokens": 1}})).json()
    assert "output_token_logprobs" not in bare["meta_info"]


async def test_it_says_that_it_is_well(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        {"prompt": "text"},
        {"prompt": {"prompt_token_ids": []}},
        {"prompt": {"prompt_token_ids": PROMPT}, "top_p": 0.9},
        {"prompt": {"prompt_token_ids": PROMPT}, "stop": ["x"]},
        {"prompt": {"prompt_token_ids": PROMPT}, "extra_body": {}},
        {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 5},
        {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 5000},
        {"input_ids": PROMPT, "sampling_params": {"repetition_penalty": 1.1}},
        {"input_ids": PROMPT, "stream": True},
    ],
)
async def test_what_would_not_be_exact_is_refused(client: httpx.AsyncClient, body: Any) -> None:
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


async def test_neutral_settings_are_taken(client: httpx.AsyncClient) -> None:
    body = {"prompt": {"prompt_token_ids": PROMPT}, "top_p": 1.0, "top_k": -1, "stop": [], "max_tokens": None}
    assert (await client.post("/generate", json=body)).status_code == 200


@pytest.mark.loop_stall(0.5)
async def test_requests_at_once_are_batches_and_stall_no_loop(
    client: httpx.AsyncClient, engine: Engine, loop_lag: None
) -> None:
    bodies = [{"input_ids": [5 + n], "sampling_params": {"max_new_tokens": 10}} for n in range(30)]
    answers = await asyncio.gather(*(client.post("/generate", json=body) for body in bodies))
    assert [answer.json()["meta_info"]["prompt_tokens"] for answer in answers] == [1] * 30
    assert {each.prompt for each in engine.sampled} == {(5 + n,) for n in range(30)}


async def test_a_caller_that_has_gone_is_not_worked_for(client: httpx.AsyncClient, engine: Engine) -> None:
    with engine.weights():
        head = asyncio.create_task(client.post("/generate", json={"input_ids": [5], "sampling_params": {"n": 2}}))
        await asyncio.sleep(0.1)
        gone = asyncio.create_task(client.post("/generate", json={"input_ids": [6]}))
        await asyncio.sleep(0.1)
        gone.cancel()
        await asyncio.wait([gone])
        await asyncio.sleep(0.2)
    await head
    await client.post("/generate", json={"input_ids": [7]})
    assert (6,) not in {each.prompt for each in engine.sampled}


async def test_stop_tokens_are_taken_if_they_are_the_engine_s_own(engine: Engine, tiny: Any) -> None:
    own, other = min(engine.stop), next(token for token in range(9) if token not in engine.stop)
    async with (
        TinyModelServer(engine, tiny.tokenizer, wires=["tokens"]) as server,
        httpx.AsyncClient(base_url=server.base_url.removesuffix("/v1"), trust_env=False, timeout=60) as client,
    ):
        for tokens, status in (([own], 200), ([own, other], 400)):
            sampling = {"max_tokens": 3, "logprobs": 1, "stop_token_ids": tokens}
            body = {"token_ids": PROMPT, "sampling_params": sampling}
            assert (await client.post("/inference/v1/generate", json=body)).status_code == status
