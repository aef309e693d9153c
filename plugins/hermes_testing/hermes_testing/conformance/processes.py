"""Checks of background processes and terminals. Core's own tests cover the details."""

from __future__ import annotations

import asyncio

import pytest

from hermes_core import Isolation, WindowSize
from hermes_testing.conformance.kit import Kit
from hermes_testing.conformance.running import TICKER, check_stopped, wait_for_ticks
from hermes_testing.conformance.waiting import expect_refusal

TERMINALS = "terminals (pty)"
SIZE = WindowSize(24, 80)


async def background_processes(kit: Kit) -> None:
    """A background process has a status, a log by byte offset, and an exit code; all are kept after its end."""
    slot = await kit.slot()
    process = await slot.start("echo one; sleep 0.3; echo two; exit 7")
    assert process.running, "it does not run after its start"
    ended = await slot.wait(process.process_id, timeout_s=20)
    assert (ended.running, ended.exit_code, ended.output_bytes) == (False, 7, 8), "its end"
    chunk = await slot.log(process.process_id, offset=4, limit=2)
    assert (chunk.data, chunk.offset, chunk.total, chunk.dropped) == (b"tw", 4, 8, 0), "its log from byte 4"
    assert [each.process_id for each in await slot.processes()] == [process.process_id], "the slot's processes"


async def a_background_process_is_written_to(kit: Kit) -> None:
    """A background process can be written to."""
    slot = await kit.slot()
    process = await slot.start("read -r line; echo got $line; exit 5")
    assert await slot.write(process.process_id, b"word\n") == 5, "bytes taken"
    ended = await slot.wait(process.process_id, timeout_s=20)
    assert (ended.exit_code, (await slot.log(process.process_id)).data) == (5, b"got word\n"), "its end and log"


async def a_background_process_is_killed_with_its_children(kit: Kit) -> None:
    """`kill` ends a background process and what it started."""
    slot = await kit.slot()
    process = await slot.start(f"({TICKER}) & wait")
    await wait_for_ticks(slot)
    killed = await slot.kill(process.process_id, grace_s=1)
    assert not killed.running, "it still runs after `kill`"
    await check_stopped(slot)


async def no_terminal_is_told(kit: Kit) -> None:
    """A sandbox without terminals reports this, in the foreground and in the background, and runs nothing."""
    slot = await kit.slot()
    if not kit.direct:
        pytest.skip("the sandbox gives terminals")
    await expect_refusal(slot.run("touch ran", pty=SIZE), "no_pty")
    await expect_refusal(slot.start("touch ran", pty=SIZE), "no_pty")
    assert (await slot.run("ls")).text == "", "the workspace"


@pytest.mark.needs(TERMINALS)
async def a_terminal_on_all_three(kit: Kit) -> None:
    """Standard input, output and error are one terminal, of the requested size."""
    slot = await kit.slot()
    command = "for fd in 0 1 2; do [ -t $fd ] && echo $fd; done; stty size; exit 7"
    result = await slot.run(command, pty=WindowSize(33, 101), timeout_s=30)
    assert (result.stdout, result.stderr, result.exit_code) == (b"0\r\n1\r\n2\r\n33 101\r\n", b"", 7), "the command"


@pytest.mark.least(Isolation.USER)
@pytest.mark.needs(TERMINALS)
async def a_neighbour_s_terminal_is_closed(kit: Kit) -> None:
    """A slot can't read its neighbour's terminal, write to it, or type into it."""
    slot, other = await kit.neighbours()
    process = await slot.start("tty; cat", pty=SIZE)
    path = (await slot.log(process.process_id, wait_s=20)).data.decode().strip()
    attempt = f"[ -e {path} ] && {{ echo intruder >{path}; head -c 1 <{path}; }} 2>/dev/null; true"
    await other.run(attempt, timeout_s=3)
    await asyncio.sleep(0.3)
    assert b"intruder" not in (await slot.log(process.process_id)).data, "it was written to"
