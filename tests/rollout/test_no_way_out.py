"""An agent breaks its slot in each way of `tests/support/ways_out.py`, at each place: its rollout ends with a 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hermes_docker
import hermes_harbor
import hermes_swe_smith
import pytest

from hermes_core.environment import Environment
from hermes_core.errors import VerifierError
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from tests.harbor.harbor_tasks import PYTHON, write_task
from tests.rollout.test_agent_exits import Doing, shell
from tests.support.ways_out import WAYS, Ways, skip_without

ROWS = [{"id": "work", "prompt": "Write it.", "check": "test -e done.txt"}]
PROFILE = {"slots_per_sandbox": 8, "max_processes": 256, "execution_timeout_s": 30.0}
PLUGINS = [hermes_docker, hermes_harbor, hermes_swe_smith]
FULL, STRESS = pytest.mark.full, pytest.mark.stress


def tasks(folder: Path) -> tuple[str, dict[str, Any]]:
    """The environment `tasks` with one undone task."""
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return "tasks", {"dataset_name": str(folder / "tasks.jsonl")}


def swe_smith(_folder: Path) -> tuple[str, dict[str, Any]]:
    """The environment `swe-smith` with one item of its demo."""
    return "swe-smith", {"dataset_name": "demo", "max_items": 1}


def harbor(folder: Path) -> tuple[str, dict[str, Any]]:
    """The environment `harbor` with one undone task, whose tests need a shell and Python."""
    test = "python3 -c 'import json'\n[ -e /app/done.txt ] && r=1 || r=0; echo $r >/logs/verifier/reward.txt\n"
    write_task(folder / "tasks" / "work", image=PYTHON, test=test)
    return "harbor", {"dataset_name": str(folder / "tasks"), "accept": ["image"]}


CELLS = [
    (tasks, "local", "private-root"),
    pytest.param(swe_smith, "local", "private-root", marks=FULL),
    pytest.param(tasks, "local", "namespace", marks=FULL),
    pytest.param(tasks, "docker", "private-root", marks=FULL),
    pytest.param(harbor, "local", "private-root", marks=FULL),
    pytest.param(tasks, "docker", "user", marks=STRESS),
    pytest.param(tasks, "docker", "dedicated", marks=STRESS),
    pytest.param(harbor, "docker", "private-root", marks=STRESS),
    pytest.param(harbor, "docker", "dedicated", marks=STRESS),
    pytest.param(swe_smith, "docker", "private-root", marks=STRESS),
    pytest.param(swe_smith, "docker", "dedicated", marks=STRESS),
]


@pytest.mark.parametrize(("environment", "backend", "level"), CELLS)
async def test_every_way_to_break_a_slot_ends_with_a_reward_of_0(request, tmp_path, environment, backend, level):
    image = {"image": request.getfixturevalue("docker_images")[0]} if backend == "docker" else {}
    is_root = level == "private-root" or environment is harbor
    ways = {name: way for name, way in WAYS.items() if is_root or not way.root}
    records = await ends(tmp_path, environment, backend, level, ways, image)
    assert {way: end for way, end in records.items() if end[:2] != (0.0, None)} == {}


async def test_a_slot_that_can_not_be_entered_again_is_the_agents_doing(change_guest, tmp_path):
    change_guest("if lived_in and os.path.lexists(path)", "if False and os.path.lexists(path)")
    ways = {name: WAYS[name] for name in ("puts a link in the place of /data", "locks its workspace")}
    records = await ends(tmp_path, tasks, "local", "private-root", ways, {})
    assert [end[:2] for end in records.values()] == [(0.0, None)] * 2
    assert "it could not be confined" in records["puts a link in the place of /data"][2]["reason"]


class Separate(Environment):
    """A verification in a fresh slot, which gives no reward for what the agent made."""

    name = "separate"

    def items(self):
        return [{"id": str(number)} for number in range(3)]

    def format_prompt(self, item):
        return "break it"

    @hookimpl
    async def verify_and_score_trajectory(self, item, rollout):
        broken = (await rollout.commands.run("test -e broken")).ok
        async with rollout.fresh_slot():
            if broken:
                raise VerifierError("no reward")
        return 0.5


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_all_that_break_their_verification_at_a_time_leave_each_other_the_slots_for_the_decision(
    tmp_path, concurrency
):
    skip_without("user")
    records: list[dict[str, Any]] = []
    async with Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False) as runtime:
        await run_rollouts(
            runtime,
            Separate(),
            Doing({"break it": shell("touch broken")}),
            backend="local",
            isolation="user",
            concurrency=concurrency,
            infra_retries=0,
            on_record=records.append,
        )
    assert [(record["reward"], record["failure"]) for record in records] == [(0.0, None)] * 3


async def ends(tmp_path, environment, backend, level, ways, given):
    """The reward, the failure and the details of each way."""
    profile: dict[str, Any] = {**PROFILE, **given}
    if backend == "docker":
        profile |= {"private-root": {"cap_add": ["SYS_ADMIN"]}, "dedicated": {"max_sandboxes": 8}}.get(level, {})
    if backend == "local":
        skip_without(level)
    agent, records = Ways(ways, tmp_path), {}
    settings = Settings(state_dir=tmp_path / "state", profiles={"default": profile})
    name, env = environment(tmp_path)
    async with Runtime(settings, load_entry_points=False, plugins=PLUGINS) as runtime:
        await run_rollouts(
            runtime,
            name,
            agent,
            env=env,
            backend=backend,
            isolation=level,
            group_size=len(ways),
            concurrency=4,
            # Root of a sandbox can end it, which looks like a loss until it happens again.
            infra_retries=2 if level == "dedicated" else 0,
            on_record=lambda record: records.update({agent.went[record["trajectory_id"]]: record}),
        )
    assert records.keys() == ways.keys()
    return {way: (record["reward"], record["failure"], record["details"]) for way, record in records.items()}
