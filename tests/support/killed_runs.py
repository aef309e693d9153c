"""Runs that are killed: they are programs, and what is left of their sandboxes is found from outside."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ORPHAN_TTL_S = 30.0
"""The default for rollouts."""


async def start(command: Sequence[str], *more: str) -> asyncio.subprocess.Process:
    """Start a run, with the plugins that are installed here."""
    environment = {name: os.environ[name] for name in os.environ if name != "HERMES_PLUGINS"}
    return await asyncio.create_subprocess_exec(
        *command, *more, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )


def traces(folder: Path) -> list[str]:
    """What is left of the sandboxes in a folder: files, and processes that have it in their mounts or words."""
    found = [str(path) for path in folder.iterdir()]
    me, word = str(os.getpid()), str(folder).encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or entry.name == me:
            continue
        try:
            facts = b"".join((entry / name).read_bytes() for name in ("cmdline", "environ", "mountinfo"))
        except OSError:  # ended, or another user's
            continue
        if word in facts:
            found.append(f"process {entry.name}: {(entry / 'cmdline').read_bytes()[:200]!r}")
    return found


async def gone(folder: Path, seconds: float) -> list[str]:
    """What is still left of the sandboxes in a folder after some time."""
    deadline = time.monotonic() + seconds
    while (left := traces(folder)) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    return left


def scored(folder: Path) -> Counter[tuple[str, int]]:
    """How often each rollout was scored, by the records."""
    lines = (folder / "trajectories.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(row["reward"] in (None, 1.0) for row in rows)
    return Counter((row["item_id"], row["rollout_index"]) for row in rows if row["reward"] is not None)
