"""Pools of real sandboxes: warm-up, growth, retirement, order, deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hermes_testing.conformance.kit import Kit
from hermes_testing.conformance.waiting import until, within

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.once]


async def test_a_pool_shrinks_when_idle(kit: Kit) -> None:
    """Sandboxes above the minimum are ended when idle; a busy one is not."""
    async with kit.tools(seats=4, per_sandbox=2, idle_timeout=0.5) as tools:
        slots = await asyncio.gather(*(tools.acquire() for _ in range(3)))
        kept = slots[0]
        for slot in slots[1:]:
            await tools.release(slot, reset_workspace=True)

        async def one_left() -> bool:
            return [info.sandbox_id for info in await kit.list_sandboxes()] == [kept.sandbox_id]

        await until(one_left, 60, "idle sandboxes were not ended")
        assert (await tools.commands(kept).run("echo fine")).text == "fine\n", "a command in the busy one"


async def test_ids_are_never_used_again(kit: Kit) -> None:
    """No two leases have the same slot id and generation, over sandboxes and time."""
    seen = set()
    for _ in range(2):
        async with kit.tools(seats=2, per_sandbox=1) as tools:
            for _ in range(2):
                slots = await asyncio.gather(tools.acquire(), tools.acquire())
                seen |= {(slot.slot_id, slot.generation) for slot in slots}
                for slot in slots:
                    await tools.release(slot, reset_workspace=True)
    assert len(seen) == 8, "different leases of eight"


# --- callers that are cancelled, at every await ----------------------------------------------------------------------

TURNS = 30
"""How many turns of the event loop a call is let go, one more at each attempt, before it is cancelled."""


async def cut(work: Coroutine[Any, Any, Any], turns: int, seconds: float = 0.0) -> Any:
    """What it gives if it is done after that many turns of the loop and seconds; else None, and it was cancelled."""
    task = asyncio.ensure_future(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    if seconds:
        await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.wait([task])
    if task.cancelled():
        return None
    return task.result()


async def test_cancelling_acquire_loses_no_slot(kit: Kit) -> None:
    """`acquire` cancelled at any turn of the event loop gives its slot back."""
    async with kit.tools(seats=2, per_sandbox=2, warm=1) as tools:
        for turns in range(TURNS):
            slot = await cut(tools.acquire(), turns)
            if slot is not None:
                await tools.release(slot)
        both = await within(60, asyncio.gather(tools.acquire(), tools.acquire()), "both slots afterwards")
        assert len({slot.slot_id for slot in both}) == 2, "slots that are still there"


async def test_cancelling_release_completes_it(kit: Kit) -> None:
    """`release` cancelled at any moment is done all the same, and the next lease is clean."""
    async with kit.tools(seats=1, per_sandbox=1, warm=1) as tools:
        for turns in range(1, TURNS, 3):  # cancelled before its first turn, it was never called
            slot = await tools.acquire()
            await tools.commands(slot).write_file("f", b"x")
            await cut(tools.release(slot, reset_workspace=True), turns)
            async with tools.lease() as other:
                assert list(await tools.commands(other).list_dir()) == [], f"the workspace, cut off after {turns} turns"


async def test_cancelling_commands_spares_the_others(kit: Kit) -> None:
    """Commands and file operations cancelled at any turn: those beside them are whole, the slot goes on."""
    slot = await kit.slot()
    data = bytes(range(256)) * 400
    await slot.write_file("f", data)
    for turns in range(TURNS):
        beside = asyncio.ensure_future(slot.run("cat f", output_limit=1 << 20))
        await cut(slot.run("cat f; sleep 1000"), turns)
        await cut(slot.read_file("f"), turns)
        await cut(slot.write_file("g", data), turns)
        assert (await beside).stdout == data, f"a command beside those cancelled after {turns} turns"
    assert (await slot.run("echo fine")).text == "fine\n", "the next command"
