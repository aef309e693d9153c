"""What the emulator guesses about Kubernetes, held against a cluster: each test that fails there names a guess to fix.

`HERMES_LIVE_KUBECONFIG=FILE` names the cluster; the context's namespace must admit privileged containers.
`HERMES_LIVE_KUBECONFIG=emulator` runs the tests on the emulator, to see that they are right themselves.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_core import ChannelLost, ImageError, Isolation, SandboxLost, SandboxSpec, SandboxStatus

Create = Callable[..., Any]

IDLE_S = 150
"""More seconds than a channel stays silent before its connection is tested."""


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The kubeconfig of the cluster."""
    named = os.environ.get("HERMES_LIVE_KUBECONFIG", "")
    if not named:
        pytest.skip("HERMES_LIVE_KUBECONFIG=FILE runs this on the cluster of that kubeconfig")
    pytest.importorskip("kubernetes_asyncio", reason="`make setup EXTRAS=cloud`, and run it from .venv-cloud")
    if named != "emulator":
        yield named
        return
    from tests.kubernetes.conftest import ClusterProcess

    cluster = ClusterProcess(tmp_path_factory.mktemp("cluster"))
    yield cluster.kubeconfig
    cluster.close()


@pytest.fixture
async def create(kubeconfig: str) -> AsyncIterator[Create]:
    """`create(level, **settings)`: makes sandboxes, which end with the test."""
    from hermes_kubernetes.backend import KubernetesBackend
    from hermes_kubernetes.config import KubernetesConfig

    backend, owner = KubernetesBackend(), f"live-{uuid.uuid4().hex[:12]}"

    async def make(level: str = "shared", creation_id: str | None = None, **settings: Any) -> Any:
        config = KubernetesConfig(**{"kubeconfig": kubeconfig, "orphan_ttl_s": 600, **settings})
        spec = SandboxSpec(
            creation_id or uuid.uuid4().hex, owner, config, Isolation.parse(level), {"SUM": "$(A) $$ $((1))"}
        )
        return await backend.create(spec)

    backend.note_profile(KubernetesConfig(kubeconfig=kubeconfig))
    yield make
    for info in await backend.list(owner):
        await backend.terminate_id(info.sandbox_id)
    await backend.aclose()


async def run(sandbox: Any, script: str) -> tuple[bytes, int]:
    channel = await sandbox.open(["sh", "-c", script])
    try:
        output = b""
        while data := await channel.read(1 << 20):
            output += data
        return output, await channel.wait()
    finally:
        await channel.aclose()


async def test_words_with_dollars_arrive(create: Create) -> None:
    sandbox = await create()
    assert await run(sandbox, 'printf %s "$SUM"') == (b"$(A) $$ $((1))", 0)


async def test_statuses_of_programs(create: Create) -> None:
    sandbox = await create()
    assert (await run(sandbox, "exit 7"))[1] == 7
    assert (await run(sandbox, "kill -9 $$"))[1] == 137
    assert (await run(sandbox, "exec no-such-program"))[1] == 127


async def test_50_mb_come_back_as_they_went(create: Create) -> None:
    sandbox = await create()
    data = os.urandom(1 << 20) * 50
    channel = await sandbox.open(["head", "-c", str(len(data))])
    writing = asyncio.create_task(channel.write(data))
    got = bytearray()
    while piece := await channel.read(1 << 20):
        got += piece
    await writing
    assert bytes(got) == data
    await channel.aclose()


async def test_a_silent_channel_stays_open(create: Create) -> None:
    """The server answers pings, and nothing between us and it closes a connection that is in use."""
    sandbox = await create()
    assert await run(sandbox, f"sleep {IDLE_S}; echo still there") == (b"still there\n", 0)


async def test_a_program_outlives_its_channel(create: Create) -> None:
    sandbox = await create()
    channel = await sandbox.open(
        ["sh", "-c", '(trap "" HUP; sleep 5; echo on >/data/proof) </dev/null >/dev/null 2>&1 & echo in']
    )
    assert await channel.read(10) == b"in\n"
    await channel.aclose()
    await asyncio.sleep(8)
    assert await run(sandbox, "cat /data/proof") == (b"on\n", 0)


async def test_the_main_process_ends_the_pod(create: Create) -> None:
    sandbox = await create(orphan_ttl_s=5)
    async with asyncio.timeout(90):
        while await sandbox.status() is SandboxStatus.RUNNING:
            await asyncio.sleep(1)
    with pytest.raises(SandboxLost):
        await run(sandbox, "true")


async def test_a_deleted_pod_is_gone_soon(create: Create) -> None:
    sandbox = await create()
    channel = await sandbox.open(["sleep", "1000"])
    began = time.monotonic()
    await sandbox.terminate()
    assert time.monotonic() - began < 45, "its grace period is a second"
    assert await sandbox.status() is SandboxStatus.GONE
    with pytest.raises(ChannelLost):
        if await channel.read(1) == b"" and await channel.wait() == 137:
            raise ChannelLost("it was killed")
    await channel.aclose()


async def test_a_name_is_given_once(create: Create) -> None:
    creation_id = uuid.uuid4().hex
    first, second = await asyncio.gather(*(create(creation_id=creation_id) for _ in range(2)))
    assert first.id == second.id


async def test_an_image_that_the_registry_does_not_have(create: Create) -> None:
    with pytest.raises(ImageError):
        await create(image=f"python:missing-{uuid.uuid4().hex[:8]}")


async def test_the_setup_container_switches_off_what_it_says(create: Create) -> None:
    sandbox = await create("user", network="none")
    states, _ = await run(sandbox, "cat /sys/class/net/*/operstate; cat /proc/sys/kernel/shmmni")
    assert b"up" not in states.split()
    assert states.split()[-1] == b"0"
    output, _ = await run(sandbox, "cat /proc/net/route | tail -n +2 | wc -l")
    assert output.strip() == b"0"


async def test_a_network_is_cut_for_good(create: Create) -> None:
    sandbox = await create("user", network="setup")
    await sandbox.cut_network()
    assert (await run(sandbox, "tail -n +2 /proc/net/route | wc -l"))[0].strip() == b"0"


async def test_the_image_is_known(create: Create) -> None:
    sandbox = await create()
    assert sandbox.image.digest.startswith("sha256:")
    assert Path(sandbox.image.workdir).is_absolute()
