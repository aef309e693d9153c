"""Containers as sandboxes, on the real daemon: one per creation id, with limits and channels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from docker import APIClient
from docker.errors import NotFound
from hermes_docker import containers
from hermes_docker.backend import DockerBackend

from hermes_core.errors import PolicyError, ProvisionError, SandboxLost
from hermes_core.sandbox.contract import Channel, Isolation, SandboxSpec, SandboxStatus

Spec = Callable[..., SandboxSpec]


async def output(channel: Channel) -> tuple[bytes, int]:
    """All that a process says, and its exit status."""
    said = b""
    try:
        while data := await channel.read(1 << 16):
            said += data
        return said, await channel.wait()
    finally:
        await channel.aclose()


async def said(sandbox: Any, *argv: str) -> str:
    text, status = await output(await sandbox.open(argv))
    assert status == 0, text
    return text.decode().strip()


async def test_one_lease_is_one_container(backend: DockerBackend, spec: Spec, owner: str, api: APIClient) -> None:
    wanted = spec()
    first, second = await asyncio.gather(backend.create(wanted), backend.create(wanted))
    third = await backend.create(wanted)
    assert first.id == second.id == third.id
    assert first.uid_base == third.uid_base  # type: ignore[attr-defined]
    [info] = await backend.list(owner)
    assert (info.sandbox_id, info.creation_id, info.status) == (first.id, wanted.creation_id, SandboxStatus.RUNNING)
    labels = api.inspect_container(first.id)["Config"]["Labels"]
    assert labels["hermes-rl.owner"] == owner
    assert labels["hermes-rl.profile"] == "default"
    api.kill(first.id)
    again = await backend.create(wanted)
    assert await again.status() is SandboxStatus.RUNNING
    await again.terminate()
    await again.terminate()
    assert await again.status() is SandboxStatus.GONE
    assert await backend.list(owner) == []


async def test_a_lease_of_a_weaker_level_is_refused(backend: DockerBackend, spec: Spec) -> None:
    await backend.create(spec(Isolation.SHARED, creation_id="weak-" + spec().creation_id))
    with pytest.raises(PolicyError, match="'shared', not 'user'"):
        wanted = [info.creation_id for info in await backend.list(spec().owner)]
        await backend.create(spec(Isolation.USER, creation_id=wanted[0]))


async def test_the_limits_are_those_asked_for(
    backend: DockerBackend, spec: Spec, api: APIClient, tmp_path: Any
) -> None:
    (tmp_path / "shown").write_text("to the sandbox")
    tmp_path.chmod(0o755)
    sandbox = await backend.create(
        spec(
            memory=256,
            cpu=0.5,
            pids_limit=200,
            shm_size=8,
            read_only=True,
            tmpfs={"/tmp": "size=4m,exec"},
            network="none",
            volumes=(f"{tmp_path}:/shown:ro",),
        )
    )
    host = api.inspect_container(sandbox.id)["HostConfig"]
    assert (host["Memory"], host["MemorySwap"], host["NanoCpus"]) == (256 << 20, 256 << 20, 500_000_000)
    assert (host["PidsLimit"], host["ShmSize"], host["ReadonlyRootfs"]) == (200, 8 << 20, True)
    assert (host["AutoRemove"], host["Init"], host["CapDrop"]) == (True, True, ["ALL"])
    assert {name.removeprefix("CAP_") for name in host["CapAdd"]} == set(containers.CAPABILITIES)
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert await said(sandbox, "cat", "/shown/shown") == "to the sandbox"
    assert await said(sandbox, "sh", "-c", "echo x 2>/dev/null >/shown/more || echo refused") == "refused"
    assert await said(sandbox, "sh", "-c", "echo x 2>/dev/null >/etc/more || echo refused") == "refused"
    assert await said(sandbox, "sh", "-c", "mkdir -p /data/x && echo written") == "written"
    assert await said(sandbox, "sh", "-c", "grep NoNewPrivs /proc/self/status") == "NoNewPrivs:\t1"
    assert await said(sandbox, "cat", "/proc/sys/kernel/shmmni") == "0"


async def test_no_two_containers_share_user_ids(
    backend: DockerBackend, spec: Spec, api: APIClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await backend.create(spec())
    taken = first.uid_base  # type: ignore[attr-defined]
    blocks = iter([taken, taken, taken + 2 * containers.UID_BLOCK])
    monkeypatch.setattr(containers, "_free_block", lambda *_: next(blocks))
    second = await backend.create(spec())
    assert second.uid_base == taken + 2 * containers.UID_BLOCK  # type: ignore[attr-defined]
    assert next(blocks, None) is None, "it came back to another one"
    attached = await backend.attach(second.id)
    assert attached.uid_base == second.uid_base  # type: ignore[attr-defined]


async def test_a_lost_sandbox_says_so(backend: DockerBackend, spec: Spec, api: APIClient) -> None:
    sandbox = await backend.create(spec())
    channel = await sandbox.open(["cat"])
    await channel.write(b"it runs")  # killed before it does, the daemon's own words would come instead
    assert await channel.read(10) == b"it runs"
    api.kill(sandbox.id)
    assert await channel.read(10) == b""
    await channel.aclose()
    with pytest.raises(SandboxLost):
        await sandbox.open(["true"])
    while await sandbox.status() is not SandboxStatus.GONE:
        await asyncio.sleep(0.05)
    with pytest.raises(SandboxLost):
        await backend.attach(sandbox.id)


async def test_what_is_not_ours_is_left_alone(
    backend: DockerBackend, spec: Spec, api: APIClient, busybox_image: str
) -> None:
    wanted = spec()
    name = containers.name_of(wanted.creation_id)
    api.create_container(busybox_image, ["sleep", "60"], name=name)
    try:
        await backend.terminate_id(name)
        assert api.inspect_container(name)["Name"] == f"/{name}"
        with pytest.raises(SandboxLost):
            await backend.attach(name)
        with pytest.raises(ProvisionError, match="another container has its name"):
            await backend.create(wanted)
    finally:
        api.remove_container(name, force=True)
    with pytest.raises(NotFound):
        api.inspect_container(name)


async def test_what_can_not_be_kept_is_refused(backend: DockerBackend, spec: Spec, owner: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="SYS_ADMIN"):
        await backend.create(spec(Isolation.NAMESPACE))
    with pytest.raises(PolicyError, match="only root can keep slots apart"):
        await backend.create(spec(user="1000"))
    with pytest.raises(ProvisionError) as failed:
        await backend.create(spec(volumes=(f"{tmp_path}/none:/x",)))
    assert not failed.value.retryable and "must exist on the daemon's host" in str(failed.value)
    with pytest.raises((ProvisionError, PolicyError), match="gpu") as refused:
        await backend.create(spec(gpus=-1))
    assert not getattr(refused.value, "retryable", False)
    with pytest.raises(ProvisionError) as failed:
        await backend.create(spec(network_name="hermes-no-such-network"))
    assert not failed.value.retryable
    assert await backend.list(owner) == []
