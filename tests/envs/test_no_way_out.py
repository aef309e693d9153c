"""No way out of a slot that its agent has broken: each line of `tests/ways_out.py`, at each place, ends with a 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hermes_docker
import hermes_swe_smith
import pytest

from hermes_core.envs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from tests.ways_out import WAYS, Ways

ROWS = [{"id": "work", "prompt": "Write it.", "check": "test -e done.txt"}]
PROFILE = {"slots_per_sandbox": 8, "max_processes": 256, "execution_timeout_s": 30.0}
FULL, STRESS = pytest.mark.full, pytest.mark.stress


def tasks(folder: Path) -> tuple[str, dict[str, Any]]:
    """The environment `tasks` with one undone task."""
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return "tasks", {"dataset_name": str(folder / "tasks.jsonl")}


def swe_smith(_folder: Path) -> tuple[str, dict[str, Any]]:
    """The environment `swe-smith` with one item of its demo."""
    return "swe-smith", {"dataset_name": "demo", "max_items": 1}


CELLS = [
    pytest.param(tasks, "local", "private-root", marks=pytest.mark.root),
    pytest.param(swe_smith, "local", "private-root", marks=[pytest.mark.root, FULL]),
    pytest.param(tasks, "local", "namespace", marks=FULL),
    pytest.param(tasks, "docker", "private-root", marks=FULL),
    pytest.param(tasks, "docker", "user", marks=STRESS),
    pytest.param(swe_smith, "docker", "private-root", marks=STRESS),
    pytest.param(swe_smith, "docker", "dedicated", marks=STRESS),
]


@pytest.mark.loop_stall(1.0)
@pytest.mark.parametrize(("environment", "backend", "level"), CELLS)
async def test_no_way_out(request, tmp_path, environment, backend, level):
    profile: dict[str, Any] = dict(PROFILE)
    if backend == "docker":
        profile["image"] = request.getfixturevalue("docker_images")[0]
        profile |= {"private-root": {"cap_add": ["SYS_ADMIN"]}, "dedicated": {"max_sandboxes": 8}}.get(level, {})
    ways = {name: way for name, way in WAYS.items() if level == "private-root" or not way.root}
    agent, records = Ways(ways, tmp_path), {}
    settings = Settings(state_dir=tmp_path / "state", profiles={"default": profile})
    name, env = environment(tmp_path)
    async with Runtime(settings, load_entry_points=False, plugins=[hermes_docker, hermes_swe_smith]) as runtime:
        await run_rollouts(
            runtime,
            name,
            agent,
            env=env,
            backend=backend,
            isolation=level,
            group_size=len(ways),
            concurrency=4,
            infra_retries=0,
            on_record=lambda record: records.update({agent.went[record["trajectory_id"]]: record}),
        )
    assert records.keys() == ways.keys()
    ends = {way: (record["reward"], record["failure"]) for way, record in records.items()}
    assert {way: end for way, end in ends.items() if end != (0.0, None)} == {}
