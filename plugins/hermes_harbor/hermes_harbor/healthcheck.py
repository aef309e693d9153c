"""Waits until a health check of a task succeeds, with the rules of Docker's HEALTHCHECK."""

from __future__ import annotations

import asyncio

from hermes_core import CommandResult, SetupFailed, SlotCommands
from hermes_harbor.task_toml import Healthcheck

SHOWN = 500
"""Number of last characters of the output in an error."""


async def wait_until_healthy(commands: SlotCommands, check: Healthcheck, what: str) -> None:
    """Run a check's command until it succeeds. Failures in the start period do not count.

    Args:
        what: the check's name in messages: `environment.healthcheck`.

    Raises:
        SetupFailed: the command failed `retries` times in a row.
    """
    clock = asyncio.get_running_loop().time
    counts_from = clock() + check.start_period_sec
    failures = 0
    while True:
        counts = clock() >= counts_from
        result = await commands.run(check.command, timeout_s=check.timeout_sec, merge_stderr=True)
        if result.ok:
            return
        failures += counts
        if failures >= check.retries:
            raise SetupFailed(
                f"{what} failed {failures} times, in the end with {_outcome(result)}: {check.command}",
                hint="run it in the image by hand; or give it more time with start_period_sec and retries",
            )
        await asyncio.sleep(check.interval_sec if counts else check.start_interval_sec)


def _outcome(result: CommandResult) -> str:
    status = "its time limit" if result.timed_out else f"status {result.returncode}"
    output = result.text.strip()[-SHOWN:]
    return f"{status} ({output})" if output else status
