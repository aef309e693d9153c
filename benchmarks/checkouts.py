"""How much memory the driver takes while agents leave large checkouts: 24 rollouts, 8 at a time, 240 MB each.

A task of the demo, by an agent that leaves a large file of zeros in its checkout as part of its work. It goes from the
agent's slot to the preparation user, and with the tested tree to a fresh slot. Beside it the same rollouts with nothing
added. Each figure is the peak of a driver in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.measure import MB, Row, Rows, Target, peak
from hermes_core.agents.base import Agent, AgentResult, AgentTask, StopReason
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime

ROLLOUTS, AT_A_TIME, MEGABYTES = 24, 8, 240
QUICK = (4, 4, 40)
TARGET = Target(500.0)


async def rows(quick: bool) -> Rows:
    """The peak of the driver's resident memory."""
    rollouts, at_a_time, megabytes = QUICK if quick else (ROLLOUTS, AT_A_TIME, MEGABYTES)
    case = f"driver's peak, {rollouts} rollouts, {at_a_time} at a time, checkouts of {megabytes} MB"
    small = await asyncio.to_thread(_measured, rollouts, at_a_time, 0)
    large = await asyncio.to_thread(_measured, rollouts, at_a_time, megabytes)
    notes = (
        f"ours {large['wall_s']:.0f} s, with nothing added {small['wall_s']:.0f} s",
        f"rewards {large['rewards']}, beside {small['rewards']}",
    )
    yield Row("checkouts", case, large["peak_mb"], small["peak_mb"], "MB", TARGET, notes)


def _measured(rollouts: int, at_a_time: int, megabytes: int) -> dict[str, Any]:
    """What a driver of its own prints."""
    argv = [sys.executable, "-m", "benchmarks.checkouts", str(rollouts), str(at_a_time), str(megabytes)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


class _Hoarder:
    """Mends the bug by the reference solution, and leaves a file of so many megabytes."""

    name = "hoarder"

    def __init__(self, megabytes: int) -> None:
        self._command = f"head -c {megabytes}000000 /dev/zero >ledgerline/large.bin"

    async def run(self, task: AgentTask) -> AgentResult:
        await task.solve()
        await task.tool_handler("terminal", {"command": self._command, "timeout": 300}, task.trajectory_id)
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self) -> None:
        return


async def _drive(rollouts: int, at_a_time: int, megabytes: int) -> None:
    """Run the rollouts here, and print their rewards and our peak."""
    rewards: list[float | None] = []
    agent: Agent = _Hoarder(megabytes)
    began = time.perf_counter()
    async with Runtime() as runtime:
        await run_rollouts(
            runtime,
            "swe-smith",
            agent,
            env={"dataset_name": "demo", "max_items": 1},
            group_size=rollouts,
            backend="local",
            isolation="user",
            concurrency=at_a_time,
            on_record=lambda record: rewards.append(record["reward"]),
        )
    counted = {str(reward): rewards.count(reward) for reward in dict.fromkeys(rewards)}
    print(json.dumps({"peak_mb": peak(os.getpid()) / MB, "rewards": counted, "wall_s": time.perf_counter() - began}))


if __name__ == "__main__":
    asyncio.run(_drive(*map(int, sys.argv[1:])))
