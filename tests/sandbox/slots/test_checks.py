"""What the conformance kit asks of slots, where `local` would not be asked by itself: other levels, the direct mode."""

from __future__ import annotations

import pytest
from hermes_testing.conformance.checks import Check, choose_checks
from hermes_testing.conformance.kit import Rig
from hermes_testing.conformance.runner import run_check

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.elsewhere]


@pytest.mark.parametrize("check", [each.as_param() for each in choose_checks(["commands", "processes", "files"])])
async def test_check(rig: Rig, check: Check) -> None:
    await run_check(rig, check)
