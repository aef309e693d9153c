"""Notices when a run stalls, because its event loop is blocked or no rollout ends. Writes the stacks of tasks and
threads to a file.

The watch runs in a thread, because a blocked event loop can't notice that it is blocked.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from hermes_core.aio import alongside
from hermes_core.records.run_files import open_to_write
from hermes_core.rollout.running import RunningRollouts
from hermes_core.workers import begin_thread

log = logging.getLogger(__name__)

STALLS = "stalls.txt"
"""The file with the stacks, in the folder of a run."""

LAG_S = 10.0
"""Maximum seconds for which the event loop may be blocked."""

LOOK_S = 1.0
"""Seconds between two checks."""

MOST_STALLS = 10
"""Maximum number of stalls of one run that are written to the file."""

MOST_FRAMES, MOST_NAMES = 40, 5
"""Maximum number of frames that are written for a task, and of names written for tasks with the same stack."""


@asynccontextmanager
async def stalls_noticed(running: RunningRollouts, path: Path, timeout_s: float | None) -> AsyncIterator[None]:
    """Notice stalls while the block runs. Each stall is written to the file once, and to the log in one line.

    Args:
        running: the rollouts of the run.
        path: the file; made at the first stall.
        timeout_s: seconds without the end of a rollout, although some run, that count as a stall. None turns the watch
            off.
    """
    if timeout_s is None:
        yield
        return
    watch = _Watch(asyncio.get_running_loop(), running, path, timeout_s)
    begin_thread(watch.look, "stall watch")
    try:
        async with alongside(watch.beat()):
            yield
    finally:
        watch.over.set()


class _Watch:
    """Compares the times of the loop and of the rollouts with the clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop, running: RunningRollouts, path: Path, timeout_s: float) -> None:
        self.over = threading.Event()
        self._loop = loop
        self._running = running
        self._path = path
        self._timeout_s = timeout_s
        self._alive = time.monotonic()
        """The time when the event loop last ran."""
        self._told: set[float] = set()
        """The starting times of the stalls that were written to the file."""

    async def beat(self) -> None:
        """Note, again and again, that the event loop runs."""
        while True:
            self._alive = time.monotonic()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Check at intervals, in a thread, until the run is over."""
        began = time.monotonic()
        while not self.over.wait(LOOK_S) and len(self._told) < MOST_STALLS:
            now = time.monotonic()
            if now - began > LAG_S / 2:  # the thread was late, too: the process was stopped, or the host is busy
                self._alive = now
            began = now
            alive, ended = self._alive, self._running.ended
            if now - alive > LAG_S:
                self._tell(alive, f"the event loop has been blocked for {now - alive:.0f} s")
            elif now - ended > self._timeout_s and (count := len(self._running)):
                self._tell(ended, f"none of {count} rollouts has ended for {now - ended:.0f} s")

    def _tell(self, since: float, what: str) -> None:
        if since in self._told:
            return
        self._told.add(since)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(open_to_write(self._path, os.O_APPEND), "a", encoding="utf-8") as file:
                _write(file, f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {what}", asyncio.all_tasks(self._loop))
        except Exception as error:  # the run goes on
            log.warning("%s; the stacks could not be written to %s: %s", what, self._path, error)
        else:
            log.warning("%s; the stacks of all tasks and threads are in %s", what, self._path)


def _write(file: TextIO, headline: str, tasks: Iterable[asyncio.Task[Any]]) -> None:
    print(f"=== {headline}\n\n--- threads", file=file, flush=True)
    faulthandler.dump_traceback(file, all_threads=True)
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for task in tasks:
        alike[_stack(task)].append(task.get_name())
    print("\n--- tasks", file=file)
    for stack, names in sorted(alike.items(), key=lambda each: -len(each[1])):
        shown = ", ".join(sorted(names)[:MOST_NAMES])
        print(f"\n{len(names)} ({shown}{', …' if len(names) > MOST_NAMES else ''})\n{stack}", file=file)


def _stack(task: asyncio.Task[Any]) -> str:
    """Return a task's stack as text, outermost function first, as in a traceback."""
    frames = ((frame, frame.f_lineno) for frame in islice(_frames(task.get_coro()), MOST_FRAMES))
    return "".join(traceback.StackSummary.extract(frames, capture_locals=False).format())


def _frames(waiting: Any) -> Iterator[FrameType]:
    """Yield the frame of a coroutine, then that of the coroutine that it awaits, and so on. `Task.get_stack` returns
    only the first of these frames."""
    while waiting is not None:
        kind = next((each for each in ("cr", "ag", "gi") if hasattr(waiting, f"{each}_frame")), None)
        if kind is None or (frame := getattr(waiting, f"{kind}_frame")) is None:
            return
        yield frame
        waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
