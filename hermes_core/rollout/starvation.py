"""Tells a check that is slow from one that hardly gets a processor, when its time limit passes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from hermes_core.aio import alongside
from hermes_core.errors import HermesError
from hermes_core.sandbox.commands import SlotCommands

T = TypeVar("T")

LEAST_LIMIT_S = 30.0
"""Time limits below this are not looked at: on a busy host, looking takes seconds itself."""
LOOK_AT = 0.95
"""The share of its time limit after which a check is looked at."""
STARVED = 0.5
"""The share of the time so far that one of its threads must have waited for a processor."""

# Prints how long the user's threads have waited for a processor: the longest of these times, in nanoseconds.
_WAITED = """most=0
for each in /proc/[0-9]*/task/[0-9]*/schedstat; do
  [ -O "$each" ] && { read -r _ waited _ <"$each"; } 2>/dev/null || continue
  [ "$waited" -le "$most" ] || most=$waited
done
echo "$most"
"""


async def watch_for_starvation(commands: SlotCommands, check: Awaitable[T], limit_s: float) -> tuple[T, str | None]:
    """Return the outcome of a check; and, if it hardly got a processor, a text that says so, else None.

    A check that sleeps, or computes all the time, is to blame itself. Where the kernel does not count how long threads
    wait (`/proc/PID/schedstat`), the answer is None.

    Args:
        commands: the commands of the check's slot, as its user or as root.
        limit_s: the time limit of the check, in seconds.
    """

    async def look() -> str | None:
        await asyncio.sleep(LOOK_AT * limit_s)
        with suppress(HermesError, ValueError):
            waited_s = int((await commands.run(["/bin/sh", "-c", _WAITED], cwd="/")).stdout) / 1e9
            if waited_s >= STARVED * LOOK_AT * limit_s:
                return f"it waited {waited_s:.0f} s of {limit_s:g} s for a processor"
        return None

    if limit_s < LEAST_LIMIT_S:
        return await check, None
    async with alongside(look()) as looking:
        outcome = await check
        return outcome, looking.result() if looking.done() else None
