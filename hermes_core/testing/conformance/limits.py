"""Time limits and cancelling: what is ended, what is spared, and that nothing gets away."""

from __future__ import annotations

import asyncio
import time

from hermes_core.sandbox.commands import SlotCommands
from hermes_core.sandbox.contract import Isolation
from hermes_core.testing.conformance.checks import check
from hermes_core.testing.conformance.expect import expect, same, until, within
from hermes_core.testing.conformance.kit import Kit

TICKER = "while :; do echo x >>ticks; sleep 0.05; done"
"""Shows that it runs by a file that grows: no process list is needed to see it."""

PROOF = "proof that a killed slot is dead"

BOMB = "bomb() { bomb | bomb & }; bomb"


async def stopped(slot: SlotCommands) -> None:
    """Go on if the ticker does not run any more."""

    async def still() -> bool:
        before = await ticks(slot)
        await asyncio.sleep(0.3)
        return await ticks(slot) == before

    await until(still, 10, "a process that the command had started still runs")


async def ticks(slot: SlotCommands) -> str:
    """How far the ticker is."""
    return (await slot.run("wc -c <ticks 2>/dev/null || echo 0")).text.strip()


@check("limits")
async def a_time_limit_ends_a_command(kit: Kit) -> None:
    """At its time limit a command gets TERM, is told as timed out, and keeps what it had written."""
    slot = await kit.slot()
    began = time.monotonic()
    result = await slot.run("echo before; sleep 1000; echo after", timeout_s=0.5)
    expect(time.monotonic() - began < 20, "it took more than 20 s to end at a limit of 0.5 s")
    same((result.timed_out, result.returncode, result.stdout), (True, 124, b"before\n"), "its result")


@check("limits")
async def a_time_limit_is_not_early(kit: Kit) -> None:
    """A command within its limit is left alone."""
    result = await (await kit.slot()).run("sleep 1; echo done", timeout_s=30)
    same((result.timed_out, result.text), (False, "done\n"), "its result")


@check("limits")
async def what_was_started_ends_too(kit: Kit) -> None:
    """At a time limit the children end with their command."""
    slot = await kit.slot()
    result = await slot.run(f"({TICKER}) & sleep 1000", timeout_s=0.5)
    expect(result.timed_out, "it did not time out")
    await stopped(slot)


@check("limits")
async def what_ignores_term_is_killed(kit: Kit) -> None:
    """After TERM and a grace period comes KILL."""
    slot = await kit.slot()
    result = await within(30, slot.run(f"trap '' TERM; {TICKER}", timeout_s=0.5), "a command that ignores TERM")
    expect(result.timed_out, "it did not time out")
    await stopped(slot)


@check("limits")
async def a_child_that_ignores_term_is_killed(kit: Kit) -> None:
    """A child that ignores TERM does not outlive its command's time limit."""
    slot = await kit.slot()
    result = await within(30, slot.run(f"(trap '' TERM; {TICKER}) & sleep 1000", timeout_s=0.5), "its time limit")
    expect(result.timed_out, "it did not time out")
    await stopped(slot)


@check("limits")
async def children_may_clean_up(kit: Kit) -> None:
    """Within the grace period a command can put its things in order."""
    slot = await kit.slot()
    result = await slot.run("trap 'sleep 0.3; echo cleaned >f; exit 1' TERM; sleep 1000 & wait", timeout_s=0.5)
    same((result.timed_out, (await slot.run("cat f")).text), (True, "cleaned\n"), "that it timed out and cleaned up")


@check("limits")
async def a_double_fork_does_not_get_away(kit: Kit) -> None:
    """A process that forked twice and was left by its parents ends at its command's time limit."""
    slot = await kit.slot()
    result = await slot.run(f"( ( {TICKER} ) & ) ; sleep 1000", timeout_s=0.7)
    expect(result.timed_out, "it did not time out")
    await stopped(slot)


@check("limits")
async def a_session_of_its_own_does_not_get_away(kit: Kit) -> None:
    """Nor does one with a session of its own."""
    slot = await kit.slot()
    if not (await slot.run("command -v setsid")).ok:
        raise kit.not_applicable("the sandbox has no `setsid`")
    result = await slot.run(f"setsid sh -c '({TICKER}) & wait' & sleep 1000", timeout_s=0.7)
    expect(result.timed_out, "it did not time out")
    await stopped(slot)


@check("limits")
async def earlier_commands_are_spared(kit: Kit) -> None:
    """A time limit ends its own command's processes, not those that earlier commands left."""
    slot = await kit.slot()
    await slot.run(f"({TICKER}) >/dev/null 2>&1 &")
    expect((await slot.run("sleep 1000", timeout_s=0.3)).timed_out, "it did not time out")
    before = await ticks(slot)
    await asyncio.sleep(0.5)
    expect(await ticks(slot) != before, "what an earlier command had left running was ended too")


@check("limits")
async def a_stopped_command_is_ended(kit: Kit) -> None:
    """A command that has stopped itself ends at its time limit."""
    result = await within(30, (await kit.slot()).run("kill -STOP $$", timeout_s=0.5), "a stopped command")
    expect(result.timed_out, "it did not time out")


@check("limits")
async def cancelling_ends_a_command(kit: Kit) -> None:
    """A command whose caller was cancelled is killed, with what it started."""
    slot = await kit.slot()
    running = asyncio.ensure_future(slot.run(f"trap '' TERM; ({TICKER}) & wait"))

    async def begun() -> bool:
        return await ticks(slot) != "0"

    await until(begun, 10, "it did not begin")
    running.cancel()
    await asyncio.wait([running])
    await stopped(slot)


@check("limits", limit_s=120)
async def cancelling_at_any_moment(kit: Kit) -> None:
    """A command cancelled at any moment of its way leaves nothing running, and the slot goes on."""
    slot = await kit.slot()
    for delay in (0, 0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.02):
        running = asyncio.ensure_future(slot.run(TICKER))
        await asyncio.sleep(delay)
        running.cancel()
        await asyncio.wait([running])
    same((await slot.run("echo fine")).text, "fine\n", "the next command")
    await stopped(slot)


@check("limits", least=Isolation.USER, needs=PROOF, limit_s=120)
async def a_fork_bomb_is_bounded(kit: Kit) -> None:
    """A fork bomb stays inside its slot's process limit: a neighbour can work, and a time limit ends it."""
    slot, other = await kit.neighbours()
    bomb = asyncio.ensure_future(slot.run(f"{BOMB}; sleep 1000", timeout_s=3.0))
    await asyncio.sleep(1.0)
    same((await within(30, other.run("echo fine"), "a neighbour's command")).text, "fine\n", "a neighbour's output")
    expect((await within(60, bomb, "the bomb's end")).timed_out, "it did not time out")
    same((await within(30, slot.run("echo fine"), "the slot's next command")).text, "fine\n", "the slot's next command")
