"""What every benchmark uses: figures with their targets, taking turns, percentiles, memory and event-loop stalls."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

T = TypeVar("T")
MB = 1_000_000


@dataclass(frozen=True)
class Target:
    """What a figure has to be: at most (or at least) `limit`, in its own unit or as a multiple of the reference."""

    limit: float
    of_reference: bool = False
    at_least: bool = False

    def met(self, ours: float, reference: float | None) -> bool:
        """Whether this figure of ours will do."""
        if self.of_reference:
            assert reference is not None
            ours = ours / reference
        return ours >= self.limit if self.at_least else ours <= self.limit

    def text(self, unit: str) -> str:
        """As in a table: `<= 2x`, `<= 10 ms`."""
        sign = ">=" if self.at_least else "<="
        return f"{sign} {self.limit:.3g}{'x' if self.of_reference else ' ' + unit}"


@dataclass(frozen=True)
class Row:
    """One figure: ours, the reference's, and what was asked for."""

    benchmark: str
    case: str
    ours: float | None
    """None where this host does not grant what the case needs."""
    reference: float | None
    """None where there is nothing to compare with."""
    unit: str
    target: Target | None = None
    """None where nothing was asked for: the figure is for information."""
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Ours as a multiple of the reference."""
        return self.ours / self.reference if self.ours is not None and self.reference else None

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None where there is none."""
        if self.target is None or self.ours is None:
            return None
        return self.target.met(self.ours, self.reference)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        target = self.target.text(self.unit) if self.target else None
        return {**asdict(self), "target": target, "ratio": self.ratio, "met": self.met}


Rows = AsyncIterator[Row]


async def alternate(
    ours: Callable[[], Awaitable[T]], reference: Callable[[], Awaitable[T]], rounds: int, *, warm_up: int = 1
) -> tuple[list[T], list[T]]:
    """Do both in turns, A B A B …, so that whatever else the machine does meets both; the outcomes of each."""
    taken = await take_turns((ours, reference), rounds, warm_up=warm_up)
    return taken[0], taken[1]


async def take_turns(
    works: Sequence[Callable[[], Awaitable[T]]], rounds: int, *, warm_up: int = 1
) -> Sequence[list[T]]:
    """Do all of them in turns, A B C A B C …; the outcomes of each, without those of the first `warm_up` rounds."""
    taken: list[list[T]] = [[] for _ in works]
    for number in range(warm_up + rounds):
        for outcomes, work in zip(taken, works, strict=True):
            outcome = await work()
            if number >= warm_up:
                outcomes.append(outcome)
    return taken


def timed(work: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[float]]:
    """The same work, giving the seconds that it took."""

    async def measured() -> float:
        began = time.perf_counter()
        await work()
        return time.perf_counter() - began

    return measured


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def p50(values: Iterable[float]) -> float:
    """The median."""
    return percentile(values, 0.50)


def span(values: Sequence[float], unit: str, factor: float = 1.0) -> str:
    """The range of repeated measurements, for a note."""
    return f"{min(values) * factor:.3g} to {max(values) * factor:.3g} {unit} in {len(values)} rounds"


# --- subprocesses: the reference of most figures ----------------------------------------------------------------------


async def bare(*command: str, captured: bool = True) -> None:
    """A command by asyncio's subprocess, its output captured as ours is, or thrown away."""
    where = asyncio.subprocess.PIPE if captured else asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=where, stderr=where
    )
    await process.communicate()
    assert process.returncode == 0, f"{command} ended with status {process.returncode}"


# --- memory -----------------------------------------------------------------------------------------------------------


class Memory:
    """How far the resident memory of some processes grows above what it is now, at its peak.

    The kernel keeps the peak (`VmHWM`), and writing 5 to `clear_refs` makes it start anew.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._before: dict[int, int] = {}
        for pid in pids:
            with open(f"/proc/{pid}/clear_refs", "w") as file:
                file.write("5")
            self._before[pid] = _status(pid, "VmRSS")

    def growth(self) -> int:
        """Bytes, of all of them together; processes that have ended meanwhile are left out."""
        total = 0
        for pid, before in self._before.items():
            try:
                total += max(0, _status(pid, "VmHWM") - before)
            except OSError:
                continue
        return total


def rss(pid: int) -> int:
    """The resident memory of a process now, in bytes."""
    return _status(pid, "VmRSS")


def peak(pid: int) -> int:
    """The most that its resident memory has been, in bytes."""
    return _status(pid, "VmHWM")


def _status(pid: int, field: str) -> int:
    with open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


# --- the event loop ---------------------------------------------------------------------------------------------------


class Stalls:
    """The longest time in which the event loop could not run anything.

    Attributes:
        longest_s: what the loop's own thread is to blame for: its processor time, or time in which it was blocked.
        elapsed_s: by the clock, time in which the machine was busy with something else included.
        lags_s: what the loop's own thread is to blame for, each time that it was looked at.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.elapsed_s = 0.0
        self.lags_s: list[float] = []


@asynccontextmanager
async def watch_stalls(interval_s: float = 0.002) -> AsyncIterator[Stalls]:
    """Watch the running loop. A thread that only sleeps is the witness of how late the machine itself is."""
    found = Stalls()
    ended = threading.Event()
    late_s = 0.0

    def witness() -> None:
        nonlocal late_s
        while not ended.is_set():
            began = time.monotonic()
            time.sleep(interval_s)
            late_s += max(0.0, time.monotonic() - began - interval_s)

    async def watch() -> None:
        while True:
            began, worked, late_before = time.monotonic(), time.thread_time(), late_s
            await asyncio.sleep(interval_s)
            over = time.monotonic() - began - interval_s
            own = max(min(over, time.thread_time() - worked), over - (late_s - late_before))
            found.lags_s.append(own)
            found.longest_s = max(found.longest_s, own)
            found.elapsed_s = max(found.elapsed_s, over)

    thread = threading.Thread(target=witness, daemon=True)
    thread.start()
    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch())
        try:
            yield found
            await asyncio.sleep(2 * interval_s)
        finally:
            watcher.cancel()
            ended.set()
            thread.join()
