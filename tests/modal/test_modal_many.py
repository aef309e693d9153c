"""Many trajectories on few sandboxes that keep dying: order, limits, and nothing given twice or lost."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from typing import Any

import pytest
from hermes_modal.backend import ModalBackend
from hermes_modal.config import ModalSandboxConfig
from hermes_modal_emulator import ModalEmulator

from hermes_core.errors import InfraError
from hermes_core.sandbox.contract import Isolation
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry

pytestmark = pytest.mark.usefixtures("workable")

LEASES_OF_EACH = 5
SANDBOXES, SLOTS = 5, 10
DEADLINE_S = 120.0


def in_order(tools: ToolBackend) -> list[str]:
    """Watch the pool: whoever gets a slot came before everyone who still waits. What it finds wrong."""
    pool = tools._pools["default"]
    wrong: list[str] = []
    place = pool._place

    def watched(waiter: Any) -> Any:
        first = min((each.number for each in pool._queue), default=waiter.number)
        if first < waiter.number:
            wrong.append(f"{waiter.number} before {first}")
        return place(waiter)

    pool._place = watched  # type: ignore[method-assign]
    return wrong


@pytest.mark.full  # a question of size
@pytest.mark.parametrize(
    ("v2", "trajectories"),
    [
        ("1", 60),
        pytest.param("1", 200, marks=pytest.mark.stress),
        pytest.param("0", 200, marks=pytest.mark.stress),
    ],
)
async def test_hundreds_of_leases_while_a_sandbox_dies_every_second(
    own_emulator: ModalEmulator, monkeypatch: pytest.MonkeyPatch, v2: str, trajectories: int
) -> None:
    monkeypatch.setenv("MODAL_SANDBOX_V2", v2)
    backend = ModalBackend()
    config = ModalSandboxConfig(
        slots_per_sandbox=SLOTS, max_sandboxes=SANDBOXES, reserve_slots=0, acquire_timeout_s=DEADLINE_S
    )
    tools = ToolBackend(
        backend,
        profiles={"default": config},
        tools=ToolRegistry(),
        isolation=Isolation.USER,
        owner=f"test-{uuid.uuid4().hex[:12]}",
    )
    held: set[str] = set()
    outcomes: Counter[str] = Counter()
    deaths = 0
    over = asyncio.Event()

    async def lease(name: str) -> str:
        slot = await tools.acquire(name)
        assert slot.slot_id not in held, "given twice"
        held.add(slot.slot_id)
        try:
            done = await tools.execute(slot, "bash", {"command": f"echo {name} >>mine; sleep 0.05; cat mine"})
            assert done.output == f"{name}\n", "somebody else's file"
        finally:
            held.discard(slot.slot_id)
            await tools.release(slot, reset_workspace=True)
        return "done"

    async def trajectory(number: int) -> None:
        for turn in range(LEASES_OF_EACH):
            async with asyncio.timeout(DEADLINE_S + 60):
                try:
                    outcomes[await lease(f"t{number}-{turn}")] += 1
                except InfraError:
                    outcomes["infra"] += 1

    async def deaths_every_second() -> None:
        nonlocal deaths
        drawn = random.Random(4)
        while not over.is_set():
            try:
                await asyncio.wait_for(over.wait(), 1)
            except TimeoutError:
                pass
            if not over.is_set() and (running := await asyncio.to_thread(own_emulator.sandboxes)):
                await asyncio.to_thread(own_emulator.kill_sandbox, drawn.choice(running)["id"])
                deaths += 1

    async with tools:
        wrong = in_order(tools)
        killer = asyncio.create_task(deaths_every_second())
        async with asyncio.TaskGroup() as group:
            for number in range(trajectories):
                group.create_task(trajectory(number))
        over.set()
        await killer
        assert sum(outcomes.values()) == trajectories * LEASES_OF_EACH
        assert outcomes["done"] > outcomes["infra"], outcomes
        assert deaths > 0 and wrong == []
        slots = await asyncio.gather(*(tools.acquire(f"last-{n}") for n in range(SANDBOXES * SLOTS)))
        assert len({slot.slot_id for slot in slots}) == SANDBOXES * SLOTS
        results = await tools.execute_batch([(slot, "bash", {"command": "ls -A"}) for slot in slots])
        assert {(result.success, result.output, result.error) for result in results} == {(True, "", "")}
        assert await asyncio.to_thread(lambda: len(own_emulator.sandboxes())) == SANDBOXES
        for slot in slots:
            await tools.release(slot)
        status = tools.get_status()
        assert (status["available_slots"], status["total_slots"], status["waiting"]) == (50, 50, 0)
    assert own_emulator.sandboxes() == []
    await backend.aclose()
