"""A driver for the tests of recovery: takes over what its state directory names, starts processes, says so, and waits.

Run as `python recovery_driver.py FOLDER TTL_S COUNT`; what it has done it prints as lines of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from hermes_core.sandbox.contract import Isolation
from hermes_core.sandbox.local.backend import LocalBackend, LocalConfig
from hermes_core.sandbox.pool.checkpoint import Checkpoint
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry

LINES = 400
SLOTS = 4


def command(number: int) -> str:
    """A process that writes numbered lines, slowly and then no more, and ends with a status of its own."""
    return (
        f"i=0; while [ $i -lt {LINES} ]; do printf '%03d:%05d\\n' {number} $i; i=$((i + 1));"
        f" [ $((i % 100)) -eq 0 ] && sleep 0.5; done; exit {number}"
    )


def output(number: int) -> bytes:
    """All that it writes."""
    return b"".join(b"%03d:%05d\n" % (number, line) for line in range(LINES))


def tool_backend(backend: LocalBackend, level: Isolation, checkpoint: Checkpoint, ttl_s: float) -> ToolBackend:
    """The tool backend of every driver here."""
    config = LocalConfig(
        name="default", slots_per_sandbox=SLOTS, max_sandboxes=2, min_sandboxes=0, reserve_slots=0, orphan_ttl_s=ttl_s
    )
    profiles = {"default": config}
    return ToolBackend(
        backend, profiles=profiles, tools=ToolRegistry(), isolation=level, owner="recovery", checkpoint=checkpoint
    )


def strongest(backend: LocalBackend) -> Isolation:
    """What this host grants."""
    return max(level for level in backend.capabilities.isolation if level is not Isolation.DEDICATED)


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


async def main(folder: Path, ttl_s: float, count: int) -> None:
    backend = LocalBackend()
    with Checkpoint(folder, "recovery-" + folder.name) as checkpoint:
        tools = tool_backend(backend, strongest(backend), checkpoint, ttl_s)
        taken = await tools.take_over()
        say(taken={slot.trajectory_id: len(await tools.commands(slot).processes()) for slot in taken})
        slots = taken or [await tools.acquire(f"task-{number}") for number in range(SLOTS)]
        say(sandboxes=[slot.sandbox_id for slot in slots])
        for number in range(count):
            slot = slots[number % len(slots)]
            status = await tools.commands(slot).start(command(number))
            say(started=number, process=status.process_id, task=slot.trajectory_id)
        say(done=True)
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
