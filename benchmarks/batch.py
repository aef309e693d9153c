"""How long one batch of `sleep 1` in 50 slots takes, beside 50 asyncio subprocesses that sleep for a second."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from benchmarks.host import acquire_all, local_backend
from benchmarks.measure import Row, Rows, Target, alternate, bare, p50, span, timed
from hermes_core.sandbox.commands import Slot
from hermes_core.tool_backend import ToolBackend

SLOTS = 50
TARGET = Target(1.3)


async def rows(quick: bool) -> Rows:
    """The wall time of `execute_batch`, at `user` where the host grants it."""
    for level in ("user", "shared"):
        async with local_backend(level, SLOTS) as backend:
            if backend is None:
                continue
            slots = await acquire_all(backend, SLOTS)
            ours, reference = await alternate(
                timed(partial(_ours, backend, slots)), timed(_bare), 1 if quick else 5, warm_up=0 if quick else 1
            )
            for slot in slots:
                await backend.release(slot)
        case = f"{SLOTS} slots x `sleep 1`, {slots[0].isolation}"
        yield Row("batch", case, p50(ours), p50(reference), "s", TARGET, (span(ours, "s"),))
        return


async def _ours(backend: ToolBackend, slots: Sequence[Slot]) -> None:
    requests = [(slot, "bash", {"command": "sleep 1"}) for slot in slots]
    results = await backend.execute_batch(requests, timeout_s=30)
    assert all(result.success for result in results), [result.error for result in results]


async def _bare() -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(SLOTS):
            group.create_task(bare("bash", "-c", "sleep 1"))
