"""What the emulator guesses about Nomad, held against a cluster: each test that fails there names a guess to fix.

`NOMAD_LIVE=1` runs them on the cluster that NOMAD_ADDR names, with the token in NOMAD_TOKEN. `NOMAD_LIVE=emulator` runs
them on the emulator, to see that the tests themselves are right.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from hermes_core import (
    ImageError,
    Isolation,
    ProvisionError,
    Sandbox,
    SandboxLost,
    SandboxSpec,
    SandboxStatus,
    Settings,
)
from tests.nomad.conftest import Cluster

Create = Callable[..., Any]


@pytest.fixture(scope="module")
def live_nomad() -> Iterator[None]:
    """Settles which Nomad it is."""
    way = os.environ.get("NOMAD_LIVE", "")
    if way not in ("1", "emulator"):
        pytest.skip("NOMAD_LIVE=1 runs this on the Nomad cluster that NOMAD_ADDR names")
    if way == "1":
        yield
        return
    with contextlib.closing(Cluster()) as cluster:
        before = os.environ.get("NOMAD_ADDR")
        os.environ["NOMAD_ADDR"] = cluster.address
        yield
        os.environ.pop("NOMAD_ADDR") if before is None else os.environ.update({"NOMAD_ADDR": before})


@pytest.fixture
async def backend(live_nomad: None) -> AsyncIterator[Any]:
    from hermes_nomad.backend import NomadBackend

    made = NomadBackend(Settings.load())
    yield made
    for info in await made.list("live-tests"):
        await made.terminate_id(info.sandbox_id)
    await made.aclose()


@pytest.fixture
def create(backend: Any) -> Create:
    from hermes_nomad.config import NomadConfig

    async def make(isolation: Isolation = Isolation.USER, creation_id: str = "", **settings: Any) -> Sandbox:
        config = NomadConfig(**{"orphan_ttl_s": 120, "memory": 512, **settings})
        spec = SandboxSpec(creation_id or uuid.uuid4().hex, "live-tests", config, isolation, {"OF_THE_SPEC": "a $b"})
        made: Sandbox = await backend.create(spec)
        return made

    return make


async def outcome(sandbox: Sandbox, *argv: str, **env: str) -> tuple[bytes, int, str]:
    """Return output, exit status and last words of a program."""
    channel = await sandbox.open(argv, env=env)
    try:
        output = b""
        while data := await channel.read(1 << 20):
            output += data
        return output, await channel.wait(), channel.stderr_tail
    finally:
        await channel.aclose()


async def test_the_cluster_can_be_used(backend: Any) -> None:
    diagnosis = await backend.check()
    assert diagnosis.usable, diagnosis


async def test_programs(create: Create) -> None:
    """Arguments, variables, status, and output that a program writes last."""
    sandbox = await create()
    script = 'printf "%s|" "$OF_THE_SPEC" "$OF_THE_CALL" "$@" "$PWD" "$(id -u)"; echo words >&2; exit 7'
    words = ["", "$HOME", "${NOMAD_ALLOC_ID}", "%{x}", "a\nb", "ü€"]
    output, status, said = await outcome(sandbox, "sh", "-c", script, "x", *words, OF_THE_CALL="${y}")
    assert output.decode() == "|".join(["a $b", "${y}", *words, "/data", "0", ""])
    assert (status, said) == (7, "words")
    output, status, _ = await outcome(sandbox, "sh", "-c", "head -c 3000000 /dev/zero; printf end")
    assert (len(output), output[-3:], status) == (3_000_003, b"end", 0)
    assert (await outcome(sandbox, "no-such-program"))[1] == 127


async def test_what_a_container_may(create: Create) -> None:
    """The capabilities, no new privileges, and no System V IPC at level `user`."""
    sandbox = await create()
    status = (await outcome(sandbox, "cat", "/proc/self/status"))[0].decode()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    bits = {bit for bit in range(64) if int(fields["CapBnd"], 16) >> bit & 1}
    assert bits == {0, 1, 3, 5, 6, 7, 8}, "CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID, SETPCAP"
    assert fields["NoNewPrivs"] == "1"
    assert (await outcome(sandbox, "cat", "/proc/sys/kernel/shmmni"))[0] == b"0\n"


async def test_a_program_outlives_its_channel(create: Create) -> None:
    sandbox = await create()
    channel = await sandbox.open(["sh", "-c", "echo on; sleep 3; echo done >after"])
    assert await channel.read(10) == b"on\n"
    await channel.aclose()
    for _ in range(60):
        if (await outcome(sandbox, "cat", "after"))[0] == b"done\n":
            return
        await asyncio.sleep(0.5)
    pytest.fail("the program ended with its websocket")


async def test_much_in_both_directions(create: Create) -> None:
    sandbox = await create()
    data = os.urandom(1 << 20) * 20
    channel = await sandbox.open(["head", "-c", str(len(data))])
    got = bytearray()
    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        group.create_task(channel.write(data))
        while piece := await channel.read(1 << 20):
            got += piece
    await channel.aclose()
    assert bytes(got) == data


async def test_one_creation_id_is_one_job(backend: Any, create: Create) -> None:
    name = uuid.uuid4().hex
    first, second = await asyncio.gather(create(creation_id=name), create(creation_id=name))
    assert first.id == second.id and first.uid_base == second.uid_base
    assert [info.creation_id for info in await backend.list("live-tests")] == [name]
    assert (await backend.attach(first.id)).id == first.id
    await first.terminate()
    assert await first.status() is not SandboxStatus.RUNNING
    assert await backend.list("live-tests") == []
    with pytest.raises(SandboxLost):
        await second.open(["true"])
    again = await create(creation_id=name)
    assert await again.status() is SandboxStatus.RUNNING


async def test_a_silent_driver(backend: Any, create: Create) -> None:
    """The job of a sandbox whose watchdog has ended is dead, and its id is free."""
    name = uuid.uuid4().hex
    sandbox = await create(creation_id=name, orphan_ttl_s=2)
    async with asyncio.timeout(60):
        while await sandbox.status() is SandboxStatus.RUNNING:
            await asyncio.sleep(0.5)
        while (await backend.list("live-tests"))[0].status is not SandboxStatus.ENDED:
            await asyncio.sleep(0.5)
    assert await (await create(creation_id=name)).status() is SandboxStatus.RUNNING


async def test_no_network(create: Create) -> None:
    sandbox = await create(network="none")
    routes = (await outcome(sandbox, "cat", "/proc/net/route"))[0].splitlines()
    assert len(routes) <= 1


async def test_refusals(create: Create) -> None:
    with pytest.raises(ImageError):
        await create(image=f"hermes-rl-no-such-image-{uuid.uuid4().hex}:missing")
    with pytest.raises(ProvisionError) as failed:
        await create(constraints=["${node.class} = hermes-rl-no-such-class"])
    assert not failed.value.retryable
