"""Runs checks one after another, and records the outcome of each: passed, failed, or not applicable and why."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from hermes_core.errors import PolicyError
from hermes_core.sandbox.contract import Isolation
from hermes_core.testing.conformance.checks import Check
from hermes_core.testing.conformance.expect import CheckFailed, NotApplicable
from hermes_core.testing.conformance.kit import Kit, Rig, reason_of


class Outcome(StrEnum):
    """The kinds of outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not_applicable"


@dataclass(frozen=True)
class Result:
    """One check's outcome."""

    name: str
    group: str
    outcome: Outcome
    reason: str
    """Why it failed or is not applicable; empty if it passed."""
    seconds: float


@dataclass(frozen=True)
class Report:
    """The outcome of a run of the kit."""

    backend: str
    checks: tuple[Result, ...]
    figures: dict[str, float]

    @property
    def sound(self) -> bool:
        """Return whether nothing failed."""
        return all(each.outcome is not Outcome.FAILED for each in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return the report for programs."""
        return {"backend": self.backend, "checks": [asdict(each) for each in self.checks], "figures": self.figures}


async def run(rig: Rig, checks: Sequence[Check], *, on_result: Callable[[Result], object] = lambda _: None) -> Report:
    """Run the checks on a rig that has been entered."""
    results = []
    for check in checks:
        results.append(await run_one(rig, check))
        on_result(results[-1])
    return Report(rig.name, tuple(results), dict(rig.figures))


async def run_one(rig: Rig, check: Check) -> Result:
    """Run one check on a rig that has been entered. Any error in it becomes its outcome."""
    began = time.monotonic()
    level = rig.level if check.level is None else check.level
    outcome, reason = Outcome.PASSED, ""
    try:
        _applies(rig, check, level)
        if rig.no_slots and check.group != "contract":
            raise CheckFailed(rig.no_slots)
        async with asyncio.timeout(check.limit_s) as clock:
            async with Kit(rig, level) as kit:
                await check.function(kit)
    except NotApplicable as error:
        outcome, reason = Outcome.NOT_APPLICABLE, reason_of(error)
    except Exception as error:
        outcome, reason = Outcome.FAILED, reason_of(error)
        if isinstance(error, TimeoutError) and clock.expired():
            reason = f"not done within {check.limit_s:g} s"
        await rig.replace(level)
    return Result(check.name, check.group, outcome, reason, round(time.monotonic() - began, 3))


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
    if level in rig.refused:
        raise PolicyError(f"refused for this profile: {rig.refused[level]}")
    if rig.missing and level not in (Isolation.SHARED, Isolation.DEDICATED):
        raise PolicyError(f"a sandbox without a guest lacks: {rig.missing[0]}")
