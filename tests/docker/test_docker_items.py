"""Items with images, directories and files of their own, in one run of `prompts` or `tasks` on Docker."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import hermes_docker
import pytest

from hermes_core.agents.base import AgentResult, AgentTask, StopReason
from hermes_core.agents.calls import run_calls
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings

pytestmark = pytest.mark.full

LOOKS = "pwd; cat given/note.txt; cat /etc/os-release 2>/dev/null | head -1; command -v python3 || echo no python"


class Looks:
    """An agent that runs one command."""

    name = "looks"

    def __init__(self, command: str) -> None:
        self.command = command

    async def run(self, task: AgentTask) -> AgentResult:
        task.result.messages.extend(task.messages)
        function = {"name": "terminal", "arguments": json.dumps({"command": self.command})}
        call = {"id": "c", "type": "function", "function": function}
        calls = task.result.add_turn({"role": "assistant", "content": "", "tool_calls": [call]}, started=0.0)
        await run_calls(task, calls)
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self) -> None:
        pass


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with Runtime(Settings(state_dir=tmp_path), plugins=[hermes_docker], load_entry_points=False) as one:
        yield one


async def rolled_out(
    runtime: Runtime, folder: Path, environment: str, agent: Any, rows: list[dict[str, Any]], **options: Any
) -> dict[str, Mapping[str, Any]]:
    """The records by item."""
    dataset = folder / "rows.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found: dict[str, Mapping[str, Any]] = {}
    await run_rollouts(
        runtime,
        environment,
        agent,
        env={"dataset_name": str(dataset)},
        backend="docker",
        on_record=lambda record: found.update({record["item_id"]: record}),
        **options,
    )
    return found


PLACES = {"below": "a place/in it", "absolute": "/tmp/made for it", "image": "/usr"}


def rows(images: tuple[str, str], names: list[str]) -> list[dict[str, Any]]:
    by_kind = dict(zip(("python", "busybox"), images, strict=True))
    return [
        {
            **{"id": f"{kind} {place}", "prompt": "Look.", "image": by_kind[kind], "cwd": PLACES[place]},
            **{
                "workspace": {"given/note.txt": f"note of {place}\n"},
                "setup": ["test -s given/note.txt", "echo made > made"],
            },
        }
        for kind, place in map(str.split, names)
    ]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        # Slots with users of their own need Python in the image.
        ({"isolation": "user"}, ["python below", "python absolute"]),
        ({"isolation": "dedicated"}, ["python absolute", "busybox below"]),
        (
            {"isolation": "dedicated", "backend_config": {"slot_user": "root"}},
            ["python below", "busybox absolute", "busybox image"],
        ),
    ],
    ids=["user", "dedicated", "root"],
)
async def test_prompts_and_tasks_with_images_directories_and_files_of_their_own(
    runtime: Runtime, tmp_path: Path, docker_images: tuple[str, str], options: dict[str, Any], names: list[str]
) -> None:
    given = rows(docker_images, names)
    options["concurrency"] = 2

    found = await rolled_out(runtime, tmp_path, "prompts", Looks(LOOKS), given, **options)
    for row in given:
        record = found[row["id"]]
        assert record["failure"] is None, record["failure"]
        assert record["image"]["name"] == row["image"]
        output = json.loads(record["messages"][-1]["content"])["output"]
        assert output.splitlines()[0].endswith(row["cwd"]), output
        assert f"note of {row['id'].split()[1]}" in output
        assert ("no python" in output) == row["id"].startswith("busybox")

    tasks = [
        {
            **row,
            "check": [
                "grep -qx made made",
                "test -s given/note.txt",
                "test -s ~/hidden/answer",
                "cmp -s work ~/hidden/answer",
            ],
            "files": {"hidden/answer": "42\n"},
            "solution": ["test ! -e ~/hidden", "echo 42 > work"],
        }
        for row in given
    ]
    agents = (("oracle", 1.0), ("nop", 0.0))
    for agent, reward in agents if options["isolation"] == "user" else agents[:1]:
        found = await rolled_out(runtime, tmp_path, "tasks", agent, tasks, **options)
        assert {item: (record["reward"], record["failure"]) for item, record in found.items()} == {
            row["id"]: (reward, None) for row in tasks
        }, json.dumps([record["details"] for record in found.values()])
