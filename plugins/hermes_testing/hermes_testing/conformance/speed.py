"""Checks of speed: figures, and limits as ratios on one machine at one time (never as absolute times)."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

import pytest

from hermes_core import Sandbox
from hermes_testing.conformance.kit import Kit, communicate

GUEST = "background processes that outlive"
"""A feature that a sandbox without Python lacks. Without a guest, a command needs two channels."""

_TRIES = 3
"""Maximum number of attempts at a comparison, because other programs may use the machine during one attempt."""


async def p50(work: Callable[[], Awaitable[object]], times: int) -> float:
    """Run `work` `times` times, after one run that does not count, and return the median duration in seconds."""
    await work()
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        await work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


async def less(measure: Callable[[], Awaitable[tuple[float, float]]], times: float, otherwise: str) -> None:
    """Check that the first of the two figures is less than `times` the second. Measure again if it is not.

    Raises:
        pytest.fail.Exception: it was not less in any attempt; the message is `otherwise`, formatted with the last
            figures.
    """
    for _ in range(_TRIES):
        figures = await measure()
        if figures[0] < times * figures[1]:
            return
    pytest.fail(otherwise.format(*figures))


async def _open_channel(sandbox: Sandbox) -> None:
    await communicate(await sandbox.open(["true"]))


async def a_command_is_quick(kit: Kit) -> None:
    """`true` in a slot takes no longer than on a channel of its own."""
    slot = await kit.slot()

    async def measure() -> tuple[float, float]:
        ours = await p50(lambda: slot.run("true"), 50)
        kit.figure("true_p50_ms", ours * 1000)
        if kit.direct:
            lacks = kit.rig.missing[0]
            pytest.skip(f"a sandbox without a guest lacks: {lacks}; a command is two channels")
        async with kit.sandbox() as sandbox:
            return ours, await p50(lambda: _open_channel(sandbox), 10)

    await less(measure, 1.2, "`true` takes {:.4f} s, a channel of its own {:.4f} s")


async def commands_scale(kit: Kit) -> None:
    """Running 32 at a time, as many commands per second complete as one after another, or more."""
    slot = await kit.slot()
    turns = 10 if not kit.direct else 1

    async def per_second(workers: int, times: int) -> float:
        async def worker() -> None:
            for _ in range(times):
                await slot.run("true")

        began = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(workers)))
        return workers * times / (time.perf_counter() - began)

    async def measure() -> tuple[float, float]:
        alone, together = await per_second(1, 50), await per_second(32, turns)
        kit.figure("commands_per_s_at_32", together)
        return alone, together

    await less(measure, 1.25, "{:.0f} commands a second one after another, {:.0f} if 32 run at a time")


@pytest.mark.limit(180)
async def a_lease_is_quicker_than_a_sandbox(kit: Kit) -> None:
    """Acquire, reset and release take less time than a new sandbox."""

    async def measure() -> tuple[float, float]:
        began = time.perf_counter()
        async with kit.tools(seats=1, per_sandbox=1) as tools:
            async with tools.lease() as slot:
                await tools.commands(slot).run("true")
                ready = time.perf_counter() - began
            kit.figure("sandbox_ready_s", ready)

            async def lease() -> None:
                async with tools.lease() as slot:
                    await tools.commands(slot).write_file("f", b"x")

            ours = await p50(lease, 15)
        kit.figure("lease_p50_ms", ours * 1000)
        if kit.direct and kit.is_dedicated:
            pytest.skip("without Python each lease of a dedicated sandbox takes a new one")
        return ours, ready

    await less(measure, 1, "a lease takes {:.3f} s, a new sandbox {:.3f} s")


async def output_flows(kit: Kit) -> None:
    """10 MB of output take at most ten times as long as over a bare channel."""
    slot = await kit.slot()

    async def ours() -> None:
        result = await slot.run("head -c 10000000 /dev/zero", output_limit=16 << 20)
        assert len(result.stdout) == 10_000_000, f"{len(result.stdout)} of 10,000,000 bytes arrived"

    async def measure() -> tuple[float, float]:
        seconds = await p50(ours, 5)
        kit.figure("output_mb_per_s", 10 / seconds)
        async with kit.sandbox() as sandbox:

            async def bare() -> None:
                await communicate(await sandbox.open(["head", "-c", "10000000", "/dev/zero"]))

            return seconds, await p50(bare, 5)

    await less(measure, 10, "10 MB take {:.2f} s, over a bare channel {:.2f} s")


@pytest.mark.needs(GUEST)
async def a_neighbour_is_not_slowed_down(kit: Kit) -> None:
    """While 200 MB flow out of one slot, a neighbour's `true` takes at most thirty times as long."""
    slot, other = await kit.neighbours()

    async def measure() -> tuple[float, float]:
        alone = await p50(lambda: other.run("true"), 20)
        flood = asyncio.ensure_future(slot.run("head -c 200000000 /dev/zero", output_limit=8 << 20))
        await asyncio.sleep(0.1)
        beside = await p50(lambda: other.run("true"), 20)
        flood.cancel()
        await asyncio.wait([flood])
        return beside, alone

    await less(measure, 30, "`true` takes {:.4f} s beside the flood, {:.4f} s alone")
