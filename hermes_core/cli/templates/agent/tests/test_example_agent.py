"""The agent on a small task, in a sandbox on this host."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import example_agent as plugin
from hermes_core import Runtime, UnknownNameError, run_rollouts

TASK = {"id": "greet", "prompt": "Write 'hello' to greeting.txt.", "check": "grep -qx hello greeting.txt"}


def rollout(folder: Path, **settings: object) -> Mapping[str, Any]:
    """Let the agent work on the task, and return the record."""
    (folder / "tasks.jsonl").write_text(json.dumps(TASK))
    records: list[Mapping[str, Any]] = []

    async def work() -> None:
        async with Runtime(plugins=[plugin], load_entry_points=False) as runtime:
            await run_rollouts(
                runtime,
                "tasks",
                "example-agent",
                env={"dataset_name": str(folder / "tasks.jsonl")},
                settings=settings,
                on_record=records.append,
                isolation="shared",
                allow_unisolated=True,
            )

    asyncio.run(work())
    [record] = records
    return record


def test_it_solves_the_task(tmp_path: Path) -> None:
    record = rollout(tmp_path, commands=["echo hello > greeting.txt"])
    assert record["reward"] == 1.0
    assert [message["role"] for message in record["messages"]] == ["user", "assistant", "tool"]
    assert [turn["message"] for turn in record["turns"]] == [1]
    [call] = record["calls"]
    assert (call["name"], call["exit_code"], call["error"]) == ("terminal", 0, None)


@pytest.mark.parametrize(("stop_on_error", "reward"), [(True, 0.0), (False, 1.0)])
def test_a_command_that_fails_is_the_last_one_if_asked(tmp_path: Path, stop_on_error: bool, reward: float) -> None:
    commands = ["false", "echo hello > greeting.txt"]
    assert rollout(tmp_path, commands=commands, stop_on_error=stop_on_error)["reward"] == reward


def test_a_misspelt_setting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'commands'"):
        rollout(tmp_path, command=["true"])
