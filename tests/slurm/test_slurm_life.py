"""Sandboxes in jobs: made once, found, taken over, refused with a reason, gone without a trace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hermes_slurm.backend import SlurmBackend

from hermes_core import PolicyError, ProvisionError, SandboxLost, SandboxSpec, SandboxStatus

Spec = Callable[..., SandboxSpec]


async def test_commands_files_and_nothing_left(cluster: Any, tool_backend: Any, bash: Any, leak_check: None) -> None:
    async with tool_backend() as backend:
        slot = await backend.acquire("one")
        assert slot.isolation == "namespace"
        ran = await bash(backend, slot, "id -un; echo err >&2; cat /proc/1/comm; exit 7")
        assert ran.metadata["exit_code"] == 7 and "agent" in ran.output
        await bash(backend, slot, "setsid sleep 1000 & nohup sleep 1000 & disown -a; touch mine")
        await backend.release(slot, reset_workspace=True)
        again = await backend.acquire("two")
        assert (await bash(backend, again, "ls -A; pgrep sleep; env | grep -i slurm")).output.strip() == ""
        assert len(cluster.jobs()) == 1
    assert cluster.jobs() == []


async def test_a_slot_reaches_neither_the_keeper_nor_slurm(cluster: Any, tool_backend: Any, bash: Any) -> None:
    async with tool_backend() as backend:
        slot = await backend.acquire("one")
        assert list(cluster.place.glob("*.socket"))
        seen = await bash(backend, slot, f"ls -d {cluster.place} /home/hermes-slurm")
        assert "No such file" in seen.output + seen.error and "slurm-test" not in seen.output.replace(
            str(cluster.place), ""
        )


async def test_many_sandboxes_are_on_both_nodes_and_share_looks_at_the_queue(
    cluster: Any, backend: SlurmBackend, spec: Spec
) -> None:
    log = cluster.wrappers / "looks"
    cluster.wrap("squeue", f'date +%s.%N >>{log}; exec $REAL "$@"')
    began = time.monotonic()
    memory = 3000  # no node has so much for all of them
    made = await asyncio.gather(*(backend.create(spec(memory=memory)) for _ in range(4)))
    assert {cluster.node(sandbox.id) for sandbox in made} == {"n1", "n2"}
    assert len({sandbox.id for sandbox in made}) == len(cluster.jobs()) == 4
    await asyncio.gather(*(sandbox.terminate() for sandbox in made))
    looks = len(log.read_text().splitlines())
    assert looks <= 2 + 2 * (time.monotonic() - began), looks


async def test_the_driver_may_be_in_a_job_itself(
    cluster: Any, backend: SlurmBackend, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"JOB_ID": "1", "MEM_PER_NODE": "999999", "NNODES": "7", "NTASKS": "9", "GPUS": "8"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SBATCH_EXPORT", "ALL")
    monkeypatch.setenv("MY_SECRET", "hidden-value")
    sandbox = await backend.create(spec("shared"))
    keeper = min(set(cluster.processes()) - set(cluster.sruns()))
    assert b"hidden-value" not in Path(f"/proc/{keeper}/environ").read_bytes()
    channel = await sandbox.open(["sh", "-c", "env; cat /proc/$PPID/environ"])  # the parent is started by the keeper
    output = b""
    while data := await channel.read(1 << 16):
        output += data
    assert b"PATH=" in output and b"hidden-value" not in output
    await channel.aclose()
    await sandbox.terminate()


# --- found again ---------------------------------------------------------------------------------------------------


async def test_create_after_the_answer_of_sbatch_was_lost(cluster: Any, backend: SlurmBackend, spec: Spec) -> None:
    cluster.wrap(
        "sbatch", '$REAL "$@" >/dev/null; echo "sbatch: error: Socket timed out on send/recv operation" >&2; exit 1'
    )
    cluster.wrap("scancel", "echo 'scancel: error: Unable to contact slurm controller' >&2; exit 1")
    wanted = spec()
    with pytest.raises(ProvisionError, match="Socket timed out") as caught:
        await backend.create(wanted)
    assert caught.value.retryable
    (left,) = cluster.jobs()
    for name in ("sbatch", "scancel"):
        (cluster.wrappers / name).unlink()
    sandbox = await backend.create(wanted)
    assert sandbox.id.startswith(f"{left}/") and cluster.jobs() == [left]
    await sandbox.terminate()


async def test_two_drivers_that_race_make_one_sandbox(cluster: Any, backend: SlurmBackend, spec: Spec) -> None:
    other, wanted = SlurmBackend(), spec(orphan_ttl_s=200)  # nobody sends heartbeats here
    made = await asyncio.gather(backend.create(wanted), other.create(wanted))
    assert made[0].id == made[1].id
    assert cluster.jobs() == [made[0].id.partition("/")[0]]
    await made[0].terminate()
    await other.aclose()


async def test_a_later_driver_finds_reaches_and_ends_it(cluster: Any, backend: SlurmBackend, spec: Spec) -> None:
    wanted = spec()
    sandbox = await backend.create(wanted)
    later = SlurmBackend()
    (info,) = [info for info in await later.list("me") if info.creation_id == wanted.creation_id]
    assert (info.sandbox_id, info.status) == (sandbox.id, SandboxStatus.RUNNING) and abs(
        info.created - time.time()
    ) < 300
    attached = await later.attach(sandbox.id)
    channel = await attached.open(["sh", "-c", "echo reached"])
    assert await channel.read(100) == b"reached\n" and await channel.wait() == 0
    await channel.aclose()
    await later.terminate_id(sandbox.id)
    assert await sandbox.status() is SandboxStatus.GONE and cluster.leaves_nothing()
    for lost in (sandbox.id, "999999/local-1", "nonsense"):
        with pytest.raises(SandboxLost):
            await later.attach(lost)
        await later.terminate_id(lost)
    with pytest.raises(SandboxLost):
        await sandbox.open(["true"])
    await later.aclose()


async def test_slurm_s_time_limit_is_the_sandbox_s_lifetime(cluster: Any, backend: SlurmBackend, spec: Spec) -> None:
    sandbox = await backend.create(spec(time_limit="02:00"))
    assert sandbox.lifetime_s is not None and 60 < sandbox.lifetime_s <= 120
    await sandbox.terminate()


# --- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"partition": "none"}, "setting `partition`"),
        ({"memory": 900000}, "(`memory`|lists them)"),
        ({"gres": "gpu:1"}, "setting `gres`"),
        ({"constraint": "fast"}, "setting `constraint`"),
        ({"exclude": "n99"}, "setting `exclude`"),
        ({"partition": "closed"}, "PartitionDown"),
        ({"partition": "short", "time_limit": "05:00:00"}, "PartitionTimeLimit"),
        ({"python": "/nonexistent/python3"}, "127:0.*there is no Python"),
        ({"directory": "/proc/none"}, "6:0.*name another one by `directory`"),
    ],
)
async def test_a_job_that_can_never_run(
    cluster: Any, backend: SlurmBackend, spec: Spec, given: dict[str, Any], words: str
) -> None:
    wanted = spec("shared", **given)
    with pytest.raises(ProvisionError, match=words) as caught:
        await backend.create(wanted)
    assert not caught.value.retryable
    assert all(info.creation_id != wanted.creation_id for info in await backend.list())


async def test_a_job_that_waits_too_long(cluster: Any, backend: SlurmBackend, spec: Spec) -> None:
    with pytest.raises(ProvisionError, match=r"waited 2 s, because of BeginTime.*queue_timeout_s") as caught:
        await backend.create(spec(options=["--begin=now+1hour"], queue_timeout_s=2))
    assert caught.value.retryable
    assert cluster.jobs() == []


async def test_a_level_that_the_node_refuses(cluster: Any, backend: SlurmBackend, spec: Spec) -> None:
    with pytest.raises(PolicyError, match=r"job '\d+': this account can't have isolation 'private-root'"):
        await backend.create(spec("private-root"))
    assert cluster.jobs() == []


async def test_the_doctor_lists_the_partitions(cluster: Any, backend: SlurmBackend) -> None:
    found = await backend.check()
    assert found.usable and "slurm" in found.summary
    assert any("main (default): up" in line for line in found.details)
    cluster.wrap("sinfo", "echo 'sinfo: error: Unable to contact slurm controller' >&2; exit 1")
    lost = await backend.check()
    assert not lost.usable and "Unable to contact" in lost.summary and "scontrol ping" in lost.advice[0]
