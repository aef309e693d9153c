"""Stock vLLM, stock SGLang and Atropos' own server give tokens alike; one that can't be trained with is refused."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hermes_testing.scripted_server import ScriptedServer
from hermes_testing.tiny_model.engine import Engine
from hermes_testing.tiny_model.folder import make_model
from hermes_testing.tiny_model.server import TinyModelServer

from hermes_core.agents.base import AgentSettings
from hermes_core.agents.endpoint.errors import BadCompletion
from hermes_core.agents.exact.agent import ExactSession
from hermes_core.agents.exact.chat import Chat
from hermes_core.agents.exact.generate import GenerateServer
from hermes_core.agents.exact.probe import check_tokenizer, try_out
from hermes_core.agents.exact.wires import WIRES, Sampled, check_sampled
from hermes_core.errors import ConfigError, ModelError
from hermes_core.runtime import Runtime
from tests.support.http_server import listening

PROMPT = [7, 8, 9, 10]
KINDS = {"atropos": "vllm", "tokens": "vllm", "completions": "vllm", "sglang": "sglang"}
PATHS = {
    "atropos": "/generate",
    "tokens": "/inference/v1/generate",
    "completions": "/v1/completions",
    "sglang": "/generate",
}


@pytest.fixture(scope="session")
def model(torch_extra: None, tokenizers: Callable[[str], Any]) -> Any:
    import torch

    torch.set_num_threads(1)
    return make_model(tokenizers("chatml"))


Serve = Callable[..., Any]


@pytest.fixture
async def serve(model: Any, tokenizers: Callable[[str], Any]) -> AsyncIterator[Serve]:
    """`await serve(wire, asked=…, raw_logprobs=…)`: a client of a server that speaks this wire alone."""
    async with contextlib.AsyncExitStack() as stack:

        async def speaking(
            wire: str, *, asked: str = "tiny", raw_logprobs: bool = False
        ) -> tuple[GenerateServer, Engine]:
            engine = stack.enter_context(Engine(model, raw_logprobs=raw_logprobs))
            server = await stack.enter_async_context(TinyModelServer(engine, tokenizers("chatml"), wires=[wire]))
            settings = AgentSettings(base_url=server.base_url, model=asked, max_retries=0)
            client = GenerateServer(settings, KINDS[wire])
            stack.push_async_callback(client.aclose)
            return client, engine

        yield speaking


@pytest.mark.parametrize("wire", sorted(KINDS))
async def test_what_is_read_is_what_was_sampled(serve: Serve, wire: str, tokenizers: Callable[[str], Any]) -> None:
    client, engine = await serve(wire)
    for temperature in (1.0, 0.7):
        sampled = await client.sample(PROMPT, max_tokens=6, temperature=temperature)
        given = engine.sampled[-1]
        assert (tuple(sampled.tokens), tuple(sampled.logprobs)) == (given.tokens, given.logprobs)
        assert (sampled.finish_reason, given.prompt, given.temperature) == (
            given.finish_reason,
            tuple(PROMPT),
            temperature,
        )
    assert client.wire.path == PATHS[wire], "what the server speaks is found out"
    text = tokenizers("chatml").decode(sampled.tokens, skip_special_tokens=True)
    assert sampled.text == (None if wire == "tokens" else text)


@pytest.mark.parametrize("wire", sorted(KINDS))
async def test_the_same_seed_samples_the_same_tokens(serve: Serve, wire: str) -> None:
    client, _ = await serve(wire)

    async def sampled(seed: int | None) -> list[int]:
        return (await client.sample(PROMPT, max_tokens=16, temperature=1.0, seed=seed)).tokens

    assert await sampled(5) == await sampled(5)
    assert await sampled(5) != await sampled(6)
    assert await sampled(None) != await sampled(None)


@pytest.mark.parametrize("wire", sorted(KINDS))
async def test_a_model_without_a_name_is_the_one_that_there_is(serve: Serve, wire: str) -> None:
    client, _ = await serve(wire, asked="default")
    assert len((await client.sample(PROMPT, max_tokens=3, temperature=1.0)).tokens) <= 3


@pytest.mark.parametrize("wire", ["tokens", "completions"])
async def test_another_model_is_named_and_not_taken_for_another_server(serve: Serve, wire: str) -> None:
    client, _ = await serve(wire, asked="other")
    with pytest.raises(ModelError, match="The model `other` does not exist"):
        await client.sample(PROMPT, max_tokens=3, temperature=1.0)


async def test_a_server_that_gives_no_tokens_is_told_apart_from_vllm() -> None:
    async with ScriptedServer([]) as server:
        client = GenerateServer(AgentSettings(base_url=server.base_url, max_retries=0), "vllm")
        with pytest.raises(ModelError) as raised:
            await client.sample(PROMPT, max_tokens=3, temperature=1.0)
        await client.aclose()
    assert "/inference/v1/generate, /v1/completions, /generate" in str(raised.value)
    assert "takes vLLM, the API server of Atropos' example trainer" in str(raised.value)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_what_a_server_would_fill_in_is_said(kind: str) -> None:
    """vLLM takes what is not said from the model's generation_config.json, SGLang from its command line."""
    for wire in WIRES[kind]:
        body = wire.write(PROMPT, {"max_tokens": 3, "temperature": 0.5})
        said = body.get("sampling_params", body)
        if "prompt_token_ids" not in str(body):  # Atropos' server fills in nothing
            neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
            assert {key: said[key] for key in neutral} == neutral
        assert said["temperature"] == 0.5


