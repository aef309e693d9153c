"""Groups of an agent that is a program in the slot, as those of `model`: tokens, masks and logprobs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.scripted_server import ScriptedServer, ToolScript, call

from hermes_core.errors import ConfigError, UsageError
from tests.atropos.conftest import PROGRAM
from tests.support.token_server import TokenServer, differences
from tests.tiny_model.token_exactness import TrainedSequence


def writes(prompt: str) -> str:
    """Do what the tasks ask for, with the program's own tool."""
    if "<tool_response>" in prompt:
        return "Done."
    number = re.search(r"user\nWrite (\d+)", prompt)
    command = f"echo {number[1] if number else 0} > out.txt"
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


async def test_the_trainer_gets_what_was_sampled_for_a_program(
    make_env: Callable[..., Any], tokenizers: Callable[[str], Any], isolates: None, tmp_path: Path
) -> None:
    groups = tmp_path / "groups.jsonl"
    async with TokenServer(tokenizers("chatml"), writes) as server:
        env = make_env(server.base_url, "vllm", total_steps=3, data_path_to_save_groups=str(groups), **PROGRAM)
        await env.process_manager()
    rows = [json.loads(line) for line in groups.read_text().splitlines()]
    assert [row["scores"] for row in rows] == [[1.0, 1.0]] * 3
    sequences = [
        TrainedSequence(*lists)
        for row in rows
        for lists in zip(row["tokens"], row["masks"], row["inference_logprobs"], strict=True)
    ]
    assert len(sequences) == 6
    assert len(server.log) == 12
    assert differences(sequences, server.log) == []


async def test_a_program_asks_openai_servers(
    make_env: Callable[..., Any], tokenizers: Callable[[str], Any], isolates: None, tmp_path: Path
) -> None:
    def play(prompt: str) -> Any:
        yield call("bash", command=f"echo {prompt.split()[1]} > out.txt")
        return "Done."

    groups = tmp_path / "groups.jsonl"
    async with ScriptedServer(ToolScript(play)) as server:
        env = make_env(server.base_url, total_steps=1, data_path_to_save_groups=str(groups), **PROGRAM)
        await env.process_manager()
    (row,) = [json.loads(line) for line in groups.read_text().splitlines()]
    assert row["scores"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"agent": "oracle"}, UsageError, "can't be given a model"),
        ({"agent": "program"}, ConfigError, "has no command"),
        ({**PROGRAM, "compact_at": 100}, ConfigError, "compact_at is only for the agent `model`"),
    ],
)
async def test_what_can_not_be_trained_is_refused_before_a_sandbox_is_made(
    make_env: Callable[..., Any], settings: dict[str, Any], error: type[Exception], said: str
) -> None:
    env = make_env("http://127.0.0.1:9/v1", "vllm", **settings)
    with pytest.raises(error, match=said):
        async with env.running():
            pass
