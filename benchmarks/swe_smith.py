"""How long 24 real SWE-smith rollouts take, 2 at a time, beside the same test commands run bare.

Ours: the `oracle` agent on every task. Lease, workspace, reference fix, diff, a second and pristine lease, the tests,
reset. The pool and the environments with the test dependencies are warm: one rollout of each repository was done
before. What is prepared once per task, its trees, is not: every task is met for the first time, in a new sandbox each
round.

Bare: what is left when all of that is taken away. For every task, a checkout of the tree that passes was made before,
and a virtual environment with the same pinned packages. Timed is only the repository's own `test_cmd`, on the test
files that hold the task's FAIL_TO_PASS and PASS_TO_PASS ids, as an asyncio subprocess with PYTHONPATH set; also 2 at a
time, in the same order. Like ours it writes no `.pyc` files. It runs whole files, so also tests that the task does not
name (the note says how many): naming thousands of ids on a command line costs pytest more than running those.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hermes_swe_smith.scripts import FILES, console_scripts, wrapper

from benchmarks.host import NOT_GRANTED, processor_time
from benchmarks.measure import Row, Rows, Target, p50, span
from hermes_core.errors import PolicyError, ProvisionError
from hermes_core.runs.options import RunOptions
from hermes_core.runs.runner import Jobs, Run
from hermes_core.runs.session import hooks_for, make_environment, open_session, set_up
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from hermes_core.tool_backend import ToolBackend

AT_A_TIME = 2
TARGET = Target(1.15, of_reference=True)
ROOT = Path(__file__).resolve().parents[1]


async def rows(quick: bool) -> Rows:
    """Wall time of all rollouts, and rollouts an hour."""
    folder = tasks_folder()
    case = f"oracle rollouts, {AT_A_TIME} at a time"
    if not (folder / "tasks.jsonl").is_file():
        yield Row("swe-smith", case, None, None, "s", TARGET, (f"{folder} has no tasks.jsonl: set HERMES_SWE_TASKS",))
        return
    tasks = read_tasks(folder, quick)
    for level in ("user", "namespace"):
        case = f"{len(tasks)} oracle rollouts, {AT_A_TIME} at a time, {level}"
        with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
            bare_runs = prepare_bare(tasks, folder, Path(scratch))
            ours: list[Ours] = []
            reference: list[Bare] = []
            try:
                for number in range(1 if quick else 3):
                    await run_bare(bare_runs[:: max(1, len(bare_runs) // 6)])
                    ours.append(await run_ours(tasks, folder, Path(scratch) / f"round{number}", _options(level)))
                    reference.append(await run_bare(bare_runs))
            except (PolicyError, ProvisionError) as error:
                yield Row("swe-smith", case, None, None, "s", TARGET, (NOT_GRANTED, str(error)))
                continue
        wall, bare_wall = p50(run.wall_s for run in ours), p50(run.wall_s for run in reference)
        yield Row("swe-smith", case, wall, bare_wall, "s", TARGET, _notes(ours, reference, bare_runs))
        used, bare_used = p50(run.driver_s + run.sandbox_s for run in ours), p50(run.processor_s for run in reference)
        notes = (f"of ours the driver {p50(run.driver_s for run in ours):.2f} s",)
        yield Row("swe-smith", f"processor time of that, {level}", used, bare_used, "s", None, notes)
        rate, bare_rate = (len(tasks) / wall_s * 3600 for wall_s in (wall, bare_wall))
        yield Row("swe-smith", f"rollouts an hour, {level}", rate, bare_rate, "/h")


def tasks_folder() -> Path:
    """Where the tasks are, if there are any."""
    return Path(os.environ.get("HERMES_SWE_TASKS") or ROOT.parent / "shared" / "swe_tasks").resolve()


def read_tasks(folder: Path, quick: bool) -> list[dict[str, Any]]:
    """All of them, or a third."""
    tasks = [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]
    return tasks[::3] if quick else tasks


def _notes(ours: Sequence[Ours], reference: Sequence[Bare], bare_runs: Sequence[BareRun]) -> tuple[str, ...]:
    stages = ", ".join(f"{name[:-2]} {values['p50'] * 1e3:.0f}" for name, values in ours[-1].timings.items())
    return (
        f"ours {span([run.wall_s for run in ours], 's')}, bare {span([run.wall_s for run in reference], 's')}",
        f"p50 of a rollout's stages in ms: {stages}",
        f"bare ran {sum(run.ran for run in bare_runs)} tests, the tasks name {sum(run.named for run in bare_runs)}",
    )


# --- ours -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ours:
    """One round of ours: the wall time, and the percentiles of each stage."""

    wall_s: float
    driver_s: float
    """Processor time of the driver."""
    sandbox_s: float
    """Processor time of everything in the sandbox: the guest, git, the tests."""
    timings: Any


def _options(level: str) -> RunOptions:
    return RunOptions(backend="local", isolation=level, concurrency=AT_A_TIME)


async def run_ours(
    tasks: Sequence[dict[str, Any]], folder: Path, scratch: Path, options: RunOptions, *, group_size: int = 1
) -> Ours:
    """All tasks on sandboxes of which one has met their repositories, but not them; each task `group_size` times."""
    _write(scratch / "warm.jsonl", _warming(tasks))
    _write(scratch / "tasks.jsonl", tasks)
    config = {"repo_base_url": str(folder), "shuffle": False}
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(Runtime(Settings()))
        warm, timed = (
            make_environment(runtime, "swe-smith", {"dataset_name": str(scratch / f"{name}.jsonl"), **config}, None)
            for name in ("warm", "tasks")
        )
        session = await stack.enter_async_context(open_session(runtime, warm, "oracle", options))
        await stack.enter_async_context(set_up(timed))
        context = await stack.enter_async_context(session.sandboxes())
        for environment, times in ((warm, 1), (timed, group_size)):
            run = Run(session.tools, Jobs(replace(session, environment=environment), times), options)
            hooks = hooks_for(runtime, environment, "oracle")
            began = await _clocks(context.backend)
            summary = await run.all(replace(context, environment=environment, hooks=hooks), options.concurrency)
            ended = await _clocks(context.backend)
            assert summary.solved == summary.total, f"{summary.solved} of {summary.total} solved: {summary.to_dict()}"
    wall_s, driver_s, sandbox_s = (after - before for before, after in zip(began, ended, strict=True))
    return Ours(wall_s, driver_s, sandbox_s, summary.timings)


async def _clocks(backend: ToolBackend) -> tuple[float, float, float]:
    """Seconds by the clock, and of the driver's and the sandbox's processor time."""
    slot = await backend.acquire()
    await backend.release(slot)
    return time.perf_counter(), time.process_time(), processor_time(slot)


def _warming(tasks: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """A task of each repository under another id, so that nothing made for it serves the timed one."""
    first = {task["repo"]: task for task in reversed(tasks)}
    return [{**task, "instance_id": task["instance_id"] + "_warm"} for task in first.values()]


def _write(path: Path, tasks: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))


# --- bare -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bare:
    """One round of the bare commands."""

    wall_s: float
    processor_s: float


@dataclass
class BareRun:
    """One task's test command, ready to be run."""

    command: str
    directory: Path
    environment: dict[str, str]
    named: int
    """Tests that the task names."""
    ran: int = 0
    """Tests that the command ran, the last time."""


