"""Runs for the tests of exports: records as a run writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hermes_core.agents.base import CallError, CallErrorKind, CallRecord, TurnRecord, Usage
from hermes_core.errors import FailureKind
from hermes_core.records.record import Failure, Record, SandboxCommand, ToolCalls
from hermes_core.records.tokens import TokenSequence
from tests.support.selection import makes_tests_full

MakeRun = Callable[..., Path]

SEQUENCE = TokenSequence.of(
    [1, 2, 3, 10, 11, 4, 5, 12, 13],
    [-100, -100, -100, 10, 11, -100, -100, 12, 13],
    [1.0, 1.0, 1.0, -0.5, -0.25, 1.0, 1.0, -0.125, -1.5],
)
"""Two answers of two tokens each."""


def tool(name: str, *parameters: str) -> dict[str, Any]:
    """The schema of a tool with text parameters."""
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": f"Use {name}", "parameters": schema}}


def rollout(item: str = "greet", index: int = 0, *, said: str = "Done.", **changes: Any) -> Record:
    """A rollout with two answers, of which the first calls a tool twice."""
    arguments = json.dumps({"command": f"echo {said}"})
    calls = [
        {"id": f"call_{item}_{index}_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, name in enumerate(("bash", "read"))
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"Do {item} é."},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": calls[0]["id"], "name": "bash", "content": '{"output": "hi", "exit_code": 0}'},
        {"role": "tool", "tool_call_id": calls[1]["id"], "name": "read", "content": '{"error": "no file"}'},
        {"role": "assistant", "content": said},
    ]
    failed = CallError(CallErrorKind.FAILED, "no file")
    record = Record(
        f"{item}-{index}",
        "tasks",
        item,
        item,
        index,
        "model",
        "local",
        model="tiny",
        seed=7,
        started=1_000.0,
        ended=1_010.0,
        reward=1.0,
        details={"reason": "as asked"},
        messages=messages,
        turns=(
            TurnRecord(2, "tiny-1", 1_001.0, 1_002.0, 0.0, 3, 2, 1, None, 0.25, {"temperature": 1.0}, "tool_calls"),
            TurnRecord(5, "tiny-1", 1_004.0, 1_005.0, 0.0, 7, 2, None, None, 0.25, {"temperature": 1.0}, "stop"),
        ),
        calls=(
            CallRecord(0, 3, calls[0]["id"], "bash", arguments, 1_002.0, 1_003.0, None, 0),
            CallRecord(0, 4, calls[1]["id"], "read", arguments, 1_003.0, 1_003.5, failed),
        ),
        tool_schemas=[tool("bash", "command"), tool("read", "path")],
        sequences=(SEQUENCE,),
        stop_reason="finished",
        timings={"acquire_s": 0.5, "setup_s": 0.5, "agent_s": 4.0, "verify_s": 2.0, "release_s": 0.25},
        tool_calls=ToolCalls(2, 2, 1, 1),
        usage=Usage(2, 10, 4, 1, 0.5),
        sandbox_commands=(SandboxCommand("verify", "make test", 1_006.0, 1_007.0, 0, "1 passed"),),
        isolation="user",
        versions={"hermes-rl": "0.1.0", "python": "3.11"},
    )
    return replace(record, **changes)


def failed(item: str, index: int = 0, kind: FailureKind = FailureKind.INFRA) -> Record:
    """A rollout that failed before the model said anything."""
    bare = Record(f"{item}-{index}-failed", "tasks", item, item, index, "model", "local", started=1.0, ended=2.0)
    return replace(bare, failure=Failure(kind, "acquire", "the sandbox was lost"), versions={"hermes-rl": "0.1.0"})


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """`make_run(records, name="run")` writes a run's folder and returns it."""

    def make(records: Iterable[Record | bytes], name: str = "run", **about: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        lines = (record.line() if isinstance(record, Record) else record for record in records)
        (folder / "trajectories.jsonl").write_bytes(b"".join(lines))
        run = {
            "configuration": {"environment": "tasks", "agent": "model"},
            "configuration_hash": "abc",
            "versions": {"hermes-rl": "0.1.0"},
            "seed": 7,
            "started": "2026-11-23T08:00:00+00:00",
        }
        (folder / "run.json").write_text(json.dumps({**run, **about}))
        return folder

    return make


@pytest.fixture
@makes_tests_full
def datasets_extra(require: Callable[[str, str | None], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The package `datasets`, which reads no network and writes to the test's folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    try:
        import datasets
    except ImportError:
        require("datasets", "datasets is not installed")
        raise
    require("datasets", None if hasattr(datasets, "Json") else f"datasets {datasets.__version__} has no Json columns")
    return datasets
