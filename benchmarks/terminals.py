"""Tasks of endless-terminals, 8 at a time: slots with roots of their own in one container, and a container for each.

Both sides run the same environment on the same tasks, five kinds of them, with the agent `oracle`: `%post` as root, the
tests of the initial state, the reference solution as the task's user, the tests of the final state. Ours is at level
`private-root`: every slot is one of a container. The reference is at level `dedicated`: each rollout has a container,
which is made for it and removed after it. Both take turns, with all of the tasks each time.

A slot is ready when the rollout's setup can begin in it: this is the time from the request for it, with its wait for a
container. The first rollouts of ours wait for the one container.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import Rows, Target, p50, percentile, span, take_turns
from benchmarks.peers import Case
from benchmarks.peers_docker import IMAGE, missing
from benchmarks.terminal_tasks import image_with_pytest, write_tasks
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings

TASKS, QUICK, TURNS, AT_A_TIME = 100, 16, 2, 8
CASE = f"{TASKS} terminal tasks, {AT_A_TIME} at a time, slots in one container: "
RATE = Case("terminals", f"{CASE}rollouts an hour", "/h", Target(3, of_reference=True, at_least=True))
READY = Case("terminals", f"{CASE}slot ready p50", "ms", Target(0.05, of_reference=True))

ONE_CONTAINER = {"cap_add": ["SYS_ADMIN"], "slots_per_sandbox": AT_A_TIME, "min_sandboxes": 1, "max_sandboxes": 1}
ONE_EACH = {"max_sandboxes": AT_A_TIME, "min_sandboxes": 0}


@dataclass(frozen=True)
class Round:
    """One run of ours or of the reference."""

    wall_s: float
    ready_s: list[float]
    setup_s: list[float]
    verify_s: list[float]


async def rows(quick: bool) -> Rows:
    """Rollouts an hour, and the time until a slot is ready."""
    reason = await missing()
    if reason is not None:
        for case in (RATE, READY):
            yield case.left_out(reason)
        return
    count, turns = (QUICK, 1) if quick else (TASKS, TURNS)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, ExitStack() as stack:
        tag = f"hermes-bench-terminals:{uuid.uuid4().hex[:12]}"
        image = await asyncio.to_thread(stack.enter_context, image_with_pytest(IMAGE, tag))
        folder = Path(scratch) / "tasks"
        await asyncio.to_thread(write_tasks, folder, count, source=image)
        sides = (partial(_run, folder, ONE_CONTAINER, image), partial(_run, folder, ONE_EACH, image))
        ours, reference = await take_turns(sides, turns, warm_up=0)
    rates = [[count / each.wall_s * 3600 for each in side] for side in (ours, reference)]
    yield RATE.row(
        p50(rates[0]),
        p50(rates[1]),
        f"ours {span(rates[0], '/h')}, a container each {span(rates[1], '/h')}; all of {count} tasks solved each time",
        *(f"p50 in ms, {name}: {_stages(side)}" for name, side in (("ours", ours), ("a container each", reference))),
    )
    ready = [[second for each in side for second in each.ready_s] for side in (ours, reference)]
    yield READY.row(
        p50(ready[0]) * 1e3,
        p50(ready[1]) * 1e3,
        "p95 in ms: ours {:.0f}, a container each {:.0f}".format(*(percentile(side, 0.95) * 1e3 for side in ready)),
    )


def _stages(side: list[Round]) -> str:
    setup, verify = ([second for each in side for second in getattr(each, name)] for name in ("setup_s", "verify_s"))
    return f"setup {p50(setup) * 1e3:.0f}, verify {p50(verify) * 1e3:.0f}"


async def _run(folder: Path, config: dict[str, Any], image: str) -> Round:
    records: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as state:
        async with Runtime(Settings(state_dir=Path(state))) as runtime:
            began = time.perf_counter()
            summary = await run_rollouts(
                runtime,
                "endless-terminals",
                "oracle",
                env={"dataset_name": str(folder), "use_images": False},
                backend="docker",
                backend_config={"image": image, "reserve_slots": 0, "orphan_ttl_s": 120, **config},
                concurrency=AT_A_TIME,
                on_record=records.append,
            )
            wall_s = time.perf_counter() - began
    assert summary.solved == summary.total, f"{summary.solved} of {summary.total} solved: {summary.to_dict()}"
    timings = [record["timings"] for record in records]
    return Round(wall_s, *([each[f"{name}_s"] for each in timings] for name in ("acquire", "setup", "verify")))
