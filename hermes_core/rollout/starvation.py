"""Finds out whether a check that reaches its time limit is slow itself, or hardly got a processor."""

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
"""Minimum time limit in seconds for which a check is examined: on a busy host, examining it takes seconds."""
LOOK_AT = 0.95
"""The share of its time limit after which a check is examined."""
STARVED = 0.5
"""A check is starved if one of its threads has waited for a processor for this share of the time so far."""

# Prints, in nanoseconds, the longest time that a thread of the user has waited for a processor.
_WAITED = """most=0
for each in /proc/[0-9]*/task/[0-9]*/schedstat; do
  [ -O "$each" ] && { read -r _ waited _ <"$each"; } 2>/dev/null || continue
  [ "$waited" -le "$most" ] || most=$waited
done
echo "$most"
"""


async def watch_for_starvation(commands: SlotCommands, check: Awaitable[T], limit_s: float) -> tuple[T, str | None]:
    """Return the outcome of a check, and a text that says so if the check hardly got a processor, else None.

    A check that sleeps, or computes all the time, is not starved. Where the kernel does not count the waits of threads
    (`/proc/PID/schedstat`), the text is None.

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
