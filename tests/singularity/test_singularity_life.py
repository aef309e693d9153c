"""Containers of Apptainer from their start to their end, what is inside of them, and what they survive."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from hermes_singularity.backend import SingularityBackend, SingularitySandbox

from hermes_core.errors import ProvisionError, SandboxLost
from hermes_core.sandbox.contract import Isolation, Sandbox, SandboxSpec, SandboxStatus
from hermes_core.sandbox.local.container import owner_outside
from hermes_core.sandbox.local.processes import start_time
from tests.support.killed_runs import gone, traces

Spec = Callable[..., SandboxSpec]


async def run(sandbox: Sandbox, script: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """The exit status of a script in a sandbox, and what it prints."""
    async with aclosing(await sandbox.open(["sh", "-c", script], env=env)) as channel:
        output = b""
        while data := await channel.read(1 << 16):
            output += data
        return await channel.wait(), output.decode("utf-8", "replace") + channel.stderr_tail


async def output_of(sandbox: Sandbox, script: str) -> str:
    status, output = await run(sandbox, script)
    assert status == 0, output
    return output


async def start(backend: SingularityBackend, spec: SandboxSpec) -> SingularitySandbox:
    sandbox = await backend.create(spec)
    assert isinstance(sandbox, SingularitySandbox)
    return sandbox


def pid_outside(sandbox: SingularitySandbox) -> int:
    """The first process of the runtime, with which everything ends: the supervisor's child."""
    supervisor = sandbox.record.supervisor[0]
    (child,) = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return int(child)


async def until(condition: Callable[[], bool], limit_s: float = 20) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.05)


# --- inside -----------------------------------------------------------------------------------------------------------


async def test_nothing_of_the_host_is_inside(
    spec: Spec, backend: SingularityBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SECRET_OF_THE_DRIVER", "APPTAINERENV_SECRET", "APPTAINER_BIND"):
        monkeypatch.setenv(name, "/etc")
    sandbox = await start(backend, spec())
    names = {line.partition("=")[0] for line in (await output_of(sandbox, "env")).splitlines()}
    assert names - {"PWD", "SHLVL"} == {"HERMES_SANDBOX_ID", "HOME", "LANG", "LD_LIBRARY_PATH", "PATH"}
    for path in (sandbox.directory, Path(__file__)):
        assert (await run(sandbox, f"ls -d {path}"))[0] != 0
    mounted = [line.split()[4] for line in (await output_of(sandbox, "cat /proc/self/mountinfo")).splitlines()]
    expected = {"/", "/proc", "/tmp", "/data", "/var/tmp", "/etc/resolv.conf"}
    assert {path for path in mounted if not path.startswith("/dev")} <= expected
    devices = {"null", "zero", "full", "random", "urandom", "tty", "console", "ptmx", "pts", "shm", "mqueue"}
    assert {*(await output_of(sandbox, "ls /dev")).split()} <= devices | {"fd", "stdin", "stdout", "stderr", "core"}
    assert await output_of(sandbox, "cat /proc/1/comm; id -u") == "sh\n0\n"
    assert "launcher.py" not in await output_of(
        sandbox, "for p in /proc/[0-9]*; do [ $p = /proc/$$ ] || cat $p/environ; done"
    )


async def test_root_of_a_container_is_not_root_outside(spec: Spec, backend: SingularityBackend) -> None:
    sandbox = await start(backend, spec())
    await output_of(sandbox, "touch /data/mine")
    assert (sandbox.directory / "data/mine").stat().st_uid == owner_outside()
    assert Path(f"/proc/{sandbox.record.init[0]}").stat().st_uid == owner_outside()
    script = "for f in kernel/core_pattern vm/drop_caches; do echo 1 >/proc/sys/$f && echo wrote $f; done"
    assert "wrote" not in (await run(sandbox, script))[1]


async def test_our_interpreter_is_out_of_reach(spec: Spec, backend: SingularityBackend) -> None:
    """The process that waits for a program has files of the host open: its own program, for example."""
    sandbox = await start(backend, spec())
    async with aclosing(await sandbox.open(["sh", "-c", "echo on; exec sleep 60"])) as channel:
        assert await channel.read(10) == b"on\n"
        script = "for p in /proc/[0-9]*; do grep -q launcher $p/cmdline 2>&- && echo $p; done; true"
        found = [{*(await output_of(sandbox, script)).split()} for _ in range(2)]
        (waiting,) = set.intersection(*found)  # each script had such a process of its own
        for name in ("exe", "root", "cwd", "fd", "environ", "mem", "map_files"):
            status, said = await run(sandbox, f"ls {waiting}/{name}/ || head -c 1 {waiting}/{name}")
            assert status != 0 and "denied" in said, (name, said)


async def test_directories_of_the_host_are_mounted_as_asked(
    spec: Spec, backend: SingularityBackend, place: Path
) -> None:
    source = place / "shared"
    source.mkdir()
    os.chown(source, owner_outside(), -1)
    (source / "file").write_text("from the host\n")
    volumes = [f"{source}:/mnt/rw", f"{source}:/mnt/ro:ro"]
    sandbox = await start(backend, spec(volumes=volumes))
    assert (
        await output_of(sandbox, "cat /mnt/ro/file; echo more >/mnt/rw/more; cat /mnt/ro/more")
        == "from the host\nmore\n"
    )
    assert (await run(sandbox, "echo x >/mnt/ro/more"))[0] != 0
    with pytest.raises(ProvisionError, match="doesn't exist") as refused:
        await start(backend, spec(volumes=["/nowhere:/mnt"]))
    assert "source of each volume" in str(refused.value.hint)
    for path in source.iterdir():
        path.unlink()
    source.rmdir()


async def test_a_full_disk_is_the_containers_own_trouble(spec: Spec, backend: SingularityBackend) -> None:
    sandbox = await start(backend, spec(tmpfs_size=16))
    for path in ("/etc/big", "/data/big", "/tmp/big"):
        status, said = await run(sandbox, f"dd if=/dev/zero of={path} bs=1M count=32")
        assert status != 0 and "No space left" in said
        assert await output_of(sandbox, f"rm {path}; echo fine >{path}; cat {path}") == "fine\n"
    await sandbox.terminate()
    assert await sandbox.status() is SandboxStatus.GONE


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["runtime", "first process", "supervisor"])
async def test_whatever_is_killed_everything_ends(
    spec: Spec, backend: SingularityBackend, place: Path, victim: str
) -> None:
    sandbox = await start(backend, spec())
    async with aclosing(await sandbox.open(["sh", "-c", "trap '' TERM; sleep 7531 & setsid sleep 7531; echo on"])):
        pids = {"runtime": pid_outside(sandbox), "first process": sandbox.record.init[0]}
        os.kill(pids.get(victim, sandbox.record.supervisor[0]), signal.SIGKILL)
        await until(lambda: not start_time(sandbox.record.init[0]))
    if victim != "supervisor":
        await until(lambda: not sandbox.directory.exists())
    assert await sandbox.status() is not SandboxStatus.RUNNING
    with pytest.raises(SandboxLost):
        await sandbox.open(["true"])
    with pytest.raises(SandboxLost):
        await backend.attach(sandbox.id)
    await backend.terminate_id(sandbox.id)
    assert await gone(place, 10) == []


