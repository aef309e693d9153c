"""Runs on the disk, as `rollout` writes them, without rolling anything out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from hermes_core.agents.base import CallError, CallErrorKind, CallRecord, TurnRecord, Usage
from hermes_core.errors import FailureKind
from hermes_core.records.record import Failure, Record, SandboxCommand, ToolCalls
from hermes_core.records.store import OutputFolder
from hermes_core.records.summary import Tally

BEGAN = 1_764_000_000.0

MakeRecord = Callable[..., Record]
WriteRun = Callable[..., Path]


def summarised(record: Record) -> Record:
    """Return the record with its second answer as a summary, from which the conversation goes on."""
    first, second = record.turns
    told = [
        {"role": "user", "content": "Write a summary."},
        {"role": "assistant", "content": "I looked."},
        {"role": "user", "content": "Make the tests pass. I looked."},
        {"role": "assistant", "content": "Done."},
    ]
    summary = dataclasses.replace(second, message=5, compacted=True)
    last = dataclasses.replace(second, message=7, started=second.ended, ended=second.ended + 1)
    return dataclasses.replace(record, messages=[*record.messages[:4], *told], turns=(first, summary, last))


@pytest.fixture
def make_record() -> MakeRecord:
    """Makes the record of a rollout with two turns and one tool call; keywords replace fields."""

    def make(item: str = "greet", index: int = 0, reward: float | None = 1.0, **given: Any) -> Record:
        call = {"name": "terminal", "arguments": '{"command": "make test"}'}
        values: dict[str, Any] = {
            "trajectory_id": f"{item}-{index}-0123456789abcdef",
            "environment": "tasks",
            "item_id": item,
            "group": item,
            "rollout_index": index,
            "agent": "model",
            "backend": "local",
            "model": "scripted",
            "started": BEGAN,
            "ended": BEGAN + 10.0,
            "reward": reward,
            "details": {"reason": "1 of 2 tests failed", "output": "E assert 1 == 2"},
            "failure": None if reward is not None else Failure(FailureKind.INFRA, "verify", "the sandbox was lost"),
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Make the tests pass."},
                {
                    "role": "assistant",
                    "content": "I look.",
                    "reasoning_content": "Hm.",
                    "tool_calls": [{"id": "c1", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": "c1", "name": "terminal", "content": '{"output": "2 failed"}'},
                {"role": "assistant", "content": "Done."},
            ],
            "turns": (
                TurnRecord(2, "scripted", BEGAN + 2, BEGAN + 3, 0.5, 900, 80, 100, None, 0.01, {"temperature": 0.7}),
                TurnRecord(4, "scripted", BEGAN + 4, BEGAN + 5, 0.0, 1000, 20, 0, None, 0.01),
            ),
            "calls": (CallRecord(0, 3, "c1", call["name"], call["arguments"], BEGAN + 3, BEGAN + 4, None, 2, 4096),),
            "stop_reason": "finished",
            "timings": {"acquire_s": 1.0, "setup_s": 1.0, "agent_s": 3.0, "verify_s": 4.0, "release_s": 1.0},
            "waited_s": 0.5,
            "tool_calls": ToolCalls(1, 1, 1, 0),
            "usage": Usage(2, 1900, 100, 100, 0.02),
            "sandbox_commands": (SandboxCommand("verify", "pytest -q", BEGAN + 5, BEGAN + 9, 1, "E assert 1 == 2"),),
            "tool_schemas": (
                {
                    "type": "function",
                    "function": {
                        "name": "terminal",
                        "description": "Run it.",
                        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
                    },
                },
            ),
            "isolation": "user",
        }
        return Record(**(values | given))

    return make


@pytest.fixture
def failed_call() -> CallRecord:
    """A call of another tool, which it refused."""
    error = CallError(CallErrorKind.INVALID_ARGUMENTS, "path is missing")
    return CallRecord(0, 3, "c1", "patch", "{}", BEGAN + 3, BEGAN + 4, error)


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Writes a folder of a run with these records, or adds them to it."""

    def write(records: Iterable[Record], name: str = "run", *, ended: bool = True) -> Path:
        folder, tally = OutputFolder(tmp_path / name), Tally()
        configuration = {
            **{"environment": "tasks", "agent": "model", "backend": "local", "group_size": 2, "env": {"n": 1}},
            "agent_settings": {"model": "scripted"},
        }
        there = (tmp_path / name / "trajectories.jsonl").exists()
        folder.open(configuration, {"versions": {"hermes-rl": "0.1.0"}, "seed": 7}, tally, resume=there)
        for record in records:
            folder.append(record.line())
            tally.add(record)
        if ended:
            folder.write_summary(tally.summary(tally.scored, out_dir=str(tmp_path / name)))
        folder.close()
        return tmp_path / name

    return write
