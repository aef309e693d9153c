"""Programs that run in a slot until they are ended, and functions that check whether they still run."""

from __future__ import annotations

import asyncio

from hermes_core import SlotCommands
from hermes_testing.conformance.waiting import until

TICKER = "while :; do echo x >>ticks; sleep 0.05; done"
"""A program whose file grows while it runs, so that no process list is needed to see it run."""

BOMB = "bomb() { bomb | bomb & }; bomb"

PROOF = "proof that a killed slot is dead"
"""The feature that a check needs if it leaves a slot full of running programs, in words of `DirectClient.missing`."""


async def ticks(slot: SlotCommands) -> str:
    """Return the size of the ticker's file, which grows with each tick, as text; `0` if there is no file."""
    return (await slot.run("wc -c <ticks 2>/dev/null || echo 0")).text.strip()


async def wait_for_ticks(slot: SlotCommands) -> None:
    """Wait until the ticker runs."""

    async def has_begun() -> bool:
        return await ticks(slot) != "0"

    await until(has_begun, 15, "it did not begin")


async def check_stopped(slot: SlotCommands) -> None:
    """Check that the ticker does not run any more."""

    async def still() -> bool:
        before = await ticks(slot)
        await asyncio.sleep(0.3)
        return await ticks(slot) == before

    await until(still, 10, "a process that the command had started still runs")
