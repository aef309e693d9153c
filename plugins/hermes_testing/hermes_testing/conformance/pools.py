"""Checks of pools of real sandboxes: warm-up, replacement, the end, and cancelled creations."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from hermes_testing.conformance.kit import Kit
from hermes_testing.conformance.waiting import within


async def a_pool_is_warm_at_its_start(kit: Kit) -> None:
    """`min_sandboxes` exist when `start` returns, in the pool's counts and in the backend's list."""
    async with kit.tools(seats=4, per_sandbox=2, warm=2) as tools:
        status = tools.get_status()
        slots = 2 if kit.is_dedicated else 4
        assert (status["healthy_sandboxes"], status["available_slots"]) == (2, slots), "sandboxes and free slots"
        assert len(await kit.list_sandboxes()) == 2, "sandboxes that the backend lists"
    assert len(await kit.list_sandboxes()) == 0, "sandboxes that it lists after the end"


@pytest.mark.limit(150)
async def a_dead_sandbox_is_replaced(kit: Kit) -> None:
    """A sandbox that dies is replaced, and waiting callers are served."""
    async with kit.tools(seats=1, per_sandbox=1, warm=1, orphan_ttl_s=3.0) as tools:
        first = await tools.acquire()
        waiting = asyncio.ensure_future(tools.acquire())
        await asyncio.sleep(0)
        await kit.backend.terminate_id(first.sandbox_id)
        second = await within(90, waiting, "the slot of somebody who waited when the sandbox died")
        assert second.sandbox_id != first.sandbox_id, "it is on the dead sandbox"
        assert (await tools.commands(second).run("echo fine")).text == "fine\n", "a command in it"
        await tools.release(first)


async def closing_ends_everything(kit: Kit) -> None:
    """`aclose` ends sandboxes with running commands, and waiting callers get an error."""
    async with kit.tools(seats=1, per_sandbox=1) as tools:
        slot = await tools.acquire()
        command = asyncio.ensure_future(tools.commands(slot).run("sleep 1000"))
        waiting = asyncio.ensure_future(tools.acquire())
        await asyncio.sleep(0.3)
        await within(60, tools.aclose(), "closing the tool backend")
        assert len(await kit.list_sandboxes()) == 0, "sandboxes afterwards"
        outcomes = await asyncio.gather(command, waiting, return_exceptions=True)
        assert all(isinstance(each, Exception) for each in outcomes), f"after the end: {outcomes!r}"


@pytest.mark.limit(240)
async def cancelling_a_creation_leaves_nothing(kit: Kit) -> None:
    """If `acquire` is cancelled while its sandbox is being made, closing the pool leaves nothing."""
    for seconds in (0.0, 0.02, 0.1, 0.3, 1.0):
        async with kit.tools(seats=1, per_sandbox=1) as tools:
            await _cut(tools.acquire(), seconds)
        assert [info.sandbox_id for info in await kit.list_sandboxes()] == [], (
            f"sandboxes after a cancellation at {seconds:g} s"
        )


@pytest.mark.limit(180)
async def cancelling_a_start_leaves_nothing(kit: Kit) -> None:
    """A tool backend whose start is cancelled leaves no sandbox."""
    for seconds in (0.0, 0.05, 0.2, 0.6):
        block = kit.tools(seats=2, per_sandbox=1, warm=2)
        tools = await _cut(block.__aenter__(), seconds)
        if tools is not None:
            await tools.aclose()
        assert [info.sandbox_id for info in await kit.list_sandboxes()] == [], (
            f"sandboxes after a cancellation at {seconds:g} s"
        )


async def _cut(work: Coroutine[Any, Any, Any], seconds: float) -> Any:
    """Return the result of `work` if it ends within `seconds`; else cancel it, and return None."""
    task = asyncio.ensure_future(work)
    await asyncio.wait([task], timeout=seconds)
    task.cancel()
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()
