"""Background processes of a slot."""

from __future__ import annotations

import asyncio

import pytest

from hermes_core.errors import CommandError

pytestmark = pytest.mark.asyncio(loop_scope="module")


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


async def test_all_who_wait_for_a_process_hear_of_its_end(slot):
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


async def test_buffers_and_times_that_make_no_sense_are_refused(slot):
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
