"""A sandbox of Nomad's from its creation to its end: one for each creation id, found again, and nothing left."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hermes_core import (
    ImageError,
    PolicyError,
    ProvisionError,
    SandboxLost,
    SandboxSpec,
    SandboxStatus,
    Settings,
)
from hermes_core.sandbox.contract import Isolation
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
    for info in await made.list():
        await made.terminate_id(info.sandbox_id)
    await made.aclose()
    assert cluster.left() == ([], [], 0)


def spec(**settings: Any) -> SandboxSpec:
    from hermes_nomad.config import NomadConfig

    config = NomadConfig(**{"orphan_ttl_s": 60, **settings})
    return SandboxSpec(uuid.uuid4().hex, "life", config, Isolation.SHARED)


async def test_the_job_says_whose_it_is(cluster: Cluster, backend: NomadBackend) -> None:
    wanted = spec(cpu=2, memory=512, priority=70, constraints=["${node.class} = sandboxes"], job_prefix="mine")
    sandbox = await backend.create(wanted)
    [job] = cluster.ask("state")["jobs"]
    assert job["ID"].startswith("mine-")
    assert sandbox.id == f"{job['ID']}@default"
    assert (job["Type"], job["Priority"], job["Datacenters"]) == ("batch", 70, ["*"])
    assert job["Meta"]["hermes-rl.creation-id"] == wanted.creation_id
    group = job["TaskGroups"][0]
    assert group["RestartPolicy"]["Attempts"] == group["ReschedulePolicy"]["Attempts"] == 0
    assert group["RestartPolicy"]["Mode"] == "fail", "Nomad refuses no attempts in another mode"
    assert group["Tasks"][0]["Resources"] == {"CPU": 0, "Cores": 2, "MemoryMB": 512}
    [info] = await backend.list("life")
    assert (info.sandbox_id, info.creation_id, info.status) == (sandbox.id, wanted.creation_id, SandboxStatus.RUNNING)
    assert await backend.list("somebody else") == []


async def test_a_lost_answer_makes_no_second_sandbox(cluster: Cluster, backend: NomadBackend) -> None:
    cluster.ask("fail", match="POST /v1/jobs", lose_answer=True)
    wanted = spec()
    first = await backend.create(wanted)
    second = await backend.create(wanted)
    assert first.id == second.id and first.uid_base == second.uid_base is not None
    assert len(cluster.ask("state")["alive"]) == 1


async def test_an_ended_sandbox_leaves_its_id_free(cluster: Cluster, backend: NomadBackend) -> None:
    wanted = spec(orphan_ttl_s=1)
    sandbox = await backend.create(wanted)
    while await sandbox.status() is SandboxStatus.RUNNING:
        await asyncio.sleep(0.2)
    assert [info.status for info in await backend.list()] == [SandboxStatus.ENDED]
    with pytest.raises(SandboxLost):
        await backend.attach(sandbox.id)
    again = await backend.create(wanted)
    assert await again.status() is SandboxStatus.RUNNING


async def test_a_weaker_sandbox_is_not_taken_for_a_stronger(backend: NomadBackend) -> None:
    wanted = spec()
    sandbox = await backend.create(wanted)
    with pytest.raises(PolicyError, match="isolation 'shared', not 'user'"):
        await backend.create(replace(wanted, isolation=Isolation.USER))
    assert await sandbox.status() is SandboxStatus.RUNNING, "what is there belongs to somebody"


async def test_a_replacement_is_not_the_sandbox(cluster: Cluster, backend: NomadBackend) -> None:
    """Nomad starts the job of a drained node elsewhere, without the files and the guest."""
    sandbox = await backend.create(spec())
    [first] = cluster.ask("state")["alive"]
    cluster.ask("drain", node=first["NodeName"])
    async with asyncio.timeout(30):
        while [each["ClientStatus"] for each in cluster.ask("state")["alive"] if each["ID"] != first["ID"]] != [
            "running"
        ]:
            await asyncio.sleep(0.1)
    assert await sandbox.status() is SandboxStatus.ENDED
    with pytest.raises(SandboxLost):
        await backend.attach(sandbox.id)
    await sandbox.terminate()
    assert cluster.ask("state")["alive"] == [], "the replacement, too"


async def test_a_long_list_has_pages(cluster: Cluster, backend: NomadBackend) -> None:
    cluster.ask("set", page_size=2)
    made = [await backend.create(spec()) for _ in range(5)]
    assert {info.sandbox_id for info in await backend.list()} == {sandbox.id for sandbox in made}


async def test_jobs_of_others_are_left_alone(cluster: Cluster, backend: NomadBackend) -> None:
    from hermes_nomad.api import NomadApi
    from hermes_nomad.jobs import describe_job

    job = describe_job(spec(), spec().config) | {"ID": "hermes-rl-of-another", "Meta": {}}
    api = NomadApi(cluster.address, None, None)
    await api.call("POST", "/v1/jobs", body={"Job": job})
    try:
        assert await backend.list() == []
        await backend.terminate_id("hermes-rl-of-another@default")
        await backend.terminate_id("no-such-job@default")
        await backend.terminate_id("nonsense")
        assert [each["ID"] for each in cluster.ask("state")["jobs"]] == ["hermes-rl-of-another"]
    finally:
        await api.call("DELETE", "/v1/job/hermes-rl-of-another", query={"purge": "true"})
        await api.aclose()
        while cluster.ask("state")["alive"]:
            await asyncio.sleep(0.1)


async def test_a_cancelled_creation_leaves_nothing(cluster: Cluster, backend: NomadBackend) -> None:
    cluster.ask("set", start_delay_s=5)
    for after_s in (0.0, 0.05, 0.3):
        making = asyncio.create_task(backend.create(spec()))
        await asyncio.sleep(after_s)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert cluster.ask("state")["jobs"] == []


REFUSALS: list[tuple[dict[str, Any], dict[str, Any], type[ProvisionError], bool, str]] = [
    ({}, {"image": "registry.example/no:missing"}, ImageError, False, "manifest for .* not found"),
    ({"unreachable_images": ["slow"]}, {"image": "slow"}, ProvisionError, True, "TLS handshake timeout"),
    ({"capacity": 0}, {"placement_timeout_s": 0.5}, ProvisionError, True, "no node has room .* memory exhausted"),
    ({"nodes": []}, {"placement_timeout_s": 0.5}, ProvisionError, True, "no node is ready"),
    ({"drivers": ["exec"]}, {}, ProvisionError, False, "missing drivers: docker"),
    ({}, {"constraints": ["${node.class} = gone"]}, ProvisionError, False, r"node.class} = gone"),
    ({}, {"gpus": 1}, ProvisionError, False, "missing devices"),
    ({"start_delay_s": 9}, {"start_timeout_s": 0.3}, ProvisionError, True, "larger start_timeout_s"),
    ({"token": "right"}, {}, ProvisionError, False, "Permission denied.*NOMAD_TOKEN needs a policy"),
]


@pytest.mark.parametrize(("cluster_has", "profile", "kind", "retryable", "said"), REFUSALS)
async def test_a_refusal_says_why_and_what_to_do(
    cluster: Cluster,
    cluster_has: dict[str, Any],
    profile: dict[str, Any],
    kind: type[ProvisionError],
    retryable: bool,
    said: str,
) -> None:
    from hermes_nomad.backend import NomadBackend

    backend = NomadBackend()
    cluster.ask("set", **cluster_has)
    with pytest.raises(kind, match=said) as failed:
        await backend.create(spec(**profile))
    assert (type(failed.value), failed.value.retryable) == (kind, retryable)
    assert failed.value.hint
    cluster.ask("reset")
    assert cluster.ask("state")["jobs"] == []
    await backend.aclose()


async def test_an_earlier_refusal_does_not_count(cluster: Cluster, backend: NomadBackend) -> None:
    """The evaluation of a purged job stays until Nomad collects it."""
    wanted = spec()
    cluster.ask("set", drivers=[])
    with pytest.raises(ProvisionError, match="missing drivers"):
        await backend.create(wanted)
    cluster.ask("set", drivers=["docker"], place_delay_s=1)
    assert await (await backend.create(wanted)).status() is SandboxStatus.RUNNING


async def test_a_full_cluster_is_waited_for(cluster: Cluster, backend: NomadBackend) -> None:
    cluster.ask("set", capacity=0)
    making = asyncio.create_task(backend.create(spec(placement_timeout_s=30)))
    await asyncio.sleep(0.5)
    assert not making.done()
    cluster.ask("set", capacity=9)
    assert await (await making).status() is SandboxStatus.RUNNING


async def test_the_token_is_sent_and_never_shown(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from hermes_nomad.backend import NomadBackend

    monkeypatch.setenv("NOMAD_TOKEN", "s3cret-token")
    cluster.ask("set", token="s3cret-token")
    backend = NomadBackend(Settings.load())
    sandbox = await backend.create(spec())
    channel = await sandbox.open(["env"])
    assert b"s3cret" not in await channel.read(1 << 16)
    await channel.aclose()
    assert (await backend.check()).usable
    cluster.ask("set", token="another")
    diagnosis = await backend.check()
    assert not diagnosis.usable and "Permission denied" in diagnosis.summary
    assert "s3cret" not in repr(diagnosis)
    cluster.ask("set", token="s3cret-token")
    await sandbox.terminate()
    await backend.aclose()


async def test_the_diagnosis_says_what_is_missing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from hermes_nomad.backend import NomadBackend

    async def said() -> str:
        backend = NomadBackend()
        found = await backend.check()
        await backend.aclose()
        assert not found.usable and found.advice
        return "; ".join([found.summary, *found.details, *found.advice])

    cluster.ask("set", drivers=["exec"])
    assert "no node has a healthy driver docker" in await said()
    cluster.ask("set", nodes=[])
    assert "0 of 0 nodes are ready" in await said()
    cluster.ask("set", leader="")
    assert "No cluster leader" in await said()
    monkeypatch.setenv("NOMAD_ADDR", "http://127.0.0.1:9")
    assert "could not be reached" in await said()
    monkeypatch.delenv("NOMAD_ADDR")
    assert "NOMAD_ADDR" in await said()


FIRST = """
import asyncio, os, signal, sys
from hermes_core import Isolation, Runtime, Settings, ToolBackend
from hermes_core.tools.registry import ToolRegistry
from hermes_nomad.backend import NomadBackend
from hermes_nomad.config import NomadConfig

