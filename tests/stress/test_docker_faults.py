"""24 rollouts by the reference solution while containers die, and while the daemon is restarted: each scored once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import docker.errors
import pytest

pytestmark = pytest.mark.stress

EVERY_S = 10.0
DAEMON = Path("/var/run/docker.pid")
START = Path(__file__).parents[2] / ".ci" / "docker"


@pytest.fixture
def daemon(docker_images: tuple[str, str]) -> Iterator[docker.DockerClient]:
    """The real daemon, asked behind the backend's back."""
    client = docker.DockerClient.from_env(timeout=30)
    yield client.api
    client.close()


class Job:
    """The rollouts of all tasks, four at a time in two containers, by the command line."""

    def __init__(self, tasks: Path, image: str, folder: Path) -> None:
        self.owner = f"stress-{os.getpid()}"
        self.out = folder / "out"
        (folder / "run.yaml").write_text("run: {infra_retries: 20}\n")
        self.command = [
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
            *(f"--env.dataset_name={tasks}/tasks.jsonl", f"--env.repo_base_url={tasks}", "--json"),
            *("--backend", "docker", f"--backend.image={image}", "--isolation", "user", "--out", str(self.out)),
            *("--backend.min_sandboxes=2", "--backend.max_sandboxes=2", "--backend.slots_per_sandbox=4"),
            *("--config", str(folder / "run.yaml")),
        ]

    async def start(self, *more: str) -> asyncio.subprocess.Process:
        environment = {name: os.environ[name] for name in os.environ if name != "HERMES_PLUGINS"}
        return await asyncio.create_subprocess_exec(
            *self.command,
            *more,
            env={**environment, "HERMES_OWNER": self.owner},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    def check(self) -> None:
        """Every task was scored once, with 1.0."""
        rows = [json.loads(line) for line in (self.out / "trajectories.jsonl").read_text().splitlines()]
        scored = Counter((row["item_id"], row["rollout_index"]) for row in rows if row["reward"] is not None)
        assert (len(scored), set(scored.values())) == (24, {1})
        assert {row["reward"] for row in rows} <= {1.0, None}


async def test_containers_killed_under_rollouts_are_replaced(daemon, docker_images, swe_tasks, tmp_path):
    job = Job(swe_tasks, docker_images[0], tmp_path)
    program = await job.start()
    chance, kills = random.Random(11), 0
    running = asyncio.ensure_future(program.communicate())
    while not (await asyncio.wait([running], timeout=EVERY_S))[0]:
        ours = await asyncio.to_thread(containers, daemon, job.owner)
        if ours:
            await asyncio.to_thread(kill, daemon, chance.choice(ours))
            kills += 1
    output, said = await running
    assert program.returncode == 0, said.decode()[-4000:]
    job.check()
    assert kills > 1 and json.loads(output)["infra_retries"] > 0
    assert containers(daemon, job.owner) == []


@pytest.mark.skipif(os.geteuid() != 0 or not DAEMON.exists(), reason="the daemon is none that root could restart here")
async def test_the_daemon_is_restarted_under_rollouts(daemon, docker_images, swe_tasks, tmp_path):
    job = Job(swe_tasks, docker_images[0], tmp_path)
    program = await job.start()
    running = asyncio.ensure_future(program.communicate())
    await until(lambda: (job.out / "trajectories.jsonl").exists() and (job.out / "trajectories.jsonl").stat().st_size)
    await asyncio.to_thread(restart)
    _, said = await running
    assert program.returncode in (0, 3), said.decode()[-4000:]
    if program.returncode == 3:
        program = await job.start("--resume")
        _, said = await program.communicate()
        assert program.returncode == 0, said.decode()[-4000:]
    job.check()
    assert containers(daemon, job.owner) == []


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not true():
            await asyncio.sleep(0.2)


def restart() -> None:
    """End the daemon, and with it every container; start it as `.ci/docker` does."""
    pid = int(DAEMON.read_text())
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline, "the daemon does not end"
        time.sleep(0.1)
    subprocess.run([START], check=True, timeout=120, stdout=subprocess.DEVNULL)


def containers(api: docker.APIClient, owner: str) -> list[str]:
    return [one["Id"] for one in api.containers(filters={"label": f"hermes-rl.owner={owner}"})]


def kill(api: docker.APIClient, container: str) -> None:
    try:
        api.kill(container)
    except docker.errors.APIError:  # it has ended by itself
        pass
