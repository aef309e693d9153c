"""An answer that a server breaks off, as at an update of its weights, is continued from its tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hermes_core.agents.base import AgentSettings, TurnRecord
from hermes_core.agents.endpoint.errors import BadCompletion
from hermes_core.agents.exact.agent import ExactSession
from hermes_core.agents.exact.chat import Chat
from hermes_core.agents.exact.generate import GenerateServer
from hermes_core.agents.exact.wires import Sampled
from hermes_core.agents.loop import HermesAgentLoop
from hermes_core.agents.replies import read_reply
from hermes_core.records.record import Record
from hermes_core.records.tokens import tokens_of
from hermes_core.runtime import Runtime
from tests.support.http_server import listening

PROMPT = [7, 8, 9]


def _choice(logprobs: Any, tokens: list[int], reason: str, version: str) -> dict[str, Any]:
    choice = {"token_ids": tokens, "logprobs": logprobs, "finish_reason": reason}
    return {"choices": [choice], "metadata": {"weight_version": version}}


WIRES: dict[str, tuple[str, Callable[[Any], tuple[list[int], int]], Callable[[list[int], str, str], Any]]] = {
    "/inference/v1/generate": (
        "vllm",
        lambda body: (body["token_ids"], body["sampling_params"]["max_tokens"]),
        lambda tokens, reason, version: _choice(
            {"content": [{"logprob": -token / 100} for token in tokens]}, tokens, reason, version
        ),
    ),
    "/v1/completions": (
        "vllm",
        lambda body: (body["prompt"], body["max_tokens"]),
        lambda tokens, reason, version: _choice(
            {"token_logprobs": [-token / 100 for token in tokens]}, tokens, reason, version
        ),
    ),
    "/generate": (
        "vllm",
        lambda body: (body["prompt"]["prompt_token_ids"], body["max_tokens"]),
        lambda tokens, reason, version: {
            "logprobs": [[[{str(token): -token / 100}] for token in tokens]],
            "finish_reasons": [reason],
            "weight_version": version,
        },
    ),
    "/generate of SGLang": (
        "sglang",
        lambda body: (body["input_ids"], body["sampling_params"]["max_new_tokens"]),
        lambda tokens, reason, version: {
            "meta_info": {
                "output_token_logprobs": [[-token / 100, token, None] for token in tokens],
                "finish_reason": {"type": reason},
                "weight_version": version,
                "completion_tokens": "many",
            }
        },
    ),
}
"""Each wire: the type of its server, the prompt and the length in a request, and an answer."""

Answers = Sequence[tuple[list[int], str, str]]


@pytest.mark.usefixtures("exact_extra")
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("answers", "asked", "tokens", "reason", "parts"),
    [
        (
            [([1, 2], "abort", "w1"), ([3], "abort", "w2"), ([4, 5], "stop", "w2")],
            [([], 9), ([1, 2], 7), ([1, 2, 3], 6)],
            [1, 2, 3, 4, 5],
            "stop",
            [[2, "w1"], [1, "w2"], [2, "w2"]],
        ),
        ([([], "abort", "w1"), ([4], "stop", "w2")], [([], 9), ([], 9)], [4], "stop", []),
        ([([*range(1, 10)], "abort", "w1")], [([], 9)], [*range(1, 10)], "length", []),
        ([([1], "abort", "w1"), ([*range(8)], "length", "w1")], [([], 9), ([1], 8)], [1, *range(8)], "length", None),
    ],
    ids=["twice", "before the first token", "at the limit", "to the limit"],
)
async def test_an_answer_is_continued_from_its_tokens(
    wire: str, answers: Answers, asked: Any, tokens: list[int], reason: str, parts: Any
) -> None:
    from aiohttp import web

    kind, read, write = WIRES[wire]
    left, seen = list(answers), []

    async def answer(request: Any) -> Any:
        prompt, length = read(json.loads(await request.read()))
        seen.append((prompt[len(PROMPT) :], length))
        return web.json_response(write(*left.pop(0)))

    async with listening({f"POST {wire.partition(' ')[0]}": answer}) as url:
        client = GenerateServer(AgentSettings(base_url=url), kind)
        try:
            sampled = await client.sample(PROMPT, max_tokens=9, temperature=1.0, seed=5)
        finally:
            await client.aclose()
    assert seen == asked
    assert (sampled.tokens, sampled.finish_reason) == (tokens, reason)
    assert sampled.logprobs == [-token / 100 for token in tokens]
    assert sampled.weight_version == answers[-1][2]
    assert parts is None or sampled.parts == parts


async def test_the_parts_are_recorded(tokenizers: Callable[[str], Any], runtime: Runtime) -> None:
    class Updated:
        async def sample(self, prompt: Any, **_: Any) -> Sampled:
            first = Sampled(tokenizers("chatml").encode("Do"), [-0.5], "abort", weight_version="w1")
            more = Sampled(tokenizers("chatml").encode("ne"), [-0.25], "stop", weight_version="w2")
            first, more = (replace(one, logprobs=one.logprobs * len(one.tokens)) for one in (first, more))
            return first.then(more)

    session = ExactSession(Updated(), Chat(tokenizers("chatml")), runtime.parser("hermes"), max_length=999)  # type: ignore[arg-type]
    result = await HermesAgentLoop(session, [], set()).run([{"role": "user", "content": "go"}])
    assert result.messages[-1]["content"] == "Done"
    assert tokens_of(session.get_state()).refused is None
    (turn,) = result.turns
    assert [version for _, version in turn.parts] == ["w1", "w2"]
    assert sum(int(count or 0) for count, _ in turn.parts) == turn.completion_tokens
    record = Record("t", "e", "i", "g", 0, "a", "b", turns=(turn, TurnRecord(3, weight_version="w3")))
    assert record.weight_versions == ["w1", "w2", "w3"]


def test_a_chat_answer_that_was_broken_off_is_not_the_last() -> None:
    completion = {"choices": [{"message": {"content": "I'll"}, "finish_reason": "abort"}]}
    with pytest.raises(BadCompletion, match="broke its answer off"):
        read_reply(completion, 1)
