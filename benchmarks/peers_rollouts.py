"""Rollouts an hour on real tasks, 8 at a time: slots in one container, a container for each, and the tests alone.

Ours is the `oracle` agent as in `swe_smith`, in one container with a slot for each rollout (and one for each
verification). The environments are made in it before, by one rollout of each repository.

One container each is what is done without slots, and the least of it: `docker run` of an image that has the
repositories and the test dependencies already; the bug put in, the reference fix, the diff and the tests, each by
`docker exec`; `docker rm -f`. The tests run where the agent was: no second container, no pristine tree.

Bare are the same test commands on this host, without any sandbox, as in `swe_smith`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import Rows, Target, p50, span, take_turns
from benchmarks.peers import Case, captured
from benchmarks.peers_docker import IMAGE, docker, missing, running
from benchmarks.swe_smith import (
    Bare,
    Ours,
    prepare_bare,
    project_commands,
    read_tasks,
    run_bare,
    run_ours,
    tasks_folder,
)
from hermes_core.runs.options import RunOptions

AT_A_TIME = 8
WHEELS = "/wheels"
CASE = f"oracle rollouts an hour, {AT_A_TIME} at a time, 8 slots in one container: "
EACH = Case("docker-rollouts", CASE + "one each", "/h", Target(1.5, of_reference=True, at_least=True))
BARE = Case("docker-rollouts", CASE + "bare", "/h", Target(0.85, of_reference=True, at_least=True))


async def rows(quick: bool) -> Rows:
    """Rollouts an hour of the three."""
    folder = tasks_folder()
    reason = await missing()
    if not await asyncio.to_thread((folder / "tasks.jsonl").is_file):
        reason = f"{folder} has no tasks.jsonl: set HERMES_SWE_TASKS"
    if reason is not None:
        for case in (EACH, BARE):
            yield case.left_out(reason)
        return
    tasks = await asyncio.to_thread(read_tasks, folder, quick)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        bare_runs = await asyncio.to_thread(prepare_bare, tasks, folder, Path(scratch) / "bare")
        async with AsyncExitStack() as stack:
            wheels = await _download(folder, Path(scratch) / "wheels")
            image = await stack.enter_async_context(_image(folder, wheels))
            turns = (
                partial(_ours, tasks, folder, Path(scratch), wheels),
                partial(_one_each, tasks, folder, image),
                partial(run_bare, bare_runs, AT_A_TIME),
            )
            await run_bare(bare_runs[:: max(1, len(bare_runs) // 6)], AT_A_TIME)
            ours, each, bare = await take_turns(turns, 1 if quick else 3, warm_up=0)
    walls = [[run if isinstance(run, float) else run.wall_s for run in side] for side in (ours, each, bare)]
    rates = [[len(tasks) / wall_s * 3600 for wall_s in side] for side in walls]
    notes = [span(side, "/h") for side in rates]
    last = ours[-1]
    assert isinstance(last, Ours)
    stages = ", ".join(f"{name[:-2]} {values['p50'] * 1e3:.0f}" for name, values in last.timings.items())
    yield EACH.row(
        p50(rates[0]), p50(rates[1]), f"ours {notes[0]}, the peer {notes[1]}", f"p50 of ours' stages in ms: {stages}"
    )
    yield BARE.row(p50(rates[0]), p50(rates[2]), f"bare {notes[2]}; {len(tasks)} tasks")


# --- ours -------------------------------------------------------------------------------------------------------------


async def _ours(tasks: Sequence[dict[str, Any]], folder: Path, scratch: Path, wheels: Path) -> Ours | Bare | float:
    config = {
        "image": IMAGE,
        "slots_per_sandbox": 2 * AT_A_TIME,
        "reserve_slots": AT_A_TIME,
        "min_sandboxes": 1,
        "max_sandboxes": 1,
        "volumes": (f"{wheels}:{WHEELS}:ro",),
    }
    options = RunOptions(backend="docker", backend_config=config, isolation="user", concurrency=AT_A_TIME)
    with _variables({"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": WHEELS}):
        return await run_ours(tasks, folder, scratch / f"round-{uuid.uuid4().hex[:8]}", options)


@contextmanager
def _variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """The variables that pip gets while a sandbox is prepared: it finds everything in one folder, without a network."""
    before = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    for name in before:
        del os.environ[name]
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]
        os.environ.update(before)


async def _download(folder: Path, wheels: Path) -> Path:
    """All packages that the tasks' tests need, for the interpreter in the image."""
    entries = await asyncio.to_thread(_repos, folder)
    version = "import sys; print(*sys.version_info[:2], sep='.')"
    status, said = await captured("docker", "run", "--rm", IMAGE, "python3", "-c", version)
    assert status == 0, said
    for entry in entries:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--only-binary=:all:",
            "--python-version",
            said.decode().strip(),
        ]
        command += ["-d", str(wheels), "-r", str(folder / entry["requirements_file"])]
        status, answer = await captured(*command)
        assert status == 0, f"{' '.join(command)}: {answer[-1000:].decode(errors='replace')}"
    return wheels


