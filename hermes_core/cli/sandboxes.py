"""Lists running sandboxes and ends those whose driver is dead: `hermes-rl ps` and `hermes-rl reap`."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hermes_core.errors import HermesError, describe
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Backend, CanAttach, SandboxInfo, SandboxStatus
from hermes_core.sandbox.direct import sh as shell
from hermes_core.sandbox.promises import list_sandboxes

LISTEN_S = 10
"""Seconds of watching for a heartbeat. Every live driver sends heartbeats at shorter intervals."""

LIST_LIMIT_S = 30.0
"""Time limit in seconds for a backend to list its sandboxes."""

STARTING_S = 600.0
"""Seconds that a new sandbox may be without heartbeat, because its driver may still be making it."""

WAITING_S = 3600.0
"""A sandbox whose time to live is at least this is meant to wait for its driver's return, such as a shell's or a
terminal task's."""

_END_LIMIT_S = 60.0
_AT_A_TIME = 8

# The heartbeat's file is empty for a moment while it is being written.
_LISTEN = """
file=$1 left=$2 before= now=
read -r before <"$file"
while [ "$left" -gt 0 ]; do
  sleep 1
  left=$((left - 1)) now=
  read -r now <"$file"
  if [ -n "$before" ] && [ -n "$now" ] && [ "$now" != "$before" ]; then echo beats; break; fi
  before=${before:-$now}
done 2>/dev/null
if [ ! -e "$file" ]; then echo none; else printf 'silent %.99s\n' "$before"; fi
"""
_SILENT = re.compile(rb"silent \d+ (\d{1,20})$", re.MULTILINE)


@dataclass(frozen=True)
class FoundSandbox:
    """A sandbox that a backend has."""

    backend: str
    info: SandboxInfo

    def row(self) -> dict[str, str]:
        """Return the cells of its row in a table."""
        info = self.info
        age = _duration(max(0.0, time.time() - info.created))
        return {
            "sandbox": info.sandbox_id,
            "backend": self.backend,
            "owner": info.owner,
            "status": info.status.value,
            "age": age,
        }


@dataclass(frozen=True)
class Census:
    """The sandboxes found, and the errors of backends that could not list theirs."""

    sandboxes: tuple[FoundSandbox, ...]
    problems: dict[str, str]


@dataclass(frozen=True)
class Reaped:
    """What happened to one sandbox."""

    found: FoundSandbox
    outcome: str
    """`ended`, `left` or `failed`; in a dry run `would end` or `left`. The help of `reap` explains them."""
    why: str

    def row(self) -> dict[str, str]:
        """Return the cells of its row in a table."""
        return {**self.found.row(), "outcome": self.outcome, "why": self.why}


async def find(runtime: Runtime, names: Sequence[str] = (), owner: str | None = None) -> Census:
    """Find every sandbox with our label, of these backends or of all.

    Args:
        owner: find only sandboxes of this owner; None finds all.

    Raises:
        UnknownNameError: no backend has one of the names.
    """
    for name in names:
        runtime.backends.entry(name)
    asked = list(names) or runtime.backends.names()
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(_list(runtime, name, owner)) for name in asked}
    sandboxes: list[FoundSandbox] = []
    problems = {}
    for name, task in tasks.items():
        answer = task.result()
        if isinstance(answer, str):
            problems[name] = answer
        else:
            sandboxes += answer
    return Census(tuple(sorted(sandboxes, key=lambda each: each.info.created)), problems)


async def reap(
    runtime: Runtime, sandboxes: Sequence[FoundSandbox], *, waiting: bool = False, dry_run: bool = False
) -> list[Reaped]:
    """End the sandboxes whose driver is dead. A sandbox with a heartbeat, or whose heartbeat can't be read, is left.

    Args:
        waiting: also end sandboxes that wait for their driver to return, such as that of a shell that its user left.
        dry_run: end nothing, only say what would be done.
    """
    places = asyncio.Semaphore(_AT_A_TIME)

    async def one(found: FoundSandbox) -> Reaped:
        async with places:
            return await _reap(runtime.backend(found.backend), found, waiting, dry_run)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(found)) for found in sandboxes]
    return [task.result() for task in tasks]


async def _list(runtime: Runtime, name: str, owner: str | None) -> list[FoundSandbox] | str:
    try:
        async with asyncio.timeout(LIST_LIMIT_S):
            return [FoundSandbox(name, info) for info in await list_sandboxes(runtime.backend(name), owner)]
    except TimeoutError:
        return f"it did not answer within {LIST_LIMIT_S:g} s"
    except HermesError as error:
        return str(error)
    except Exception as error:
        return describe(error)


async def _reap(backend: Backend, found: FoundSandbox, waiting: bool, dry_run: bool) -> Reaped:
    alive = None
    if found.info.status is SandboxStatus.RUNNING:
        alive = await _sign_of_life(backend, found.info, waiting)
    if alive is not None:
        return Reaped(found, "left", alive)
    why = "its driver is dead" if found.info.status is SandboxStatus.RUNNING else "the sandbox has ended by itself"
    if dry_run:
        return Reaped(found, "would end", why)
    try:
        async with asyncio.timeout(_END_LIMIT_S):
            await backend.terminate_id(found.info.sandbox_id)
    except TimeoutError:
        return Reaped(found, "failed", f"it was not gone within {_END_LIMIT_S:g} s")
    except HermesError as error:
        return Reaped(found, "failed", str(error))
    return Reaped(found, "ended", why)


async def _sign_of_life(backend: Backend, info: SandboxInfo, waiting: bool) -> str | None:
    """Return the reason to leave a running sandbox alone.

    None if the sandbox has no heartbeat and, unless `waiting`, does not wait for its driver's return.
    """
    if not isinstance(backend, CanAttach) or not backend.capabilities.attach:
        return (
            f"it is not known whether its driver lives: backend {backend.name!r} does not implement `attach`; "
            "if nobody uses it, end it where it runs"
        )
    try:
        async with asyncio.timeout(LISTEN_S + LIST_LIMIT_S):
            sandbox = await backend.attach(info.sandbox_id)
            heard = await shell.helper(sandbox, _LISTEN, f"{sandbox.state_dir}/heartbeat", str(LISTEN_S))
    except (HermesError, shell.Ended, TimeoutError) as error:
        reason = error.message if isinstance(error, HermesError) else "no answer"
        return f"its heartbeat can't be read: {reason}"
    if b"beats" in heard:
        return "its driver is alive"
    if b"none" in heard and time.time() - info.created < STARTING_S:
        return "it has no heartbeat yet: its driver may be creating it"
    silent = _SILENT.search(heard)
    if silent is not None and int(silent[1]) >= WAITING_S and not waiting:
        return f"it waits {_duration(int(silent[1]))} for a driver to come back; --waiting ends it now"
    return None


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"
