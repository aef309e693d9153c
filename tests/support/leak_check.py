"""The fixture `leak_check`: your test fails if it leaves processes, descriptors or threads behind."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.loop_lag import Witness

LEAK_GRACE_S = 20.0
"""How long after a test what it started may take to end."""


@pytest.fixture
def leak_check() -> Iterator[None]:
    """Fails the test if processes, descriptors or threads are left a few seconds after it.

    Orphans are adopted for the time of the test, so a process that was left by a dead parent is seen as well.
    """
    before = _Census.take()
    _adopt_orphans(True)
    try:
        yield
        deadline = time.monotonic() + LEAK_GRACE_S
        while (left := _Census.take(before.processes).beyond(before)) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        _adopt_orphans(False)
    if left:
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)


@dataclass(frozen=True)
class _Census:
    """What this process holds: descendants by (pid, start time), descriptors, and threads."""

    processes: dict[tuple[int, str], str]
    descriptors: dict[int, str]
    threads: frozenset[threading.Thread]

    @classmethod
    def take(cls, known: Collection[tuple[int, str]] = ()) -> _Census:
        """What is here now, but for the `known` processes and what is below them: another fixture's, still at work."""
        return cls(_descendants(known), _descriptors(), frozenset(threading.enumerate()))

    def beyond(self, before: _Census) -> list[str]:
        """What is here and was not there before. The loop's own worker threads end with the loop."""
        processes = [f"process {pid} {command}" for (pid, _), command in self.processes.items()]
        descriptors = [
            f"descriptor {n} {what}" for n, what in self.descriptors.items() if before.descriptors.get(n) != what
        ]
        started = [t for t in self.threads - before.threads if not isinstance(t, Witness)]
        threads = [f"thread {t.name}" for t in started if not t.name.startswith("asyncio_")]
        return processes + descriptors + threads


def _descendants(known: Collection[tuple[int, str]] = ()) -> dict[tuple[int, str], str]:
    """Every process below this one that has not ended, by pid and start time, with its command line."""
    children: dict[int, list[tuple[int, str, str]]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        except OSError:
            continue
        state, parent, start = rest.split()[0], int(rest.split()[1]), rest.split()[19]
        if state != "Z":
            children.setdefault(parent, []).append((int(entry.name), start, command or name))
    found, queue = {}, [os.getpid()]
    while queue:
        for pid, start, command in children.get(queue.pop(), []):
            if (pid, start) in known:
                continue
            found[pid, start] = command[:200]
            queue.append(pid)
    return found


def _descriptors() -> dict[int, str]:
    """The open descriptors and what they lead to."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[int(entry.name)] = os.readlink(entry)
        except OSError:
            continue  # the one of this very listing
    return found


def _adopt_orphans(adopt: bool) -> None:
    """Whether processes below this one whose parent ends become this one's children."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, int(adopt), 0, 0, 0)
