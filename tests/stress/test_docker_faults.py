"""24 rollouts by the reference solution in two containers, one of them killed every ten seconds: each scored once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable

import docker
import pytest

pytestmark = pytest.mark.stress

IMAGE = "hermes-test-python:bookworm"
EVERY_S = 10.0


@pytest.fixture
def daemon(require: Callable[[str, str | None], None]):
    """The real daemon, asked behind the backend's back."""
    try:
        client = docker.DockerClient.from_env(timeout=30)
        client.api.inspect_image(IMAGE)
    except docker.errors.DockerException as error:
        require("docker", f"no daemon with the image {IMAGE} answers ({error}); `.ci/docker` makes both")
        raise
    yield client.api
    client.close()


async def test_containers_killed_under_rollouts_are_replaced(daemon, swe_tasks, tmp_path):
    (tmp_path / "run.yaml").write_text("run: {infra_retries: 20}\n")
    owner = f"stress-{os.getpid()}"
    command = [
        *(sys.executable, "-m", "hermes_core.cli", "rollout", "swe-smith", "--agent", "oracle", "--concurrency", "4"),
        *(f"--env.dataset_name={swe_tasks}/tasks.jsonl", f"--env.repo_base_url={swe_tasks}", "--json"),
        *("--backend", "docker", f"--backend.image={IMAGE}", "--isolation", "user", "--out", str(tmp_path / "out")),
        *("--backend.min_sandboxes=2", "--backend.max_sandboxes=2", "--backend.slots_per_sandbox=4"),
        *("--config", str(tmp_path / "run.yaml")),
    ]
    environment = {name: os.environ[name] for name in os.environ if name != "HERMES_PLUGINS"}
    environment["HERMES_OWNER"] = owner
    program = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    chance, kills = random.Random(11), 0
    running = asyncio.ensure_future(program.communicate())
    while not (await asyncio.wait([running], timeout=EVERY_S))[0]:
        ours = await asyncio.to_thread(containers, daemon, owner)
        if ours:
            await asyncio.to_thread(kill, daemon, chance.choice(ours))
            kills += 1
    output, said = await running
    assert program.returncode == 0, said.decode()[-4000:]
    summary = json.loads(output)
    rows = [json.loads(line) for line in (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()]
    scored = Counter((row["item_id"], row["rollout_index"]) for row in rows if row["reward"] is not None)
    assert (summary["solved"], len(scored), set(scored.values())) == (24, 24, {1}), summary
    assert kills > 1 and summary["infra_retries"] > 0
    assert containers(daemon, owner) == []


def containers(api, owner: str) -> list[str]:
    return [one["Id"] for one in api.containers(filters={"label": f"hermes-rl.owner={owner}"})]


def kill(api, container: str) -> None:
    try:
        api.kill(container)
    except docker.errors.APIError:  # it has ended by itself
        pass
