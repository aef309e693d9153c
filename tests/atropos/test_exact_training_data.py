"""What trainers are given is, token for token and logprob for logprob, what a real model sampled."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hermes_core.agents.trial import TRIAL
from hermes_core.envs.tokens import MASKED
from hermes_core.testing.tiny_model.engine import Engine
from hermes_core.testing.tiny_model.exactness import Exactness, TrainedSequence, check_exactness
from hermes_core.testing.tiny_model.folder import make_model
from hermes_core.testing.tiny_model.plans import WildPlans
from hermes_core.testing.tiny_model.server import TinyModelServer

PARSERS = {"chatml": "hermes", "llama3": "llama3_json", "qwen3": "qwen"}
GROUPS = 6
TURNS = 5
COMPACT_AT = 990
"""A number of tokens that some of the conversations reach."""


WIRES = {"atropos": "vllm", "tokens": "vllm", "completions": "vllm", "sglang": "sglang"}
"""What a server speaks, and its `server_type`: the API server of Atropos' trainer, stock vLLM in both ways, SGLang."""


@pytest.mark.long
@pytest.mark.parametrize("group_size", [2, pytest.param(6, marks=pytest.mark.stress)])
@pytest.mark.parametrize(
    ("form", "wire", "compact_at"),
    [
        # Each form, each wire, and compaction; `rollout` is tested with the same in tests/envs/test_exact_rollouts.py.
        ("chatml", "sglang", None),
        ("llama3", "atropos", None),
        ("qwen3", "completions", None),
        ("llama3", "tokens", COMPACT_AT),
        *(
            pytest.param(*each, marks=pytest.mark.stress)
            for each in (
                ("chatml", "atropos", None),
                ("chatml", "tokens", COMPACT_AT),
                ("llama3", "sglang", None),
                ("qwen3", "atropos", None),
                ("qwen3", "sglang", None),
                ("qwen3", "tokens", None),
                ("qwen3", "tokens", COMPACT_AT),
            )
        ),
    ],
)
async def test_every_trained_token_is_what_the_model_sampled(
    form: str,
    wire: str,
    compact_at: int | None,
    group_size: int,
    make_env: Callable[..., Any],
    tokenizers: Callable[[str], Any],
    torch_extra: None,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    import torch

    torch.set_num_threads(1)  # the machine has others to serve
    tokenizer = tokenizers(form)
    model = make_model(tokenizer, context=8192)
    groups = tmp_path / "groups.jsonl"
    with Engine(model, plan=WildPlans(tokenizer, form, TURNS)) as engine:
        async with TinyModelServer(engine, tokenizer, wires=[wire], model="scripted") as server:
            env = make_env(
                server.base_url,
                WIRES[wire],
                tokenizer_name=tokenizer.name_or_path,
                tool_call_parser=PARSERS[form],
                group_size=group_size,
                max_agent_turns=2 * TURNS if compact_at else TURNS,
                compact_at=compact_at,
                max_turn_tokens=250,
                max_token_length=8192,
                enabled_toolsets=["terminal"],
                data_path_to_save_groups=str(groups),
            )
            # A request that is given up under load and sent again is sampled twice and used once.
            env.server_configs = [each.model_copy(update={"timeout": 600}) for each in env.server_configs]
            await env.process_manager()
    rows = [json.loads(line) for line in groups.read_text().splitlines()]
    found = _check(model, rows, engine, tokenizer)
    turns = [_answers(masks) for row in rows for masks in row["masks"]]
    sequences = Counter(
        about["trajectory_id"] for row in rows for about in row["overrides"] if "trainable" not in about
    )
    figures = {"trajectories": len(sequences), "trained": found.trained, "drawn": found.drawn, "worst": found.worst}
    record_property("exactness", {"form": form, "wire": wire, "answers": sum(turns), **figures})
    assert found.problems == []
    assert len(sequences) == GROUPS * group_size
    assert found.sequences == sequences.total()
    assert (max(sequences.values()) > 1) is (compact_at is not None)
    assert found.worst <= 1e-5
    assert max(turns) > (3 if compact_at is None else 1), "hardly a rollout had several turns"
    assert 0.2 < found.drawn / found.trained < 0.9


def _check(model: Any, rows: list[dict[str, Any]], engine: Engine, tokenizer: Any) -> Exactness:
    sequences = [
        TrainedSequence(*lists)
        for row in rows
        for lists in zip(row["tokens"], row["masks"], row["inference_logprobs"], strict=True)
        if set(lists[1]) != {MASKED}  # it stands for a rollout that has fewer sequences than others of its group
    ]
    trial = tuple(tokenizer.encode(TRIAL, add_special_tokens=False))
    return check_exactness(model, sequences, [each for each in engine.sampled if each.prompt != trial])


def _answers(masks: list[int]) -> int:
    return sum(before == MASKED != here for before, here in pairwise(masks))
