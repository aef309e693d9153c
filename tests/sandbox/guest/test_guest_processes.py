"""Background processes of a slot."""

from __future__ import annotations

import asyncio
import time

import pytest

from hermes_core.errors import CommandError

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_exit_code_and_log_outlive_the_process(slot):
    started = await slot.start("echo out; echo err >&2; exit 7")
    assert started.running and started.pid and started.command.startswith("echo out")
    assert started.cwd == slot.workspace_dir and abs(started.started_at - time.time()) < 30
    ended = await slot.wait(started.process_id)
    assert (ended.running, ended.exit_code, ended.signal, ended.output_bytes) == (False, 7, None, 8)
    assert (await slot.log(started.process_id)).data == b"out\nerr\n"
    assert (await slot.poll(started.process_id)) == ended
    assert [process.process_id for process in await slot.processes()] == [started.process_id]


async def test_how_long_it_has_run_stops_growing_at_its_end(slot):
    process = await slot.start("sleep 0.2")
    ended = await slot.wait(process.process_id)
    await asyncio.sleep(0.3)
    assert 0.2 <= (await slot.poll(process.process_id)).uptime_s == ended.uptime_s < 60


async def test_log_by_offset(slot):
    process = await slot.start("printf 0123456789")
    await slot.wait(process.process_id)

    async def log(**range_):
        chunk = await slot.log(process.process_id, **range_)
        return chunk.data, chunk.offset, chunk.total, chunk.dropped

    assert await log() == (b"0123456789", 0, 10, 0)
    assert await log(offset=4, limit=3) == (b"456", 4, 10, 0)
    assert await log(offset=10) == (b"", 10, 10, 0)
    assert await log(offset=99) == (b"", 10, 10, 0)
    assert await log(offset=-5, limit=1) == (b"0", 0, 10, 0)
    assert await log(limit=0) == (b"", 0, 10, 0)


async def test_a_full_buffer_tells_what_was_dropped(slot):
    process = await slot.start("seq 1 100000", buffer_bytes=1000)
    await slot.wait(process.process_id)
    everything = b"".join(b"%d\n" % n for n in range(1, 100001))
    chunk = await slot.log(process.process_id)
    assert (chunk.offset, chunk.total, chunk.dropped) == (
        len(everything) - 1000,
        len(everything),
        len(everything) - 1000,
    )
    assert chunk.data == everything[-1000:]
    later = await slot.log(process.process_id, offset=len(everything) - 10)
    assert (later.data, later.dropped) == (everything[-10:], 0)
    earlier = await slot.log(process.process_id, offset=5000, limit=10)
    assert earlier.dropped == len(everything) - 1000 - 5000


async def test_log_while_it_runs(slot):
    process = await slot.start("echo one; sleep 1000")
    for _ in range(100):
        chunk = await slot.log(process.process_id)
        if chunk.data:
            break
        await asyncio.sleep(0.02)
    assert chunk.data == b"one\n"
    await slot.kill(process.process_id)


async def test_input_and_its_end(slot):
    process = await slot.start("cat; echo end")
    assert await slot.write(process.process_id, b"hello\n") == 6
    assert await slot.write(process.process_id, b"world\n", eof=True) == 6
    assert (await slot.wait(process.process_id, timeout_s=10)).exit_code == 0
    assert (await slot.log(process.process_id)).data == b"hello\nworld\nend\n"
    with pytest.raises(CommandError) as caught:
        await slot.write(process.process_id, b"more")
    assert caught.value.code == "ended"


async def test_the_end_of_a_large_input_comes_after_all_of_it(slot):
    process, left = await slot.start("wc -c"), bytes(1_000_000)
    while left:
        left = left[await slot.write(process.process_id, left, eof=True) :]
    assert (await slot.wait(process.process_id, timeout_s=10)).exit_code == 0
    assert (await slot.log(process.process_id)).data == b"1000000\n"


