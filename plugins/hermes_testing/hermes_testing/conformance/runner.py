"""Runs one check on a backend: within its time, and skipped if the backend does not make its promise."""

from __future__ import annotations

import pytest

from hermes_core import Isolation
from hermes_testing.conformance.checks import Check
from hermes_testing.conformance.kit import Kit, Rig
from hermes_testing.conformance.waiting import within

CLEANUP_S = 30.0
"""How long a check may take in seconds to end what it made, after its own time."""


async def run_check(rig: Rig, check: Check, figures: dict[str, float] | None = None) -> None:
    """Run a check on a rig that has been entered.

    Args:
        figures: gets what the check measures, also if the check is skipped or fails after that.

    Raises:
        pytest.skip.Exception: the promise is not made here; the message says why.
        pytest.fail.Exception: the backend declares what it can't give, or no command can be run in a slot.
        NotDone: the check, or ending what it had made, took too long.
        Exception: what the check raises if the promise is not kept.
    """
    level = rig.level if check.level is None else check.level
    _skip_or_fail(rig, check, level)
    # For a check that goes on when its time is over.
    kit = Kit(rig, level, {} if figures is None else figures)
    await within(check.limit_s + 2 * CLEANUP_S, _run(kit, check), "the check and ending what it had made")


async def _run(kit: Kit, check: Check) -> None:
    try:
        try:
            await within(check.limit_s, check.function(kit))
        # Ending has a limit of its own, which begins only now. One that began earlier could be lost: the event loop may
        # have been held up until it and the check's own were both over, and then a task is cancelled once for both.
        except BaseException:
            await within(CLEANUP_S, kit.aclose(failed=True), "ending what it had made")
            raise
        await within(CLEANUP_S, kit.aclose(), "ending what it had made")
    except (Exception, pytest.fail.Exception):
        # The check may have damaged the sandboxes that it shares with others.
        await within(CLEANUP_S, kit.rig.replace(kit.level), "ending the sandboxes that it shared")
        raise


def _skip_or_fail(rig: Rig, check: Check, level: Isolation) -> None:
    """Skip the check if its promise is not made here. Fail it if the promise is made and can't even be tried."""
    levels = sorted(rig.capabilities.isolation)
    if level not in levels:
        declared = ", ".join(each.label for each in levels)
        pytest.skip(f"backend {rig.name!r} does not declare level {level.label} here, but {declared}")
    if level not in rig.levels:
        pytest.skip(f"the profile under test can't have level {level.label}")
    if level in rig.broken:
        pytest.fail(
            f"level {level.label} is declared and can't be had: {rig.broken[level]}; leave it out of `capabilities` "
            "or, for this profile, out of `levels`"
        )
    if level in rig.refused:
        pytest.skip(f"refused for this profile: {rig.refused[level]}")
    if rig.missing and level not in (Isolation.SHARED, Isolation.DEDICATED):
        pytest.skip(f"a sandbox without a guest lacks: {rig.missing[0]}")
    if level < check.least:
        pytest.skip(f"documented as open: level {level.label} keeps nothing apart")
    lacks = [sentence for sentence in rig.missing if check.needs and check.needs in sentence]
    if lacks:
        pytest.skip(f"a sandbox without a guest lacks: {lacks[0]}")
    if rig.no_slots and check.group != "contract":
        pytest.fail(rig.no_slots)
