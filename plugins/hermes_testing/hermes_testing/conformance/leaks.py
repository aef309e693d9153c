"""Checks for leaks: afterwards, no more descriptors, threads, processes and sandboxes exist than before."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from hermes_testing.conformance.kit import Kit

SETTLE_S = 10.0
"""Seconds that the driver may take to release what it has used."""

SPARE = 3
"""Number of things that may come and go by themselves, such as an event loop's worker thread or an SDK's connection."""


@dataclass(frozen=True)
class Holdings:
    """The numbers of descriptors, threads and child processes that this process holds."""

    descriptors: Counter[str]
    threads: int
    children: int

    @classmethod
    def take(cls) -> Holdings:
        """Return the current numbers. Descriptors are counted by kind, because a descriptor's own number changes."""
        gc.collect()
        kinds: Counter[str] = Counter()
        for entry in Path("/proc/self/fd").iterdir():
            try:
                kinds[str(entry.readlink()).partition(":")[0]] += 1
            except OSError:
                continue  # the descriptor of the listing itself
        children = Path("/proc/self/task").glob("*/children")
        threads = sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())
        return cls(kinds, threads, sum(len(path.read_text().split()) for path in children))

    def beyond(self, before: Holdings) -> str:
        """Return the numbers that have grown by more than `SPARE`, in words; empty if there are none."""
        grown = []
        for what, now, then in (
            ("descriptors", self.descriptors.total(), before.descriptors.total()),
            ("threads", self.threads, before.threads),
            ("child processes", self.children, before.children),
        ):
            if now > then + SPARE:
                more = f" ({dict(self.descriptors - before.descriptors)})" if what == "descriptors" else ""
                grown.append(f"{now} {what}, {then} before{more}")
        return "; ".join(grown)


async def census() -> Holdings:
    """Return the holdings of this process, collected outside the event loop's thread."""
    if sys.platform != "linux":
        pytest.skip("what the driver holds can only be counted on Linux")
    return await asyncio.to_thread(Holdings.take)


async def nothing_more(before: Holdings, what: str) -> None:
    """Check that the driver soon holds no more than before."""
    for _ in range(int(SETTLE_S / 0.2)):
        grown = (await census()).beyond(before)
        if not grown:
            return
        await asyncio.sleep(0.2)
    pytest.fail(f"after {what} the driver holds more than before: {grown}")


@pytest.mark.limit(300)
async def a_thousand_commands(kit: Kit) -> None:
    """1,000 commands leave no descriptor, thread or process, in the driver or in the slot."""
    slot = await kit.slot()
    count = "ls -d /proc/[0-9]* | wc -l"
    turns, size = (20, 50) if not kit.direct else (5, 20)

    async def turn() -> None:
        results = await asyncio.gather(*(slot.run("true") for _ in range(size)))
        assert all(each.ok for each in results), "`true` failed"

    await turn()  # an SDK keeps as many connections as it needed at the same time
    inside, before = int((await slot.run(count)).text), await census()
    for _ in range(turns):
        await turn()
    await nothing_more(before, f"{turns * size} commands")
    for _ in range(50):
        now = int((await slot.run(count)).text)
        if now <= inside + SPARE:
            return
        await asyncio.sleep(0.2)
    pytest.fail(f"the slot sees {now} processes after {turns * size} commands, {inside} before")


@pytest.mark.limit(300)
async def a_hundred_leases(kit: Kit) -> None:
    """100 leases leave no sandbox, descriptor, thread or process."""
    turns = 100 if not kit.direct else 10
    async with kit.tools(seats=4, per_sandbox=4, warm=1) as tools:
        async with tools.lease() as slot:
            await tools.commands(slot).run("true")
        before = await census()
        here = len(await kit.list_sandboxes())

        async def turn() -> None:
            async with tools.lease() as slot:
                await tools.commands(slot).run("echo x >f; sleep 1000 & true")

        for _ in range(turns // 4):
            await asyncio.gather(*(turn() for _ in range(4)))
        assert len(await kit.list_sandboxes()) <= max(here, 4), (
            f"{len(await kit.list_sandboxes())} sandboxes, {here} before"
        )
        if not kit.is_dedicated:
            await nothing_more(before, f"{turns} leases")
    assert await kit.list_sandboxes() == [], "sandboxes after the end"


@pytest.mark.limit(300)
async def sandboxes_come_and_go(kit: Kit) -> None:
    """Eight sandboxes with commands that still ran leave nothing in the driver, and nothing with the backend."""

    async def one() -> None:
        async with kit.tools(seats=1, per_sandbox=1) as tools:
            slot = await tools.acquire()
            await tools.commands(slot).run("sleep 1000 & true")

    await one()
    before = await census()
    for _ in range(4):
        await asyncio.gather(one(), one())
    assert [info.sandbox_id for info in await kit.list_sandboxes()] == [], "sandboxes afterwards"
    await nothing_more(before, "eight sandboxes")


@pytest.mark.limit(300)
async def a_hundred_channels(kit: Kit) -> None:
    """Of 100 channels, closed while their programs ran, the second half leaves nothing in the driver."""
    async with kit.sandbox() as sandbox:

        async def open_and_close() -> None:
            channels = await asyncio.gather(*(sandbox.open(["sh", "-c", "cat; exit 0"]) for _ in range(5)))
            await asyncio.gather(*(channel.aclose() for channel in channels))

        for _ in range(10):  # a backend may keep a thread for each call that it ever had at the same time
            await open_and_close()
        before = await census()
        for _ in range(10):
            await open_and_close()
        await nothing_more(before, "50 channels")