async def test_input_is_taken_as_far_as_there_is_room(slot):
    process = await slot.start("sleep 1000")
    taken = [await slot.write(process.process_id, bytes(200_000)) for _ in range(4)]
    assert taken[0] == 200_000 and taken[-1] == 0 and sum(taken) < 800_000
    await slot.kill(process.process_id)


async def test_input_that_the_process_has_closed(slot):
    process = await slot.start("exec 0<&-; sleep 1000")
    with pytest.raises(CommandError) as caught:
        for _ in range(100):
            await slot.write(process.process_id, b"x")
            await asyncio.sleep(0.02)
    assert caught.value.code == "ended"
    await slot.kill(process.process_id)


async def test_kill_by_term(slot):
    process = await slot.start("sleep 1000")
    began = time.monotonic()
    killed = await slot.kill(process.process_id)
    assert (killed.running, killed.signal, killed.exit_code) == (False, 15, None)
    assert time.monotonic() - began < 15
    assert await slot.kill(process.process_id) == killed


async def test_kill_of_what_ignores_term(slot):
    process = await slot.start("trap '' TERM; echo ready; sleep 1000 & while :; do sleep 0.1; done")
    while not (await slot.log(process.process_id)).data:
        await asyncio.sleep(0.02)
    killed = await slot.kill(process.process_id, grace_s=0.3)
    assert (killed.running, killed.signal) == (False, 9)
    assert (await slot.kill(process.process_id, grace_s=0)).signal == 9


async def test_wait_has_a_limit_of_its_own(slot):
    process = await slot.start("sleep 1000")
    for _ in range(3):
        assert (await slot.wait(process.process_id, timeout_s=0.05)).running
    assert (await slot.wait(process.process_id, timeout_s=0)).running
    await slot.kill(process.process_id, grace_s=0)


async def test_waiting_together(slot):
    process = await slot.start("sleep 0.3; exit 3")
    waits = [asyncio.ensure_future(slot.wait(process.process_id)) for _ in range(5)]
    await asyncio.sleep(0.05)
    waits.pop().cancel()
    assert {(await wait).exit_code for wait in waits} == {3}


async def test_cancelling_a_wait_leaves_the_process(slot):
    process = await slot.start("sleep 1000")
    waiting = asyncio.ensure_future(slot.wait(process.process_id))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.sleep(0.05)
    assert (await slot.poll(process.process_id)).running
    await slot.kill(process.process_id, grace_s=0)


async def test_cancelling_a_start_leaves_no_process(slot):
    for delay in (0, 0, 0.001, 0.002, 0.003, 0.005):
        starting = asyncio.ensure_future(slot.start("sleep 1000"))
        await asyncio.sleep(delay)
        starting.cancel()
        try:
            await slot.kill((await starting).process_id, grace_s=0)
        except asyncio.CancelledError:
            pass
    for _ in range(100):
        if not any(process.running for process in await slot.processes()):
            return
        await asyncio.sleep(0.05)
    pytest.fail("it runs")


async def test_what_cannot_be_started(slot):
    with pytest.raises(CommandError) as caught:
        await slot.start(["no-such-program"])
    assert caught.value.code == "not_found"
    assert await slot.processes() == []


@pytest.mark.parametrize("operation", ["poll", "log", "wait", "kill"])
async def test_unknown_process(slot, operation):
    with pytest.raises(CommandError) as caught:
        await getattr(slot, operation)("nobody")
    assert caught.value.code == "unknown_process"


async def test_processes_of_another_slot_are_out_of_reach(rig):
    slot, other = await rig.slot(), await rig.slot()
    process = await slot.start("sleep 1000")
    with pytest.raises(CommandError):
        await other.kill(process.process_id)
    assert await other.processes() == []
    assert (await slot.poll(process.process_id)).running
    await slot.kill(process.process_id, grace_s=0)


