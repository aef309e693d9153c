"""Background processes: how they end, what of their output is held, what they are told, and whose they are."""

from __future__ import annotations

import asyncio
import resource
import time

import pytest
from hermes_testing.conformance.kit import Kit, communicate
from hermes_testing.conformance.running import TICKER, check_stopped, wait_for_ticks
from hermes_testing.conformance.waiting import expect_refusal, within

from hermes_core.errors import CommandError
from hermes_core.sandbox.commands import SlotCommands
from hermes_core.sandbox.contract import Isolation, Sandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")

OUTLIVE = "background processes that outlive"
TELLS_SIGNALS = "telling exit status"
MOST = 64
"""Processes that a slot knows at most."""
HELD = 200_000
"""Bytes of a process's output that are held."""
GIGABYTE = 1 << 30


async def _says(slot: SlotCommands, process_id: str, words: bytes) -> None:
    """Wait until the process has written these words."""
    seen = b""
    while words not in seen:
        chunk = await within(20, slot.log(process_id, offset=len(seen), wait_s=20), f"waiting for {words!r}")
        assert chunk.data, f"it did not write {words!r}, but {seen!r}"
        seen += chunk.data


@pytest.mark.needs("the end of their input")
async def test_the_end_of_a_background_processs_input(kit: Kit) -> None:
    """Its input can be ended."""
    slot = await kit.slot()
    process = await slot.start("cat; echo end")
    await slot.write(process.process_id, b"last\n", eof=True)
    await slot.wait(process.process_id, timeout_s=20)
    assert (await slot.log(process.process_id)).data == b"last\nend\n", "its log"


@pytest.mark.needs("background processes that outlive")
async def test_a_full_log_tells_what_it_dropped(kit: Kit) -> None:
    """A background process's log keeps the last bytes and says how many are gone."""
    slot = await kit.slot()
    process = await slot.start("seq 1 100000", buffer_bytes=1000)
    await slot.wait(process.process_id, timeout_s=20)
    wanted = "".join(f"{number}\n" for number in range(1, 100_001)).encode()
    chunk = await slot.log(process.process_id)
    assert (chunk.data, chunk.total, chunk.dropped) == (wanted[-1000:], len(wanted), len(wanted) - 1000), "the log"


@pytest.mark.needs(TELLS_SIGNALS)
async def test_exit_codes_of_background_processes(kit: Kit) -> None:
    """`exit 7` in the background reads 7, and so does every other status."""
    slot = await kit.slot()
    for status in (0, 1, 7, 42, 124, 126, 127, 128, 137, 255):
        process = await slot.start(f"exit {status}")
        ended = await slot.wait(process.process_id, timeout_s=20)
        assert (ended.exit_code, ended.signal, ended.running) == (status, None, False), f"`exit {status}`"


async def test_a_background_process_ends_by_a_signal(kit: Kit) -> None:
    """Of a process that a signal ended it is told which."""
    slot = await kit.slot()
    for number in (9, 15):
        process = await slot.start(f"kill -{number} $$; sleep 5")
        ended = await slot.wait(process.process_id, timeout_s=20)
        assert (ended.exit_code, ended.signal) == (None, number), f"a shell that signal {number} ended"


async def test_a_quick_end_is_an_end(kit: Kit) -> None:
    """A process that ends at once is never shown as running after that, nor is its output lost."""
    slot = await kit.slot()
    for number in range(20):
        process = await slot.start(f"echo {number}; exit {number}")
        ended = await within(20, slot.wait(process.process_id), "its end")
        log = await slot.log(process.process_id)
        assert (ended.running, ended.exit_code, log.data) == (False, number, f"{number}\n".encode()), "its end and log"


async def test_sixty_four_at_once(kit: Kit) -> None:
    """A slot runs 64 processes at once, each with its own input, output and exit code."""
    slot = await kit.slot()
    started = await asyncio.gather(*(slot.start(f"read -r x; echo $x; exit {n}") for n in range(MOST)))
    assert len({process.process_id for process in started}) == MOST, "different ids"
    await asyncio.gather(*(slot.write(each.process_id, f"to {n}\n".encode()) for n, each in enumerate(started)))
    ended = await asyncio.gather(*(slot.wait(each.process_id, timeout_s=60) for each in started))
    assert [each.exit_code for each in ended] == list(range(MOST)), "the exit codes"
    logs = await asyncio.gather(*(slot.log(each.process_id) for each in started))
    assert [log.data for log in logs] == [f"to {n}\n".encode() for n in range(MOST)], "the logs"


