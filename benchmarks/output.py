"""What 100 MB of output cost: memory of the driver and of the guest, and stalls of the driver's event loop.

Each measurement is made in a driver process of its own (`python -m benchmarks.output CASE LEVEL`), as memory that one
left behind would hide what the next one needs.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from benchmarks.host import guest_processes, local_backend
from benchmarks.measure import MB, Memory, Row, Rows, Target, alternate, p50, watch_stalls
from hermes_core.sandbox.commands import SlotCommands

SIZE = 100 * MB
PART = 4 << 20
MEMORY = Target(40.0)
STALL = Target(50.0)
PRINT = f"head -c {SIZE} /dev/zero"

Figures = dict[str, float]


async def rows(quick: bool) -> Rows:
    """Growth, stalls and speed of three ways in which much data leaves a slot."""
    level = await _level()
    rounds = 1 if quick else 5
    for case, ours, reference in (
        ("captured (`run`)", "run", "communicate"),
        (f"`read_file` in parts of {PART >> 20} MiB", "read", "pipe"),
        ("`tar_out` in one piece", "tar", "communicate"),
    ):
        taken = await alternate(
            partial(_in_a_process, ours, level),
            partial(_in_a_process, reference, level),
            rounds,
            warm_up=0,
        )

        clock = f"by the clock, other load included: {p50(figures['elapsed_ms'] for figures in taken[0]):.1f} ms"
        own = ours == "tar"
        for what, key, unit, target, note in (
            ("driver's growth", "driver_mb", "MB", None if own else MEMORY, "the result itself" if own else ""),
            ("guest's growth", "guest_mb", "MB", MEMORY, ""),
            ("longest loop stall", "stall_ms", "ms", STALL, clock),
            ("speed", "mb_s", "MB/s", None, ""),
        ):
            mine, theirs = ([figures[key] for figures in side if key in figures] for side in taken)
            reference_figure = p50(theirs) if theirs else None
            notes = (note,) if note else ()
            yield Row("output", f"100 MB {case}: {what}", p50(mine), reference_figure, unit, target, notes)


async def _level() -> str:
    async with local_backend("user", 1) as backend:
        return "shared" if backend is None else "user"


async def _in_a_process(case: str, level: str) -> Figures:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.output", case, level, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, f"{case} ended with status {process.returncode}"
    figures: Figures = json.loads(output)
    return figures


# --- in the process ---------------------------------------------------------------------------------------------------


async def _measure(work: Callable[[], Awaitable[int]], guest: list[int]) -> Figures:
    """What moving `SIZE` bytes costs; `work` gives how many it moved."""
    driver, inside = Memory([os.getpid()]), Memory(guest)
    began = time.perf_counter()
    async with watch_stalls() as stalls:
        moved = await work()
        taken = time.perf_counter() - began
    assert moved >= SIZE, f"{moved} bytes instead of {SIZE}"
    figures = {
        "driver_mb": driver.growth() / MB,
        "stall_ms": stalls.longest_s * 1e3,
        "elapsed_ms": stalls.elapsed_s * 1e3,
        "mb_s": SIZE / MB / taken,
    }
    return {**figures, "guest_mb": inside.growth() / MB} if guest else figures


async def _ours(case: str, level: str) -> Figures:
    async with local_backend(level, 1) as backend:
        assert backend is not None
        async with backend.lease() as slot:
            commands = backend.commands(slot)
            await commands.run(f"mkdir files && {PRINT} >files/zeros; true", timeout_s=60)
            await commands.read_file("files/zeros", limit=PART)
            work = {"run": _run, "read": _read, "tar": _tar}[case]
            return await _measure(lambda: work(commands), guest_processes(slot))


async def _run(commands: SlotCommands) -> int:
    return (await commands.run(PRINT, timeout_s=60)).stdout_bytes


async def _read(commands: SlotCommands) -> int:
    offset = 0
    while offset < SIZE:
        part = await commands.read_file("files/zeros", offset=offset, limit=PART)
        offset += len(part.data)
    return offset


async def _tar(commands: SlotCommands) -> int:
    return len(await commands.tar_out("files", max_bytes=2 * SIZE))


async def _communicate() -> int:
    """What most drivers do: all of the output in memory."""
    process = await asyncio.create_subprocess_exec("bash", "-c", PRINT, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return len(output)


async def _pipe() -> int:
    """A file through a pipe, in pieces that are not kept."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "zeros"
        with path.open("wb") as file:
            file.truncate(SIZE)
        process = await asyncio.create_subprocess_exec("cat", str(path), stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        total = 0
        while data := await process.stdout.read(1 << 18):
            total += len(data)
        await process.wait()
    return total


def main(case: str, level: str) -> None:
    """Measure one case and print its figures."""
    references = {"communicate": _communicate, "pipe": _pipe}
    measured = _measure(references[case], []) if case in references else _ours(case, level)
    print(json.dumps(asyncio.run(measured)))


if __name__ == "__main__":
    main(*sys.argv[1:])