def prepare_bare(tasks: Sequence[dict[str, Any]], folder: Path, scratch: Path) -> list[BareRun]:
    """The trees and the environments, which are not timed."""
    repos = {entry["repo"]: entry for entry in json.loads((folder / "repos.json").read_text())}
    prepared = []
    for number, task in enumerate(tasks):
        entry = repos[task["repo"]]
        venv = scratch / "venvs" / Path(entry["bundle"]).stem
        if not venv.exists():
            python = shutil.which(f"python{entry['python']}") or sys.executable
            _do(python, "-m", "venv", str(venv))
            _do(str(venv / "bin" / "pip"), "install", "-q", "-r", str(folder / entry["requirements_file"]))
            for name, text in project_commands(entry, folder, str(venv / "bin" / "python")).items():
                command = venv / "bin" / name
                command.write_text(text)
                command.chmod(0o755)
        tree = scratch / "trees" / str(number)
        _do("git", "clone", "-q", str(folder / entry["bundle"]), str(tree))
        _do("git", "-C", str(tree), "checkout", "-q", entry["base_commit"])
        ids = task["FAIL_TO_PASS"] + task["PASS_TO_PASS"]
        files = dict.fromkeys(node_id.split("::")[0] for node_id in ids)
        environment = {
            **os.environ,
            "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str((tree / entry["pythonpath"]).resolve()),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        prepared.append(BareRun(" ".join([entry["test_cmd"], *files]), tree, environment, len(ids)))
    return prepared


def project_commands(entry: Mapping[str, Any], folder: Path, python: str) -> dict[str, str]:
    """The texts of the commands that the project would install, some of whose tests run them, by their names."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        _do("git", "clone", "-q", "--no-checkout", str(folder / entry["bundle"]), scratch)
        paths = _do("git", "-C", scratch, "ls-tree", "--name-only", entry["base_commit"]).splitlines()
        show = ("git", "-C", scratch, "show")
        files = {name: _do(*show, f"{entry['base_commit']}:{name}") for name in FILES if name in paths}
    return {name: wrapper(python, target) for name, target in console_scripts(files).items()}


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-500:]}{done.stderr[-500:]}"
    return done.stdout


async def run_bare(runs: Sequence[BareRun], at_a_time: int = AT_A_TIME) -> Bare:
    """Run these test commands, some at a time."""
    left = iter(runs)
    used = _children_s()

    async def worker() -> None:
        for run in left:
            process = await asyncio.create_subprocess_exec(
                "sh",
                "-c",
                run.command,
                cwd=run.directory,
                env=run.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output, _ = await process.communicate()
            assert process.returncode == 0, f"{run.command}: {output[-1000:].decode(errors='replace')}"
            run.ran = sum(map(int, re.findall(rb"(\d+) (?:passed|skipped|xfailed)", output.splitlines()[-1])))

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(at_a_time):
            group.create_task(worker())
    return Bare(time.perf_counter() - began, _children_s() - used)


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
