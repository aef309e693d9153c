"""What the conformance kit asks of slots, where `local` would not be asked by itself: other levels, the direct mode."""

from __future__ import annotations

import pytest
from hermes_testing.conformance import Check, CheckOutcome, Rig, chosen, run_one

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.elsewhere]


@pytest.mark.parametrize("check", chosen(["commands", "processes", "files"]), ids=lambda check: check.name)
async def test_check(rig: Rig, check: Check) -> None:
    result = await run_one(rig, check)
    if result.outcome is CheckOutcome.NOT_APPLICABLE:
        pytest.skip(result.reason)
    assert result.outcome is CheckOutcome.PASSED, f"{check.promise}\n{result.reason}"
