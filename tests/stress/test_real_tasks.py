"""Real SWE-smith tasks on `local` while things die at random moments: the driver, channels, sandboxes, patience."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.sandbox.local import processes
from hermes_core.sandbox.local.sandbox import LocalSandbox
from tests.support.killed_runs import ORPHAN_TTL_S, gone, scored, start

pytestmark = pytest.mark.stress

LEVELS = ["user", "namespace"] if os.geteuid() == 0 else ["namespace"]
KILLS = 20 // len(LEVELS)
TASKS = 24


@pytest.fixture(params=LEVELS)
def level(request) -> str:
    return request.param


@pytest.fixture
def command(swe_tasks, sandboxes, tmp_path, level):
    """The main job as a command line."""
    return [
        *(
            sys.executable,
            "-m",
            "hermes_core",
            "rollout",
            "swe-smith",
            "--agent",
            "oracle",
            "--concurrency",
            "4",
        ),
        *(f"--env.dataset_name={swe_tasks}/tasks.jsonl", f"--env.repo_base_url={swe_tasks}", "--isolation", level),
        *("--backend", "local", f"--backend.state_dir={sandboxes}", "--out", str(tmp_path / "out"), "--resume"),
    ]


async def test_killed_at_random_moments_it_leaves_nothing_and_each_rollout_is_scored_once(command, sandboxes, tmp_path):
    chance = random.Random(7)
    for _ in range(KILLS):
        program = await start(command)
        await asyncio.sleep(chance.uniform(0.2, 8))
        if program.returncode is None:
            program.kill()
        await program.communicate()
    assert await gone(sandboxes, ORPHAN_TTL_S + 10) == []
    program = await start(command, "--json")
    output, _ = await program.communicate()
    assert program.returncode == 0, output.decode()
    counts = scored(tmp_path / "out")
    assert len(counts) == TASKS and set(counts.values()) == {1}
    assert await gone(sandboxes, 5) == []


async def test_interrupted_at_random_moments_it_is_clean_at_once(command, sandboxes, tmp_path):
    chance = random.Random(8)
    for number in [signal.SIGINT, signal.SIGTERM] * 5:
        program = await start(command)
        await asyncio.sleep(chance.uniform(1, 8))
        if program.returncode is not None:
            break
        began = time.monotonic()
        program.send_signal(number)
        output, _ = await program.communicate()
        assert program.returncode == 130, output.decode()
        assert time.monotonic() - began < 10
        assert await gone(sandboxes, 1) == []
    if (tmp_path / "out" / "trajectories.jsonl").exists():
        assert set(scored(tmp_path / "out").values()) <= {1}


@pytest.fixture
def rolled_out(swe_tasks, sandboxes, level):
    """Roll the tasks out in this process; the summary."""

    async def run() -> dict:
        async with Runtime() as runtime:
            summary = await run_rollouts(
                runtime,
                "swe-smith",
                "oracle",
                env={"dataset_name": str(swe_tasks / "tasks.jsonl"), "repo_base_url": str(swe_tasks)},
                backend="local",
                backend_config={"state_dir": str(sandboxes), "max_sandboxes": 2},
                isolation=level,
                concurrency=4,
                infra_retries=20,
            )
            return summary.to_dict()

    return run


@pytest.mark.entry_points
async def test_over_channels_that_are_cut_every_rollout_scores_without_a_second_try(rolled_out, sandboxes, monkeypatch):
    chance = random.Random(9)
    channels, cuts = {}, 0
    plain = LocalSandbox.open

    async def noted(self, *arguments, **options):
        channels[self.id] = await plain(self, *arguments, **options)
        return channels[self.id]

    monkeypatch.setattr(LocalSandbox, "open", noted)
    running = asyncio.ensure_future(rolled_out())
    while not (await asyncio.wait([running], timeout=chance.uniform(0.1, 1)))[0]:
        for channel in channels.values():  # whatever is on its way, in either direction, is lost
            await channel.aclose()
            cuts += 1
    summary = await running
    assert (summary["solved"], summary["failures"], summary["infra_retries"]) == (TASKS, {}, 0)
    assert cuts > 5
    assert await gone(sandboxes, 5) == []


def ours(folder: Path) -> list[int]:
    """The processes of the sandboxes in a folder that are not a slot's: watchdogs, guests, bridges."""
    return [pid for sandbox in folder.iterdir() for pid in processes.find_marked(sandbox.name) if _owner(pid) == 0]


def _owner(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


@pytest.mark.entry_points
@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's slots are of the same user as the guest")
async def test_what_keeps_a_sandbox_is_killed_under_rollouts(rolled_out, sandboxes):
    """Watchdogs, guests and bridges, whichever chance picks: each rollout ends at 1.0, and nothing is left."""
    chance = random.Random(10)
    kills = 0
    running = asyncio.ensure_future(rolled_out())
    while not (await asyncio.wait([running], timeout=chance.uniform(5, 12)))[0]:
        if victims := ours(sandboxes):
            os.kill(chance.choice(victims), signal.SIGKILL)
            kills += 1
    summary = await running
    assert summary["solved"] == TASKS, summary
    assert kills > 2
    assert await gone(sandboxes, ORPHAN_TTL_S + 10) == []
