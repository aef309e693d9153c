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
from hermes_core.envs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from tests.ways_out import skip_without

ELSEWHERE = [pytest.param(each, marks=pytest.mark.full) for each in ("local private-root", "docker user")]
FILLS = {
    "blocks": "head -c 100M /dev/zero >full; head -c 100M /dev/zero >~/full; true",
    "inodes": "mkdir many; cd many; seq 20000 | xargs touch 2>/dev/null; true",
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
    backend, level = place.split()
    disk: dict[str, Any] = {"tmpfs_size": 16}
    if backend == "docker":
        image = request.getfixturevalue("docker_images")[0]
        disk = {"image": image, "tmpfs": {"/data": "size=16m,nr_inodes=8k,mode=711"}}
    else:
        skip_without(level)
    check = "grep -q done out.txt && echo x >~/written"
    rows = [{"id": name, "prompt": name, "check": check} for name in ("fill", "work")]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    profile = {"slots_per_sandbox": 4, "max_sandboxes": 1, "reserve_slots": 0, **disk}
    settings = Settings(state_dir=tmp_path / "state", profiles={"default": profile})
    records: dict[str, Any] = {}
    async with Runtime(settings, load_entry_points=False, plugins=[hermes_docker]) as runtime:
        await run_rollouts(
            runtime,
            "tasks",
            Filler(FILLS[fill]),
            env={"dataset_name": str(tmp_path / "tasks.jsonl"), "shuffle": False},
            backend=backend,
            isolation=level,
            concurrency=2,
            on_record=lambda record: records.update({record["item_id"]: record}),
        )
    ends = {name: (record["reward"], record["failure"]) for name, record in records.items()}
    assert ends == {"fill": (0.0, None), "work": (1.0, None)}
    assert records["fill"]["infra_retries"] == 0 and records["work"]["infra_retries"] > 0
