"""A Nomad cluster that fails: calls are repeated, sandboxes replaced, and rollouts scored all the same."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hermes_swe_smith import demo_tasks

from hermes_core import ErrorKind, InfraError, Isolation, ProvisionError, SandboxSpec
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry
from tests.nomad.conftest import Cluster

if TYPE_CHECKING:
    from hermes_nomad.backend import NomadBackend


@pytest.fixture
async def backend(cluster: Cluster) -> AsyncIterator[NomadBackend]:
    from hermes_nomad.backend import NomadBackend

    made = NomadBackend()
    yield made
    await made.aclose()
    assert cluster.left() == ([], [], 0)


def tool_backend(backend: NomadBackend, **settings: Any) -> ToolBackend:
    from hermes_nomad.config import NomadConfig

    profile = {"slots_per_sandbox": 2, "max_sandboxes": 2, "reserve_slots": 0, "acquire_timeout_s": 60, **settings}
    return ToolBackend(
        backend,
        profiles={"default": NomadConfig(**profile)},
        tools=ToolRegistry(),
        isolation=Isolation.USER,
        owner=f"test-{uuid.uuid4().hex[:12]}",
    )


BUSY: list[dict[str, Any]] = [
    {"status": 429, "times": 2},
    {"status": 500, "text": "No cluster leader", "times": 3},
    {"status": 503, "text": "Not ready to serve consistent reads"},
    {"lose_answer": True},
]


@pytest.mark.parametrize("match", ["POST /v1/jobs", "/evaluations", "/allocations", "GET /v1/allocation/", "DELETE"])
@pytest.mark.parametrize("fault", BUSY, ids=["429", "no-leader", "503", "lost-answer"])
async def test_a_busy_cluster_is_waited_for(
    cluster: Cluster, backend: NomadBackend, match: str, fault: dict[str, Any]
) -> None:
    from hermes_nomad.config import NomadConfig

    cluster.ask("fail", match=match, **fault)
    sandbox = await backend.create(SandboxSpec(uuid.uuid4().hex, "busy", NomadConfig(), Isolation.SHARED))
    assert len(cluster.ask("state")["alive"]) == 1
    await sandbox.terminate()


async def test_a_pause_that_nomad_names_is_kept(cluster: Cluster, backend: NomadBackend) -> None:
    await backend.list()
    cluster.ask("fail", match="GET /v1/jobs", status=429, retry_after=3)
    began = time.monotonic()
    await backend.list()
    assert time.monotonic() - began >= 3


async def test_a_wrong_job_is_not_sent_again(cluster: Cluster, backend: NomadBackend) -> None:
    from hermes_nomad.config import NomadConfig

    spec = SandboxSpec(uuid.uuid4().hex, "wrong", NomadConfig(datacenters=()), Isolation.SHARED)
    with pytest.raises(ProvisionError, match="Missing job datacenters") as failed:
        await backend.create(spec)
    assert not failed.value.retryable
    assert cluster.ask("state")["counts"]["POST jobs"] == 1


NONSENSE = ["<html>", "7", "[1]", "[]", '"text"', "{}", '[{"JobModifyIndex": "x", "CreateIndex": {}, "Meta": 3}]']


@pytest.mark.parametrize(
    "match", ["POST /v1/jobs", "GET /v1/jobs", "/evaluations", "/allocations", "GET /v1/allocation/"]
)
@pytest.mark.parametrize("text", NONSENSE)
async def test_answers_that_are_nonsense(cluster: Cluster, backend: NomadBackend, match: str, text: str) -> None:
    """A proxy may answer in Nomad's place. Errors are ours, and nothing is left."""
    from hermes_nomad.config import NomadConfig

    config = NomadConfig(placement_timeout_s=3, start_timeout_s=3)
    for times in (1, 2):
        cluster.ask("fail", match=match, status=200, text=text, times=times)
        with contextlib.suppress(InfraError):
            sandbox = await backend.create(SandboxSpec(uuid.uuid4().hex, "busy", config, Isolation.SHARED))
            await sandbox.status()
            await sandbox.terminate()
        with contextlib.suppress(InfraError):
            await backend.list()
        cluster.ask("reset")
    for info in await backend.list():
        await backend.terminate_id(info.sandbox_id)


async def test_a_cluster_without_a_leader_is_given_up(cluster: Cluster) -> None:
    from hermes_nomad.api import NomadApi, NomadError

    cluster.ask("set", leader="")
    api = NomadApi(cluster.address, None, None)
    with pytest.raises(NomadError, match="No cluster leader") as failed:
        await api.call("GET", "/v1/jobs", patience_s=2)
    assert failed.value.passing
    await api.aclose()


