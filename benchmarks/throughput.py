"""How many commands a second 32 slots run, each one after the other, beside 32 loops of asyncio `bash -c true`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from benchmarks.host import LEVELS, NOT_GRANTED, acquire_all, local_backend, shell
from benchmarks.measure import Row, Rows, Target, alternate, bare, p50, span

SLOTS = 32
TARGET = Target(0.7, of_reference=True, at_least=True)


async def rows(quick: bool) -> Rows:
    """Commands a second at each level; the target is for `user` as root."""
    each = 10 if quick else 40
    for level in LEVELS:
        case = f"{SLOTS} slots, `true` over and over, {level}"
        target = TARGET if level == "user" and os.geteuid() == 0 else None
        async with local_backend(level, SLOTS) as backend:
            if backend is None:
                yield Row("throughput", case, None, None, "/s", target, (NOT_GRANTED,))
                continue
            slots = await acquire_all(backend, SLOTS)
            ours, reference = await alternate(
                partial(_rate, [partial(shell, backend, slot, "true") for slot in slots], each),
                partial(_rate, [partial(bare, "bash", "-c", "true")] * SLOTS, each),
                2 if quick else 7,
            )
            for slot in slots:
                await backend.release(slot)
        yield Row("throughput", case, p50(ours), p50(reference), "/s", target, (span(ours, "/s"),))


async def _rate(works: Sequence[Callable[[], Awaitable[None]]], each: int) -> float:
    """How often a second they are done, all of them at the same time, each `each` times."""

    async def loop(work: Callable[[], Awaitable[None]]) -> None:
        for _ in range(each):
            await work()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(loop(work))
    return len(works) * each / (time.perf_counter() - began)