async def test_one_too_many_is_refused(kit: Kit) -> None:
    """With 64 running, another one is refused; one that has ended makes room."""
    slot = await kit.slot()
    started = await asyncio.gather(*(slot.start("sleep 1000") for _ in range(MOST)))
    await expect_refusal(slot.start("true"), "too_many")
    await slot.kill(started[0].process_id, grace_s=0)
    assert (await slot.start("sleep 1000")).running, "that there is room again"
    await expect_refusal(slot.poll(started[0].process_id), "unknown_process")


async def test_what_ends_by_term_is_told_so(kit: Kit) -> None:
    """A process that TERM ends is reported as ended by TERM; a second kill changes nothing."""
    slot = await kit.slot()
    process = await slot.start("sleep 1000 & echo ready; wait")
    # bash loses a TERM that comes between the start of a command's process and its `exec`.
    await _says(slot, process.process_id, b"ready")
    killed = await slot.kill(process.process_id)
    assert (killed.running, killed.signal) == (False, 15), "its end"
    again = await slot.kill(process.process_id)
    assert (again.running, again.signal) == (False, 15), "what a second kill says"


async def test_what_ignores_term_is_told_as_killed(kit: Kit) -> None:
    """A process that ignores TERM dies, and is reported as KILLed."""
    slot = await kit.slot()
    process = await slot.start(f"trap '' TERM; echo ready; {TICKER}")
    await _says(slot, process.process_id, b"ready")
    killed = await within(20, slot.kill(process.process_id, grace_s=0.5), "its end")
    assert (killed.running, killed.signal) == (False, 9), "its end"
    await check_stopped(slot)


async def test_a_handled_term_keeps_its_exit_code(kit: Kit) -> None:
    """A process that handles TERM and exits is reported with its own exit code."""
    slot = await kit.slot()
    process = await slot.start("trap 'exit 7' TERM; echo ready; while :; do sleep 0.1; done")
    await _says(slot, process.process_id, b"ready")
    killed = await slot.kill(process.process_id, grace_s=10)
    assert (killed.running, killed.exit_code, killed.signal) == (False, 7, None), "its end"


async def test_a_kill_finds_what_has_left_its_session(kit: Kit) -> None:
    """`kill` ends what has forked twice, or made itself a session of its own."""
    slot = await kit.slot()
    if not (await slot.run("command -v setsid")).ok:
        pytest.skip("the sandbox has no `setsid`")
    process = await slot.start(f"setsid sh -c '( ( {TICKER} ) & ) & sleep 1000' & wait")
    await wait_for_ticks(slot)
    await slot.kill(process.process_id, grace_s=0.5)
    await check_stopped(slot)


async def test_a_kill_after_its_end(kit: Kit) -> None:
    """`kill` of a process that has ended ends what it has left running, and keeps its exit code."""
    slot = await kit.slot()
    process = await slot.start(f"({TICKER}) >/dev/null 2>&1 & exit 3")
    assert (await slot.wait(process.process_id, timeout_s=20)).exit_code == 3, "its exit code"
    await wait_for_ticks(slot)
    killed = await slot.kill(process.process_id, grace_s=0.5)
    assert (killed.running, killed.exit_code, killed.signal) == (False, 3, None), "its end, after the kill"
    await check_stopped(slot)


async def test_a_kill_spares_the_others(kit: Kit) -> None:
    """`kill` ends one process of a slot and leaves its neighbours in the slot alone."""
    slot = await kit.slot()
    other = await slot.start("read -r x; exit 3")
    process = await slot.start("sleep 1000")
    await slot.kill(process.process_id, grace_s=0.5)
    assert (await slot.poll(other.process_id)).running, "another process was ended too"
    await slot.write(other.process_id, b"\n")
    assert (await slot.wait(other.process_id, timeout_s=20)).exit_code == 3, "the exit code of the other one"


