"""Modal failing in every way that the emulator knows: the pool is back at full strength, and nothing is leaked."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hermes_modal import account
from hermes_modal.backend import ModalBackend
from hermes_modal.config import ModalSandboxConfig
from hermes_modal_emulator import ModalEmulator
from modal import exception

from hermes_core.errors import AcquireTimeout, ErrorKind, ImageError, InfraError, ProvisionError
from hermes_core.sandbox.commands import Slot, SlotCommands
from hermes_core.sandbox.contract import Isolation
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry

pytestmark = pytest.mark.usefixtures("workable")


@pytest.fixture(params=["v2", pytest.param("v1", marks=pytest.mark.stress)])
def create(request: pytest.FixtureRequest, own_emulator: ModalEmulator, monkeypatch: pytest.MonkeyPatch) -> str:
    """The call that makes a sandbox, of each of Modal's two kinds; the tests of the older one take minutes more."""
    if request.param == "v1":
        monkeypatch.setenv("MODAL_SANDBOX_V2", "0")
    return {"v2": "SandboxCreateV2", "v1": "SandboxCreate"}[request.param]


@pytest.fixture
async def backend(own_emulator: ModalEmulator, create: str) -> AsyncIterator[ModalBackend]:
    made = ModalBackend()
    yield made
    await made.aclose()
    assert own_emulator.sandboxes() == [], "a sandbox was leaked"


def tool_backend(backend: ModalBackend, **config: Any) -> ToolBackend:
    settings = {"slots_per_sandbox": 4, "max_sandboxes": 2, "reserve_slots": 0, "acquire_timeout_s": 40, **config}
    return ToolBackend(
        backend,
        profiles={"default": ModalSandboxConfig(**settings)},
        tools=ToolRegistry(),
        isolation=Isolation.USER,
        owner=f"test-{uuid.uuid4().hex[:12]}",
    )


async def works(tools: ToolBackend, slot: Slot) -> bool:
    return (await tools.execute(slot, "bash", {"command": "echo on"})).output == "on\n"


async def full_strength(tools: ToolBackend, slots: int = 8) -> None:
    """As many slots as the pool may have, all of them working."""
    taken = await asyncio.gather(*(tools.acquire(f"t{n}") for n in range(slots)))
    assert len({slot.slot_id for slot in taken}) == slots
    assert all(await asyncio.gather(*(works(tools, slot) for slot in taken)))
    await asyncio.gather(*(tools.release(slot, reset_workspace=True) for slot in taken))


async def test_a_sandbox_dies_idle_and_in_a_command(backend: ModalBackend, own_emulator: ModalEmulator) -> None:
    async with tool_backend(backend) as tools:
        own_emulator.kill_sandbox(own_emulator.sandboxes()[0]["id"])
        await full_strength(tools)
        slot = await tools.acquire("a")
        running = asyncio.create_task(tools.execute_batch([(slot, "bash", {"command": "sleep 60"})], timeout_s=90))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(own_emulator.kill_sandbox, slot.sandbox_id)
        [result] = await asyncio.wait_for(running, 45)
        assert (result.success, result.error_kind) == (False, ErrorKind.INFRA)
        await tools.release(slot)
        await full_strength(tools)


async def test_creation_fails_three_times_then_works(
    backend: ModalBackend, own_emulator: ModalEmulator, create: str
) -> None:
    own_emulator.fault(create, "RESOURCE_EXHAUSTED", times=2)
    async with tool_backend(backend, min_sandboxes=0) as tools:
        own_emulator.fault(create, "INTERNAL")
        await full_strength(tools)


async def test_creation_fails_always(backend: ModalBackend, own_emulator: ModalEmulator, create: str) -> None:
    own_emulator.fault(create, "RESOURCE_EXHAUSTED", times=-1)
    async with tool_backend(backend, min_sandboxes=0, acquire_timeout_s=3) as tools:
        with pytest.raises(AcquireTimeout, match="the last sandbox could not be made"):
            await tools.acquire("a")
        own_emulator.clear_faults()
        own_emulator.set(missing_images=["python:3.11"])
        with pytest.raises(ProvisionError, match="verify that the image exists"):
            await tools.acquire("a", timeout_s=30)
        own_emulator.set(missing_images=[])
        await full_strength(tools)


