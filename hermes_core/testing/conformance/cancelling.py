"""Pools whose callers are cancelled, at every await: nothing is lost, and nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from hermes_core.testing.conformance.checks import check
from hermes_core.testing.conformance.expect import same, within
from hermes_core.testing.conformance.kit import Kit

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


@check("pools", limit_s=180)
async def cancelling_acquire_loses_no_slot(kit: Kit) -> None:
    """`acquire` cancelled at any turn of the event loop gives its slot back."""
    async with kit.tools(seats=2, per_sandbox=2, warm=1) as tools:
        for turns in range(TURNS):
            slot = await cut(tools.acquire(), turns)
            if slot is not None:
                await tools.release(slot)
        both = await within(60, asyncio.gather(tools.acquire(), tools.acquire()), "both slots afterwards")
        same(len({slot.slot_id for slot in both}), 2, "slots that are still there")


@check("pools", limit_s=240)
async def cancelling_a_creation_leaves_nothing(kit: Kit) -> None:
    """`acquire` cancelled while its sandbox is being made: the pool's end leaves nothing."""
    for seconds in (0.0, 0.02, 0.1, 0.3, 1.0):
        async with kit.tools(seats=1, per_sandbox=1) as tools:
            await cut(tools.acquire(), 1, seconds)
        same([info.sandbox_id for info in await kit.listed()], [], f"sandboxes after a cancellation at {seconds:g} s")


@check("pools", limit_s=180)
async def cancelling_release_completes_it(kit: Kit) -> None:
    """`release` cancelled at any moment is done all the same, and the next lease is clean."""
    async with kit.tools(seats=1, per_sandbox=1, warm=1) as tools:
        for turns in range(1, TURNS, 3):  # cancelled before its first turn, it was never called
            slot = await tools.acquire()
            await tools.commands(slot).write_file("f", b"x")
            await cut(tools.release(slot, reset_workspace=True), turns)
            async with tools.lease() as other:
                same(list(await tools.commands(other).list_dir()), [], f"the workspace, cut off after {turns} turns")


@check("pools", limit_s=180)
async def cancelling_commands_spares_the_others(kit: Kit) -> None:
    """Commands and file operations cancelled at any turn: those beside them are whole, the slot goes on."""
    slot = await kit.slot()
    data = bytes(range(256)) * 400
    await slot.write_file("f", data)
    for turns in range(TURNS):
        beside = asyncio.ensure_future(slot.run("cat f", output_limit=1 << 20))
        await cut(slot.run("cat f; sleep 1000"), turns)
        await cut(slot.read_file("f"), turns)
        await cut(slot.write_file("g", data), turns)
        same((await beside).stdout, data, f"a command beside those cancelled after {turns} turns")
    same((await slot.run("echo fine")).text, "fine\n", "the next command")


@check("pools", limit_s=180)
async def cancelling_a_start_leaves_nothing(kit: Kit) -> None:
    """A tool backend whose start is cancelled leaves no sandbox."""
    for seconds in (0.0, 0.05, 0.2, 0.6):
        block = kit.tools(seats=2, per_sandbox=1, warm=2)
        tools = await cut(block.__aenter__(), 1, seconds)
        if tools is not None:
            await tools.aclose()
        same([info.sandbox_id for info in await kit.listed()], [], f"sandboxes after a cancellation at {seconds:g} s")