def _repos(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "repos.json").read_text())
    return found


# --- a container for each ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def _image(folder: Path, wheels: Path) -> AsyncIterator[str]:
    """An image with every repository at its base commit, and an environment with the dependencies of its tests."""
    name = f"hermes-bench-tasks:{uuid.uuid4().hex[:12]}"
    steps = ["set -e"]
    for entry in await asyncio.to_thread(_repos, folder):
        key = _key(entry)
        steps += [
            f"git clone -q {shlex.quote('/tasks/' + entry['bundle'])} /repos/{key}",
            f"git -C /repos/{key} checkout -q {entry['base_commit']}",
            f"python3 -m venv /venvs/{key}",
            f"/venvs/{key}/bin/pip install -q --no-index --find-links {WHEELS} "
            f"-r {shlex.quote('/tasks/' + entry['requirements_file'])}",
        ]
    mounts = ["-v", f"{folder}:/tasks:ro", "-v", f"{wheels}:{WHEELS}:ro"]
    try:
        async with running(IMAGE, *mounts) as container:
            await docker("exec", container, "bash", "-c", "\n".join(steps))
            for entry in await asyncio.to_thread(_repos, folder):
                await _add_commands(container, entry, folder)
            await docker("commit", container, name)
        yield name
    finally:
        await docker("rmi", "-f", name, check=False)


async def _add_commands(container: str, entry: Mapping[str, Any], folder: Path) -> None:
    programs = f"/venvs/{Path(entry['bundle']).stem}/bin"
    found = await asyncio.to_thread(project_commands, entry, folder, f"{programs}/python")
    for name, text in found.items():
        script = 'cat >"$1" && chmod 755 "$1"'
        command = ["exec", "-i", container, "sh", "-c", script, "sh", f"{programs}/{name}"]
        status, said = await captured("docker", *command, stdin=text.encode())
        assert status == 0, said


def _key(entry: Mapping[str, Any]) -> str:
    return shlex.quote(Path(entry["bundle"]).stem)


async def _one_each(tasks: Sequence[dict[str, Any]], folder: Path, image: str) -> float:
    """Seconds for all tasks."""
    repos = {entry["repo"]: entry for entry in await asyncio.to_thread(_repos, folder)}
    left = iter(tasks)

    async def worker() -> None:
        for task in left:
            await _in_a_container(task, repos[task["repo"]], image)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(AT_A_TIME):
            group.create_task(worker())
    return time.perf_counter() - began


async def _in_a_container(task: Mapping[str, Any], entry: Mapping[str, Any], image: str) -> None:
    """One rollout: the bug, the reference fix, the diff, the tests."""
    key = _key(entry)
    files = dict.fromkeys(node_id.split("::")[0] for node_id in task["FAIL_TO_PASS"] + task["PASS_TO_PASS"])
    tests = (
        f"export PATH=/venvs/{key}/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/repos/{key}/{entry['pythonpath']}; "
        f"{entry['test_cmd']} {shlex.join(files)}"
    )
    patch = task["patch"].encode()
    async with running(image) as container:
        commit = "git -c user.name=bench -c user.email=bench@localhost commit -qam bug"
        for command, stdin in (
            (f"git apply - && {commit}", patch),
            ("git apply -R -", patch),
            ("git diff", b""),
            (tests, b""),
        ):
            where = ["-w", f"/repos/{Path(entry['bundle']).stem}", container]
            status, said = await captured("docker", "exec", "-i", *where, "bash", "-c", command, stdin=stdin)
            assert status == 0, f"{task['instance_id']}: {command}: {said[-1000:].decode(errors='replace')}"
