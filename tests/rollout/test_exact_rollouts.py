"""`hermes-rl rollout --parser`: what a run writes is, token for token, what the server sampled, without any trainer."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hermes_testing.tiny_model.engine import Engine
from hermes_testing.tiny_model.folder import make_model
from hermes_testing.tiny_model.server import TinyModelServer

from hermes_core.agents.exact.probe import TRIAL
from hermes_core.cli.main import main
from hermes_core.records.record import Record
from hermes_core.records.store import TRAJECTORIES
from hermes_core.records.tokens import MASKED
from tests.support.exactness import check_share
from tests.tiny_model.plans import WildPlans
from tests.tiny_model.token_exactness import Exactness, TrainedSequence, check_exactness

ISOLATION = ["--isolation", "user"] if os.geteuid() == 0 else ["--isolation", "shared", "--allow-unisolated"]
TURNS = 4


async def rollout(folder: Path, *arguments: object) -> tuple[int, str]:
    """Run `hermes-rl rollout` as a process, and return its exit code and what it printed."""
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "HERMES_PLUGINS": os.environ["HERMES_PLUGINS"],
        "HERMES_ENV_FILE": "",
        "XDG_STATE_HOME": str(folder / "state"),
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "hermes_core", "rollout", "tasks", *map(str, arguments)),
        env=environ,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, said.decode()


def tasks(folder: Path, items: int) -> str:
    rows = [{"id": f"t{n}", "prompt": f"Write {n} into out.txt", "check": "test -s out.txt"} for n in range(items)]
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"--env.dataset_name={path}"


COMPACT_AT = {"qwen3": 0.139, "chatml": 0.1355, "llama3": 0.143}
"""Shares of the context that about half of the conversations reach."""

WIRES = {"qwen3": "tokens", "chatml": "sglang", "llama3": "completions"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "compacts", "items", "group_size"),
    [
        ("qwen3", True, 4, 2),
        # Another form and its wire are in tests/atropos/test_exact_training_data.py.
        pytest.param("llama3", True, 4, 2, marks=pytest.mark.stress),
        pytest.param("chatml", True, 4, 2, marks=pytest.mark.stress),
        *(pytest.param(form, False, 8, 2, marks=pytest.mark.stress) for form in WIRES),
        pytest.param("qwen3", False, 50, 4, marks=pytest.mark.stress),
        *(pytest.param(form, True, 50, 4, marks=pytest.mark.stress) for form in WIRES),
    ],
)
async def test_every_recorded_and_exported_token_is_what_the_server_sampled(
    form: str,
    compacts: bool,
    items: int,
    group_size: int,
    torch_extra: None,
    tokenizers: Callable[[str], Any],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    tokenizer = tokenizers(form)
    model = make_model(tokenizer, context=8192)
    with Engine(model, plan=WildPlans(tokenizer, form, TURNS)) as engine:
        records = await recorded(
            *(tmp_path, form, engine, tokenizer),
            *(tasks(tmp_path, items), "--env.enabled_toolsets=terminal", "--group-size", group_size),
            *("--max-turns", 2 * TURNS if compacts else TURNS),
            *([f"--agent.compact_at={COMPACT_AT[form]}"] if compacts else []),
        )
    found = compared(model, records, engine, tokenizer)
    answers = [answers_in(sequence.masks) for record in records for sequence in record.sequences]
    summaries = [sum(turn.compacted for turn in record.turns) for record in records]
    record_property(
        "figure",
        f"exact rollouts, {form} by {WIRES[form]}: {len(records)} trajectories with {sum(answers)} answers, "
        f"{sum(map(bool, summaries))} of them with {sum(summaries)} summaries: {found.tokens} "
        f"tokens, {found.trained} of them sampled; {len(found.problems)} differences from the server's own record, and "
        f"logprobs within {found.worst:.1e} of those of the weights",
    )
    assert found.problems == []
    assert len(records) == items * group_size
    assert [len(record.sequences) for record in records] == [1 + summed for summed in summaries]
    assert all(record.tokens_refused is None for record in records)
    if compacts:
        check_share(summaries)
    else:
        assert max(answers) == TURNS, "no rollout used all of its turns"
    for record in records:
        assert sum(turn.completion_tokens for turn in record.turns) == sum(each.trained for each in record.sequences)
        assert {turn.stop_reason for turn in record.turns} <= {"stop", "length"}
        assert {turn.sampling["temperature"] for turn in record.turns} == {1.0}
        assert all(turn.completion_tokens <= turn.sampling["max_tokens"] <= 250 for turn in record.turns)
    assert sum(record.tool_calls.executed_ok for record in records) > len(records) / 2

    exported = CliRunner().invoke(
        main, ["export", str(tmp_path / "run"), "--to", "tokens", "--out", str(tmp_path / "exported")]
    )
    assert exported.exit_code == 0, exported.output
    rows = [json.loads(line) for line in (tmp_path / "exported" / "train.jsonl").read_bytes().splitlines()]
    assert [(row["input_ids"], row["labels"], sampled_logprobs(row["logprobs"], row["labels"])) for row in rows] == [
        (each["tokens"], each["masks"], sampled_logprobs(each["logprobs"], each["masks"]))
        for record in records
        for each in (sequence.lists() for sequence in record.sequences)
    ]


WRITTEN_ANEW = """
        for call in message.get("tool_calls") or ():
            try:
                arguments = json.loads(call["function"]["arguments"])
            except ValueError:
                continue
            call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
        message.pop("reasoning_content", None)
        if len(messages) == 2:
            messages.append({"role": "user", "content": "That was not what I meant."})
            continue
        messages.append(message)
