"""What a trainer gets through verifiers' `TrainClient`: the very tokens that a model sampled, with its logprobs."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hermes_core.testing.tiny_model.engine import Engine, Plan
from hermes_core.testing.tiny_model.exactness import TrainedSequence, check_exactness
from hermes_core.testing.tiny_model.folder import FORMATS, make_model, make_tokenizer
from hermes_core.testing.tiny_model.plans import Gap, letters, make_plan
from hermes_core.testing.tiny_model.server import TinyModelServer

pytestmark = [
    pytest.mark.usefixtures("verifiers_extra", "torch_extra", "leak_check"),
    pytest.mark.filterwarnings("ignore"),  # those of verifiers and of what it needs
]

LEVEL = {} if os.geteuid() == 0 else {"isolation": "shared", "allow_unisolated": True}
MANY = pytest.param(67, marks=pytest.mark.stress)


@pytest.mark.parametrize("rollouts", [8, MANY])
async def test_its_tokens_and_logprobs_are_those_of_the_server(
    tasks: dict[str, Any], tmp_path: Path, rollouts: int
) -> None:
    import verifiers.v1 as vf
    from hermes_rl import HermesEnv
    from hermes_verifiers.adapter import HermesEnvConfig
    from verifiers.v1.clients import ModelContext

    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])  # as in Qwen: verifiers' parser looks for these tokens
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    drawn = Gap(3, letters(tokenizer))

    def plan(prompt: Sequence[int], chance: random.Random) -> Plan:
        if FORMATS["chatml"].result in tokenizer.decode(prompt):
            return make_plan(tokenizer, ["Done ", drawn])
        command = f'{{"name": "terminal", "arguments": {{"command": "echo {chance.randrange(2)} > out.txt"}}}}'
        return make_plan(tokenizer, [f"<tool_call>\n{command}\n</tool_call>"])

    env = HermesEnv(
        HermesEnvConfig.model_validate(
            {
                "taskset": {"id": "hermes_rl", "env": {**tasks, "enabled_toolsets": ["terminal"]}, "run": LEVEL},
                "agent": {"harness": {"id": "hermes_rl"}, "runtime": {"type": "subprocess"}},
            }
        )
    )
    with Engine(make_model(tokenizer, context=8192), plan=plan) as engine:
        async with TinyModelServer(engine, tokenizer, wires=["tokens"]) as server, env.serving():
            client = vf.TrainClientConfig(
                base_url=server.base_url,
                api_key_var="NONE",
                renderer={"name": "default", "tool_parser": "qwen3"},
                renderer_model_name=str(tmp_path / "tokenizer"),
            )
            context = ModelContext("tiny", client, vf.SamplingConfig(temperature=1.0, max_tokens=200))
            slots = [slot for task in env.taskset for slot in env.slots(task, rollouts)]
            episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))
        traces = [trace for episode in episodes for trace in episode.traces]
        assert [trace.errors for trace in traces if not trace.ok] == []
        assert {trace.reward for trace in traces} == {0.0, 1.0}
        branches = [branch for trace in traces for branch in trace.branches]
        sequences = [
            TrainedSequence(
                each.token_ids,
                [token if own else -100 for token, own in zip(each.token_ids, each.sampled_mask, strict=True)],
                each.logprobs,
            )
            for each in branches
        ]
        exact = check_exactness(engine.model, sequences, engine.sampled)
    assert not exact.problems
    assert exact.sequences == len(traces) == 3 * rollouts, "a conversation was split"
    assert exact.drawn > 3 * rollouts
    assert exact.worst < 1e-5