async def test_offset_0_is_the_first_byte_held(kit: Kit) -> None:
    """Reading from 0 gives the first byte still held, and says how many before it are gone."""
    slot = await kit.slot()
    process = await slot.start("seq 1 100000")
    await slot.wait(process.process_id, timeout_s=30)
    wanted = "".join(f"{number}\n" for number in range(1, 100_001)).encode()
    gone = len(wanted) - HELD
    chunk = await slot.log(process.process_id, offset=0, limit=100)
    got = (chunk.data, chunk.offset, chunk.total, chunk.dropped)
    assert got == (wanted[gone : gone + 100], gone, len(wanted), gone), "the log from 0"
    chunk = await slot.log(process.process_id, offset=gone - 10, limit=5)
    assert (chunk.data, chunk.offset, chunk.dropped) == (wanted[gone : gone + 5], gone, 10), (
        "the log from 10 before that"
    )
    chunk = await slot.log(process.process_id, offset=len(wanted) - 3)
    assert (chunk.data, chunk.dropped) == (wanted[-3:], 0), "its last 3 bytes"


async def test_offsets_that_are_nowhere(kit: Kit) -> None:
    """A negative offset is the first byte, one beyond the end gives nothing, and neither is an accident."""
    slot = await kit.slot()
    process = await slot.start("printf 0123456789")
    await slot.wait(process.process_id, timeout_s=20)
    for offset, wanted in ((-5, (b"0123456789", 0, 0)), (10, (b"", 10, 0)), (99, (b"", 10, 0))):
        chunk = await slot.log(process.process_id, offset=offset)
        assert (chunk.data, chunk.offset, chunk.dropped) == wanted, f"the log from {offset}"


async def test_offsets_are_exact_while_it_writes(kit: Kit) -> None:
    """While a process writes as fast as it can, what is at an offset is what was written there."""
    slot = await kit.slot()
    process = await slot.start("i=0; while [ $i -lt 60000 ]; do printf '%09d\\n' $i; i=$((i + 1)); done")
    offset, seen = 0, 0
    while True:
        chunk = await within(30, slot.log(process.process_id, offset=offset, limit=5000, wait_s=20), "its log")
        assert chunk.offset == offset + chunk.dropped, "the offset, and what was dropped before it"
        if chunk.data != _lines(chunk.offset, len(chunk.data)):
            pytest.fail(f"not what was written at {chunk.offset}")
        offset, seen = chunk.offset + len(chunk.data), seen + len(chunk.data)
        if not chunk.running and offset == chunk.total:
            break
    assert (offset, seen > 0) == (600_000, True), "all bytes, and that some of them were seen"


