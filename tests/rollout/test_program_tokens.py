"""The tokens of agents that are programs: each is what the server sampled, whatever they make of their history."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hermes_agents
import pytest
from hermes_testing.tiny_model.engine import Engine
from hermes_testing.tiny_model.folder import make_model
from hermes_testing.tiny_model.server import TinyModelServer

from hermes_core.agents.exact.probe import TRIAL
from hermes_core.records.record import Record
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from tests.tiny_model.plans import WildPlans
from tests.tiny_model.token_exactness import TrainedSequence, check_exactness

ROOT = Path(__file__).resolve().parents[2]
TURNS, ITEMS = 4, 6

AGENT = (ROOT / "examples/agent_program/agent.py").read_text("utf-8").replace('"bash"', '"terminal"')
REWRITES = AGENT.replace(
    "        messages.append(message)\n",
    "        for call in message.get('tool_calls') or ():\n"
    "            try:\n"
    "                function = call['function']\n"
    "                function['arguments'] = json.dumps(json.loads(function['arguments']), indent=2)\n"
    "            except ValueError:\n"
    "                pass\n"
    "        messages.append({k: v for k, v in message.items() if not k.startswith('reasoning')})\n",
)
"""An agent that writes the arguments of calls anew, and drops what the model thought."""


@pytest.mark.long
@pytest.mark.parametrize("agent", [AGENT, REWRITES], ids=["as-it-was", "rewritten"])
async def test_every_token_of_a_program_is_what_the_server_sampled(
    agent: str,
    torch_extra: None,
    tokenizers: Callable[[str], Any],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    assert agent == AGENT or agent.count("startswith") == 1
    tokenizer = tokenizers("qwen3")
    model = make_model(tokenizer, context=8192)
    rows = [{"id": f"t{n}", "prompt": f"Write {n} into out.txt", "check": "test -s out.txt"} for n in range(ITEMS)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    records: list[Record] = []
    with Engine(model, plan=WildPlans(tokenizer, "qwen3", TURNS)) as engine:
        async with (
            TinyModelServer(engine, tokenizer, wires=["tokens"], model="tiny-model") as server,
            Runtime(
                Settings(state_dir=tmp_path / "state"), load_entry_points=False, plugins=[hermes_agents]
            ) as runtime,
        ):
            await run_rollouts(
                runtime,
                "tasks",
                "program",
                env={"dataset_name": str(tmp_path / "tasks.jsonl")},
                settings={
                    "command": f"python3 -c {shlex.quote(agent)}",
                    "base_url": server.base_url,
                    "model": "tiny-model",
                    "tool_call_parser": "auto",
                    "tokenizer_name": tokenizer.name_or_path,
                    "max_tokens": 250,
                    "max_turns": 3 * TURNS,
                },
                isolation="user",
                concurrency=4,
                on_record=lambda record: records.append(Record.from_json(record)),
            )
    trial = tuple(tokenizer.encode(TRIAL, add_special_tokens=False))
    sampled = [each for each in engine.sampled if each.prompt != trial]
    sequences = [TrainedSequence(**sequence.lists()) for record in records for sequence in record.sequences]
    found = check_exactness(model, sequences, sampled)
    answers = sum(len(record.turns) for record in records)
    record_property(
        "figure",
        f"exact tokens of a program: {found.tokens} tokens, {found.trained} sampled, in {answers} answers",
    )
    assert found.problems == []
    assert [record.failure for record in records] == [None] * ITEMS
    assert all(record.tokens_refused is None for record in records)
    assert [record.forks for record in records] == [{}] * ITEMS
    assert [len(record.sequences) for record in records] == [1] * ITEMS
    assert answers == sum(record.program["requests"]["answered"] for record in records if record.program)
