"""Channels that are cut, spoilt or stalled: nothing is lost, nothing runs twice, nobody else waits."""

from __future__ import annotations

import asyncio
import os

import pytest
from hermes_testing.conformance.expect import expect, same, within
from hermes_testing.conformance.kit import Kit
from hermes_testing.conformance.tamper import TamperedBackend
from hermes_testing.conformance.transport import OUTLIVES, tampered

from hermes_core.errors import InfraError

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.once]


@pytest.mark.needs(OUTLIVES)
async def test_a_cut_channel_loses_no_output(kit: Kit) -> None:
    """Output that flows while the channel is cut, again and again, arrives once and whole."""
    async with tampered(kit) as (backend, slot):
        running = asyncio.ensure_future(slot.run("seq 1 400000", output_limit=16 << 20))
        for _ in range(5):
            await asyncio.sleep(0.05)
            await backend.channels[-1].cut()
        result = await within(60, running, "a command whose channel was cut five times")
        wanted = "".join(f"{number}\n" for number in range(1, 400_001)).encode()
        expect(result.stdout == wanted, f"{len(result.stdout)} of {len(wanted)} bytes arrived, or others")


@pytest.mark.needs(OUTLIVES)
async def test_a_cut_channel_loses_no_input(kit: Kit) -> None:
    """Input that flows while the channel is cut arrives once and whole."""
    data = os.urandom(1_000_000) * 20
    async with tampered(kit) as (backend, slot):
        writing = asyncio.ensure_future(slot.write_file("f", data))
        for _ in range(3):
            await asyncio.sleep(0.05)
            await backend.channels[-1].cut()
        await within(60, writing, "writing a file while the channel is cut")
        expect((await slot.read_file("f")).data == data, "the file has other bytes than were written")


@pytest.mark.needs(OUTLIVES)
async def test_garbage_on_the_channel(kit: Kit) -> None:
    """Garbage instead of frames is a lost channel, not a wrong result: another is opened, and all goes on."""
    async with tampered(kit) as (backend, slot):
        for garbage in (os.urandom(4096), b"Warning: Permanently added the host\r\n", b"\0" * 64, b"\xff" * 64):
            backend.channels[-1].garbage = garbage
            result = await within(60, slot.run("echo fine; exit 3"), "a command with garbage on its channel")
            same((result.text, result.exit_code), ("fine\n", 3), f"its result after {garbage[:20]!r}")


async def test_a_sandbox_out_of_reach_is_given_up(kit: Kit) -> None:
    """When no channel can be opened any more, callers are told within `orphan_ttl_s`."""
    backend = TamperedBackend(kit.backend)
    async with kit.tools(seats=1, per_sandbox=1, backend=backend, orphan_ttl_s=3.0) as tools:
        slot = await tools.acquire()
        commands = tools.commands(slot)
        await commands.run("true")
        backend.unreachable = True
        for channel in list(backend.channels):
            await channel.cut()
        try:
            result = await within(60, commands.run("echo x"), "a command in a sandbox out of reach")
        except InfraError:
            return
        expect(False, f"a sandbox that can't be reached answered: {result!r}")