async def test_sixty_four_run_at_once_and_no_more(rig):
    slot = await rig.slot()
    running = [await slot.start("sleep 1000") for _ in range(64)]
    with pytest.raises(CommandError) as caught:
        await slot.start("true")
    assert caught.value.code == "too_many"
    await slot.kill(running[0].process_id, grace_s=0)
    assert (await slot.start("sleep 1000")).running
    await rig.client.kill_slot(int(slot.workspace_dir.rpartition("_")[2]))
    listed = await slot.processes()
    assert len(listed) == 64 and not any(process.running for process in listed)
    assert {process.signal for process in listed} == {9}


async def test_ended_ones_are_kept_up_to_a_number(slot):
    last = None
    for _ in range(80):
        last = await slot.start("true")
        await slot.wait(last.process_id)
    listed = await slot.processes()
    assert 60 <= len(listed) <= 64 and listed[-1].process_id == last.process_id


async def test_a_time_limit_of_a_command_spares_background_processes(slot):
    process = await slot.start("sleep 1000")
    assert (await slot.run("sleep 1000", timeout_s=0.2)).timed_out
    assert (await slot.poll(process.process_id)).running
    await slot.kill(process.process_id, grace_s=0)


async def test_limits_that_are_none(slot):
    process = await slot.start("sleep 1000")
    for attempt in (
        slot.start("true", buffer_bytes=-1),
        slot.start("true", buffer_bytes=1 << 40),
        slot.wait(process.process_id, timeout_s=-1),
        slot.kill(process.process_id, grace_s=float("nan")),
    ):
        with pytest.raises(CommandError) as caught:
            await attempt
        assert caught.value.code == "invalid"
    await slot.kill(process.process_id, grace_s=0)


async def test_waiting_for_output(slot):
    process = await slot.start("sleep 0.3; printf one; sleep 0.3; printf two; sleep 1000")
    first = await slot.log(process.process_id, wait_s=20)
    second = await slot.log(process.process_id, offset=3, wait_s=20)
    assert (first.data, second.data, second.running) == (b"one", b"two", True)
    began = time.monotonic()
    nothing = await slot.log(process.process_id, offset=6, wait_s=0.2)
    assert (nothing.data, nothing.running) == (b"", True) and time.monotonic() - began >= 0.2
    waiting = asyncio.ensure_future(slot.log(process.process_id, offset=6, wait_s=60))
    await asyncio.sleep(0.05)
    await slot.kill(process.process_id)
    assert (await waiting).running is False


async def test_the_whole_log_in_a_file_of_the_slot(slot):
    process = await slot.start("seq 1 50000", buffer_bytes=100, spool=True)
    ended = await slot.wait(process.process_id)
    assert ended.spool_path == process.spool_path is not None
    assert (await slot.run(f"md5sum <{ended.spool_path}")).stdout == (await slot.run("seq 1 50000 | md5sum")).stdout


async def test_those_that_ended_first_make_room(slot):
    first = await slot.start("true")
    await slot.wait(first.process_id)
    runs = await slot.start("sleep 1000")
    others = [await slot.start("true") for _ in range(63)]
    for process in others:
        await slot.wait(process.process_id)
    known = [process.process_id for process in await slot.processes()]
    assert len(known) == 64 and first.process_id not in known and runs.process_id in known
    await slot.kill(runs.process_id)


@pytest.mark.parametrize("left", ["sleep 1000", "trap '' TERM; while :; do sleep 0.1; done"])
async def test_a_kill_ends_what_one_that_has_ended_left_running(slot, left):
    spared = await slot.start("sleep 1000")
    process = await slot.start(f"( {left} ) & ( {left} ) & echo $! >pid; exit 3")
    ended = await slot.wait(process.process_id)
    assert (ended.exit_code, ended.left_killed) == (3, 0)
    assert (await slot.run("kill -0 $(cat pid)")).ok
    killed = await slot.kill(process.process_id, grace_s=0.3)
    assert (killed.exit_code, killed.signal, killed.left_killed >= 2) == (3, None, True)
    assert not (await slot.run("kill -0 $(cat pid)")).ok
    assert await slot.kill(process.process_id) == killed
    assert (await slot.poll(spared.process_id)).running
    await slot.kill(spared.process_id)
