"""A slot that fills the disk of its sandbox gets its 0, and what its neighbours do is repeated where there is room."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import hermes_docker
import pytest

from hermes_core.agents.base import AgentResult, AgentTask, StopReason
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from tests.rollout.test_agent_exits import Doing, shell
from tests.support.ways_out import skip_without

ELSEWHERE = [pytest.param(each, marks=pytest.mark.full) for each in ("local private-root", "docker user")]
FILLS = {
    "blocks": "head -c 100M /dev/zero >full; head -c 100M /dev/zero >~/full; true",
    "inodes": "mkdir many; cd many; seq 20000 | xargs touch 2>/dev/null; true",
}
CHECK = "grep -q done out.txt && echo x >~/written"
HIDES = {
    "in a directory of everybody's": "mkdir /tmp/mine; head -c 100M /dev/zero >/tmp/mine/full; chmod 0 /tmp/mine",
    "in a file without a name": "echo 'exec 9>full; rm full; head -c 100M /dev/zero >&9; sleep 600 & exit 1' >theirs",
}


class Filler:
    """Fills the disk in the rollouts of one item, and does the work in the others, which end while the disk is full."""

    name = "filler"

    def __init__(self, fill: str) -> None:
        self._fill = fill
        self._begun = asyncio.Barrier(2)
        self._is_full = asyncio.Event()
        self._neighbour_is_back = asyncio.Event()

    async def run(self, task: AgentTask) -> AgentResult:
        if task.messages[-1]["content"] == "fill":
            await self._begun.wait()
            await task.tool_handler("terminal", {"command": self._fill}, task.trajectory_id)
            self._is_full.set()
            with contextlib.suppress(TimeoutError):  # in another sandbox: its check found no room here
                await asyncio.wait_for(self._neighbour_is_back.wait(), 60)
        else:
            await task.tool_handler("terminal", {"command": "echo done >out.txt"}, task.trajectory_id)
            if self._is_full.is_set():
                self._neighbour_is_back.set()
            else:
                await self._begun.wait()
                await self._is_full.wait()
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self) -> None:
        return


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("place", ["local user", *ELSEWHERE])
async def test_an_honest_neighbour_is_repeated_elsewhere(
    request: pytest.FixtureRequest, tmp_path: Path, place: str, fill: str
) -> None:
    rows = [{"id": name, "prompt": name, "check": CHECK} for name in ("fill", "work")]
    records = await ends(request, tmp_path, place, rows, Filler(FILLS[fill]))
    found = {name: (record["reward"], record["failure"]) for name, record in records.items()}
    assert found == {"fill": (0.0, None), "work": (1.0, None)}
    assert records["fill"]["infra_retries"] == 0 and records["work"]["infra_retries"] > 0


@pytest.mark.parametrize("where", HIDES)
async def test_who_hides_what_fills_the_disk_gets_its_0(
    request: pytest.FixtureRequest, tmp_path: Path, where: str
) -> None:
    rows = [{"id": "fill", "prompt": "fill", "check": [CHECK, "sh ./theirs"]}]
    records = await ends(
        request, tmp_path, "local user", rows, Doing({"fill": shell("echo done >out.txt", HIDES[where])})
    )
    record = records["fill"]
    assert (record["reward"], record["failure"], record["infra_retries"]) == (0.0, None, 0)
    assert "No space left" in record["details"]["output"]


async def ends(
    request: pytest.FixtureRequest, tmp_path: Path, place: str, rows: list[dict[str, Any]], agent: Any
) -> dict[str, Any]:
    """The records of these tasks by id, where four slots share a small disk."""
    backend, level = place.split()
    disk: dict[str, Any] = {"tmpfs_size": 16}
    if backend == "docker":
        image = request.getfixturevalue("docker_images")[0]
        disk = {"image": image, "tmpfs": {"/data": "size=16m,nr_inodes=8k,mode=711"}}
    else:
        skip_without(level)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    profile = {"slots_per_sandbox": 4, "max_sandboxes": 1, "reserve_slots": 0, **disk}
    settings = Settings(state_dir=tmp_path / "state", profiles={"default": profile})
    records: dict[str, Any] = {}
    async with Runtime(settings, load_entry_points=False, plugins=[hermes_docker]) as runtime:
        await run_rollouts(
            runtime,
            "tasks",
            agent,
            env={"dataset_name": str(tmp_path / "tasks.jsonl"), "shuffle": False},
            backend=backend,
            isolation=level,
            concurrency=2,
            on_record=lambda record: records.update({record["item_id"]: record}),
        )
    return records
