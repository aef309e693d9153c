"""Rollouts an hour on `slurm` and `singularity` beside `local`, in turns: each task 8 times, in two sandboxes.

A rollout is one of the `oracle` agent, as in `swe_smith`. Everything is alike but for the backend: level `namespace`,
two sandboxes, a slot for each rollout at a time, environments made by one rollout of each repository before. The two
nodes of `.ci/slurm` are this machine, so no backend has more processors than `local`. A sandbox has a node of its own.
Without the folder of tasks, the demo tasks of SWE-smith are taken.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hermes_swe_smith import demo_tasks

from benchmarks.measure import Row, Rows, Target, alternate, p50, span
from benchmarks.swe_smith import read_tasks, run_ours, tasks_folder
from hermes_core.errors import HermesError
from hermes_core.runs.options import RunOptions

AT_A_TIME, EACH, SANDBOXES = 8, 8, 2
TARGET = Target(0.9, of_reference=True, at_least=True)
COMMON = {"min_sandboxes": SANDBOXES, "max_sandboxes": SANDBOXES, "slots_per_sandbox": AT_A_TIME}

BACKENDS: Mapping[str, Mapping[str, Any]] = {
    "slurm": {"cpu": 20},  # a node of `.ci/slurm` has room for one of these
    "singularity": {"image": os.environ.get("HERMES_BENCH_SIF", "")},
}


def missing(name: str) -> str | None:
    """Why this backend can't be measured here; None if it can."""
    if name == "slurm":
        folder = os.environ.get("HERMES_TEST_SLURM")
        return None if folder or shutil.which("sbatch") else 'there is no Slurm: eval "$(.ci/slurm)"'
    if not (shutil.which("apptainer") or shutil.which("singularity")):
        return "there is no Apptainer"
    return None if BACKENDS[name]["image"] else "HERMES_BENCH_SIF names no image with Python and git"


async def rows(quick: bool) -> Rows:
    """Rollouts an hour of each backend."""
    each = 2 if quick else EACH
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = tasks_folder()
        if not (folder / "tasks.jsonl").is_file():
            folder = Path(scratch)
            demo_tasks.write(folder)
        tasks = read_tasks(folder, quick)
        for name in BACKENDS:
            case = f"{len(tasks)} tasks x {each} rollouts an hour, {AT_A_TIME} at a time: {name}"
            if (reason := missing(name)) is not None:
                yield Row("backends", case, None, None, "/h", TARGET, (reason,))
                continue
            rate = partial(_rate, tasks, folder, each)
            try:
                ours, reference = await alternate(
                    partial(rate, name), partial(rate, "local"), 1 if quick else 2, warm_up=0
                )
            except HermesError as error:
                yield Row("backends", case, None, None, "/h", TARGET, (str(error),))
                continue
            notes = (f"{name} {span(ours, '/h')}, local {span(reference, '/h')}",)
            yield Row("backends", case, p50(ours), p50(reference), "/h", TARGET, notes)


async def _rate(tasks: Sequence[dict[str, Any]], folder: Path, each: int, name: str) -> float:
    """Rollouts an hour, all of which are solved."""
    config = {**COMMON, **BACKENDS.get(name, {})}
    options = RunOptions(backend=name, backend_config=config, isolation="namespace", concurrency=AT_A_TIME)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        ran = await run_ours(tasks, folder, Path(scratch), options, group_size=each)
    return len(tasks) * each / ran.wall_s * 3600
