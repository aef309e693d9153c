"""The channel over Nomad's exec: what the protocol could lose, and what a cut websocket must not end."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator

import pytest

from hermes_core import ChannelLost, Sandbox, SandboxLost, SandboxSpec
from hermes_core.sandbox.contract import Isolation
from tests.nomad.conftest import Cluster


@pytest.fixture
async def sandbox(cluster: Cluster) -> AsyncIterator[Sandbox]:
    from hermes_nomad.backend import NomadBackend
    from hermes_nomad.config import NomadConfig

    backend = NomadBackend()
    spec = SandboxSpec(uuid.uuid4().hex, "channels", NomadConfig(orphan_ttl_s=120), Isolation.SHARED)
    made = await backend.create(spec)
    yield made
    await made.terminate()
    await backend.aclose()
    assert cluster.ask("state")["alive"] == []


async def read_all(sandbox: Sandbox, *argv: str) -> tuple[bytes, int, str]:
    channel = await sandbox.open(argv)
    try:
        output = b""
        while data := await channel.read(1 << 20):
            output += data
        return output, await channel.wait(), channel.stderr_tail
    finally:
        await channel.aclose()


async def test_the_last_words_of_a_program_are_not_lost(sandbox: Sandbox) -> None:
    """Nomad's docker driver drops what was not sent when the process ends."""
    for _ in range(10):
        assert await read_all(sandbox, "sh", "-c", "echo out; echo words >&2; exit 3") == (b"out\n", 3, "words")
    channel = await sandbox.open(["sh", "-c", "head -c 20000000 /dev/zero; printf end"])
    output = b""
    while data := await channel.read(1 << 16):
        output += data
        await asyncio.sleep(0.015)  # so that the program ends while much of its output is still under way
    assert (len(output), output[-3:], await channel.wait()) == (20_000_003, b"end", 0)
    await channel.aclose()


async def test_100_mb_pass_unchanged(sandbox: Sandbox) -> None:
    script = (
        "import random, sys; r = random.Random(7)\nfor _ in range(100): sys.stdout.buffer.write(r.randbytes(1 << 20))"
    )
    channel = await sandbox.open(["python3", "-c", script])
    digest, size = hashlib.sha256(), 0
    while data := await channel.read(1 << 20):
        digest.update(data)
        size += len(data)
    await channel.aclose()
    import random

    same = random.Random(7)
    wanted = hashlib.sha256()
    for _ in range(100):
        wanted.update(same.randbytes(1 << 20))
    assert size == 100 << 20
    assert digest.digest() == wanted.digest()


async def test_a_program_outlives_a_cut_websocket(cluster: Cluster, sandbox: Sandbox) -> None:
    channel = await sandbox.open(["sh", "-c", "echo on; sleep 2; echo done >/data/after"])
    assert await channel.read(10) == b"on\n"
    await asyncio.to_thread(cluster.ask, "cut")
    with pytest.raises(ChannelLost):
        await channel.read(10)
    with pytest.raises(ChannelLost):
        await channel.wait()
    await channel.aclose()
    for _ in range(100):
        if (await read_all(sandbox, "cat", "/data/after"))[0] == b"done\n":
            return
        await asyncio.sleep(0.2)
    pytest.fail("the program ended with its channel")


async def test_a_shell_that_is_killed_breaks_the_channel(sandbox: Sandbox) -> None:
    """Without its shell, nobody knows the program's status, nor whether its output was whole."""
    channel = await sandbox.open(["sh", "-c", "echo on; kill -9 $PPID; sleep 60"])
    with pytest.raises(ChannelLost, match="killed"):
        while await channel.read(10):
            pass
    await channel.aclose()


async def test_a_program_that_forges_the_mark_fills_no_memory(sandbox: Sandbox) -> None:
    """A program can read the mark in the shell's command line."""
    script = "mark=$(tr '\\0' '\\n' </proc/$PPID/cmdline | grep -E '^[0-9a-f]{32}$'); printf %s \"$mark\" >&2; "
    channel = await sandbox.open(["sh", "-c", script + "head -c 1000000 /dev/zero >&2; sleep 60"])
    with pytest.raises(ChannelLost, match="forged"):
        await channel.read(1)
    await channel.aclose()
    assert await read_all(sandbox, "echo", "on") == (b"on\n", 0, "")


async def test_an_exec_that_nomad_refuses_is_no_lost_sandbox(cluster: Cluster, sandbox: Sandbox) -> None:
    cluster.ask("set", max_connections=0)
    with pytest.raises(ChannelLost, match="429") as failed:
        await sandbox.open(["true"])
    assert "http_max_conns_per_client" in str(failed.value)
    cluster.ask("set", max_connections=100)
    assert await read_all(sandbox, "true") == (b"", 0, "")


async def test_a_drained_node_is_a_lost_sandbox(cluster: Cluster, sandbox: Sandbox) -> None:
    for node in ("node-1", "node-2"):
        cluster.ask("drain", node=node)
    with pytest.raises(SandboxLost, match="alloc is being migrated"):
        await sandbox.open(["true"])
