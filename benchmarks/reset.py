"""How long a slot takes from one lease to the next: acquire, and release with reset, after a lease that left things.

What is left behind each time: a process in a session of its own, and a tree of files. The reference is what a script
would do between two tasks without any of this: remove the directory and make it anew, with nothing killed and nothing
proved.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.host import LEVELS, NOT_GRANTED, local_backend, shell
from benchmarks.measure import Row, Rows, Target, alternate, bare, p50, percentile
from benchmarks.peers_docker import IMAGE, docker, missing
from hermes_core.tool_backend import ToolBackend

TARGET = Target(10.0)
OWN_ROOT = "private-root"
FASTER = Target(1 / 20, of_reference=True)
"""A twentieth of the time of a container."""
FILES = 20
LITTER = (
    "setsid sleep 1000 >/dev/null 2>&1 & "
    f"mkdir -p a/b && for i in $(seq {FILES}); do echo $i >a/b/$i; done; touch $TMPDIR/x"
)


async def rows(quick: bool) -> Rows:
    """p50 of acquire + release with reset at each level, and which part of it is what."""
    rounds = 15 if quick else 150
    for level in (*LEVELS, OWN_ROOT):
        target = TARGET if level in LEVELS else None
        case = f"acquire + reset + release p50, {level}"
        async with local_backend(level, 1) as backend:
            if backend is None:
                yield Row("reset", case, None, None, "ms", target, (NOT_GRANTED,))
                continue
            with tempfile.TemporaryDirectory() as folder:
                reference, parts = [], []
                for _ in range(rounds + 3):
                    parts.append(await _one_lease(backend))
                    reference.append(await _by_hand(Path(folder) / "workspace"))
            kills = [await _kill_only(backend) for _ in range(rounds + 3)]
        acquires, releases = zip(*parts[3:], strict=True)
        whole = [sum(part) for part in parts[3:]]
        yield Row(
            "reset",
            case,
            p50(whole) * 1e3,
            p50(reference[3:]) * 1e3,
            "ms",
            target,
            (
                f"p95 {percentile(whole, 0.95) * 1e3:.2f} ms",
                f"acquire {p50(acquires) * 1e3:.2f}, reset and release {p50(releases) * 1e3:.2f} ms, "
                f"of which killing with proof, without removing files, {p50(kills[3:]) * 1e3:.2f} ms",
            ),
        )
    yield await _beside_a_container(5 if quick else 20)


async def _beside_a_container(rounds: int) -> Row:
    """A whole lease of a slot that is root of its own root, beside a container that is made, used and removed."""
    case = "a root of its own: acquire, a command, reset, p50; docker run"
    reason = await missing()
    async with local_backend(OWN_ROOT, 1) as backend:
        if backend is None or reason:
            return Row("reset", case, None, None, "ms", FASTER, (reason or NOT_GRANTED,))

        async def lease() -> float:
            began = time.perf_counter()
            async with backend.lease() as slot:
                await shell(backend, slot, "touch /usr/bin/new")
            return time.perf_counter() - began

        async def container() -> float:
            began = time.perf_counter()
            await docker("run", "--rm", IMAGE, "touch", "/usr/bin/new")
            return time.perf_counter() - began

        ours, theirs = await alternate(lease, container, rounds)
    faster = p50(theirs) / p50(ours)
    return Row("reset", case, p50(ours) * 1e3, p50(theirs) * 1e3, "ms", FASTER, (f"{faster:.0f} times as fast",))


async def _one_lease(backend: ToolBackend) -> tuple[float, float]:
    """Seconds to acquire a slot, and to reset and release it after something was left in it."""
    began = time.perf_counter()
    slot = await backend.acquire()
    acquired = time.perf_counter() - began
    await shell(backend, slot, LITTER)
    began = time.perf_counter()
    await backend.release(slot, reset_workspace=True)
    return acquired, time.perf_counter() - began


async def _kill_only(backend: ToolBackend) -> float:
    async with backend.lease() as slot:
        await shell(backend, slot, LITTER)
        began = time.perf_counter()
        await backend.kill_everything(slot)
        return time.perf_counter() - began


async def _by_hand(workspace: Path) -> float:
    """Seconds for `rm -rf` and `mkdir` of a directory with as many files."""
    _litter(workspace / "a" / "b")
    began = time.perf_counter()
    await bare("bash", "-c", 'rm -rf "$1" && mkdir -m 700 "$1"', "bash", str(workspace))
    return time.perf_counter() - began


def _litter(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(FILES):
        (folder / str(number)).write_text(f"{number}\n")
