"""What the emulator guesses about Daytona, held against Daytona: DAYTONA_LIVE=1 runs it, with DAYTONA_API_KEY.

It takes minutes, and costs cents. `DAYTONA_LIVE=emulator` runs it on the emulator, to see that the tests are right.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from hermes_core.errors import ChannelLost
from hermes_core.sandbox.contract import Isolation, Sandbox, SandboxSpec, SandboxStatus
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry

OWNER = f"live-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def daytona() -> Iterator[None]:
    """Daytona itself, or the emulator."""
    if os.environ.get("DAYTONA_LIVE") == "emulator":
        from tests.daytona.emulator import DaytonaEmulator

        with DaytonaEmulator() as emulator, pytest.MonkeyPatch.context() as patch:
            for name, value in emulator.environment.items():
                patch.setenv(name, value)
            yield
    elif os.environ.get("DAYTONA_LIVE") == "1" and os.environ.get("DAYTONA_API_KEY"):
        yield
    else:
        pytest.skip("DAYTONA_LIVE=1 runs this on Daytona itself, with DAYTONA_API_KEY and at your cost")


@pytest.fixture
async def backend(daytona: None) -> AsyncIterator[Any]:
    """A backend. Nothing is left at the end."""
    from hermes_daytona.backend import DaytonaBackend

    made = DaytonaBackend()
    yield made
    for info in await made.list(OWNER):
        await made.terminate_id(info.sandbox_id)
    await made.aclose()


@pytest.fixture
def make_spec() -> Callable[..., SandboxSpec]:
    from hermes_daytona.config import DaytonaConfig

    def make(**config: Any) -> SandboxSpec:
        return SandboxSpec(uuid.uuid4().hex, OWNER, DaytonaConfig(**config), Isolation.USER)

    return make


async def said(sandbox: Sandbox, script: str) -> bytes:
    channel, parts = await sandbox.open(["sh", "-c", script]), []
    while data := await channel.read(1 << 16):
        parts.append(data)
    await channel.aclose()
    return b"".join(parts)


async def test_the_gateway_is_binary_and_waits_for_slow_readers(backend: Any, make_spec: Any) -> None:
    sandbox = await backend.create(make_spec(orphan_ttl_s=200))
    data = os.urandom(8 << 20)
    channel, got = await sandbox.open(["head", "-c", str(len(data))]), hashlib.sha256()
    writing = asyncio.create_task(channel.write(data))
    while piece := await channel.read(1 << 16):
        got.update(piece)
    await writing
    assert got.digest() == hashlib.sha256(data).digest()
    await channel.aclose()
    slow = await sandbox.open(["sh", "-c", "head -c 268435456 /dev/zero; echo >/data/written"])
    await slow.read(1)
    await asyncio.sleep(10)
    assert await said(sandbox, "ls /data") == b"", "256 MB were taken, and nobody had read them"
    await slow.aclose()


async def test_a_status_and_last_words_arrive(backend: Any, make_spec: Any) -> None:
    sandbox = await backend.create(make_spec(orphan_ttl_s=200))
    channel = await sandbox.open(["sh", "-c", "echo words >&2; exit 7"])
    assert (await channel.wait(), channel.stderr_tail) == (7, "words")
    await channel.aclose()


async def test_term_ends_the_daemon_and_the_sandbox(backend: Any, make_spec: Any) -> None:
    """The dead-man switch depends on it; otherwise `auto_stop_interval` ends the sandbox."""
    sandbox, began = await backend.create(make_spec(orphan_ttl_s=10, auto_stop_interval=30)), time.monotonic()
    while await sandbox.status() is SandboxStatus.RUNNING and time.monotonic() - began < 120:
        await asyncio.sleep(1)
    assert await sandbox.status() is not SandboxStatus.RUNNING


async def test_an_idle_sandbox_is_stopped_and_deleted(backend: Any, make_spec: Any) -> None:
    sandbox = await backend.create(make_spec(orphan_ttl_s=50, auto_stop_interval=1))
    await said(sandbox, "pkill -STOP -f '[h]ermes-watchdog'")
    await backend._work.aclose()  # no more signs of life
    await sandbox.disconnect()
    began = time.monotonic()
    while await backend.list(OWNER) and time.monotonic() - began < 300:
        await asyncio.sleep(5)
    assert await backend.list(OWNER) == []


async def test_a_name_is_given_once_and_labels_are_found_at_once(backend: Any, make_spec: Any) -> None:
    spec = make_spec()
    first, again = await backend.create(spec), await backend.create(spec)
    assert first.id == again.id
    assert [info.sandbox_id for info in await backend.list(OWNER)] == [first.id]
    await first.terminate()
    assert await backend.list(OWNER) == []
    await (await backend.create(spec)).terminate()


async def test_a_deleted_sandbox_ends_its_channels(backend: Any, make_spec: Any) -> None:
    sandbox = await backend.create(make_spec(orphan_ttl_s=200))
    channel = await sandbox.open(["sh", "-c", "echo in; sleep 1000"])
    assert await channel.read(10) == b"in\n"
    await sandbox.terminate()
    with pytest.raises(ChannelLost):
        await asyncio.wait_for(channel.read(10), 60)
    await channel.aclose()


async def test_no_network_leads_nowhere(backend: Any, make_spec: Any) -> None:
    """Organizations of the lower tiers can't have this."""
    sandbox = await backend.create(make_spec(network="none", orphan_ttl_s=200))
    script = "python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 443), 5)' 2>&1 | tail -1"
    assert b"rror" in await said(sandbox, script)


@pytest.mark.parametrize("level", [Isolation.USER, Isolation.NAMESPACE])
async def test_slots(backend: Any, level: Isolation) -> None:
    from hermes_daytona.config import DaytonaConfig

    config = DaytonaConfig(max_sandboxes=1, reserve_slots=0, acquire_timeout_s=300, namespaces=True)
    tools = ToolBackend(backend, profiles={"default": config}, tools=ToolRegistry(), isolation=level, owner=OWNER)
    async with tools:
        slots = [await tools.acquire(f"t{n}", timeout_s=300) for n in range(10)]
        results = await tools.execute_batch([(slot, "bash", {"command": "sleep 1; id -u"}) for slot in slots])
        assert len({result.output for result in results}) == 10
        for slot in slots:
            await tools.release(slot, reset_workspace=True)
    assert await backend.list(OWNER) == []