def _lines(offset: int, size: int) -> bytes:
    first = offset // 10
    return b"".join(b"%09d\n" % number for number in range(first, first + size // 10 + 2))[offset % 10 :][:size]


async def test_a_follower_misses_nothing(kit: Kit) -> None:
    """Who reads on from where the last read ended gets every byte, once."""
    slot = await kit.slot()
    process = await slot.start("i=0; while [ $i -lt 300 ]; do printf '%09d\\n' $i; i=$((i + 1)); done; sleep 0.2")
    seen = b""
    while True:
        chunk = await within(30, slot.log(process.process_id, offset=len(seen), limit=7, wait_s=20), "its log")
        assert (chunk.offset, chunk.dropped) == (len(seen), 0), "where the log goes on"
        seen += chunk.data
        if not chunk.running and len(seen) == chunk.total:
            break
    if seen != _lines(0, 3000):
        pytest.fail(f"{len(seen)} of 3000 bytes, or others")


async def test_writers_at_the_same_time(kit: Kit) -> None:
    """Of eight writers at once no byte is lost, and no line of theirs is torn."""
    slot = await kit.slot()
    writer = "i=0; while [ $i -lt 1000 ]; do echo $n:$i; i=$((i + 1)); done"
    process = await slot.start(f"for n in 1 2 3 4 5 6 7 8; do ( {writer} ) & done; wait")
    await slot.wait(process.process_id, timeout_s=60)
    lines = (await slot.log(process.process_id)).data.decode().split()
    assert sorted(lines) == sorted(f"{n}:{i}" for n in range(1, 9) for i in range(1000)), "their lines"


async def test_characters_cut_by_a_read(kit: Kit) -> None:
    """Reads that cut a character in two lose nothing of it: the pieces make the text again."""
    slot = await kit.slot()
    text = "aä€𝄞" * 20
    process = await slot.start(["printf", "%s", text])
    await slot.wait(process.process_id, timeout_s=20)
    seen = b""
    while len(seen) < len(text.encode()):
        seen += (await slot.log(process.process_id, offset=len(seen), limit=1)).data
    assert seen.decode() == text, "the text"


@pytest.mark.full  # a question of size
async def test_a_gigabyte_is_held_to_its_buffer(kit: Kit) -> None:
    """A process that writes 1 GB is held to its buffer: neither driver nor guest grows."""
    slot = await kit.lease()
    commands = (await kit.common_tools()).commands(slot)
    if kit.direct:
        pytest.skip("a sandbox without Python sends every byte to the driver, which holds the last ones")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    process = await commands.start("yes 0123456789abcde | head -c 1073741824")
    ended = await commands.wait(process.process_id, timeout_s=150)
    assert (ended.running, ended.output_bytes) == (False, GIGABYTE), "that it ended, and what it wrote"
    chunk = await commands.log(process.process_id)
    assert (len(chunk.data), chunk.offset, chunk.dropped) == (HELD, GIGABYTE - HELD, GIGABYTE - HELD), "what is held"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 << 10, f"the driver grew by {grown >> 10} MB"
    attach = getattr(kit.backend, "attach", None)
    if attach is None or kit.level is Isolation.SHARED:
        return  # there it may be anyone's processes that a sandbox sees
    sandbox: Sandbox = await attach(slot.sandbox_id)
    peaks = await communicate(await sandbox.open(["sh", "-c", "grep -h VmHWM /proc/[0-9]*/status 2>/dev/null || :"]))
    largest = max((int(line.split()[1]) for line in peaks.out.splitlines()), default=0)
    assert largest < 128 << 10, f"a process of the sandbox took {largest >> 10} MB"


@pytest.mark.needs("spooled output")
async def test_the_whole_log_on_request(kit: Kit) -> None:
    """On request the whole log is kept in a file that the slot can read."""
    slot = await kit.slot()
    process = await slot.start("seq 1 100000", buffer_bytes=100, spool=True)
    await slot.wait(process.process_id, timeout_s=30)
    path = (await slot.poll(process.process_id)).spool_path
    assert path, "it has no path"
    assert (await slot.run(f"wc -c <{path}")).text.strip() == "588895", "the size of the file"
    assert (await slot.run(f"tail -n 1 {path}")).text == "100000\n", "its last line"


async def test_a_log_can_be_waited_for(kit: Kit) -> None:
    """Waiting for more of a log ends with more of it, with the process, or at the time limit."""
    slot = await kit.slot()
    process = await slot.start("read -r x; echo $x; read -r x")
    waiting = asyncio.ensure_future(slot.log(process.process_id, wait_s=20))
    await asyncio.sleep(0.2)
    assert not waiting.done(), "it did not wait"
    await slot.write(process.process_id, b"more\n")
    assert (await waiting).data == b"more\n", "what came"
    nothing = await slot.log(process.process_id, offset=5, wait_s=0.2)
    assert (nothing.data, nothing.running) == (b"", True), "at the time limit"
    waiting = asyncio.ensure_future(slot.log(process.process_id, offset=5, wait_s=20))
    await asyncio.sleep(0.1)
    await slot.kill(process.process_id, grace_s=1)
    assert not (await within(20, waiting, "its end")).running, "at its end"


async def test_a_wait_has_its_time_limit(kit: Kit) -> None:
    """`wait` returns at its time limit with a process that still runs, and blocks nobody else in the slot."""
    slot = await kit.slot()
    process = await slot.start("sleep 1000")
    assert (await slot.wait(process.process_id, timeout_s=0)).running, "it ran no more at once"
    waiting = asyncio.ensure_future(slot.wait(process.process_id, timeout_s=2))
    assert (await within(20, slot.run("echo meanwhile"), "another command")).text == "meanwhile\n", "another command"
    assert not waiting.done(), "the wait was over before its time"
    assert (await within(20, waiting, "its time limit")).running, "it does not run any more"


async def test_no_more_can_be_written_to_what_has_ended(kit: Kit) -> None:
    """Writing to a process that has ended is refused."""
    slot = await kit.slot()
    process = await slot.start("true")
    await slot.wait(process.process_id, timeout_s=20)
    with pytest.raises(CommandError) as raised:
        await slot.write(process.process_id, b"x")
    error = raised.value
    assert "ended" in error.message, f"it does not say why: {error.message}"
    if not kit.direct:
        assert error.code == "ended", "the code of the error"


async def test_a_session_that_there_is_not(kit: Kit) -> None:
    """Every operation on a process that the slot does not have is refused as `unknown_process`."""
    slot = await kit.slot()
    unknown = "proc_0123456789ab"
    for what in (slot.poll, slot.log, slot.wait, slot.kill):
        await expect_refusal(what(unknown), "unknown_process")
    await expect_refusal(slot.write(unknown, b"x"), "unknown_process")


async def test_another_slot_s_processes_are_unknown(kit: Kit) -> None:
    """A slot neither lists nor drives the processes of its neighbour."""
    slot, other = await kit.neighbours()
    process = await slot.start("sleep 1000")
    assert list(await other.processes()) == [], "the neighbour's processes"
    await expect_refusal(other.kill(process.process_id), "unknown_process")
    await expect_refusal(other.write(process.process_id, b"x"), "unknown_process")
    assert (await slot.poll(process.process_id)).running, "it was ended"


async def test_the_next_lease_knows_none(kit: Kit) -> None:
    """What one trajectory has started is unknown to the next one of its slot, released with or without a reset."""
    async with kit.tools(seats=1, per_sandbox=1) as tools:
        for reset in (False, True):
            slot = await tools.acquire()
            process = await tools.commands(slot).start(f"trap '' TERM; {TICKER}")
            await tools.release(slot, reset_workspace=reset)
            async with tools.lease() as again:
                commands = tools.commands(again)
                assert list(await commands.processes()) == [], f"processes of the next lease (reset: {reset})"
                await expect_refusal(commands.poll(process.process_id), "unknown_process")
                await check_stopped(commands)


@pytest.mark.needs(OUTLIVE)
async def test_emptying_a_slot_keeps_its_logs(kit: Kit) -> None:
    """After everything of a slot was killed, its processes are ended ones, with their logs."""
    tools, slot = await kit.common_tools(), await kit.lease()
    commands = tools.commands(slot)
    process = await commands.start("trap '' TERM; echo last words; while :; do sleep 0.1; done")
    await _says(commands, process.process_id, b"last words\n")
    await tools.kill_everything(slot)
    ended = await commands.poll(process.process_id)
    assert (ended.running, ended.signal) == (False, 9), "its end"
    assert (await commands.log(process.process_id)).data == b"last words\n", "its log"


async def test_processes_are_listed_in_order(kit: Kit) -> None:
    """The list has running and ended ones, the oldest first, each with its command and directory."""
    slot = await kit.slot()
    commands = ["sleep 1000", "exit 4", "sleep 1001"]
    started = [await slot.start(command) for command in commands]
    await slot.wait(started[1].process_id, timeout_s=20)
    listed = await slot.processes()
    assert [each.process_id for each in listed] == [each.process_id for each in started], "the order"
    assert [each.command for each in listed] == commands, "the commands"
    assert [each.running for each in listed] == [True, False, True], "which of them run"
    assert {each.cwd.rstrip("/.") for each in listed} == {slot.workspace_dir}, "the directory"
    assert all(abs(each.started_at - time.time()) < 60 for each in listed), "they did not start just now"


async def test_a_background_process_has_its_directory_and_variables(kit: Kit) -> None:
    """`cwd` and `env` are the process's; a directory that is missing is told."""
    slot = await kit.slot()
    await slot.run("mkdir sub")
    process = await slot.start("pwd; echo $WORD", cwd="sub", env={"WORD": "a word"})
    await slot.wait(process.process_id, timeout_s=20)
    lines = (await slot.log(process.process_id)).data.decode().splitlines()
    assert (lines[0].rpartition("/")[2], lines[1]) == ("sub", "a word"), "its directory and variable"


async def test_uptime_stands_still_at_the_end(kit: Kit) -> None:
    """How long it has run grows while it runs, and no more once it has ended."""
    slot = await kit.slot()
    process = await slot.start("sleep 0.5")
    assert (await slot.poll(process.process_id)).uptime_s < 30, "it claims to be older than it is"
    ended = await slot.wait(process.process_id, timeout_s=20)
    await asyncio.sleep(0.3)
    later = await slot.poll(process.process_id)
    assert (later.uptime_s, later.uptime_s >= 0.4) == (ended.uptime_s, True), "its age some time after its end"


async def test_a_command_s_time_limit_spares_them(kit: Kit) -> None:
    """A command that reaches its time limit takes no background process of the slot with it."""
    slot = await kit.slot()
    process = await slot.start("sleep 1000")
    assert (await slot.run("sleep 1000", timeout_s=0.3)).timed_out, "it did not time out"
    assert (await slot.poll(process.process_id)).running, "the background process was ended too"
