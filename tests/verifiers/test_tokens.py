"""What a trainer gets through verifiers' `TrainClient`: the very tokens that a model sampled, with its logprobs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hermes_testing.tiny_model.engine import Engine
from hermes_testing.tiny_model.folder import make_model
from hermes_testing.tiny_model.server import TinyModelServer

from hermes_core.agents.compaction import CONTINUED
from tests.support.exactness import COMMAND, FORMS, TURNS, check_run, check_share, long_conversations, without_trial
from tests.tiny_model.plans import WildPlans
from tests.tiny_model.token_exactness import TrainedSequence

pytestmark = [
    pytest.mark.usefixtures("verifiers_extra", "torch_extra", "leak_check"),
    pytest.mark.filterwarnings("ignore"),  # those of verifiers and of what it needs
]

LEVEL = {} if os.geteuid() == 0 else {"isolation": "shared", "allow_unisolated": True}

RENDERERS: dict[str, dict[str, str]] = {
    "qwen3": {"name": "qwen3"},
    "llama3": {"name": "llama-3"},
    "chatml": {"name": "default", "tool_parser": "qwen3"},
}
"""verifiers' own renderers of two of the formats, and the one that knows nothing but the template."""

TOKENS = {
    "qwen3": ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"],
    "llama3": ["<|end_of_text|>"],
    "chatml": ["<tool_call>", "</tool_call>"],
}
"""The tokens that verifiers looks for, as in the models themselves."""

ENDS = {
    "qwen3": ["<|im_end|>", "<|endoftext|>"],
    "llama3": ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"],
    "chatml": ["<|im_end|>"],
}
"""The tokens by which verifiers has answers ended."""

SEQUENCES = {"qwen3": 2, "llama3": 1}
"""The number of sequences that a summary begins. Qwen3's template drops all thoughts when a summary is asked for."""


@pytest.mark.parametrize(
    ("form", "rollouts", "agent"),
    [
        *((form, 2, "model") for form in FORMS),
        ("qwen3", 2, "program"),
        *(pytest.param(form, 67, "model", marks=pytest.mark.stress) for form in FORMS),
    ],
)
async def test_its_tokens_and_logprobs_are_those_of_the_server(
    form: str,
    rollouts: int,
    agent: str,
    tasks: dict[str, Any],
    tokenizers: Callable[[str], Any],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    import verifiers.v1 as vf
    from hermes_rl import HermesEnv
    from hermes_verifiers.adapter import HermesEnvConfig
    from transformers import AutoTokenizer
    from verifiers.v1.clients import ModelContext

    monkeypatch.setattr("renderers.client._max_prompt_len_lock", asyncio.Lock())  # that of another test's event loop
    folder = tmp_path / "tokenizer"
    tokenizers(form).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(TOKENS[form])
    tokenizer.save_pretrained(folder)
    task, system = "Write 0 into out.txt", tasks["system_prompt"]
    settings = long_conversations(tokenizer, form, task, system, rollouts=3 * rollouts)
    longest, level = settings.pop("max_tokens"), LEVEL
    if agent == "program":
        request.getfixturevalue("program_agents")
        settings, level = {"command": COMMAND, "max_turns": TURNS}, {}
    env = HermesEnv(
        HermesEnvConfig.model_validate(
            {
                "taskset": {"id": "hermes_rl", "env": {**tasks, "enabled_toolsets": ["terminal"]}, "run": level},
                "agent": {
                    "harness": {"id": "hermes_rl", "agent": agent, "settings": settings},
                    "runtime": {"type": "subprocess"},
                },
            }
        )
    )
    model, stop = make_model(tokenizer, context=8192), tokenizer.convert_tokens_to_ids(ENDS[form])
    with Engine(model, stop=stop, plan=WildPlans(tokenizer, form, TURNS)) as engine:
        async with TinyModelServer(engine, tokenizer, wires=["tokens"]) as server, env.serving():
            client = vf.TrainClientConfig(
                base_url=server.base_url,
                api_key_var="NONE",
                renderer=RENDERERS[form],
                renderer_model_name=str(folder),
            )
            context = ModelContext("tiny", client, vf.SamplingConfig(temperature=1.0, max_tokens=longest))
            slots = [slot for task in env.taskset for slot in env.slots(task, rollouts)]
            episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))
        traces = [trace for episode in episodes for trace in episode.traces]
        assert [trace.errors for trace in traces if not trace.ok] == []
        assert len(traces) == 3 * rollouts
        summaries = [summaries_of(trace) for trace in traces]
        found = check_run(
            f"verifiers, {agent}, {form} by the renderer {RENDERERS[form]['name']}",
            engine.model,
            [sequence for trace in traces for sequence in sequences_of(trace)],
            without_trial(engine.sampled, tokenizer),
            summaries=summaries,
            tell=record_property,
        )
    if agent == "model":
        check_share(summaries)
    assert found.drawn > 3 * rollouts
    # Only the default renderer splits a conversation elsewhere: it writes each answer anew, from its text.
    for trace, summed in zip(traces, summaries, strict=True):
        assert trace.info["hermes"]["stop_reason"] != "refused"
        assert form not in SEQUENCES or len(trace.branches) == 1 + SEQUENCES[form] * summed


def sequences_of(trace: Any) -> list[TrainedSequence]:
    """What is trained on of a trace, as sequences of our own."""
    from hermes_verifiers.branches import branches

    return [
        TrainedSequence(tokens, [token if own else -100 for token, own in zip(tokens, mask, strict=True)], logprobs)
        for tokens, mask, logprobs in branches(trace)
    ]


def summaries_of(trace: Any) -> int:
    """The number of messages that a conversation went on from."""
    said = [node.message for node in trace.nodes if node.message.role == "user"]
    return sum(CONTINUED in str(message.content) for message in said)


def test_an_answer_that_two_branches_share_is_trained_on_once() -> None:
    from hermes_verifiers.branches import branches

    prompt, answer, again, last = (
        SimpleNamespace(mask=[own] * 2, token_ids=[token] * 2)
        for token, own in ((1, False), (2, True), (3, False), (4, True))
    )
    ways = [[prompt, answer], [prompt, answer, last], [prompt, answer, again]]
    trace = SimpleNamespace(
        branches=[
            SimpleNamespace(
                nodes=way, token_ids=[token for node in way for token in node.token_ids], logprobs=[0.0] * 2 * len(way)
            )
            for way in ways
        ]
    )
    trained = [[token for token, own in zip(each.tokens, each.mask, strict=True) if own] for each in branches(trace)]
    assert trained == [[2, 2], [4, 4]], "nothing of the third is left to train on"