DRIVER = """
import asyncio, json, sys
from hermes_singularity.backend import SingularityBackend
from hermes_singularity.config import SingularityConfig
from hermes_core.sandbox.contract import Isolation, SandboxSpec

async def main():
    creation_id, owner, profile = json.loads(sys.argv[1])
    spec = SandboxSpec(creation_id, owner, SingularityConfig(**profile), Isolation.DEDICATED)
    sandbox = await SingularityBackend().create(spec)
    channel = await sandbox.open(["sh", "-c", "echo kept >/data/kept; echo $$; exec sleep 9753"])
    print(sandbox.id, (await channel.read(100)).decode(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def start_driver(creation_id: str, owner: str, profile: dict[str, Any]) -> tuple[subprocess.Popen[str], str]:
    """A driver in a process of its own, and the id of its sandbox, in which a program runs."""
    request = json.dumps([creation_id, owner, profile])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, request], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert driver.stdout is not None
    line = await asyncio.to_thread(driver.stdout.readline)
    return driver, line.split()[0]


def kill(driver: subprocess.Popen[str]) -> None:
    driver.kill()
    driver.wait()
    assert driver.stdout is not None
    driver.stdout.close()


async def test_a_container_outlives_a_killed_driver_and_is_taken_over(
    spec: Spec, backend: SingularityBackend, owner: str, profile: dict[str, Any]
) -> None:
    creation_id = uuid.uuid4().hex
    driver, sandbox_id = await start_driver(creation_id, owner, profile)
    kill(driver)
    backend.note_profile(spec().config)
    (info,) = await backend.list(owner)
    assert (info.sandbox_id, info.creation_id, info.status) == (sandbox_id, creation_id, SandboxStatus.RUNNING)
    assert (await backend.create(spec(creation_id=creation_id))).id == sandbox_id
    attached = await backend.attach(sandbox_id)
    assert await output_of(attached, "cat /data/kept; grep -l 975[3] /proc/[0-9]*/cmdline | grep -c .") == "kept\n1\n"
    await attached.terminate()
    assert await backend.list(owner) == []


async def test_a_container_of_a_killed_driver_ends_itself(owner: str, profile: dict[str, Any], place: Path) -> None:
    driver, _ = await start_driver(uuid.uuid4().hex, owner, {**profile, "orphan_ttl_s": 5})
    kill(driver)
    assert traces(place) != []
    assert await gone(place, 30) == []


async def test_what_a_killed_supervisor_left_is_removed_by_the_next_driver(
    spec: Spec, backend: SingularityBackend, place: Path
) -> None:
    sandbox = await start(backend, spec())
    await output_of(sandbox, "mkdir -p /data/a/b; chmod 0 /data/a; echo x >/etc/changed")
    os.kill(sandbox.record.supervisor[0], signal.SIGKILL)
    await until(lambda: not start_time(sandbox.record.init[0]))
    assert sandbox.directory.exists()
    next_backend = SingularityBackend()
    other = await next_backend.create(spec(Isolation.SHARED))
    assert [path.name for path in place.iterdir()] == [other.id]
    await other.terminate()
    await next_backend.aclose()


async def test_without_the_program_it_says_what_to_install(
    spec: Spec, backend: SingularityBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ProvisionError, match="neither apptainer nor singularity") as refused:
        await backend.create(spec())
    assert "install Apptainer" in str(refused.value.hint) and not refused.value.retryable
    diagnosis = await backend.check()
    assert not diagnosis.usable and "install Apptainer" in diagnosis.advice[0]
