"""Daytona failing in the ways that the emulator knows: what was asked for is done once, and nothing is left."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from hermes_core.errors import ChannelLost, ErrorKind, ImageError, ProvisionError, SandboxLost
from hermes_core.sandbox.contract import Isolation, Sandbox, SandboxSpec, SandboxStatus
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry

MakeSpec = Callable[..., SandboxSpec]


def tool_backend(backend: Any, **config: Any) -> ToolBackend:
    from hermes_daytona.config import DaytonaConfig

    settings = {"slots_per_sandbox": 2, "max_sandboxes": 1, "reserve_slots": 0, "acquire_timeout_s": 60, **config}
    return ToolBackend(
        backend,
        profiles={"default": DaytonaConfig(**settings)},
        tools=ToolRegistry(),
        isolation=Isolation.USER,
        owner=f"test-{uuid.uuid4().hex[:12]}",
    )


async def said(sandbox: Sandbox, *argv: str) -> bytes:
    """All output of a program."""
    channel, parts = await sandbox.open(argv), []
    while data := await channel.read(1 << 16):
        parts.append(data)
    await channel.aclose()
    return b"".join(parts)


async def test_who_is_rate_limited_waits_as_long_as_daytona_asks(
    backend: Any, emulator: Any, make_spec: MakeSpec
) -> None:
    emulator.plan("create_sandbox", status=429, headers={"Retry-After-sandbox-create": "1"}, times=2)
    began = time.monotonic()
    sandbox = await backend.create(make_spec())
    assert time.monotonic() - began >= 2
    assert emulator.count("create_sandbox") == 3
    await sandbox.terminate()


async def test_a_rate_limit_that_lasts_is_told(
    backend: Any, emulator: Any, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_daytona.service.CALL_LIMIT_S", 2.0)
    emulator.plan("create_sandbox", status=429, headers={"Retry-After": "1"}, times=99)
    with pytest.raises(ProvisionError, match=r"a planned fault.*max_sandboxes") as raised:
        await backend.create(make_spec())
    assert raised.value.retryable
    assert emulator.sandboxes == []


@pytest.mark.parametrize("call", ["get_sandbox", "list_sandboxes", "delete_sandbox", "create_ssh_access", "config"])
@pytest.mark.parametrize("status", [500, 503])
async def test_a_failed_request_is_sent_again(
    backend: Any, emulator: Any, make_spec: MakeSpec, call: str, status: int
) -> None:
    emulator.plan(call, status=status, times=2)
    sandbox = await backend.create(make_spec())
    assert await said(sandbox, "echo", "on") == b"on\n"
    assert [info.sandbox_id for info in await backend.list("tests")] == [sandbox.id]
    await sandbox.terminate()
    assert emulator.sandboxes == []


async def test_a_creation_whose_answer_is_lost_is_found(backend: Any, emulator: Any, make_spec: MakeSpec) -> None:
    emulator.plan("create_sandbox", lose_answer=True)
    sandbox = await backend.create(make_spec())
    assert [each["id"] for each in emulator.sandboxes] == [sandbox.id]
    assert emulator.count("create_sandbox") == 1
    await sandbox.terminate()


async def test_a_creation_that_was_not_carried_out_is_told_as_temporary(
    backend: Any, emulator: Any, make_spec: MakeSpec
) -> None:
    emulator.plan("create_sandbox", status=500)
    with pytest.raises(ProvisionError) as raised:
        await backend.create(make_spec())
    assert raised.value.retryable and not isinstance(raised.value, ImageError)


async def test_a_cancelled_creation_ends_what_the_server_makes_later(
    backend: Any, emulator: Any, make_spec: MakeSpec
) -> None:
    emulator.plan("create_sandbox", delay_s=1)
    creating = asyncio.create_task(backend.create(make_spec()))
    await asyncio.sleep(0.3)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert emulator.count("create_sandbox") == 1
    assert emulator.sandboxes == []


async def test_an_image_that_is_missing_is_its_own_fault(backend: Any, emulator: Any, make_spec: MakeSpec) -> None:
    with pytest.raises(ImageError, match=r"manifest unknown.*example:missing"):
        await backend.create(make_spec(image="example:missing"))
    assert emulator.sandboxes == []


async def test_a_snapshot_that_is_missing_is_told(backend: Any, make_spec: MakeSpec) -> None:
    with pytest.raises(ProvisionError, match="Snapshot not found") as raised:
        await backend.create(make_spec(snapshot_id="example:refused"))
    assert not raised.value.retryable


async def test_a_key_that_is_revoked_is_told(backend: Any, emulator: Any, make_spec: MakeSpec) -> None:
    emulator.call("set", key="another")
    with pytest.raises(ProvisionError, match=r"Invalid credentials.*DAYTONA_API_KEY") as raised:
        await backend.create(make_spec())
    assert not raised.value.retryable
    emulator.call("set", key="dtn_emulator")


async def test_a_gateway_with_another_key_gets_nothing(backend: Any, emulator: Any, make_spec: MakeSpec) -> None:
    emulator.call("set", other_key=True)
    with pytest.raises(ProvisionError, match=r"another key than it should.*do not go on") as raised:
        await backend.create(make_spec())
    assert not raised.value.retryable
    assert emulator.sandboxes == []


async def test_a_connection_that_is_cut_is_made_again(backend: Any, emulator: Any, make_spec: MakeSpec) -> None:
    sandbox = await backend.create(make_spec())
    channel = await sandbox.open(["sh", "-c", "echo on; sleep 100"])
    assert await channel.read(100) == b"on\n"
    emulator.call("cut")
    with pytest.raises(ChannelLost):
        await channel.read(100)
    await channel.aclose()
    assert await said(sandbox, "echo", "again") == b"again\n"
    await sandbox.terminate()


async def test_a_session_that_nobody_waits_for_is_closed(backend: Any, make_spec: MakeSpec) -> None:
    sandbox = await backend.create(make_spec())
    for delay in (0.0, 0.001, 0.005, 0.02, 0.1):
        opening = asyncio.create_task(sandbox.open(["sh", "-c", "read -r line; : >/data/unheard-$$"]))
        await asyncio.sleep(delay)
        opening.cancel()
        try:
            await (await opening).aclose()
        except asyncio.CancelledError:
            pass
    async with asyncio.timeout(30):
        while b"unheard" in await said(sandbox, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"):
            await asyncio.sleep(0.2)
    await sandbox.terminate()


async def test_the_stream_is_cut_in_100_mb_of_output(backend: Any, emulator: Any) -> None:
    async with tool_backend(backend) as tools:
        slot = await tools.acquire("a")
        commands = tools.commands(slot)
        made = await commands.run("seq 1 13000000 | head -c 100000000 >numbers; sha256sum <numbers", timeout_s=120)
        emulator.call("set", cuts=[10_000_000] * 6)
        digest, size = hashlib.sha256(), 0
        while data := (await commands.read_file("numbers", offset=size, limit=25_000_000)).data:
            digest.update(data)
            size += len(data)
        assert size == 100_000_000
        assert digest.hexdigest() == made.text.split()[0]
        assert emulator.count("create_ssh_access") >= 7, "a connection was made for each that was cut"
        await tools.release(slot)


async def test_a_sandbox_that_daytona_stops_in_a_command_is_replaced(backend: Any, emulator: Any) -> None:
    async with tool_backend(backend) as tools:
        slot = await tools.acquire("a")
        running = asyncio.create_task(tools.execute_batch([(slot, "bash", {"command": "sleep 60"})], timeout_s=90))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(emulator.call, "stop", id=slot.sandbox_id)
        [result] = await asyncio.wait_for(running, 45)
        assert (result.success, result.error_kind) == (False, ErrorKind.INFRA)
        await tools.release(slot)
        other = await tools.acquire("b")
        assert other.sandbox_id != slot.sandbox_id
        assert (await tools.execute(other, "bash", {"command": "echo on"})).output == "on\n"
        await tools.release(other)
    assert emulator.sandboxes == []


async def test_a_stopped_sandbox_opens_no_channel(backend: Any, emulator: Any, make_spec: MakeSpec) -> None:
    sandbox = await backend.create(make_spec())
    await asyncio.to_thread(emulator.call, "stop", id=sandbox.id)
    with pytest.raises(SandboxLost):
        await sandbox.open(["true"])
    assert await sandbox.status() is SandboxStatus.GONE


async def test_a_daemon_that_does_not_end_is_stopped_by_daytona(
    backend: Any, emulator: Any, make_spec: MakeSpec
) -> None:
    """The watchdog then kills everything else, and `auto_stop_interval` ends the sandbox."""
    emulator.call("set", minute_s=4.0, ends_on_term=False)
    sandbox = await backend.create(make_spec(orphan_ttl_s=1, auto_stop_interval=5))
    channel = await sandbox.open(["sh", "-c", "trap '' TERM HUP; echo on; while :; do sleep 1; done"])
    assert await channel.read(100) == b"on\n"
    with pytest.raises(ChannelLost):  # the watchdog kills it with all others, after 5 s without a heartbeat and 5 more
        while await channel.read(100):
            pass
    await channel.aclose()
    assert await sandbox.status() is SandboxStatus.RUNNING
    async with asyncio.timeout(60):
        while await sandbox.status() is SandboxStatus.RUNNING:
            await asyncio.sleep(0.5)


async def test_a_living_driver_keeps_an_idle_sandbox(
    backend: Any, emulator: Any, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_daytona.backend.MINUTE_S", 1.0)
    emulator.call("set", minute_s=1.0)
    sandbox = await backend.create(make_spec(auto_stop_interval=2, orphan_ttl_s=100))
    sandbox._gateway.drop()
    await asyncio.sleep(5)
    assert await sandbox.status() is SandboxStatus.RUNNING
    assert emulator.count("update_last_activity") >= 3
    await backend._work.aclose()  # as if the driver had died
    async with asyncio.timeout(20):
        while await sandbox.status() is SandboxStatus.RUNNING:
            await asyncio.sleep(0.2)
