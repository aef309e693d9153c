"""Lost channels: no output lost or doubled, no command run twice; and what else a client promises."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import random
import sys
import time

import pytest

from hermes_core.errors import ChannelLost, CommandError, PolicyError, SandboxLost
from hermes_core.sandbox.contract import Channel, Isolation
from hermes_core.sandbox.guest import wire
from hermes_core.sandbox.guest_client.client import GuestClient

ROOT = os.geteuid() == 0

pytestmark = pytest.mark.usefixtures("leak_check")


class Meddler(Channel):
    """A channel that a test can look into, hold up, and put words into."""

    def __init__(self, inner, meddle):
        self.inner = inner
        self.meddle = meddle
        self.open = asyncio.Event()
        self.open.set()

    async def read(self, n):
        data = self.meddle(await self.inner.read(n))
        await self.open.wait()
        return data

    async def write(self, data):
        await self.inner.write(data)

    async def wait(self):
        return await self.inner.wait()

    async def aclose(self):
        await self.inner.aclose()

    @property
    def stderr_tail(self):
        return self.inner.stderr_tail


async def over_breaking_channels(rig, *work):
    """Do the work while one channel after the other is cut, at a random moment after its greeting.

    The first ones live for 2 ms at most, so that the fastest machine is not done before three were cut.
    """
    greeted, cuts = asyncio.Event(), 0
    tell = rig.client._on_greeting

    def told(header):
        tell(header)
        greeted.set()

    rig.client._on_greeting = told
    working = asyncio.gather(*work)
    while not working.done():
        await asyncio.wait([working], timeout=random.random() * min(0.002 * 2**cuts, 0.05))
        greeted.clear()
        rig.sandbox.cut()
        cuts += 1
        waiting = asyncio.ensure_future(greeted.wait())
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
    await working
    assert cuts > 2


async def test_commands_run_exactly_once_over_a_channel_that_breaks(rigged, level, times):
    count = times(15, 40)
    async with rigged(level) as rig:

        async def commands(index):
            slot = rig.client.commands(index)
            for number in range(count):
                result = await slot.run(f"echo {number} >>log; echo {number}; exit {number % 7}")
                assert (result.text, result.exit_code) == (f"{number}\n", number % 7)
            assert (await slot.run("cat log")).text == "".join(f"{n}\n" for n in range(count))

        indexes = [await rig.index() for _ in range(6)]
        await over_breaking_channels(rig, *map(commands, indexes))


async def test_streams_are_exact_over_a_channel_that_breaks(rigged, times):
    async with rigged("shared") as rig:
        slot = await rig.slot()
        data = os.urandom(6_000_000)
        await slot.write_file("large", data)

        async def reading():
            for _ in range(times(2, 4)):
                assert (await slot.read_file("large")).data == data
            result = await slot.run("cat large; echo end >&2", output_limit=32 << 20)
            assert result.stdout == data and result.stderr == b"end\n"

        async def writing(name):
            for _ in range(times(1, 2)):
                result = await slot.run("md5sum", stdin=data)
                assert result.text == (await slot.run("md5sum <large")).text
                await slot.write_file(name, data)
                assert (await slot.run(["cmp", name, "large"])).ok

        await over_breaking_channels(rig, reading(), writing("a"), writing("b"))


FORWARDED = """
import hashlib, socket, sys, threading
def exchange(number):
    s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    mine = bytes([number]) + data
    threading.Thread(target=lambda: (s.sendall(mine), s.shutdown(1))).start()
    digest = hashlib.sha256()
    while got := s.recv(65536):
        digest.update(got)
    print(digest.hexdigest())