@pytest.mark.parametrize(
    ("wire", "choice", "said"),
    [
        ("completions", {"token_ids": None, "logprobs": {"token_logprobs": []}}, "no token"),
        ("completions", {"token_ids": [5], "logprobs": None}, "not subscriptable"),
        ("tokens", {"token_ids": [5], "logprobs": {"content": [{"logprob": -9999.0}]}}, "is not a logprob"),
        ("tokens", {"token_ids": [5], "logprobs": {"content": []}}, "shorter"),
        ("tokens", {"token_ids": [5], "logprobs": {"content": [{"logprob": -1}]}, "finish_reason": "error"}, "error"),
    ],
)
def test_an_answer_without_tokens_and_logprobs_is_none(wire: str, choice: Any, said: str) -> None:
    (reader,) = (each for each in WIRES["vllm"] if each.path == PATHS[wire])
    with pytest.raises((TypeError, ValueError), match=said):
        check_sampled(reader.read({"choices": [{"finish_reason": "stop", **choice}]}), len(PROMPT), 10)


class Gives:
    """A server that gives the same each time."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    async def sample(self, prompt: Any, *, max_tokens: int, temperature: float | None, **_: Any) -> Sampled:
        return Sampled(self.tokens, [-0.5] * len(self.tokens), "stop")


async def test_tokens_that_the_tokenizer_does_not_have(tokenizers: Callable[[str], Any], runtime: Runtime) -> None:
    server, chat = Gives(5, 10**6), Chat(tokenizers("chatml"))
    session = ExactSession(server, chat, runtime.parser("hermes"), max_length=4000)  # type: ignore[arg-type]
    with pytest.raises(BadCompletion, match="gave the token 1000000, and"):
        await session.chat_completion(messages=[{"role": "user", "content": "go"}], max_tokens=10)
    assert session.nodes == []


@pytest.mark.parametrize("wire", sorted(KINDS))
async def test_a_tokenizer_that_is_not_the_servers(serve: Serve, wire: str, tokenizers: Callable[[str], Any]) -> None:
    client, _ = await serve(wire)
    await try_out(client, tokenizers("chatml"), 1.0)
    if wire == "atropos":  # it has nothing to ask: its own text of what it samples has to do
        with pytest.raises(ConfigError, match=r"it makes 'abc', and this one .*set tokenizer_name"):
            check_tokenizer(client, tokenizers("chatml"), Sampled([7, 8], [-1.0] * 2, "stop", "abc"))
        return
    with pytest.raises(ConfigError, match=r"is not that of the server .*of one text .*set tokenizer_name"):
        await try_out(client, tokenizers("llama3"), 1.0)


async def test_a_tokenizer_that_has_fewer_tokens(serve: Serve, tokenizers: Callable[[str], Any]) -> None:
    client, _ = await serve("tokens")
    count = len(tokenizers("chatml"))
    with pytest.raises(ConfigError, match=rf"gave the token {count}, and this one has {count}"):
        check_tokenizer(client, tokenizers("chatml"), Sampled([count], [-1.0], "stop"))


@pytest.mark.parametrize("wire", ["tokens", "completions"])
async def test_logprobs_from_before_the_temperature(serve: Serve, wire: str, tokenizers: Callable[[str], Any]) -> None:
    client, _ = await serve(wire, raw_logprobs=True)
    await try_out(client, tokenizers("chatml"), 1.0)
    with pytest.raises(ConfigError, match=r"from before the temperature.*processed_logprobs"):
        await try_out(client, tokenizers("chatml"), 0.7)
    client, _ = await serve(wire)
    await try_out(client, tokenizers("chatml"), 0.7)


CLOSED = {"error": "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out"}
REFUSED = {"error": {"message": "Invalid API key"}}
GIVEN = {"choices": [{"finish_reason": "stop", "token_ids": [5], "logprobs": {"token_logprobs": [-0.5]}}]}


@pytest.mark.parametrize(
    ("generate", "completions", "said"),
    [
        ((403, CLOSED), (200, GIVEN), None),
        ((403, {"detail": "Forbidden"}), (200, GIVEN), None),
        ((403, CLOSED), (404, {}), r"with another setting: .*start vLLM with --enable-scale-out"),
        ((403, REFUSED), (403, REFUSED), "refused the API key"),
        ((403, REFUSED), (401, REFUSED), "refused the API key"),
    ],
)
async def test_what_is_closed_is_told_apart_from_a_key_that_is_refused(
    exact_extra: None, generate: Any, completions: Any, said: str | None
) -> None:
    from aiohttp import web

    def gives(answer: tuple[int, Any]) -> Callable[[Any], Any]:
        async def route(request: Any) -> Any:
            return web.json_response(answer[1], status=answer[0])

        return route

    routes = {"POST /inference/v1/generate": gives(generate), "POST /v1/completions": gives(completions)}
    async with listening(routes) as url:
        client = GenerateServer(AgentSettings(base_url=url, max_retries=0), "vllm")
        try:
            if said is None:
                assert [(await client.sample(PROMPT, max_tokens=3, temperature=1.0)).tokens for _ in "12"] == [[5]] * 2
                assert client.wire is not None
                assert client.wire.path == "/v1/completions"
            else:
                with pytest.raises(ModelError, match=said):
                    await client.sample(PROMPT, max_tokens=3, temperature=1.0)
        finally:
            await client.aclose()
