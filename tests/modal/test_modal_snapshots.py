"""What an environment prepares once, and all later sandboxes have: Modal's snapshots, through the emulator."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hermes_modal.backend import ModalBackend
from hermes_modal.config import ModalSandboxConfig
from hermes_modal_emulator import ModalEmulator

from hermes_core.errors import CommandError, ConfigError
from hermes_core.sandbox.commands import Slot
from hermes_core.sandbox.contract import Isolation
from hermes_core.sandbox.pool.preparation import NewSandbox
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry


@pytest.fixture
async def backend(own_emulator: ModalEmulator, version: str) -> AsyncIterator[ModalBackend]:
    if own_emulator.mode != "namespaces":
        pytest.skip("the emulator keeps no snapshots without namespaces; root has them")
    made = ModalBackend()
    yield made
    await made.aclose()
    assert own_emulator.sandboxes() == [], "a sandbox was leaked"


class Prepared:
    """Counts how often sandboxes are prepared."""

    def __init__(self) -> None:
        self.times = 0

    async def __call__(self, sandbox: NewSandbox) -> None:
        self.times += 1
        lines = "mkdir -p deep/er; echo made >deep/er/file; ln deep/er/file hard; ln -s deep/er/file soft"
        await sandbox.prepare("dependencies", lines)
        await sandbox.prepare("answers", "echo secret >file", private=True)


def tool_backend(backend: ModalBackend, prepared: Prepared | None, **config: Any) -> ToolBackend:
    settings = {"slots_per_sandbox": 1, "min_sandboxes": 0, "max_sandboxes": 3, "reserve_slots": 0, **config}
    return ToolBackend(
        backend,
        profiles={"default": ModalSandboxConfig(**settings)},
        tools=ToolRegistry(),
        isolation=Isolation.USER,
        owner=f"test-{uuid.uuid4().hex[:12]}",
        prepare_sandbox=prepared,
    )


async def never(commands: Any, directory: str) -> None:
    raise AssertionError("it is prepared already")


async def has_it(tools: ToolBackend, slot: Slot) -> bool:
    """Slots read what is prepared for all, and nothing else; nothing is prepared again."""
    shared = await tools.prepare(slot, "dependencies", never)
    private = await tools.prepare(slot, "answers", never, private=True)
    own = tools.commands(slot)
    with pytest.raises(CommandError):
        await own.read_file(f"{private}/file")
    assert (await tools.preparation(slot).read_file(f"{private}/file")).data == b"secret\n"
    seen = [(await own.read_file(f"{shared}/{name}")).data for name in ("deep/er/file", "hard", "soft")]
    refused = await own.run(f"echo changed >{shared}/hard")
    return seen == [b"made\n"] * 3 and not refused.ok


def creations(emulator: ModalEmulator) -> list[dict[str, Any]]:
    return [
        each["request"]["definition"]
        for each in emulator.requests()
        if each["method"] in ("SandboxCreate", "SandboxCreateV2")
    ]


def is_cut(definition: dict[str, Any]) -> bool:
    return bool(
        definition.get("block_network") or definition.get("network_access", {}).get("network_access_type") == "BLOCKED"
    )


async def test_prepared_once_with_a_network_and_restored_without(
    backend: ModalBackend, own_emulator: ModalEmulator
) -> None:
    prepared = Prepared()
    async with tool_backend(backend, prepared, network="setup") as tools:
        slots = await asyncio.gather(*(tools.acquire(f"t{n}") for n in range(3)))
        assert len({slot.sandbox_id for slot in slots}) == 3
        assert all([await has_it(tools, slot) for slot in slots])
        for slot in slots:
            reached = await tools.commands(slot).run("exec 3<>/dev/tcp/1.1.1.1/53", timeout_s=5)
            assert not reached.ok and not reached.timed_out, "the network is cut"
        assert prepared.times == 1
        own_emulator.kill_sandbox(slots[0].sandbox_id)
        await tools.release(slots[0])
        again = await tools.acquire("again")
        assert await has_it(tools, again)
    assert prepared.times == 1
    assert [is_cut(each) for each in creations(own_emulator)] == [False, True, True, True, True]
    images = [each["image_id"] for each in creations(own_emulator)]
    assert len(set(images[1:])) == 1 and images[0] != images[1]


async def test_a_snapshot_where_the_network_stays(backend: ModalBackend, own_emulator: ModalEmulator) -> None:
    prepared = Prepared()
    async with tool_backend(backend, prepared, snapshot=True) as tools:
        slots = await asyncio.gather(*(tools.acquire(f"t{n}") for n in range(2)))
        assert all([await has_it(tools, slot) for slot in slots])
    assert prepared.times == 1
    assert [is_cut(each) for each in creations(own_emulator)] == [False] * 3


async def test_a_snapshot_that_fails_is_made_again(backend: ModalBackend, own_emulator: ModalEmulator) -> None:
    prepared = Prepared()
    own_emulator.fault("TaskSnapshotFilesystem", "INVALID_ARGUMENT")  # which the SDK does not try again itself
    async with tool_backend(backend, prepared, network="setup", acquire_timeout_s=60) as tools:
        slot = await tools.acquire("t")
        assert await has_it(tools, slot)
    assert prepared.times == 2


def test_nothing_to_prepare_is_refused(own_emulator: ModalEmulator) -> None:
    with pytest.raises(ConfigError, match="snapshot: true, and nothing prepares its sandboxes"):
        tool_backend(ModalBackend(), None, snapshot=True)
