"""What a driver takes over by a checkpoint, what it ends, and what is none of its business."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hermes_core.errors import InfraError
from hermes_core.sandbox.commands import Slot
from hermes_core.sandbox.contract import Isolation, SandboxStatus
from hermes_core.sandbox.local.backend import LocalBackend, LocalConfig
from hermes_core.sandbox.pool.checkpoint import Checkpoint, SavedSandbox
from hermes_core.sandbox.pool.provision import Provisioner, start_guest
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry

OWNER = "somebody"


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    backend = LocalBackend(state_dir=str(tmp_path / "sandboxes"))
    yield backend
    for info in await backend.list():
        await backend.terminate_id(info.sandbox_id)
    await backend.aclose()


class Joined:
    """Starts clients, and remembers of which sandboxes."""

    def __init__(self) -> None:
        self.sandboxes: list[str] = []

    async def __call__(self, sandbox: Any, settings: Any) -> Any:
        client = await start_guest(sandbox, settings)
        self.sandboxes.append(sandbox.id)
        return client


@asynccontextmanager
async def driver(local: LocalBackend, folder: Path, joined: Joined | None = None) -> AsyncIterator[ToolBackend]:
    """One of several drivers of the same owner, each with a checkpoint of its own."""
    level = max(level for level in local.capabilities.isolation if level is not Isolation.DEDICATED)
    config = LocalConfig(slots_per_sandbox=1, max_sandboxes=4, min_sandboxes=0, reserve_slots=0)
    with Checkpoint(folder, OWNER) as checkpoint:
        tools = ToolBackend(
            local,
            profiles={"default": config},
            tools=ToolRegistry(),
            isolation=level,
            owner=OWNER,
            start_client=joined or start_guest,
            checkpoint=checkpoint,
        )
        try:
            yield tools
        finally:
            await tools.aclose()


async def running(local: LocalBackend) -> set[str]:
    return {info.sandbox_id for info in await local.list(OWNER) if info.status is SandboxStatus.RUNNING}


async def works(tools: ToolBackend, slot: Slot) -> bool:
    return (await tools.execute(slot, "bash", {"command": "echo fine"})).output.strip() == "fine"


def hold(monkeypatch: pytest.MonkeyPatch, method: str) -> tuple[asyncio.Event, asyncio.Event]:
    """Stop a method of the provisioner where it begins: set when one is there, and to be set to let it go on."""
    there, go_on = asyncio.Event(), asyncio.Event()
    original: Callable[..., Awaitable[Any]] = getattr(Provisioner, method)

    async def held(*args: Any, **kwargs: Any) -> Any:
        there.set()
        await go_on.wait()
        return await original(*args, **kwargs)

    monkeypatch.setattr(Provisioner, method, held)
    return there, go_on


def died(folder: Path) -> Path:
    """What a driver that dies now would leave in its folder, in another one."""
    left = folder.with_name(folder.name + "-left")
    left.mkdir()
    shutil.copy(folder / "processes.json", left)
    return left


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["_connect", "end"])
async def test_only_what_its_driver_was_making_or_ending_is_ended(
    local: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async with driver(local, tmp_path / "neighbour") as neighbour, driver(local, tmp_path / "dying") as dying:
        slot = await neighbour.acquire("neighbour")
        if method == "end":
            await dying.acquire("task")
        there, go_on = hold(monkeypatch, method)
        last = asyncio.create_task(dying.aclose() if method == "end" else dying.acquire("task"))
        try:
            await there.wait()
            assert len(await running(local)) == 2
            async with driver(local, died(tmp_path / "dying")) as following:
                assert await following.take_over() == []
                assert await running(local) == {slot.sandbox_id}
            assert not (tmp_path / "dying-left" / "processes.json").exists()
            assert await works(neighbour, slot)
        finally:
            if method == "end":
                go_on.set()
                await last
            last.cancel()
            await asyncio.wait([last])


async def test_what_is_asked_of_the_provider_is_noted_before(
    local: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, create, noted = tmp_path / "state" / "processes.json", local.create, []

    async def asked(spec: Any) -> Any:
        noted.append(json.loads(path.read_text())["unsettled"] == {spec.creation_id: "local"})
        return await create(spec)

    monkeypatch.setattr(local, "create", asked)
    async with driver(local, tmp_path / "state") as tools:
        await tools.acquire("task")
        assert noted == [True] and json.loads(path.read_text())["unsettled"] == {}
    assert not path.exists()


async def test_what_could_not_be_ended_is_ended_by_the_next(
    local: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driver(local, tmp_path / "neighbour") as neighbour:
        slot = await neighbour.acquire("neighbour")
        with Checkpoint(tmp_path / "state", OWNER) as checkpoint:
            (creation_id,) = [info.creation_id for info in await local.list(OWNER)]
            checkpoint.note("another backend", "f" * 32)
            checkpoint.note("local", creation_id)
        async with driver(local, tmp_path / "state") as tools:
            assert await tools.take_over() == []
            assert slot.sandbox_id not in await running(local)
        left = json.loads((tmp_path / "state" / "processes.json").read_text())
        assert left["unsettled"] == {"f" * 32: "another backend"}


@pytest.mark.few(1)
@pytest.mark.parametrize("broken", ["attach", "list"])
async def test_what_was_taken_before_a_failure_is_not_taken_twice(
    local: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    async with driver(local, tmp_path) as first:
        slots = [await first.acquire(task) for task in ("one", "two")]
        await first.aclose(keep=True)
    joined = Joined()
    async with driver(local, tmp_path, joined) as second:
        _fails_once(local, monkeypatch, broken, slots[1].sandbox_id)
        checkpoint = second._provisioner.checkpoint
        assert checkpoint is not None
        checkpoint.orphans["f" * 32] = "local"
        with pytest.raises(InfraError, match="once"):
            await second.take_over()
        new = await second.acquire("three")
        taken = await second.take_over()
        assert {slot.trajectory_id: slot.sandbox_id for slot in taken} == {
            slot.trajectory_id: slot.sandbox_id for slot in slots
        }
        assert sorted(joined.sandboxes) == sorted(slot.sandbox_id for slot in [*slots, new])
        for slot in [*taken, new]:
            assert await works(second, slot)
        assert await second.take_over() == []
    assert await running(local) == set()


def _fails_once(local: LocalBackend, monkeypatch: pytest.MonkeyPatch, method: str, sandbox_id: str) -> None:
    original, left = getattr(local, method), [InfraError("once")]

    async def fails(*arguments: str) -> Any:
        if left and (method == "list" or arguments == (sandbox_id,)):
            raise left.pop()
        return await original(*arguments)

    monkeypatch.setattr(local, method, fails)


def test_a_checkpoint_of_before_there_were_notes(tmp_path: Path) -> None:
    sandbox = SavedSandbox(
        backend="local",
        sandbox_id="a",
        creation_id="creation",
        profile="default",
        config={},
        isolation="user",
        instance="i",
        boot_id="b",
        began=1,
    )
    old = {"version": 1, "owner": "mine", "sandboxes": [sandbox.model_dump(mode="json")]}
    (tmp_path / "processes.json").write_text(json.dumps(old))
    with Checkpoint(tmp_path, "never used") as checkpoint:
        assert (checkpoint.owner, checkpoint.sandboxes, checkpoint.orphans) == ("mine", {"creation": sandbox}, {})
