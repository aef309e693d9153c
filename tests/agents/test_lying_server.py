"""A server whose token ids, logprobs and counts don't fit together: it is found out, and nothing of it is recorded."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_core.agents.exact.factory import open_exact_agent
from hermes_core.agents.exact.probe import TRIAL_TOKENS
from hermes_core.agents.model import ModelSettings
from hermes_core.errors import HermesError, ModelError
from hermes_core.runs.runner import run_rollouts
from hermes_core.runs.session import parsers_with
from hermes_core.runtime import Runtime
from tests.support.http_server import listening

Change = Callable[[dict[str, Any]], object]


class Liar:
    """Speaks as vLLM or SGLang, and answers each prompt with the same words. `lie` changes its answers after the first
    `honest` ones."""

    def __init__(self, tokenizer: Any, kind: str) -> None:
        self.kind = kind
        self.honest = 0
        self.answered = 0
        self.lie: Change = lambda answer: None
        self.card: dict[str, Any] = {"id": "m", "owned_by": kind, "max_model_len": 4096}
        self.base_url = ""
        self._tokens = [*tokenizer.encode("Done.", add_special_tokens=False), tokenizer.eos_token_id]

    async def __aenter__(self) -> Liar:
        path = "/inference/v1/generate" if self.kind == "vllm" else "/generate"
        self._open = listening({"GET /v1/models": self._models, f"POST {path}": self._generate})
        self.base_url = await self._open.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._open.__aexit__(*error)

    async def _models(self, request: Any) -> Any:
        from aiohttp import web

        return web.json_response({"object": "list", "data": [self.card]})

    async def _generate(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        answer = (self._vllm if self.kind == "vllm" else self._sglang)(body)
        self.answered += 1
        if self.answered > self.honest:
            self.lie(answer)
        return web.Response(text=json.dumps(answer), content_type="application/json")

    def _vllm(self, body: dict[str, Any]) -> dict[str, Any]:
        places = [{"token": f"token_id:{token}", "logprob": -0.5} for token in self._tokens]
        choice = {"index": 0, "token_ids": [*self._tokens], "logprobs": {"content": places}, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(body["token_ids"]), "completion_tokens": len(self._tokens)}
        return {"choices": [choice], "usage": usage}

    def _sglang(self, body: dict[str, Any]) -> dict[str, Any]:
        about = {"prompt_tokens": len(body["input_ids"]), "completion_tokens": len(self._tokens)}
        places = [[-0.5, token, None] for token in self._tokens]
        return {"meta_info": {**about, "output_token_logprobs": places, "finish_reason": {"type": "stop"}}}


def settings(liar: Liar, tokenizer: Any, **changes: Any) -> dict[str, Any]:
    given = {"tool_call_parser": "auto", "base_url": liar.base_url, "model": "m", "max_retries": 0}
    return {**given, "tokenizer_name": tokenizer.name_or_path, **changes}


async def found_out(runtime: Runtime, liar: Liar, tokenizer: Any) -> str:
    """What is said of this server before a run."""
    given = ModelSettings(**settings(liar, tokenizer))
    agent = await open_exact_agent(given, parsers_with(runtime, "auto"), tools=True)
    try:
        with pytest.raises(HermesError) as raised:
            await agent.check_endpoint()
        return str(raised.value)
    finally:
        await agent.aclose()


def choice(answer: dict[str, Any]) -> Any:
    return answer["choices"][0]


VLLM: dict[str, tuple[Change, str]] = {
    "no ids": (lambda answer: choice(answer).pop("token_ids"), "KeyError: 'token_ids'"),
    "null ids": (lambda answer: choice(answer).update(token_ids=None), "no token ids with logprobs as vLLM does"),
    "no tokens": (
        lambda answer: choice(answer).update(token_ids=[], logprobs={"content": []}),
        "ValueError: no token",
    ),
    "no logprobs": (lambda answer: choice(answer).update(logprobs=None), "use vLLM 0.33 or later"),
    "fewer logprobs": (lambda answer: choice(answer)["logprobs"]["content"].pop(), "shorter"),
    "more logprobs": (lambda answer: choice(answer)["logprobs"]["content"].append({"logprob": -1}), "longer"),
    "another token": (
        lambda answer: choice(answer)["logprobs"]["content"][0].update(token="token_id:7"),
        "the logprob of token_id:7 stands beside the token",
    ),
    "no logprob": (
        lambda answer: choice(answer)["logprobs"]["content"][0].update(logprob=-9999.0),
        "-9999.0 is not a logprob",
    ),
    "a probability": (
        lambda answer: choice(answer)["logprobs"]["content"][0].update(logprob=0.6),
        "0.6 is not a logprob",
    ),
    "not a number": (
        lambda answer: choice(answer)["logprobs"]["content"][0].update(logprob=float("nan")),
        "nan is not a logprob",
    ),
    "a negative id": (
        lambda answer: (choice(answer)["token_ids"].insert(0, -1), choice(answer)["logprobs"]["content"].insert(0, {})),
        "KeyError: 'logprob'",
    ),
    "text as ids": (
        lambda answer: choice(answer).update(token_ids=["Done", "."], logprobs={"content": [{"logprob": -1}] * 2}),
        "'Done' is not a token id",
    ),
    "an id that the tokenizer lacks": (
        lambda answer: (
            choice(answer).update(token_ids=[10**6], logprobs={"content": [{"logprob": -1}]}, usage={})
            or answer.pop("usage")
        ),
        "it gave the token 1000000, and this one has",
    ),
    "a count of the answer": (
        lambda answer: answer["usage"].update(completion_tokens=1),
        "tokens, and a count of 1",
    ),
    "a count of the prompt": (
        lambda answer: answer["usage"].update(prompt_tokens=3),
        "a count of 3 for a prompt of",
    ),
    "two answers": (lambda answer: answer["choices"].append(choice(answer)), "too many values"),
    "an error": (lambda answer: choice(answer).update(finish_reason="error"), "the completion ended with 'error'"),
}

SGLANG: dict[str, tuple[Change, str]] = {
    "no logprobs": (
        lambda answer: answer["meta_info"].pop("output_token_logprobs"),
        "KeyError: 'output_token_logprobs'",
    ),
    "no place for an id": (
        lambda answer: answer["meta_info"].update(output_token_logprobs=[[-0.5]]),
        "no token ids with logprobs as SGLang does",
    ),
    "a count of the answer": (
        lambda answer: answer["meta_info"].update(completion_tokens=9),
        "tokens, and a count of 9",
    ),
    "a prompt that was cut": (
        lambda answer: answer["meta_info"].update(prompt_tokens=5),
        "servers must not cut prompts",
    ),
    "null as a logprob": (
        lambda answer: answer["meta_info"]["output_token_logprobs"][0].__setitem__(0, None),
        "None is not a logprob",
    ),
}


@pytest.mark.parametrize(("kind", "lie"), [*(("vllm", lie) for lie in VLLM), *(("sglang", lie) for lie in SGLANG)])
async def test_a_lie_is_found_out_before_the_run(
    runtime: Runtime, tokenizers: Callable[[str], Any], kind: str, lie: str
) -> None:
    tokenizer = tokenizers("chatml")
    async with Liar(tokenizer, kind) as liar:
        liar.lie, expected = (VLLM if kind == "vllm" else SGLANG)[lie]
        assert expected in await found_out(runtime, liar, tokenizer)


async def test_more_tokens_than_were_asked_for(runtime: Runtime, tokenizers: Callable[[str], Any]) -> None:
    tokenizer = tokenizers("chatml")
    async with Liar(tokenizer, "vllm") as liar:
        liar._tokens = liar._tokens[:1] * (TRIAL_TOKENS + 1)
        said = await found_out(runtime, liar, tokenizer)
        assert f"{TRIAL_TOKENS + 1} tokens, and was asked for {TRIAL_TOKENS} at most" in said


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ({"owned_by": "llamacpp"}, "set server_type to vllm or sglang; for any other leave out the parser"),
        ({"id": "other"}, "has no model 'm' (known: other)"),
        ({"max_model_len": None}, "does not say how long a conversation may be (set max_token_length"),
    ],
)
async def test_a_server_that_does_not_say_what_is_needed(
    runtime: Runtime, tokenizers: Callable[[str], Any], card: dict[str, Any], expected: str
) -> None:
    tokenizer = tokenizers("chatml")
    async with Liar(tokenizer, "vllm") as liar:
        liar.card.update(card)
        assert expected in await found_out(runtime, liar, tokenizer)


@pytest.mark.parametrize(
    ("lie", "expected"),
    [
        ("fewer logprobs", "no token ids with logprobs"),
        ("an id that the tokenizer lacks", "gave the token 1000000"),
        ("a count of the prompt", "servers must not cut prompts"),
    ],
)
async def test_a_lie_during_the_run_is_a_failure_of_the_model_and_no_token_of_it_is_kept(
    runtime: Runtime, tokenizers: Callable[[str], Any], tmp_path: Path, lie: str, expected: str
) -> None:
    tokenizer = tokenizers("chatml")
    dataset = tmp_path / "tasks.jsonl"
    dataset.write_text("".join(json.dumps({"id": f"t{n}", "prompt": "p", "check": "true"}) + "\n" for n in range(2)))
    records: list[dict[str, Any]] = []
    async with Liar(tokenizer, "vllm") as liar:
        liar.lie, liar.honest = VLLM[lie][0], 2  # the trial, and the first rollout
        summary = await run_rollouts(
            runtime,
            "tasks",
            env={"dataset_name": str(dataset)},
            settings=settings(liar, tokenizer),
            on_record=lambda record: records.append(copy.deepcopy(dict(record))),
            concurrency=1,
            isolation="shared",
            allow_unisolated=True,
        )
    assert not summary.complete
    good, bad = records
    assert (good["reward"], good["failure"]) == (1.0, None)
    assert [len(sequence["tokens"]) > 0 for sequence in good["sequences"]] == [True]
    assert (bad["reward"], bad["failure"]["kind"], bad["sequences"]) == (None, "model", [])
    assert expected in bad["failure"]["message"]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_dead_server_is_not_waited_for_as_long_as_one_that_dies_during_the_run(
    runtime: Runtime, tokenizers: Callable[[str], Any], kind: str
) -> None:
    tokenizer = tokenizers("chatml")
    async with Liar(tokenizer, kind) as liar:
        pass
    given = settings(liar, tokenizer, max_retries=None, check_patience_s=0.5, server_type=kind, max_token_length=100)
    agent = await open_exact_agent(ModelSettings(**given), parsers_with(runtime, "auto"), tools=True)
    began = time.monotonic()
    with pytest.raises(ModelError):
        await agent.check_endpoint()
    await agent.aclose()
    assert time.monotonic() - began < 20
