"""Runs checks one after another, and records the outcome of each: passed, failed, or not applicable and why."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hermes_core import Isolation, PolicyError
from hermes_testing.conformance.checks import Check
from hermes_testing.conformance.expect import CheckFailed, NotApplicable
from hermes_testing.conformance.kit import Kit, Rig, reason_of

CLEANUP_S = 30.0
"""How long a check may take in seconds to end what it made, after its own time."""

MOST_HUNG = 3
"""After this many checks that did not end in time, no further ones are run."""


class CheckOutcome(StrEnum):
    """The kinds of outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not_applicable"


@dataclass(frozen=True)
class Result:
    """One check's outcome."""

    name: str
    group: str
    outcome: CheckOutcome
    reason: str
    """Why it failed or is not applicable; empty if it passed."""
    seconds: float
    traceback: str = field(default="", repr=False)
    """Where it failed; empty if it did not."""
    hung: bool = False
    """Whether it did not end in time."""

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome for programs."""
        return {
            "name": self.name,
            "group": self.group,
            "outcome": self.outcome.value,
            "reason": self.reason,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Report:
    """The outcome of a run of the kit."""

    backend: str
    checks: tuple[Result, ...]
    figures: dict[str, float]
    not_run: tuple[str, ...] = ()
    """The names of the checks that were left out, because too many before them did not end in time."""

    @property
    def sound(self) -> bool:
        """Return whether nothing failed."""
        return all(each.outcome is not CheckOutcome.FAILED for each in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return the report for programs."""
        return {
            "backend": self.backend,
            "checks": [each.to_dict() for each in self.checks],
            "figures": self.figures,
            "not_run": list(self.not_run),
        }


async def run(rig: Rig, checks: Sequence[Check], *, on_result: Callable[[Result], object] = lambda _: None) -> Report:
    """Run the checks on a rig that has been entered."""
    results: list[Result] = []
    hung = 0
    for check in checks:
        if hung == MOST_HUNG:
            break
        results.append(await run_one(rig, check))
        on_result(results[-1])
        hung += results[-1].hung
    not_run = tuple(check.name for check in checks[len(results) :])
    return Report(rig.name, tuple(results), dict(rig.figures), not_run)


class _NotDone(CheckFailed):
    """A check did not end in time."""


async def run_one(rig: Rig, check: Check) -> Result:
    """Run one check on a rig that has been entered. Any error in it becomes its outcome."""
    began = time.monotonic()
    level = rig.level if check.level is None else check.level
    outcome, reason, where, hung = CheckOutcome.PASSED, "", "", False
    try:
        # For a check that goes on when its time is over.
        async with _limited(check.limit_s + 2 * CLEANUP_S, f"not ended {2 * CLEANUP_S:g} s after its time"):
            await _try(rig, check, level)
    except NotApplicable as error:
        outcome, reason = CheckOutcome.NOT_APPLICABLE, reason_of(error)
    except Exception as error:
        outcome, reason = CheckOutcome.FAILED, reason_of(error)
        # The error itself would keep what its frames refer to: channels, say, for the checks that look for leaks.
        where, hung = "".join(traceback.format_exception(error)), isinstance(error, _NotDone)
    return Result(check.name, check.group, outcome, reason, round(time.monotonic() - began, 3), where, hung)


async def _try(rig: Rig, check: Check, level: Isolation) -> None:
    """Run the check, and replace the sandboxes that it may have damaged if it fails."""
    _applies(rig, check, level)
    if rig.no_slots and check.group != "contract":
        raise CheckFailed(rig.no_slots)
    try:
        async with _ended(Kit(rig, level)) as kit, _limited(check.limit_s, f"not done within {check.limit_s:g} s"):
            await check.function(kit)
    except NotApplicable:
        raise
    except Exception:
        async with _cleanup():
            await rig.replace(level)
        raise


@asynccontextmanager
async def _ended(kit: Kit) -> AsyncIterator[Kit]:
    """Limit the time that the kit's end takes, from when it begins.

    A limit that began earlier could be lost: the event loop may have been held up until it and the check's own were
    both over, and then a task is cancelled once for both.
    """
    try:
        yield kit
    except BaseException:
        async with _cleanup():
            await kit.aclose(failed=True)
        raise
    async with _cleanup():
        await kit.aclose()


def _cleanup() -> AbstractAsyncContextManager[None]:
    return _limited(CLEANUP_S, f"what it had made was not ended within {CLEANUP_S:g} s")


@asynccontextmanager
async def _limited(seconds: float, otherwise: str) -> AsyncIterator[None]:
    """Limit the time of the block.

    Raises:
        _NotDone: it took longer; the message is `otherwise`.
    """
    try:
        async with asyncio.timeout(seconds) as clock:
            yield
    except TimeoutError as error:
        if not clock.expired():
            raise
        raise _NotDone(otherwise) from error


def _applies(rig: Rig, check: Check, level: Isolation) -> None:
    """Raise `NotApplicable` if the promise is not made here."""
    if check.documented:
        raise NotApplicable(f"documented as open: {check.documented}")
    try:
        _granted(rig, level)
    except PolicyError as error:
        raise NotApplicable(str(error)) from error
    if level < check.least:
        raise NotApplicable(f"documented as open: level {level.label} keeps nothing apart")
    for need in check.needs:
        for sentence in rig.missing:
            if need in sentence:
                raise NotApplicable(f"a sandbox without a guest lacks: {sentence}")


def _granted(rig: Rig, level: Isolation) -> None:
    known = sorted(rig.capabilities.isolation)
    if level not in known:
        declared = ", ".join(each.label for each in known)
        raise PolicyError(f"backend {rig.name!r} does not declare level {level.label} here, but {declared}")
    if level not in rig.levels:
        raise PolicyError(f"the profile under test can't have level {level.label}")
    if level in rig.broken:
        raise CheckFailed(
            f"level {level.label} is declared and can't be had: {rig.broken[level]}; leave it out of `capabilities` "
            "or, for this profile, out of `levels`"
        )
    if level in rig.refused:
        raise PolicyError(f"refused for this profile: {rig.refused[level]}")
    if rig.missing and level not in (Isolation.SHARED, Isolation.DEDICATED):
        raise PolicyError(f"a sandbox without a guest lacks: {rig.missing[0]}")
