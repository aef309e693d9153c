"""Time limits and cancelling: what is ended, what is spared, and that nothing gets away."""

from __future__ import annotations

import asyncio

import pytest
from hermes_testing.conformance.kit import Kit
from hermes_testing.conformance.running import TICKER, check_stopped, ticks
from hermes_testing.conformance.waiting import until, within

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_time_limit_is_not_early(kit: Kit) -> None:
    """A command within its limit is left alone."""
    result = await (await kit.slot()).run("sleep 1; echo done", timeout_s=30)
    assert (result.timed_out, result.text) == (False, "done\n"), "its result"


async def test_what_was_started_ends_too(kit: Kit) -> None:
    """At a time limit the children end with their command."""
    slot = await kit.slot()
    result = await slot.run(f"({TICKER}) & sleep 1000", timeout_s=0.5)
    assert (result.timed_out, result.exit_code, result.signal) == (True, None, 15), "how it ended"
    await check_stopped(slot)


async def test_what_ignores_term_is_killed(kit: Kit) -> None:
    """After TERM and a grace period comes KILL."""
    slot = await kit.slot()
    result = await within(30, slot.run(f"trap '' TERM; {TICKER}", timeout_s=0.5), "a command that ignores TERM")
    assert (result.timed_out, result.signal) == (True, 9), "how it ended"
    await check_stopped(slot)


async def test_a_child_that_ignores_term_is_killed(kit: Kit) -> None:
    """A child that ignores TERM does not outlive its command's time limit."""
    slot = await kit.slot()
    result = await within(30, slot.run(f"(trap '' TERM; {TICKER}) & sleep 1000", timeout_s=0.5), "its time limit")
    assert result.timed_out, "it did not time out"
    await check_stopped(slot)


async def test_children_may_clean_up(kit: Kit) -> None:
    """Within the grace period a command can put its things in order."""
    slot = await kit.slot()
    result = await slot.run("trap 'sleep 0.3; echo cleaned >f; exit 1' TERM; sleep 1000 & wait", timeout_s=0.5)
    assert (result.timed_out, (await slot.run("cat f")).text) == (True, "cleaned\n"), "that it timed out and cleaned up"
    late = await slot.run("trap 'exit 124' TERM; sleep 1000 & wait", timeout_s=0.3)
    assert (late.timed_out, late.exit_code) == (True, 124), "that it timed out, and its own exit code"


async def test_a_double_fork_does_not_get_away(kit: Kit) -> None:
    """A process that forked twice and was left by its parents ends at its command's time limit."""
    slot = await kit.slot()
    result = await slot.run(f"( ( {TICKER} ) & ) ; sleep 1000", timeout_s=0.7)
    assert result.timed_out, "it did not time out"
    await check_stopped(slot)


async def test_a_session_of_its_own_does_not_get_away(kit: Kit) -> None:
    """Nor does one with a session of its own."""
    slot = await kit.slot()
    if not (await slot.run("command -v setsid")).ok:
        pytest.skip("the sandbox has no `setsid`")
    result = await slot.run(f"setsid sh -c '({TICKER}) & wait' & sleep 1000", timeout_s=0.7)
    assert result.timed_out, "it did not time out"
    await check_stopped(slot)


async def test_earlier_commands_are_spared(kit: Kit) -> None:
    """A time limit ends its own command's processes, not those that earlier commands left."""
    slot = await kit.slot()
    await slot.run(f"({TICKER}) >/dev/null 2>&1 &")
    assert (await slot.run("sleep 1000", timeout_s=0.3)).timed_out, "it did not time out"
    before = await ticks(slot)

    async def goes_on() -> bool:
        return await ticks(slot) != before

    await until(goes_on, 15, "what an earlier command had left running was ended too")


async def test_a_stopped_command_is_ended(kit: Kit) -> None:
    """A command that has stopped itself ends at its time limit."""
    result = await within(30, (await kit.slot()).run("kill -STOP $$", timeout_s=0.5), "a stopped command")
    assert result.timed_out, "it did not time out"


@pytest.mark.full  # test_tool_backend.py cancels at random moments, too
async def test_cancelling_at_any_moment(kit: Kit) -> None:
    """A command cancelled at any moment of its way leaves nothing running, and the slot goes on."""
    slot = await kit.slot()
    for delay in (0, 0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.02):
        running = asyncio.ensure_future(slot.run(TICKER))
        await asyncio.sleep(delay)
        running.cancel()
        await asyncio.wait([running])
    assert (await slot.run("echo fine")).text == "fine\n", "the next command"
    await check_stopped(slot)