data = open("mine", "rb").read()
threads = [threading.Thread(target=exchange, args=(number,)) for number in range(3)]
for t in threads: t.start()
for t in threads: t.join()
"""


async def test_forwards_are_exact_over_a_channel_that_breaks(rigged, level, times):
    """No connection is lost or served twice, and each has the right bytes and an end in both directions."""
    if level == "shared":
        pytest.skip("it has no forwards")
    async with rigged(level) as rig:
        slot = await rig.slot()
        data = os.urandom(2_000_000)
        served = []

        async def serve(connection):
            async def hear():
                got = bytearray()
                while piece := await connection.read(30_000):
                    got += piece
                served.append(bytes(got))

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(hear())
                for start in range(0, len(data), 99_999):
                    await connection.write(data[start : start + 99_999])
                await connection.finish()

        async def exchange():
            for number in range(times(2, 5)):
                async with slot.forward(serve) as forward:
                    done = await slot.run(["python3", "-c", FORWARDED, str(forward.port)], timeout_s=60)
                    assert done.text.split() == 3 * [hashlib.sha256(data).hexdigest()], done.error_text
                    while len(served) < 3 * (number + 1):  # the last of what it sent is on its way
                        await asyncio.sleep(0.01)

        await slot.write_file("mine", data)
        await over_breaking_channels(rig, exchange())
        assert sorted(got[0] for got in served) == sorted([0, 1, 2] * times(2, 5))
        assert all(got[1:] == data for got in served)


async def test_everything_else_over_a_channel_that_breaks(rigged, times):
    async with rigged("shared") as rig:
        indexes = [await rig.index() for _ in range(4)]

        async def life(index):
            slot = rig.client.commands(index)
            for number in range(times(2, 5)):
                process = await slot.start("while read line; do echo got $line; done; exit 5")
                for word in range(20):
                    await slot.write(process.process_id, b"%d\n" % word, eof=word == 19)
                assert (await slot.wait(process.process_id)).exit_code == 5
                assert (await slot.log(process.process_id)).data == b"".join(b"got %d\n" % n for n in range(20))
                assert len(await slot.processes()) == 1
                await slot.write_file(f"{number}", b"x", append=True)
                assert (await slot.read_file(f"{number}")).data == b"x"
                assert (await slot.run("sleep 9", timeout_s=0.05)).timed_out
                await rig.client.reset_slot(index)
                assert await slot.list_dir() == []

        await over_breaking_channels(rig, *map(life, indexes))


async def test_a_channel_that_is_cut_before_the_request_arrives(rigged):
    """The request and all of its input were on their way and are lost: both are sent again."""
    async with rigged("shared") as rig:
        slot = await rig.slot()
        for delay in (0, 0.001, 0.005):
            running = asyncio.ensure_future(slot.run("wc -c", stdin=bytes(1_000_000)))
            await asyncio.sleep(delay)
            rig.sandbox.cut()
            assert (await asyncio.wait_for(running, 20)).text.strip() == "1000000"


async def test_garbage_on_the_channel(rigged):
    async with rigged("shared") as rig:
        slot = await rig.slot()
        plain, spoil = (
            rig.sandbox.open,
            [b"\0\0\0\2{]", os.urandom(50), b"\xff" * 9, wire.encode({"ev": "out"}), wire.encode({})],
        )

        async def meddling(argv, *, env=None):
            words = [spoil.pop()] if spoil else []
            count = iter(range(1000))
            return Meddler(
                await plain(argv, env=env), lambda data: words.pop() + data if words and next(count) > 4 else data
            )

        rig.sandbox.open = meddling
        rig.sandbox.cut()
        for number in range(60):
            assert (await slot.run(f"echo {number} >>log; echo {number}")).text == f"{number}\n"
        assert spoil == []
        assert (await slot.run("cat log")).text == "".join(f"{n}\n" for n in range(60))


@pytest.mark.parametrize("noise", ["Loading the environment ...", "\\0\\0\\0\\2{}\\377", "%060000d"])
async def test_what_a_wrapper_of_python_prints_before_the_greeting_is_dropped(rigged, tmp_path, noise):
    wrapper = tmp_path / "python3"
    wrapper.write_text(f"#!/bin/sh\nprintf '{noise}\\n'\nexec '{sys.executable}' \"$@\"\n")
    wrapper.chmod(0o755)
    async with rigged("shared", python=str(wrapper)) as rig:
        slot = await rig.slot()
        assert (await slot.run("echo one")).text == "one\n"
        rig.sandbox.cut()
        assert (await slot.run("echo two")).text == "two\n"


async def test_garbage_to_the_guest(rigged):
    async with rigged("shared") as rig:
        slot = await rig.slot()
        words = [b"\xff" * 9, os.urandom(100), wire.encode({"op": "exec"}), wire.encode({}), wire.encode({"op": "ack"})]
        words += [
            wire.encode({"op": "in", "id": "x"}),
            wire.encode({"op": "hello"}),
            wire.encode({"op": "nonsense", "id": "y"}),
        ]
        for word in words:
            rig.client._send(word)
            await asyncio.sleep(0.05)
            assert (await slot.run("echo fine")).text == "fine\n"


async def test_frames_right_behind_the_greeting_are_not_lost(rigged):
    """A new channel brings them together with the greeting, cut anywhere."""
    async with rigged("shared") as rig:
        slot = await rig.slot()
        plain = rig.sandbox.open

        async def sluggish(argv, *, env=None):
            channel = Meddler(await plain(argv, env=env), lambda data: data)
            channel.open.clear()
            asyncio.get_running_loop().call_later(0.3, channel.open.set)
            return channel

        rig.sandbox.open = sluggish
        process = await slot.start("sleep 0.4")
        waits = [asyncio.ensure_future(slot.wait(process.process_id)) for _ in range(20)]
        runs = [asyncio.ensure_future(slot.run("sleep 0.4; head -c 30000 /dev/zero")) for _ in range(10)]
        await asyncio.sleep(0.1)
        rig.sandbox.cut()
        assert not any(process.running for process in await asyncio.gather(*waits))
        assert {result.stdout_bytes for result in await asyncio.gather(*runs)} == {30000}


async def test_a_stalled_channel_is_replaced(rigged):
    async with rigged("shared", orphan_ttl_s=5.0) as rig:
        slot = await rig.slot()
        plain, channels = rig.sandbox.open, []

        async def meddling(argv, *, env=None):
            channels.append(Meddler(await plain(argv, env=env), lambda data: data))
            return channels[-1]

        rig.sandbox.open = meddling
        rig.sandbox.cut()
        assert (await slot.run("echo fine")).text == "fine\n"
        while not channels:  # the command may have been answered before the cut was noticed
            await asyncio.sleep(0.01)
        await slot.run("true")  # over the new channel: from here on it is in use, and no longer being opened
        channels[-1].open.clear()
        began = time.monotonic()
        assert (await asyncio.wait_for(slot.run("echo again >>log; cat log"), 20)).text == "again\n"
        assert time.monotonic() - began < 15 and len(channels) >= 2


async def test_a_channel_that_hangs_while_it_is_opened_leaves_time_for_another(rigged):
    async with rigged("shared", orphan_ttl_s=6.0) as rig:
        slot = await rig.slot()
        plain, channels = rig.sandbox.open, []

        async def first_hangs(argv, *, env=None):
            channels.append(Meddler(await plain(argv, env=env), lambda data: data))
            if len(channels) == 1:
                channels[0].open.clear()
            return channels[-1]

        rig.sandbox.open = first_hangs
        rig.sandbox.cut()
        while not channels:
            await asyncio.sleep(0.01)
        assert (await asyncio.wait_for(slot.run("echo fine"), 20)).text == "fine\n"
        assert len(channels) == 2


async def test_a_reader_that_stalls_disturbs_nobody(rigged):
    """It takes part of a stream and stops: its sender is held, a neighbour's commands take as long as before."""
    async with rigged("shared") as rig:
        slot, other = await rig.slot(), await rig.slot()
        await slot.write_file("large", bytes(30_000_000))

        async def median(times=60):
            taken = []
            for _ in range(times):
                began = time.perf_counter()
                await other.run("true")
                taken.append(time.perf_counter() - began)
            return sorted(taken)[times // 2]

        from hermes_core.sandbox.guest_client.streams import OutputStream

        alone = await median()
        stream = OutputStream()
        header = {"op": "exec", "mode": "stream", "slot": 0, "builtin": "read"}
        header["args"] = {"path": "large", "offset": 0, "limit": 30_000_000}
        call = asyncio.ensure_future(rig.client.request(header, output=stream))
        await asyncio.sleep(0.3)
        assert stream.received <= 2 * wire.WINDOW
        assert await median() < 3 * alone + 0.005
        assert sum([len(piece) async for piece in stream]) == 30_000_000
        await call


async def test_a_neighbours_flood_leaves_latency_bounded(rigged):
    async with rigged("shared") as rig:
        slot, other = await rig.slot(), await rig.slot()
        await slot.write_file("large", bytes(40_000_000))
        flood = asyncio.ensure_future(slot.read_file("large"))
        slowest = 0.0
        while not flood.done():
            began = time.perf_counter()
            await other.run("true")
            slowest = max(slowest, time.perf_counter() - began)
        assert slowest < 1.0 and len((await flood).data) == 40_000_000


# --- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.full
async def test_hundreds_of_commands_leave_nothing_behind(rigged, times):
    async with rigged("shared") as rig:
        slot = await rig.slot()

        async def one(number):
            if number % 10 == 0:
                await slot.write_file("f", b"x" * number)
            elif number % 10 == 1:
                await slot.read_file("f")
            else:
                await slot.run(f"echo {number}; sleep 0.001 &", timeout_s=600, stdin=b"x" if number % 2 else None)

        async def settle():
            for _ in range(100):
                rig.client._post_acks()
                await asyncio.sleep(0.05)
                if await known(rig) == 0 and len(rig.client._pending) == 0:
                    return
            pytest.fail(f"{await known(rig)} requests stay")

        async def many(count):
            for start in range(0, count, 20):
                await asyncio.gather(*(one(n) for n in range(start, start + 20)))
            await settle()
            gc.collect()

        await many(times(60, 100))
        guest, driver = os.listdir(f"/proc/{rig.guest_pid}/fd"), os.listdir("/proc/self/fd")
        await many(times(120, 300))
        assert len(os.listdir(f"/proc/{rig.guest_pid}/fd")) <= len(guest) + 3
        assert len(os.listdir("/proc/self/fd")) <= len(driver) + 3


async def known(rig):
    """How many requests the guest remembers: told to whoever joins with the same session."""
    hello = json.loads(json.dumps({"op": "hello", "driver": "driver", "session": rig.client._session_id}))
    counted = asyncio.get_running_loop().create_future()
    greeted = rig.client._on_greeting

    def count(header):
        if not counted.done():
            counted.set_result(len([i for i in header["known"] if i not in rig.client._pending]))
        greeted(header)

    assert hello["session"]
    rig.client._on_greeting = count
    rig.sandbox.cut()
    try:
        return await asyncio.wait_for(counted, 10)
    finally:
        rig.client._on_greeting = greeted


async def test_answers_whose_acknowledgement_was_lost_are_forgotten_later(rigged):
    async with rigged("shared") as rig:
        slot = await rig.slot()
        for _ in range(5):
            await asyncio.gather(*(slot.run("true") for _ in range(20)))
            rig.client._acks.clear()
        assert await known(rig) >= 100
        for _ in range(50):
            if await known(rig) == 0:
                return
            await asyncio.sleep(0.1)
        pytest.fail("they are kept for ever")


async def test_requests_that_are_too_large_are_refused_here(rigged):
    async with rigged("shared") as rig:
        slot = await rig.slot()
        with pytest.raises(CommandError) as caught:
            await rig.client.request({"op": "exec", "slot": 0}, bytes(wire.MAX_DATA + 1))
        assert caught.value.code == "too_large"
        with pytest.raises(CommandError) as caught:
            await slot.run("true", env={"X": "x" * 2_000_000})
        assert caught.value.code == "too_large"
        assert (await slot.run("echo fine")).text == "fine\n"


async def test_cancelling_at_any_moment(rigged, times):
    async with rigged("shared") as rig:
        slot = await rig.slot()
        await slot.write_file("f", bytes(3_000_000))

        def operations():
            yield slot.run("sleep 5")
            yield slot.run("cat", stdin=bytes(3_000_000))
            yield slot.read_file("f")
            yield slot.write_file("g", bytes(3_000_000))
            yield slot.tar_out(".")
            yield slot.start("sleep 1000")
            yield rig.client.open_slot(3)
            yield rig.client.kill_slot(0)
            yield rig.client.reset_slot(3)

        for _ in range(times(5, 12)):
            for operation in operations():
                task = asyncio.ensure_future(operation)
                await asyncio.sleep(random.choice([0, 0.001, 0.003, 0.01]))
                task.cancel()
                await asyncio.wait([task])
        await rig.client.reset_slot(0)
        assert await slot.list_dir() == [] and await slot.processes() == []
        for _ in range(100):
            if not rig.client._pending:
                break
            await asyncio.sleep(0.05)
        assert not rig.client._pending


# --- beginning and end ----------------------------------------------------------------------------------------------


async def test_closing_fails_what_is_pending(rigged):
    async with rigged("shared") as rig:
        slot = await rig.slot()
        running = [asyncio.ensure_future(slot.run("sleep 1000")), asyncio.ensure_future(slot.read_file("/dev/zero"))]
        await asyncio.sleep(0.1)
        await rig.client.aclose()
        await rig.client.aclose()
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(outcome, SandboxLost | CommandError)
        with pytest.raises(SandboxLost):
            await slot.run("true")


async def test_a_start_that_is_cancelled_leaves_no_task(host_sandbox):
    sandbox = host_sandbox()
    try:
        for delay in (0, 0.01, 0.05):
            starting = asyncio.ensure_future(GuestClient.start(sandbox, sandbox.settings("shared", orphan_ttl_s=1.0)))
            await asyncio.sleep(delay)
            starting.cancel()
            started = (await asyncio.gather(starting, return_exceptions=True))[0]
            if delay > 0 and isinstance(started, GuestClient):  # it was quicker
                await started.aclose()
            else:
                assert isinstance(started, asyncio.CancelledError)
        assert len(asyncio.all_tasks()) == 1
    finally:
        await sandbox.terminate()


async def test_a_provider_that_cannot_be_asked_is_not_the_end(rigged):
    async with rigged("shared", orphan_ttl_s=8.0) as rig:
        slot = await rig.slot()
        asked = 0

        async def status():
            nonlocal asked
            asked += 1
            raise ChannelLost("the provider is out of reach")

        rig.sandbox.status, rig.sandbox.reachable = status, False
        rig.sandbox.cut()
        while not asked:  # until the cut is noticed a command may well get through
            await asyncio.sleep(0.01)
        running = asyncio.ensure_future(slot.run("echo fine"))
        await asyncio.sleep(0.5)
        assert asked > 1 and not running.done()
        rig.sandbox.reachable = True
        assert (await running).text == "fine\n"


async def test_an_open_that_never_returns_is_given_up(rigged):
    async with rigged("shared", orphan_ttl_s=1.5) as rig:
        slot = await rig.slot()

        async def never(argv, *, env=None):
            await asyncio.sleep(1000)

        rig.sandbox.open = never
        rig.sandbox.cut()
        with pytest.raises(SandboxLost):
            while True:  # the first may be answered before the channel is gone
                await asyncio.wait_for(slot.run("true"), 15)


@pytest.mark.skipif(not ROOT, reason="a uid per slot takes root")
async def test_a_guest_that_grants_less_is_refused(host_sandbox, monkeypatch):
    sandbox = host_sandbox()
    try:
        settings = sandbox.settings("shared")
        client = await GuestClient.start(sandbox, settings)
        assert client.granted is Isolation.SHARED
        await client.aclose()
        with pytest.raises(PolicyError, match="grants isolation 'shared'"):
            await GuestClient.start(sandbox, sandbox.settings("user"))
    finally:
        await sandbox.terminate()
