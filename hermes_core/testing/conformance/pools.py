"""Pools of real sandboxes: warm-up, growth, retirement, order, deadlines."""

from __future__ import annotations

import asyncio
import time

from hermes_core.errors import AcquireTimeout
from hermes_core.testing.conformance.checks import check
from hermes_core.testing.conformance.expect import expect, raises, same, until, within
from hermes_core.testing.conformance.kit import Kit


@check("pools")
async def a_pool_is_warm_at_its_start(kit: Kit) -> None:
    """`min_sandboxes` are there when `start` returns, in the pool's counts and in the backend's list."""
    async with kit.tools(seats=4, per_sandbox=2, warm=2) as tools:
        status = tools.get_status()
        slots = 2 if kit.dedicated else 4
        same((status["healthy_sandboxes"], status["available_slots"]), (2, slots), "sandboxes and free slots")
        same(len(await kit.listed()), 2, "sandboxes that the backend lists")
    same(len(await kit.listed()), 0, "sandboxes that it lists after the end")


@check("pools")
async def a_pool_grows_with_demand(kit: Kit) -> None:
    """Sandboxes are made as they are needed, and no more than `max_sandboxes`."""
    async with kit.tools(seats=4, per_sandbox=2) as tools:
        same(len(await kit.listed()), 0, "sandboxes before anybody asks")
        slots = await asyncio.gather(*(tools.acquire() for _ in range(4)))
        same(len({slot.slot_id for slot in slots}), 4, "different slots of four")
        most = 4 if kit.dedicated else 2
        same(len(await kit.listed()), most, "sandboxes for four slots")
        await raises(AcquireTimeout, tools.acquire(timeout_s=0.5), "a fifth slot of four")
        same(len(await kit.listed()), most, "sandboxes afterwards")


@check("pools")
async def a_pool_shrinks_when_idle(kit: Kit) -> None:
    """Sandboxes above the minimum are ended when idle; a busy one is not."""
    async with kit.tools(seats=4, per_sandbox=2, idle_timeout=0.5) as tools:
        slots = await asyncio.gather(*(tools.acquire() for _ in range(3)))
        kept = slots[0]
        for slot in slots[1:]:
            await tools.release(slot, reset_workspace=True)

        async def one_left() -> bool:
            return [info.sandbox_id for info in await kit.listed()] == [kept.sandbox_id]

        await until(one_left, 60, "idle sandboxes were not ended")
        same((await tools.commands(kept).run("echo fine")).text, "fine\n", "a command in the busy one")


@check("pools", limit_s=180)
async def first_come_first_served(kit: Kit) -> None:
    """Under tenfold demand slots are given in the order of asking."""
    order: list[int] = []
    async with kit.tools(seats=2, per_sandbox=2, warm=1) as tools:

        async def turn(number: int) -> None:
            async with tools.lease(timeout_s=120) as slot:
                order.append(number)
                expect((await tools.commands(slot).run("true")).ok, "`true` failed")

        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(turn(number))
                await asyncio.sleep(0)
    # The first two are opened for the first time, which takes one of them a moment longer.
    same(order[2:], sorted(order[2:]), "the order in which twenty who wanted two slots were served")
    same(sorted(order), list(range(20)), "who was served")


@check("pools")
async def a_deadline_is_kept(kit: Kit) -> None:
    """`acquire` gives up at its deadline, and says how things stand; whoever comes next is not held up."""
    async with kit.tools(seats=1, per_sandbox=1, warm=1) as tools:
        slot = await tools.acquire()
        began = time.monotonic()
        error = await raises(AcquireTimeout, tools.acquire(timeout_s=0.5), "a second slot of one")
        expect(0.4 < time.monotonic() - began < 10, f"it gave up after {time.monotonic() - began:.1f} s, not 0.5")
        expect("0 of 1 slots free" in str(error), f"the error does not say how things stand: {error}")
        await tools.release(slot, reset_workspace=True)
        await within(60, tools.acquire(), "the next `acquire`")


@check("pools")
async def groups_stay_together(kit: Kit) -> None:
    """Slots of one group are on one sandbox where they fit."""
    if kit.dedicated:
        raise kit.not_applicable("at level dedicated each sandbox has one slot")
    async with kit.tools(seats=8, per_sandbox=4, warm=2) as tools:
        for name in "ab":
            slots = [await tools.acquire(group=name) for _ in range(3)]
            same(len({slot.sandbox_id for slot in slots}), 1, f"sandboxes of group {name}")


@check("pools")
async def the_reserve_is_for_verification(kit: Kit) -> None:
    """Agents leave the reserved slots alone; verification gets one while agents hold all the others."""
    async with kit.tools(seats=2, per_sandbox=2, warm=1, reserve_slots=1) as tools:
        await tools.acquire()
        await raises(AcquireTimeout, tools.acquire(timeout_s=0.3), "a second agent's slot, where one is reserved")
        slot = await within(60, tools.acquire(verification=True), "a slot for verification")
        same((await tools.commands(slot).run("echo fine")).text, "fine\n", "a command in it")


@check("pools", limit_s=150)
async def a_dead_sandbox_is_replaced(kit: Kit) -> None:
    """A sandbox that dies is replaced, and those who wait are served."""
    async with kit.tools(seats=1, per_sandbox=1, warm=1, orphan_ttl_s=3.0) as tools:
        first = await tools.acquire()
        waiting = asyncio.ensure_future(tools.acquire())
        await asyncio.sleep(0)
        await kit.backend.terminate_id(first.sandbox_id)
        second = await within(90, waiting, "the slot of somebody who waited when the sandbox died")
        expect(second.sandbox_id != first.sandbox_id, "it is on the dead sandbox")
        same((await tools.commands(second).run("echo fine")).text, "fine\n", "a command in it")
        await tools.release(first)


@check("pools")
async def ids_are_never_used_again(kit: Kit) -> None:
    """No two leases have the same slot id and generation, over sandboxes and time."""
    seen = set()
    for _ in range(2):
        async with kit.tools(seats=2, per_sandbox=1) as tools:
            for _ in range(2):
                slots = await asyncio.gather(tools.acquire(), tools.acquire())
                seen |= {(slot.slot_id, slot.generation) for slot in slots}
                for slot in slots:
                    await tools.release(slot, reset_workspace=True)
    same(len(seen), 8, "different leases of eight")


@check("pools")
async def closing_ends_everything(kit: Kit) -> None:
    """`aclose` ends sandboxes with commands under way, and whoever waits is told."""
    async with kit.tools(seats=1, per_sandbox=1) as tools:
        slot = await tools.acquire()
        command = asyncio.ensure_future(tools.commands(slot).run("sleep 1000"))
        waiting = asyncio.ensure_future(tools.acquire())
        await asyncio.sleep(0.3)
        await within(60, tools.aclose(), "closing the tool backend")
        same(len(await kit.listed()), 0, "sandboxes afterwards")
        outcomes = await asyncio.gather(command, waiting, return_exceptions=True)
        expect(all(isinstance(each, Exception) for each in outcomes), f"after the end: {outcomes!r}")
