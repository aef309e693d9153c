"""Runs one check on a backend, within the check's time limit. The check is skipped if its promise is not made here."""

from __future__ import annotations

import pytest

from hermes_core import Isolation
from hermes_testing.conformance.checks import Check
from hermes_testing.conformance.kit import Kit, Rig
from hermes_testing.conformance.waiting import within

CLEANUP_S = 30.0
"""Seconds that a check may take to end its sandboxes, after its own time limit."""


async def run_check(rig: Rig, check: Check, figures: dict[str, float] | None = None) -> None:
    """Run a check on a rig that has been entered.

    Args:
        figures: gets the figures that the check measures, also if the check is then skipped or fails.

    Raises:
        pytest.skip.Exception: the promise is not made here; the message is the reason.
        pytest.fail.Exception: the backend declares a level that it can't give, or no command can be run in a slot.
        NotDone: the check, or ending its sandboxes, took too long.
        Exception: the error of the check, if the promise is not kept.
    """
    level = rig.level if check.level is None else check.level
    _skip_or_fail(rig, check, level)
    # This outer limit is for a check that goes on after it was cancelled at its own limit.
    kit = Kit(rig, level, {} if figures is None else figures)
    await within(check.limit_s + 2 * CLEANUP_S, _run(kit, check), "the check and ending what it had made")


async def _run(kit: Kit, check: Check) -> None:
    try:
        try:
            await within(check.limit_s, check.function(kit))
        # Ending has a separate time limit, which begins only now. A limit that began earlier could be lost: if the
        # event loop is held up until both limits are over, the task is cancelled only once, for both of them.
        except BaseException:
            await within(CLEANUP_S, kit.aclose(failed=True), "ending what it had made")
            raise
        await within(CLEANUP_S, kit.aclose(), "ending what it had made")
    except (Exception, pytest.fail.Exception):
        # The check may have damaged the sandboxes that it shares with other checks.
        await within(CLEANUP_S, kit.rig.replace(kit.level), "ending the sandboxes that it shared")
        raise


def _skip_or_fail(rig: Rig, check: Check, level: Isolation) -> None:
    """Skip the check if its promise is not made here. Fail the check if its promise is made, but can't be tested."""
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
