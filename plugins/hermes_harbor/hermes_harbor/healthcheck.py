"""Waits until a task's sandbox says that it is ready, as Docker's HEALTHCHECK does."""

from __future__ import annotations

import asyncio

from hermes_core import CommandResult, SetupFailed, SlotCommands
from hermes_harbor.task_toml import Healthcheck

SHOWN = 500
"""Number of characters of the last output that an error shows."""


async def wait_until_healthy(commands: SlotCommands, check: Healthcheck, what: str) -> None:
    """Run the command until it succeeds. In the start period, failures do not count.

    Args:
        what: whose check it is, for messages: `environment.healthcheck`.

    Raises:
        SetupFailed: it has failed `retries` times in a row.
    """
    clock = asyncio.get_running_loop().time
    counts_from = clock() + check.start_period_sec
    failures = 0
    while True:
        counts = clock() >= counts_from
        done = await commands.run(check.command, timeout_s=check.timeout_sec, merge_stderr=True)
        if done.ok:
            return
        failures += counts
        if failures >= check.retries:
            raise SetupFailed(
                f"{what} failed {failures} times, in the end with {_outcome(done)}: {check.command}",
                hint="run it in the image by hand; or give it more time with start_period_sec and retries",
            )
        await asyncio.sleep(check.interval_sec if counts else check.start_interval_sec)


def _outcome(done: CommandResult) -> str:
    status = "its time limit" if done.timed_out else f"status {done.returncode}"
    said = done.text.strip()[-SHOWN:]
    return f"{status} ({said})" if said else status