async def test_a_drained_node_costs_no_slot(cluster: Cluster, backend: NomadBackend) -> None:
    async with tool_backend(backend) as tools:
        slot = await tools.acquire("a")
        running = asyncio.create_task(tools.execute_batch([(slot, "bash", {"command": "sleep 60"})], timeout_s=90))
        await asyncio.sleep(1)
        for node in ("node-1", "node-2"):
            await asyncio.to_thread(cluster.ask, "drain", node=node)
        [result] = await asyncio.wait_for(running, 60)
        assert (result.success, result.error_kind) == (False, ErrorKind.INFRA)
        await tools.release(slot)
        again = await tools.acquire("b")
        assert (await tools.execute(again, "bash", {"command": "echo on"})).output == "on\n"


async def test_websockets_are_cut_in_100_mb_of_output(cluster: Cluster, backend: NomadBackend) -> None:
    async with tool_backend(backend) as tools:
        slot = await tools.acquire("a")
        commands = tools.commands(slot)
        said = await commands.run("seq 1 13000000 | head -c 100000000 >numbers; sha256sum <numbers", timeout_s=120)
        for _ in range(5):
            cluster.ask("fail", match="/exec", cut_after=15_000_000)
        await asyncio.to_thread(cluster.ask, "cut")
        digest, size = hashlib.sha256(), 0
        while data := (await commands.read_file("numbers", offset=size, limit=25_000_000)).data:
            digest.update(data)
            size += len(data)
        assert size == 100_000_000
        assert digest.hexdigest() == said.text.split()[0]
        assert cluster.ask("state")["counts"]["exec"] >= 5


async def test_a_command_goes_on_while_its_websocket_is_cut(cluster: Cluster, backend: NomadBackend) -> None:
    async with tool_backend(backend) as tools:
        slot = await tools.acquire("a")
        command = {"command": "echo begun >>log; sleep 3; echo done >>log; cat log"}
        running = asyncio.create_task(tools.execute(slot, "bash", command))
        await asyncio.sleep(1)
        await asyncio.to_thread(cluster.ask, "cut")
        assert (await running).output == "begun\ndone\n", "it ran once"


def run(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start the rollouts of SWE-smith's demo tasks, by the command line."""
    (folder / "run.yaml").write_text("run: {infra_retries: 20}\n")
    argv = [
        *(sys.executable, "-m", "hermes_core", "rollout", "swe-smith", "--config", str(folder / "run.yaml")),
        *(f"--env.dataset_name={folder}/tasks.jsonl", f"--env.repo_base_url={folder}", "--out", str(folder / "out")),
        *("--backend", "nomad", "--isolation", "user", "--concurrency", "4", "--backend.slots_per_sandbox=4"),
        *("--backend.min_sandboxes=2", "--backend.max_sandboxes=2", "--backend.orphan_ttl_s=10", *words),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "HERMES_PLUGINS"}
    return subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)


def rewards(folder: Path) -> list[float]:
    """Return the rewards of all rollouts, each of which was scored once."""
    lines = (folder / "out" / "trajectories.jsonl").read_text().splitlines()
    scored = [row for row in map(json.loads, lines) if row["reward"] is not None]
    counts = Counter((row["item_id"], row["rollout_index"]) for row in scored)
    assert set(counts.values()) == {1}
    return [row["reward"] for row in scored]


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_rollouts(cluster: Cluster, tmp_path: Path, agent: str, reward: float) -> None:
    demo_tasks.write(tmp_path)
    program = run(tmp_path, "--agent", agent)
    _, said = program.communicate(timeout=300)
    assert program.returncode == 0, said.decode()[-3000:]
    assert rewards(tmp_path) == [reward] * 4
    assert cluster.ask("state")["alive"] == []


def test_rollouts_while_nodes_are_drained(cluster: Cluster, tmp_path: Path) -> None:
    demo_tasks.write(tmp_path)
    program = run(tmp_path, "--agent", "oracle")
    drains = 0
    while program.poll() is None:
        time.sleep(2)
        if drains < 3 and cluster.ask("state")["execs"]:
            cluster.ask("drain", node=f"node-{drains % 2 + 1}", lost=bool(drains % 2))
            drains += 1
    _, said = program.communicate()
    assert program.returncode == 0, said.decode()[-3000:]
    assert rewards(tmp_path) == [1.0] * 4
    assert drains
    assert cluster.ask("state")["jobs"] == []


def test_rollouts_of_a_killed_driver_are_resumed(cluster: Cluster, tmp_path: Path) -> None:
    demo_tasks.write(tmp_path)
    program = run(tmp_path, "--agent", "oracle")
    while not cluster.ask("state")["execs"] and program.poll() is None:
        time.sleep(0.2)
    time.sleep(3)
    program.send_signal(signal.SIGKILL)
    program.communicate()
    again = run(tmp_path, "--agent", "oracle", "--resume")
    _, said = again.communicate(timeout=300)
    assert again.returncode == 0, said.decode()[-3000:]
    assert rewards(tmp_path) == [1.0] * 4
    deadline = time.monotonic() + 60
    while cluster.ask("state")["alive"] and time.monotonic() < deadline:
        time.sleep(0.5)
    assert cluster.ask("state")["alive"] == []
