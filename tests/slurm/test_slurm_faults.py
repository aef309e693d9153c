"""Faults of a cluster: steps killed, a job cancelled, a node drained, the controller restarted, the driver killed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

MEGABYTES = 100


async def test_srun_is_killed_in_the_middle_of_a_command(cluster: Any, tool_backend: Any, bash: Any) -> None:
    async with tool_backend() as backend:
        slot = await backend.acquire("one")
        running = asyncio.create_task(bash(backend, slot, "echo begun >>ran; sleep 4; echo through"))
        for _ in range(3):
            await asyncio.sleep(1)
            assert cluster.kill_sruns() >= 1
        assert (await running).output.strip() == "through"
        assert (await bash(backend, slot, "wc -l <ran")).output.strip() == "1"
        assert len(cluster.jobs()) == 1


async def test_srun_is_killed_in_the_middle_of_much_output(
    cluster: Any, tool_backend: Any, bash: Any, tmp_path: Path
) -> None:
    async with tool_backend() as backend:
        slot = await backend.acquire("one")
        await bash(backend, slot, f"head -c {MEGABYTES << 20} /dev/urandom >big; mkdir out; mv big out")
        expected = (await bash(backend, slot, "sha256sum out/big")).output.split()[0]
        killed = 0
        with (tmp_path / "big.tar").open("wb") as file:

            async def sink(data: bytes) -> None:
                nonlocal killed
                file.write(data)
                if file.tell() > (killed + 1) * (MEGABYTES << 18):
                    assert cluster.kill_sruns() >= 1
                    killed += 1

            await backend.commands(slot).tar_out_to(sink, "out", max_bytes=2 * MEGABYTES << 20)
        with tarfile.open(tmp_path / "big.tar") as archive:
            content = archive.extractfile("big")
            assert content is not None
            assert hashlib.file_digest(content, "sha256").hexdigest() == expected
        assert killed >= 3


async def test_a_job_is_cancelled(cluster: Any, tool_backend: Any, bash: Any, until: Any) -> None:
    async with tool_backend(orphan_ttl_s=20) as backend:
        slot = await backend.acquire("one")
        running = asyncio.create_task(bash(backend, slot, "sleep 100"))
        await asyncio.sleep(0.5)
        (job,) = cluster.jobs()
        cluster.run("scancel", job)
        assert (await running).error_kind == "infra"
        await backend.release(slot)
        again = await backend.acquire("two")
        assert (await bash(backend, again, "echo new")).output.strip() == "new"
        assert cluster.jobs() and job not in cluster.jobs()


async def test_a_job_reaches_its_time_limit(cluster: Any, tool_backend: Any, bash: Any, until: Any) -> None:
    async with tool_backend() as backend:
        slot = await backend.acquire("one")
        (job,) = cluster.jobs()
        cluster.run("scontrol", "update", f"jobid={job}", "timelimit=0-00:00:01")
        running = await bash(backend, slot, "sleep 100", 110)
        assert running.error_kind == "infra"
        await until(lambda: job not in cluster.jobs())


async def test_a_node_is_drained(cluster: Any, tool_backend: Any, bash: Any) -> None:
    async with tool_backend(max_sandboxes=2, slots_per_sandbox=1, reserve_slots=0) as backend:
        slot = await backend.acquire("one")
        node = cluster.node(slot.sandbox_id)
        running = asyncio.create_task(bash(backend, slot, "sleep 2; echo through"))
        cluster.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
        try:
            other = await backend.acquire("two")
            assert (await bash(backend, other, "echo here")).output.strip() == "here"
            assert cluster.node(other.sandbox_id) != node
            assert (await running).output.strip() == "through"
        finally:
            cluster.run("scontrol", "update", f"nodename={node}", "state=resume")


async def test_the_controller_is_restarted(cluster: Any, tool_backend: Any, bash: Any) -> None:
    async with tool_backend(max_sandboxes=2, slots_per_sandbox=1, reserve_slots=0) as backend:
        slot = await backend.acquire("one")
        running = asyncio.create_task(bash(backend, slot, "echo begun >>ran; sleep 3; echo through"))
        second = asyncio.create_task(backend.acquire("two", timeout_s=120))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(cluster.restart_controller)
        cluster.kill_sruns()
        assert (await running).output.strip() == "through"
        assert (await bash(backend, slot, "wc -l <ran")).output.strip() == "1"
        assert (await bash(backend, await second, "echo here")).output.strip() == "here"
        assert len(cluster.jobs()) == 2


DRIVER = """
import asyncio, json, sys
import hermes_slurm
from hermes_core import Runtime, Settings
async def main():
    async with Runtime(Settings(), plugins=[hermes_slurm], load_entry_points=False) as runtime:
        config = json.loads(sys.argv[1])
        async with runtime.tool_backend("slurm", isolation=sys.argv[2], config=config, profiles={}) as backend:
            slot = await backend.acquire("one")
            await backend.execute_batch([(slot, "bash", {"command": "setsid sleep 999 & disown; touch f"})])
            print(slot.sandbox_id, flush=True)
            await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.parametrize("level", ["shared", "namespace"])
async def test_the_driver_is_killed(cluster: Any, until: Any, level: str) -> None:
    config = json.dumps({"orphan_ttl_s": 4, "directory": str(cluster.place), "max_sandboxes": 1})
    with subprocess.Popen([sys.executable, "-c", DRIVER, config, level], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        sandbox = (await asyncio.to_thread(driver.stdout.readline)).strip()
        assert [sandbox.partition("/")[0]] == cluster.jobs()
        inside = [pid for pid in _marked(sandbox) if Path(f"/proc/{pid}").exists()]
        assert len(inside) >= 3
        driver.kill()
    await until(cluster.leaves_nothing)
    assert _marked(sandbox) == []


def _marked(sandbox: str) -> list[int]:
    """The processes of a sandbox."""
    wanted, found = f"HERMES_SANDBOX_ID={sandbox.rpartition('/')[2]}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
