"""What trainers are given is, token for token and logprob for logprob, what a real model sampled."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.tiny_model.engine import Engine
from hermes_testing.tiny_model.folder import make_model
from hermes_testing.tiny_model.server import TinyModelServer

from hermes_core.records.tokens import MASKED
from tests.support.exactness import TURNS, check_run, check_share, long_conversations, without_trial
from tests.tiny_model.plans import WildPlans
from tests.tiny_model.token_exactness import TrainedSequence

PARSERS = {"chatml": "hermes", "llama3": "llama3_json", "qwen3": "qwen"}
GROUPS = 6

WIRES = {"atropos": "vllm", "tokens": "vllm", "completions": "vllm", "sglang": "sglang"}
"""What a server speaks, and its `server_type`: the API server of Atropos' trainer, stock vLLM in both ways, SGLang."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "wire", "compacts", "group_size", "agent"),
    [
        # What tests/rollout/test_exact_rollouts.py, which has the same recording, leaves to this test: a form and its
        # wire, and the wire that `rollout` does not have.
        ("chatml", "sglang", True, 1, "model"),
        ("chatml", "atropos", False, 2, "program"),
        *(
            pytest.param(*each, "model", marks=pytest.mark.stress)
            for each in (
                ("chatml", "tokens", True, 34),
                ("llama3", "tokens", True, 34),
                ("qwen3", "tokens", True, 34),
                ("llama3", "atropos", False, 1),
                ("chatml", "atropos", False, 6),
                ("llama3", "sglang", False, 6),
                ("qwen3", "atropos", False, 6),
                ("qwen3", "sglang", False, 6),
            )
        ),
    ],
)
async def test_every_trained_token_is_what_the_model_sampled(
    form: str,
    wire: str,
    compacts: bool,
    group_size: int,
    agent: str,
    make_env: Callable[..., Any],
    tokenizers: Callable[[str], Any],
    torch_extra: None,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    import torch

    torch.set_num_threads(1)  # the machine has others to serve
    tokenizer = tokenizers(form)
    model = make_model(tokenizer, context=8192)
    groups = tmp_path / "groups.jsonl"
    settings = long_conversations(tokenizer, form, "Write 0 into out.txt", rollouts=GROUPS * group_size)
    with Engine(model, plan=WildPlans(tokenizer, form, TURNS)) as engine:
        async with TinyModelServer(engine, tokenizer, wires=[wire], model="scripted") as server:
            env = make_env(
                server.base_url,
                WIRES[wire],
                tokenizer_name=tokenizer.name_or_path,
                tool_call_parser=PARSERS[form],
                group_size=group_size,
                max_agent_turns=settings["max_turns"] if compacts else TURNS,
                compact_at=settings["compact_at"] if compacts else None,
                max_turn_tokens=settings["max_tokens"],
                max_token_length=8192,
                enabled_toolsets=["terminal"],
                data_path_to_save_groups=str(groups),
                **(request.getfixturevalue("program") if agent == "program" else {}),
            )
            # A request that is given up under load and sent again is sampled twice and used once.
            env.server_configs = [each.model_copy(update={"timeout": 600}) for each in env.server_configs]
            await env.process_manager()
    rows = [json.loads(line) for line in groups.read_text().splitlines()]
    sampled = without_trial(engine.sampled, tokenizer)
    turns = [_answers(masks) for row in rows for masks in row["masks"]]
    sequences = Counter(
        about["trajectory_id"] for row in rows for about in row["overrides"] if "trainable" not in about
    )
    summaries = [count - 1 for count in sequences.values()]
    found = check_run(
        f"Atropos, {agent}, {form} by {wire}",
        model,
        _sequences(rows),
        sampled,
        summaries=summaries,
        tell=record_property,
    )
    figures = {"trajectories": len(sequences), "trained": found.trained, "drawn": found.drawn, "worst": found.worst}
    record_property("exactness", {"form": form, "wire": wire, "answers": sum(turns), **figures})
    assert len(sequences) == GROUPS * group_size
    assert found.sequences == sequences.total()
    if compacts:
        check_share(summaries)
    else:
        assert max(summaries) == 0
    assert max(turns) > (1 if compacts else 2), "hardly a rollout had several turns"
    assert found.drawn > 10 * len(sequences)


def _sequences(rows: list[dict[str, Any]]) -> Iterator[TrainedSequence]:
    for row in rows:
        for lists in zip(row["tokens"], row["masks"], row["inference_logprobs"], strict=True):
            if set(lists[1]) != {MASKED}:  # it stands for a rollout that has fewer sequences than others of its group
                yield TrainedSequence(*lists)


def _answers(masks: list[int]) -> int:
    return sum(before == MASKED != here for before, here in pairwise(masks))
