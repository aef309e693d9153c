"""Checks of channels that are cut, corrupted or stalled: nothing is lost, nothing runs twice, nobody else waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from hermes_core import SlotCommands
from hermes_testing.conformance.kit import Kit
from hermes_testing.conformance.tamper import TamperedBackend
from hermes_testing.conformance.waiting import within

OUTLIVES = "background processes that outlive"
"""A feature that a sandbox without Python lacks, because a command there depends on its channel."""


@asynccontextmanager
async def open_tampered_slot(kit: Kit) -> AsyncIterator[tuple[TamperedBackend, SlotCommands]]:
    """Return a slot behind channels that can be tampered with."""
    backend = TamperedBackend(kit.backend)
    async with kit.tools(seats=1, per_sandbox=1, backend=backend) as tools:
        slot = await tools.acquire()
        yield backend, tools.commands(slot)


@pytest.mark.needs(OUTLIVES)
async def a_cut_channel_loses_no_command(kit: Kit) -> None:
    """A command continues while its channel is cut, runs once, and its result arrives."""
    async with open_tampered_slot(kit) as (backend, slot):
        running = asyncio.ensure_future(slot.run("echo x >>ran; sleep 1; echo done; exit 7"))
        await asyncio.sleep(0.4)
        await backend.channels[-1].cut()
        result = await within(60, running, "a command whose channel was cut")
        assert (result.exit_code, result.text) == (7, "done\n"), "its result"
        assert (await slot.run("wc -l <ran")).text.strip() == "1", "how often it ran"


@pytest.mark.needs(OUTLIVES)
@pytest.mark.limit(120)
async def a_stalled_reader(kit: Kit) -> None:
    """While nobody reads the channel, output waits in the sandbox; later it is all there."""
    async with open_tampered_slot(kit) as (backend, slot):
        channel = backend.channels[-1]
        running = asyncio.ensure_future(slot.run("seq 1 2000000; echo x >written", output_limit=32 << 20))
        await asyncio.sleep(0.1)
        channel.flowing.clear()
        await asyncio.sleep(2)
        channel.flowing.set()
        result = await within(90, running, "a command whose reader had stalled for 2 s")
        assert (result.exit_code, result.stdout_bytes, result.truncated) == (0, 14_888_896, False), "its result"
        assert result.stdout.endswith(b"\n1999999\n2000000\n"), "the end of its output is not what was written"


async def a_slow_command_holds_nobody_up(kit: Kit) -> None:
    """While 100 MB flow through one command, others in the slot are answered."""
    slot = await kit.slot()
    flood = asyncio.ensure_future(slot.run("head -c 100000000 /dev/zero", output_limit=1 << 20))
    for _ in range(20):
        assert (await within(20, slot.run("echo fine"), "a command beside the flood")).text == "fine\n", "its output"
    assert (await within(80, flood, "100 MB of output")).stdout_bytes == 100_000_000, "bytes counted"