async def main():
    tools = ToolBackend(NomadBackend(), profiles={"default": NomadConfig(orphan_ttl_s=float(sys.argv[2]))},
                        tools=ToolRegistry(), isolation=Isolation.USER, owner=sys.argv[1])
    await tools.start()
    slot = await tools.acquire("first")
    await tools.execute(slot, "bash", {"command": "echo left >left; nohup sleep 7654321 >/dev/null 2>&1 &"})
    print(slot.sandbox_id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def killed_driver(owner: str, ttl_s: float) -> str:
    """Run a driver that kills itself while it has a slot. Return the id of its sandbox."""
    argv = [sys.executable, "-c", FIRST, owner, str(ttl_s)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=90)
    assert done.returncode == -9
    return done.stdout.strip()


async def test_a_killed_driver_leaves_nothing(cluster: Cluster, backend: NomadBackend) -> None:
    left = await asyncio.to_thread(killed_driver, "killed", 3)
    assert [info.sandbox_id for info in await backend.list("killed")] == [left]
    async with asyncio.timeout(60):
        while cluster.ask("state")["alive"]:
            await asyncio.sleep(0.3)


async def test_the_next_driver_of_the_same_name_takes_over(cluster: Cluster, backend: NomadBackend) -> None:
    from hermes_nomad.config import NomadConfig

    left = await asyncio.to_thread(killed_driver, "me", 40)
    profile = NomadConfig(orphan_ttl_s=40)
    tools = ToolBackend(
        backend,
        profiles={"default": profile},
        tools=ToolRegistry(),
        isolation=Isolation.USER,
        owner="me",
        take_over=True,
    )
    async with tools:
        slot = await tools.acquire("next")
        assert slot.sandbox_id == left
        command = "ls -A; ps ax -o args= | grep -c '^sleep 765432[1]'"
        assert (await tools.execute(slot, "bash", {"command": command})).output == "0\n"


def test_ps_and_reap_find_what_a_killed_driver_left(cluster: Cluster, tmp_path: Path) -> None:
    left = killed_driver("gone", 300)
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "HERMES_PLUGINS": "nomad"}

    def hermes(*argv: str) -> str:
        program = [sys.executable, "-m", "hermes_core", *argv]
        return subprocess.run(program, stdout=subprocess.PIPE, text=True, env=environment, check=True).stdout

    assert left in hermes("ps", "nomad")
    hermes("reap", "nomad", "--any-owner")
    assert left not in hermes("ps", "nomad")
    assert left not in {f"{each['ID']}@default" for each in cluster.ask("state")["jobs"]}
    assert cluster.ask("state")["alive"] == []
