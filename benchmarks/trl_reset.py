"""TRL's `reset()`, one after the other, for the environments of one batch: a slot each, or a container each.

TRL resets the environments of a batch one by one before it generates anything. The reference does in `reset()` what an
environment with a container of its own does: start it, and run the first command in it. What ends the last rollout
(the reset of our slot, the removal of the container) is not counted on either side.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import time
import uuid
from collections.abc import Sequence
from typing import Any

from benchmarks.measure import Row, Rows, Target, p50, span
from benchmarks.peers_docker import IMAGE, missing
from hermes_core import Environment, hookimpl

ENVIRONMENTS = 64
TARGET = Target(1 / 30, of_reference=True)
CASE = f"reset() of {ENVIRONMENTS} environments, a container each"


class Empty(Environment):
    """One item, whose workspace gets a file."""

    name = "empty"
    default_toolsets = ("terminal",)

    def items(self) -> Sequence[dict[str, str]]:
        return [{"id": "one"}]

    def format_prompt(self, item: Any) -> str:
        return "Do nothing."

    @hookimpl
    async def setup_trajectory_workspace(self, exec_tool: Any) -> dict[str, Any]:
        await exec_tool("bash", {"command": "echo task > task.txt"})
        return {}

    @hookimpl
    async def verify_and_score_trajectory(self) -> float:
        return 0.0


class Container:
    """An environment as `HarborEnv` of TRL is one: each reset starts a container."""

    def __init__(self) -> None:
        self._name: str | None = None

    def reset(self, **_: Any) -> None:
        self._name = f"hermes-bench-{uuid.uuid4().hex[:12]}"
        _docker("run", "-d", "--init", "--name", self._name, IMAGE, "sleep", "infinity")
        _docker("exec", self._name, "bash", "-c", "echo task > task.txt")

    def close(self) -> None:
        if self._name is not None:
            _docker("rm", "-f", self._name)
            self._name = None


async def rows(quick: bool) -> Rows:
    """Seconds for the resets of a batch whose environments have been used before."""
    reason = await missing()
    if importlib.util.find_spec("trl") is None:
        reason = "trl is not installed"
    if reason is not None:
        yield Row("trl-reset", CASE, None, None, "s", TARGET, (reason,))
        return
    yield await asyncio.to_thread(_measure, 1 if quick else 3)  # as synchronous as TRL is


def _measure(rounds: int) -> Row:
    from hermes_trl import HermesSpec

    began = time.perf_counter()
    with HermesSpec(Empty(), backend="docker", backend_config={"image": IMAGE}, concurrency=ENVIRONMENTS) as spec:
        start_s = time.perf_counter() - began
        (row,) = spec.train_dataset
        slots = [spec.environment_factory() for _ in range(ENVIRONMENTS)]
        containers = [Container() for _ in range(ENVIRONMENTS)]
        ours: list[list[float]] = []
        theirs: list[list[float]] = []
        try:
            _resets(slots, row)
            for _ in range(rounds):
                _score(spec, slots)
                ours.append(_resets(slots, row))
                for container in containers:
                    container.close()
                theirs.append(_resets(containers, row))
            last: Any = slots[-1]  # its methods are the tools
            answer = json.loads(last.terminal(command="cat task.txt"))
            assert answer["output"].strip() == "task", answer
        finally:
            for container in containers:
                container.close()
    mine, their = p50(map(sum, ours)), p50(map(sum, theirs))
    return Row(
        "trl-reset",
        CASE,
        mine,
        their,
        "s",
        TARGET,
        (
            f"{their / mine:.0f} times as fast, asked for: 30; one reset: "
            f"{p50([one for batch in ours for one in batch]) * 1e3:.1f} ms beside "
            f"{p50([one for batch in theirs for one in batch]) * 1e3:.0f} ms (p50)",
            f"ours {span([*map(sum, ours)], 's')}, theirs {span([*map(sum, theirs)], 's')}",
            f"not in it: our containers' start, once a run, {start_s:.1f} s",
        ),
    )


def _score(spec: Any, environments: Sequence[Any]) -> None:
    """End the rollouts, as after a batch."""
    for function in spec.reward_funcs:
        function(completions=["Done."] * len(environments), environments=environments)


def _resets(environments: Sequence[Any], row: Any) -> list[float]:
    """Return the seconds of each reset, one after the other."""
    taken = []
    for environment in environments:
        began = time.perf_counter()
        environment.reset(**row)
        taken.append(time.perf_counter() - began)
    return taken


def _docker(*arguments: str) -> None:
    subprocess.run(["docker", *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