"""
"""What a program may do to its history: it writes arguments in its own way, and drops thinking and its first answer."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "items"),
    [("qwen3", 4), *(pytest.param(form, 100, marks=pytest.mark.stress) for form in WIRES)],
)
async def test_every_token_of_a_program_in_a_slot_is_what_the_server_sampled(
    form: str,
    items: int,
    torch_extra: None,
    tokenizers: Callable[[str], Any],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    program_agents: None,
) -> None:
    tokenizer = tokenizers(form)
    model = make_model(tokenizer, context=8192)
    program = (Path(__file__).parents[2] / "examples/agent_program/agent.py").read_text("utf-8")
    changed = program.replace("\n        messages.append(message)\n", WRITTEN_ANEW)
    assert changed != program
    with Engine(model, plan=WildPlans(tokenizer, form, TURNS)) as engine:
        records = await recorded(
            *(tmp_path, form, engine, tokenizer, tasks(tmp_path, items), "--group-size", 2, "--max-turns", 2 * TURNS),
            *("--agent", "program", f"--agent.command=python3 -c {shlex.quote(changed)}"),
        )
    found = compared(model, records, engine, tokenizer)
    answers = sum(answers_in(sequence.masks) for record in records for sequence in record.sequences)
    record_property(
        "figure",
        f"a program in a slot, {form} by {WIRES[form]}: {len(records)} trajectories with {answers} answers, "
        f"{found.tokens} tokens, {found.trained} of them sampled; {len(found.problems)} differences from the server's "
        f"own record, and logprobs within {found.worst:.1e} of those of the weights",
    )
    assert found.problems == []
    assert [record.tokens_refused for record in records] == [None] * items * 2
    assert all(record.forks == {"dropped_answer": 1} for record in records), [record.forks for record in records]
    assert all(len(record.sequences) == 2 for record in records)
    assert answers > 3 * len(records)


async def recorded(tmp_path: Path, form: str, engine: Engine, tokenizer: Any, *options: Any) -> list[Record]:
    """The records of a run against a server of the tiny model."""
    async with TinyModelServer(engine, tokenizer, wires=[WIRES[form]], model="tiny-model") as server:
        code, said = await rollout(
            *(tmp_path, *options),
            *("--parser", "auto", "--base-url", server.base_url, "--model", "tiny-model"),
            *(f"--agent.tokenizer_name={tokenizer.name_or_path}", "--agent.max_tokens=250"),
            *("--concurrency", 8, "--out", tmp_path / "run", *ISOLATION),
        )
    assert code == 0, said
    lines = (tmp_path / "run" / TRAJECTORIES).read_bytes().splitlines()
    return [Record.from_json(json.loads(line)) for line in lines]


def sampled_logprobs(logprobs: list[float], masks: list[int]) -> list[float]:
    return [logprob for logprob, mask in zip(logprobs, masks, strict=True) if mask != MASKED]


def compared(model: Any, records: list[Record], engine: Engine, tokenizer: Any) -> Exactness:
    """Compare the sequences of these records with the server's own record, without the trial before the run."""
    trial = tuple(tokenizer.encode(TRIAL, add_special_tokens=False))
    sampled = [each for each in engine.sampled if each.prompt != trial]
    sequences = [TrainedSequence(**sequence.lists()) for record in records for sequence in record.sequences]
    return check_exactness(model, sequences, sampled)


def answers_in(masks: Any) -> int:
    return sum(before == MASKED != here for before, here in pairwise(masks))
