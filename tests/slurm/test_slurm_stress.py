"""24 rollouts by the reference solution while a cluster fails in each of its ways: all end at 1.0, each scored once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.stress


class ClusterRun:
    """The rollouts of all tasks, four at a time in two jobs, by the command line."""

    def __init__(self, tasks: Path, place: Path, folder: Path) -> None:
        self.out = folder / "out"
        (folder / "run.yaml").write_text("run: {infra_retries: 20}\n")
        self.command = [
            *(sys.executable, "-m", "hermes_core", "rollout", "swe-smith", "--agent", "oracle", "--concurrency", "4"),
            *(f"--env.dataset_name={tasks}/tasks.jsonl", f"--env.repo_base_url={tasks}", "--out", str(self.out)),
            *("--backend", "slurm", "--isolation", "namespace", f"--backend.directory={place}"),
            *("--backend.min_sandboxes=2", "--backend.max_sandboxes=2", "--backend.slots_per_sandbox=4"),
            *("--backend.acquire_timeout_s=300", "--config", str(folder / "run.yaml")),
        ]

    async def start(self, *more: str) -> asyncio.subprocess.Process:
        environment = {name: value for name, value in os.environ.items() if name != "HERMES_PLUGINS"}
        return await asyncio.create_subprocess_exec(
            *self.command, *more, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

    def check(self) -> None:
        """Every task was scored once, with 1.0."""
        rows = [json.loads(line) for line in (self.out / "trajectories.jsonl").read_text().splitlines()]
        scored = Counter((row["item_id"], row["rollout_index"]) for row in rows if row["reward"] is not None)
        assert (len(scored), set(scored.values())) == (24, {1})
        assert {row["reward"] for row in rows} <= {1.0, None}


def kill_steps(cluster: Any) -> None:
    cluster.kill_sruns()


def cancel_job(cluster: Any) -> None:
    if jobs := cluster.jobs():
        cluster.run("scancel", random.choice(jobs))


def restart_controller(cluster: Any) -> None:
    cluster.restart_controller()


def drain_nodes_in_turns(cluster: Any) -> None:
    """Drain one node, and cancel what runs there, as whoever needs the node back would."""
    drained = resume_nodes(cluster)
    node = "n2" if "n1" in drained else "n1"
    cluster.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    here = [job for job in cluster.jobs() if cluster.node(job) == node]
    if here:
        cluster.run("scancel", *here)


def resume_nodes(cluster: Any) -> set[str]:
    """Return the nodes that were drained."""
    drained = set(cluster.run("sinfo", "--noheader", "--Node", "--states=drained,draining", "--format=%N").split())
    for node in drained:
        cluster.run("scontrol", "update", f"nodename={node}", "state=resume")
    return drained


FAULTS: Mapping[str, tuple[Callable[[Any], None], float, int]] = {
    "steps": (kill_steps, 4, 1000),
    "jobs": (cancel_job, 25, 6),
    "controller": (restart_controller, 15, 1000),
    "drain": (drain_nodes_in_turns, 45, 2),
}
"""Each fault, every how many seconds it happens, and how many times. On a slow machine, no rollout would ever end
between faults that take all sandboxes."""


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_cluster_fails_under_rollouts(cluster: Any, swe_tasks: Path, tmp_path: Path, fault: str) -> None:
    run = ClusterRun(swe_tasks, cluster.place, tmp_path)
    program = await run.start()
    running = asyncio.ensure_future(program.communicate())
    act, every_s, most = FAULTS[fault]
    times = 0
    try:
        while not (await asyncio.wait([running], timeout=every_s))[0]:
            if times < most:
                await asyncio.to_thread(act, cluster)
                times += 1
    finally:
        resume_nodes(cluster)
    _, said = await running
    assert program.returncode == 0, said.decode()[-4000:]
    run.check()
    assert times >= 1


async def test_the_driver_is_killed_under_rollouts(cluster: Any, swe_tasks: Path, tmp_path: Path) -> None:
    run = ClusterRun(swe_tasks, cluster.place, tmp_path)
    kills = 0
    program = await run.start()
    while True:
        running = asyncio.ensure_future(program.communicate())
        if kills < 3 and not (await asyncio.wait([running], timeout=20))[0]:
            program.kill()
            kills += 1
        _, said = await running
        if program.returncode == 0:
            break
        assert program.returncode == -9, said.decode()[-4000:]
        program = await run.start("--resume")
    run.check()
    assert kills == 3
