"""The Slurm of `.ci/slurm` for the tests: each has a directory on the nodes, and leaves no job and no process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import hermes_slurm
import pytest
from hermes_slurm.backend import SlurmBackend
from hermes_slurm.config import SlurmConfig

from hermes_core import Isolation, Runtime, SandboxSpec, Settings, ToolBackend

ROOT = Path(__file__).resolve().parents[2]


class Cluster:
    """What tests do to the cluster, as root, and what they look at."""

    def __init__(self, folder: Path, place: Path, wrappers: Path) -> None:
        self.folder, self.place, self.wrappers = folder, place, wrappers

    def run(self, *argv: str) -> str:
        """Run one of Slurm's programs as root, and return its output."""
        done = subprocess.run([f"/usr/bin/{argv[0]}", *argv[1:]], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (argv, done.stderr)
        return done.stdout

    def jobs(self, *, owner: str | None = None) -> list[str]:
        """Return the ids of the jobs in the queue; of one owner, or of all sandboxes in this test's directory."""
        wanted = str(self.place) if owner is None else f'"owner": "{owner}"'
        lines = self.run("squeue", "--noheader", "--format=%i|%k").splitlines()
        return [line.partition("|")[0] for line in lines if wanted in line]

    def node(self, sandbox: str) -> str:
        """Return the node of a sandbox."""
        return self.run("squeue", "--noheader", "--format=%N", f"--jobs={sandbox.partition('/')[0]}").strip()

    def processes(self) -> list[int]:
        """Return the processes that have this test's directory in their command line or environment."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(self.place).encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return [pid for pid in found if pid != os.getpid()]

    def sruns(self) -> list[int]:
        """Return the processes of `srun` that carry channels of this test."""
        return [pid for pid in self.processes() if Path(f"/proc/{pid}/comm").read_text().strip() == "srun"]

    def kill_sruns(self) -> int:
        """Kill all of these with SIGKILL. Return how many there were."""
        pids = self.sruns()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        return len(pids)

    def wrap(self, name: str, script: str) -> None:
        """Let the driver run this shell script in place of one of Slurm's programs. `$REAL` is the program itself."""
        path = self.wrappers / name
        path.write_text(f"#!/bin/sh\nREAL={shlex.quote(str(self.folder / 'bin' / name))}\n{script}\n")
        path.chmod(0o755)

    def restart_controller(self) -> None:
        subprocess.run([ROOT / ".ci/slurm", "restart-controller"], check=True, timeout=60)

    def leaves_nothing(self) -> bool:
        """Return whether no job, no process and no file of this test is left."""
        return not (self.jobs() or self.processes() or self.place.exists())


@pytest.fixture
def cluster(slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    place = Path(f"/tmp/hermes-slurm-test-{uuid.uuid4().hex[:8]}")
    (tmp_path / "wrappers").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/wrappers:{os.environ['PATH']}")
    made = Cluster(slurm, place, tmp_path / "wrappers")
    yield made
    deadline = time.monotonic() + 40
    while not (left := made.leaves_nothing()) and time.monotonic() < deadline:
        time.sleep(0.3)
    jobs = made.jobs()
    for job in jobs:
        made.run("scancel", job)
    shutil.rmtree(place, ignore_errors=True)
    assert left, f"jobs {jobs}, processes {made.processes()}"


@pytest.fixture
def spec(cluster: Cluster) -> Callable[..., SandboxSpec]:
    """`spec(isolation, **config)`: with a creation id of its own, or the one that is given."""

    def make(isolation: str = "namespace", creation_id: str | None = None, **config: Any) -> SandboxSpec:
        settings = SlurmConfig.from_dict("test", {"orphan_ttl_s": 60, "directory": str(cluster.place), **config})
        return SandboxSpec(creation_id or uuid.uuid4().hex, "me", settings, Isolation.parse(isolation))

    return make


@pytest.fixture
async def backend(cluster: Cluster) -> AsyncIterator[SlurmBackend]:
    made = SlurmBackend()
    yield made
    await made.aclose()


@pytest.fixture
def tool_backend(cluster: Cluster) -> Callable[..., AbstractAsyncContextManager[ToolBackend]]:
    """`tool_backend(isolation, **config)`: a tool backend with one sandbox, unless the config says otherwise."""

    @contextlib.asynccontextmanager
    async def make(isolation: str = "namespace", **config: Any) -> AsyncIterator[ToolBackend]:
        given = {"max_sandboxes": 1, "slots_per_sandbox": 4, "directory": str(cluster.place), **config}
        async with (
            Runtime(Settings(), plugins=[hermes_slurm], load_entry_points=False) as runtime,
            runtime.tool_backend("slurm", isolation=isolation, config=given, profiles={}) as backend,
        ):
            yield backend

    return make


@pytest.fixture
def bash() -> Callable[..., Any]:
    """`await bash(backend, slot, command)`: the result of a command."""

    async def run(backend: ToolBackend, slot: Any, command: str, timeout_s: float = 60) -> Any:
        (result,) = await backend.execute_batch([(slot, "bash", {"command": command})], timeout_s=timeout_s)
        return result

    return run


@pytest.fixture
def until() -> Callable[..., Any]:
    """`await until(condition)`: wait for it."""

    async def wait(condition: Callable[[], Any], limit_s: float = 40) -> None:
        deadline = time.monotonic() + limit_s
        while not await asyncio.to_thread(condition):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)

    return wait
