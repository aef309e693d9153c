"""How long a `poll` takes while 500 background processes run in 50 slots, and what their driver needs of memory."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial

from benchmarks.host import LEVELS, NOT_GRANTED, acquire_all, local_backend
from benchmarks.measure import MB, Row, Rows, Target, bare, p50, percentile, rss
from hermes_core.sandbox.commands import SlotCommands

SLOTS = 50
EACH = 10
TALK = "while :; do echo a line of some length, now and then; sleep 5; done"
POLL, MEMORY = Target(20.0), Target(200.0)


async def rows(quick: bool) -> Rows:
    """p95 of one `poll`, with one under way for each slot, and the driver's resident memory; beside `kill -0`."""
    rounds = 5 if quick else 40
    level = next(level for level in ("user", "namespace", "shared") if level in LEVELS)
    case = f"{SLOTS * EACH} processes in {SLOTS} slots, {level}"
    async with local_backend(level, SLOTS) as backend:
        if backend is None:
            yield Row("processes", f"poll p95, {case}", None, None, "ms", POLL, (NOT_GRANTED,))
            return
        slots = [backend.commands(slot) for slot in await acquire_all(backend, SLOTS)]
        ids = await asyncio.gather(*(_start(slot) for slot in slots))
        taken: list[float] = []
        for _ in range(rounds):
            await asyncio.gather(*(_polled(slot, known, taken) for slot, known in zip(slots, ids, strict=True)))
        alone = [await _timed(partial(bare, "bash", "-c", f"kill -0 {os.getpid()}")) for _ in range(20)]
        note = f"p50 {p50(taken) * 1000:.2f} ms; {SLOTS} at a time, {len(taken)} in all; beside `bash -c 'kill -0 PID'`"
        yield Row(
            "processes", f"poll p95, {case}", percentile(taken, 0.95) * 1000, p50(alone) * 1000, "ms", POLL, (note,)
        )
        yield Row("processes", f"driver's memory, {case}", rss(os.getpid()) / MB, None, "MB", MEMORY)
        for slot in slots:
            await asyncio.gather(*(slot.kill(process, grace_s=0) for process in ids[slots.index(slot)]))


async def _start(slot: SlotCommands) -> list[str]:
    return [(await slot.start(TALK)).process_id for _ in range(EACH)]


async def _polled(slot: SlotCommands, known: list[str], taken: list[float]) -> None:
    for process in known:
        taken.append(await _timed(partial(slot.poll, process)))


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began
