"""Commands in a slot: how they end and what they print."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from hermes_testing.conformance.kit import Kit
from hermes_testing.conformance.waiting import until, within

from hermes_core.sandbox.commands import SlotCommands

pytestmark = pytest.mark.asyncio(loop_scope="module")

TELLS_SIGNALS = "telling exit status"
OUTLIVE = "background processes that outlive"


@pytest.mark.needs(TELLS_SIGNALS)
async def test_all_exit_statuses(kit: Kit) -> None:
    """All of 0 to 255 arrive, 128 + n not taken for a signal."""
    slot = await kit.slot()
    results = await asyncio.gather(*(slot.run(f"exit {status}") for status in range(256)))
    assert [(each.exit_code, each.signal) for each in results] == [(status, None) for status in range(256)], (
        "the statuses"
    )


async def test_death_by_signal(kit: Kit) -> None:
    """A command that a signal ends says which; it did not time out."""
    slot = await kit.slot()
    for number in (1, 9, 11, 15):
        await _ends_by(slot, number)


@pytest.mark.needs("SIGINT")
async def test_interrupts_have_their_defaults(kit: Kit) -> None:
    """SIGINT ends a command that does not handle it."""
    await _ends_by(await kit.slot(), 2)


async def _ends_by(slot: SlotCommands, number: int) -> None:
    result = await slot.run(f"kill -{number} $$; sleep 5")
    got = (result.exit_code, result.signal, result.timed_out, result.returncode)
    assert got == (None, number, False, 128 + number), f"a shell that signal {number} ended"


@pytest.mark.needs(TELLS_SIGNALS)
async def test_exit_137_is_no_kill(kit: Kit) -> None:
    """`exit 137` is told apart from a kill."""
    slot = await kit.slot()
    plain, killed = await slot.run("exit 137"), await slot.run("kill -9 $$")
    assert (plain.exit_code, plain.signal, killed.exit_code, killed.signal) == (137, None, None, 9), "137 and a kill"


async def test_signals_have_their_defaults(kit: Kit) -> None:
    """SIGPIPE ends a writer that nobody reads: `yes | head -1` returns."""
    slot = await kit.slot()
    result = await within(20, slot.run("yes | head -n 1; yes | { read -r x; exit 3; }"), "`yes | head -n 1`")
    assert (result.text, result.exit_code) == ("y\n", 3), "its output and status"


async def test_merged_streams_keep_their_order(kit: Kit) -> None:
    """With `merge_stderr` both come as one stream, in the order written."""
    result = await (await kit.slot()).run("for i in 1 2 3; do echo o$i; echo e$i >&2; done", merge_stderr=True)
    got = (result.text.split(), result.stderr, result.stderr_bytes)
    assert got == (["o1", "e1", "o2", "e2", "o3", "e3"], b"", 0), "merged output"


async def test_no_output_is_lost_at_the_end(kit: Kit) -> None:
    """A command that writes and ends at once has all of its output in its result, 100 times over."""
    slot = await kit.slot()
    script = "head -c 70000 /dev/zero | tr '\\0' x; echo end >&2"
    for _ in range(4):
        results = await asyncio.gather(*(slot.run(script) for _ in range(25)))
        got = {(len(each.stdout), each.stderr) for each in results}
        assert got == {(70_000, b"end\n")}, "bytes of output and the error of 25 commands"


@pytest.mark.needs("streamed output")
async def test_output_is_streamed_as_fast_as_it_is_taken(kit: Kit) -> None:
    """A sink gets all output while the command runs, and slows it down; its own failure ends the command."""
    slot = await kit.slot()
    asked: asyncio.Queue[bytes] = asyncio.Queue()
    sizes: list[int] = []

    async def input_() -> AsyncIterator[bytes]:
        yield await asked.get()

    async def sink(piece: bytes) -> None:
        if not sizes:  # the command is alive: what it prints next depends on what it reads now
            asked.put_nowait(b"3000000\n")
        sizes.append(len(piece))

    script = "echo ready; read n; head -c $n /dev/zero; echo err >&2; exit 4"
    result = await within(60, slot.run(script, stdin=input_(), stdout=sink), "a streamed command")
    assert (sum(sizes), result.stdout_bytes, result.stdout) == (3_000_006, 3_000_006, b""), "the sizes of its output"
    assert (result.exit_code, result.stderr) == (4, b"err\n"), "its status and standard error"

    async def broken(_: bytes) -> None:
        raise KeyError("sink")

    with pytest.raises(KeyError):
        await slot.run("yes & echo $! > yes.pid; wait", stdout=broken)
    await until(lambda: _nothing_runs(slot), 20, "the command of the broken sink still runs")


async def _nothing_runs(slot: SlotCommands) -> bool:
    return not (await slot.run("kill -0 $(cat yes.pid)")).ok


async def test_head_and_tail_are_kept(kit: Kit) -> None:
    """Above the limit the head and the tail are kept, a notice stands between them, and every byte is counted."""
    result = await (await kit.slot()).run("seq 1 200000", output_limit=1000)
    wanted = "".join(f"{number}\n" for number in range(1, 200_001)).encode()
    assert (result.truncated, result.stdout_bytes) == (True, len(wanted)), "that it was cut, and how much was written"
    head, _, rest = result.stdout.partition(b"\n... [")
    notice, _, tail = rest.partition(b"] ...\n")
    assert wanted.startswith(head) and wanted.endswith(tail), "the output does not begin and end as what was written"
    assert (len(head), len(tail)) == (500, 500), "bytes of the head and the tail"
    assert notice == b"%d bytes omitted" % (len(wanted) - 1000), "the notice"


async def test_output_at_the_limit_is_whole(kit: Kit) -> None:
    """Output of exactly the limit is not cut."""
    result = await (await kit.slot()).run("head -c 4096 /dev/zero", output_limit=4096)
    assert (result.truncated, result.stdout) == (False, bytes(4096)), "4096 bytes at a limit of 4096"


async def test_characters_are_not_cut(kit: Kit) -> None:
    """Where output is cut, no character of UTF-8 is cut in two."""
    slot = await kit.slot()
    for limit in (999, 1000, 1001):
        result = await slot.run("yes € | head -n 5000 | tr -d '\\n'", output_limit=limit)
        assert (result.stdout_bytes, "\ufffd" in result.text) == (15_000, False), f"cut at {limit}"


@pytest.mark.needs("spooled output")
async def test_spooled_output_is_all_there(kit: Kit) -> None:
    """With `spool` the whole output is in a file of the slot, above the limit too."""
    slot = await kit.slot()
    result = await slot.run("seq 1 100000", output_limit=100, spool=True)
    assert result.spool_path is not None, "there is no `spool_path`"
    count = await slot.run(f"wc -l <{result.spool_path}")
    assert count.text.strip() == "100000", "lines in the spool file"


async def test_background_children_are_not_waited_for(kit: Kit) -> None:
    """`cmd &` that keeps the output open does not hold the command up."""
    slot = await kit.slot()
    result = await within(20, slot.run("sleep 1000 & echo started"), "`sleep 1000 & echo started`")
    assert (result.exit_code, result.text) == (0, "started\n"), "its result"


@pytest.mark.needs(OUTLIVE)  # on `local` the pipe that it writes to ends with the command
async def test_background_children_live_on(kit: Kit) -> None:
    """What a command leaves running is not killed with it, and is not stopped by a pipe that nobody reads."""
    slot = await kit.slot()
    lines = "i=0; while [ $i -lt 4000 ]; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; i=$((i+1)); done"
    await slot.run(f"(sleep 0.2; {lines}; echo alive >proof) & true")

    async def alive() -> bool:
        return (await slot.run("cat proof 2>/dev/null")).text == "alive\n"

    await until(alive, 20, "it was killed, or waits for somebody to read what it writes")


async def test_many_run_at_once(kit: Kit) -> None:
    """Commands of one slot run at the same time, none waits for another."""
    slot = await kit.slot()
    began = time.monotonic()
    results = await asyncio.gather(*(slot.run(f"sleep 2; echo {number}") for number in range(16)))
    assert [each.text for each in results] == [f"{number}\n" for number in range(16)], "what 16 commands printed"
    took = time.monotonic() - began
    assert took < 16, f"16 commands of 2 s took {took:.0f} s: they wait for each other"
