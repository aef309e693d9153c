"""The sink in a run of two small tasks, in a sandbox on this host."""

import asyncio
import csv
import json
from pathlib import Path

import pytest

import example_sink as plugin
from hermes_core import ConfigError, Runtime, run_rollouts

TASKS = [
    {"id": "one", "prompt": "Make the file done.", "check": "test -f done", "solution": "touch done"},
    {"id": "two", "prompt": "Make the file done.", "check": "test -f done", "solution": "true"},
]


def test_each_rollout_has_a_line(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, TASKS)))

    async def work() -> None:
        async with Runtime(plugins=[plugin], load_entry_points=False) as runtime:
            await run_rollouts(
                runtime,
                "tasks",
                "oracle",
                env={"dataset_name": str(tmp_path / "tasks.jsonl")},
                sinks=[f"example-sink={tmp_path / 'rewards.csv'}"],
                isolation="shared",
                allow_unisolated=True,
            )

    asyncio.run(work())
    with (tmp_path / "rewards.csv").open(newline="") as file:
        rewards = {row["item_id"]: float(row["reward"]) for row in csv.DictReader(file)}
    assert rewards == {"one": 1.0, "two": 0.0}


@pytest.mark.parametrize(("target", "says"), [("", "where to write"), ("/no/such/folder/a.csv", "can't write")])
def test_a_target_that_can_t_be_written_is_refused_at_the_start(target: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Runtime(plugins=[plugin], load_entry_points=False).sink("example-sink", target)