async def test_a_creation_that_hangs_is_given_up(
    backend: ModalBackend, own_emulator: ModalEmulator, create: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_modal.backend.CREATE_LIMIT_S", 2.0)
    own_emulator.fault(create)
    async with tool_backend(backend, min_sandboxes=0) as tools:
        await full_strength(tools)


async def test_creation_succeeds_and_its_answer_is_lost(
    backend: ModalBackend, own_emulator: ModalEmulator, create: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_modal.backend.CREATE_LIMIT_S", 2.0)
    own_emulator.fault(create, lose_answer=True)
    async with tool_backend(backend, min_sandboxes=0, max_sandboxes=1) as tools:
        assert await works(tools, await tools.acquire("a"))
        assert len(own_emulator.sandboxes(running=False)) == 1, "the one that was made is the one in use"
        assert len(own_emulator.sandboxes()) == 1


async def test_who_is_rate_limited_waits(backend: ModalBackend, own_emulator: ModalEmulator) -> None:
    own_emulator.set(max_sandboxes=0)
    async with tool_backend(backend, min_sandboxes=0, acquire_timeout_s=60) as tools:
        waiting = asyncio.create_task(tools.acquire("a"))
        await asyncio.sleep(5)
        assert not waiting.done()
        await asyncio.sleep(5)
        assert not waiting.done()
        own_emulator.set(max_sandboxes=None)
        slot = await waiting
        assert await works(tools, slot)
        await tools.release(slot)
        await full_strength(tools)


async def test_the_stream_is_cut_in_100_mb_of_output(backend: ModalBackend, own_emulator: ModalEmulator) -> None:
    own_emulator.fault("TaskExecStdioRead", "UNAVAILABLE", cut_after_bytes=10_000_000, times=10)
    async with tool_backend(backend) as tools:
        slot = await tools.acquire("a")
        commands = tools.commands(slot)
        said = await commands.run("seq 1 13000000 | head -c 100000000 >numbers; sha256sum <numbers", timeout_s=120)
        digest, size = hashlib.sha256(), 0
        while data := (await commands.read_file("numbers", offset=size, limit=25_000_000)).data:
            digest.update(data)
            size += len(data)
        assert size == 100_000_000
        assert digest.hexdigest() == said.text.split()[0]
        assert len(own_emulator.requests("TaskExecStdioRead")) >= 8


async def test_a_sandbox_dies_in_set_up(backend: ModalBackend, own_emulator: ModalEmulator) -> None:
    async def kill_the_first() -> None:
        while not (running := own_emulator.sandboxes()):
            await asyncio.sleep(0.005)
        own_emulator.kill_sandbox(running[0]["id"])

    killing = asyncio.create_task(kill_the_first())
    async with tool_backend(backend, min_sandboxes=0, max_sandboxes=1) as tools:
        slot = await tools.acquire("a")
        await killing

        async def build(commands: SlotCommands, directory: str) -> None:
            own_emulator.kill_sandbox(slot.sandbox_id)
            await commands.run("sleep 60")

        with pytest.raises(InfraError):
            await tools.prepare(slot, "dependencies", build)
        await tools.release(slot)
        await full_strength(tools, 4)


async def test_a_token_expires(backend: ModalBackend, own_emulator: ModalEmulator, create: str) -> None:
    renews = "SandboxGetCommandRouterAccess" if create.endswith("V2") else "TaskGetCommandRouterAccess"
    own_emulator.set(router_ttl_s=1.0)
    async with tool_backend(backend, min_sandboxes=0, max_sandboxes=1) as tools:
        slot = await tools.acquire("a")
        own_emulator.set(router_ttl_s=600.0)
        await asyncio.sleep(1.2)
        before = len(own_emulator.requests(renews))
        await asyncio.to_thread(own_emulator.outage, 0.2)
        assert await works(tools, slot)
        assert len(own_emulator.requests(renews)) > before


@pytest.mark.parametrize("v2", ["1", pytest.param("0", marks=pytest.mark.stress)])
async def test_the_emulator_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch, v2: str) -> None:
    """All sandboxes are gone, and nothing of what Modal knew is known any more."""
    monkeypatch.setenv("MODAL_SANDBOX_V2", v2)
    with ModalEmulator() as first:
        for name, value in first.environment.items():
            monkeypatch.setenv(name, value)
        backend = ModalBackend()
        async with tool_backend(backend, orphan_ttl_s=8) as tools:
            slot = await tools.acquire("a")
            os.kill(first.pid, signal.SIGKILL)
            first.close()
            with ModalEmulator(port=int(first.environment["MODAL_SERVER_URL"].rpartition(":")[2])) as second:
                [result] = await tools.execute_batch([(slot, "bash", {"command": "true"})], timeout_s=60)
                assert (result.success, result.error_kind) == (False, ErrorKind.INFRA)
                await tools.release(slot)
                await full_strength(tools)
                await tools.aclose()
                assert second.sandboxes() == []
        await backend.aclose()


async def test_an_outage_and_a_revoked_token(backend: ModalBackend, own_emulator: ModalEmulator) -> None:
    async with tool_backend(backend) as tools:
        slot = await tools.acquire("a")
        assert await works(tools, slot)
        running = asyncio.create_task(tools.execute(slot, "bash", {"command": "sleep 2; echo once >>f; cat f"}))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(own_emulator.outage, 1.0)
        assert (await running).output == "once\n"
        own_emulator.revoke_tokens()
        assert await works(tools, slot)
        assert {each["id"] for each in own_emulator.sandboxes()} == {slot.sandbox_id}


def test_an_image_that_can_not_be_built_is_its_own_fault() -> None:
    failed = account.not_created(exception.ImageBuildError("no", "im-1"), ModalSandboxConfig(), "creating")
    assert isinstance(failed, ImageError) and not failed.retryable
    assert not isinstance(
        account.not_created(exception.RemoteError("no"), ModalSandboxConfig(), "creating"), ImageError
    )


def test_every_error_of_ours_is_infra() -> None:
    assert issubclass(type(account.not_created(TimeoutError(), ModalSandboxConfig(), "creating")), InfraError)
    assert issubclass(type(account.not_reached(TimeoutError(), "sb-1")), InfraError)
