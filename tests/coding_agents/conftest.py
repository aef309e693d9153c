"""What tests of real coding agents need: the agents, and places without a network for them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import docker
import hermes_agents
import pytest
from hermes_agents import packages
from hermes_swe_smith import demo_tasks

from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from tests.support.killed_runs import gone

END_S = 120.0
"""How long a sandbox may take to end: on a busy machine, it takes time to remove the thousands of files of an agent."""


@pytest.fixture
async def indexes(request: pytest.FixtureRequest, require: Callable[[str, str | None], None]) -> None:
    """The agent is fetched, or the index that others are fetched from can be reached."""
    agent = request.node.callspec.params.get("agent", "") if hasattr(request.node, "callspec") else ""
    require("agents", None if any(packages.cache().glob(f"{agent or '*'}-*")) else unreachable())
    if agent:  # now, because the test may be without an index
        runtime = Runtime(Settings(), load_entry_points=False, plugins=[hermes_agents])
        await runtime.agents.entry(agent).load().program.fetch()


def unreachable() -> str | None:
    if shutil.which("npm") is None:
        return "npm is not installed"
    asked = subprocess.run(["npm", "view", "@openai/codex", "version"], capture_output=True, timeout=60, check=False)
    return "the npm index can't be reached" if asked.returncode else None


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the demo's tests need, which every user may read: sandboxes have no index."""
    folder = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, *demo_tasks.REQUIREMENTS], check=True, timeout=300)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    return folder


@pytest.fixture
def owner() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(params=["local user", "local namespace", "docker user"])
async def place(
    request: pytest.FixtureRequest,
    owner: str,
    sandboxes: Path,
    wheels: Path,
    leak_check: None,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[dict[str, Any]]:
    """Options of `rollouts`: a place without a network, not even while the sandbox is prepared.

    Afterwards nothing is left of it: no process (and so none of its ports and mounts), file, container or volume.
    """
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    backend, level = request.param.split()
    options = {"backend": backend, "level": level}
    if backend == "docker":
        config = {"image": request.getfixturevalue("docker_images")[0], "volumes": [f"{wheels}:{wheels}:ro"]}
        with contextlib.closing(docker.from_env()) as client:
            before = _held(client.api, owner)
            yield {**options, "backend_config": {**config, "network": "none", "read_only": True}}
            deadline = time.monotonic() + END_S
            while (left := _held(client.api, owner) - before) and time.monotonic() < deadline:
                await asyncio.sleep(0.2)
            assert left == set()
    else:
        request.getfixturevalue("isolates")
        config = {"state_dir": str(sandboxes), "visible_paths": [str(wheels)], "network": "none"}
        yield {**options, "backend_config": config}
        assert await gone(sandboxes, END_S) == []


def _held(api: docker.APIClient, owner: str) -> set[str]:
    """The containers of an owner, and all volumes that no container has."""
    containers = api.containers(all=True, filters={"label": f"hermes-rl.owner={owner}"})
    volumes = api.volumes(filters={"dangling": True})["Volumes"] or ()
    return {*(each["Id"] for each in containers), *(each["Name"] for each in volumes)}
