"""Phase 2 with a real model: what leaves is what was sampled, in three chat formats, on both wire formats."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hermes_core.testing.tiny_model.engine import Engine
from hermes_core.testing.tiny_model.exactness import TrainedSequence, check_exactness
from hermes_core.testing.tiny_model.folder import chat_format, make_model
from hermes_core.testing.tiny_model.plans import Gap, letters, make_plan, ordinary
from hermes_core.testing.tiny_model.server import TinyModelServer

PARSERS = {"chatml": "hermes", "llama3": "llama3_json", "qwen3": "qwen"}
TURNS = 3


def planned(form: str, tokenizer: Any) -> Callable[[Sequence[int], random.Random], Any]:
    """Answers that call a tool, spelled in tokens of the model's own, with parts that it draws freely; then a last one.

    Some calls are broken, some answers are cut off where the limit falls.
    """
    words, anything = letters(tokenizer), ordinary(tokenizer)
    chat = chat_format(form)

    def plan(prompt: Sequence[int], chance: random.Random) -> Any:
        results = len(re.findall("tool_response>\n|ipython<", tokenizer.decode(list(prompt))))
        thought = ["<think>\n", Gap(4, words), "\n</think>\n\n"] if chat.thinks else []
        if results >= TURNS or chance.random() < 0.1:
            return make_plan(tokenizer, [*thought, Gap(chance.randrange(1, 8), anything)], chance)
        before, after = chat.call.format(name='"terminal"', arguments='{"command": "echo @ > out.txt"}').split("@")
        return make_plan(tokenizer, [*thought, before, Gap(6, words), after], chance)

    return plan


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["vllm", "sglang"])
@pytest.mark.parametrize("form", sorted(PARSERS))
async def test_every_trained_token_is_what_the_server_sampled(
    torch_extra: None, make_env: Any, tokenizers: Callable[[str], Any], tmp_path: Path, form: str, wire: str
) -> None:
    tokenizer = tokenizers(form)
    model = make_model(tokenizer, width=32)
    with Engine(model, plan=planned(form, tokenizer)) as engine:
        async with TinyModelServer(engine, tokenizer) as server:
            env = make_env(
                server.base_url,
                wire,
                tokenizer_name=tokenizer.name_or_path,
                tool_call_parser=PARSERS[form],
                group_size=3,
                total_steps=4,
                max_num_workers=2,
                enabled_toolsets=["terminal"],
                max_token_length=4000,
                max_turn_tokens=120,
                max_agent_turns=TURNS + 1,
            )
            await env.process_manager()
        sampled = list(engine.sampled)[1:]  # the first was to try the server out
        groups = [json.loads(line) for line in (tmp_path / "data/groups.jsonl").read_text().splitlines()]
        sequences = [
            TrainedSequence(*row)
            for group in groups
            for row in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True)
        ]
        found = check_exactness(model, sequences, sampled)
    assert found.problems == []
    assert found.sequences == 12
    assert found.drawn > 100
    records = [json.loads(line) for line in (tmp_path / "data/groups.trajectories.jsonl").read_text().splitlines()]
    assert {record["refused"] for record in records} == {None}
    assert sum(record["tool_calls"]["executed_ok"] for record in records) > 12
