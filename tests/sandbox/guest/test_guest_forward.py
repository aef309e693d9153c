"""Forwards: a port in a slot whose connections end on the driver, whatever becomes of the channel."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import asynccontextmanager

import pytest

from hermes_core.errors import CommandError

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENT = """
import socket, sys
def connected(port):
    sock = socket.create_connection(("127.0.0.1", int(port)))
    sock.settimeout(50)
    return sock
def rest(sock):
    parts = []
    while data := sock.recv(65536):
        parts.append(data)
    return b"".join(parts)
"""


async def client(slot, port, program, **options):
    """Run a program in the slot that has a connection `s`."""
    source = CLIENT + f"s = connected({port})\n" + program
    return await slot.run(["python3", "-c", source], timeout_s=60, **options)


async def rest(connection):
    parts = []
    while data := await connection.read():
        parts.append(data)
    return b"".join(parts)


async def upper(connection):
    """Answer what the program has sent, in capitals."""
    await connection.write((await rest(connection)).upper())


async def until(condition, what):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_connection_is_closed_when_it_has_been_served(own_rig):
    """A program that keeps its end open, or sends on and on, does not keep the connection open."""
    slot = await own_rig.slot()

    async def brief(connection):
        await connection.write(await connection.read(3))

    async with slot.forward(brief, most=1) as forward:
        for _ in range(2):
            held = "s.sendall(b'abc'); print(rest(s)); c2 = connected(%d); c2.sendall(b'x'); print(rest(c2))"
            assert (await client(slot, forward.port, held % forward.port)).text == "b'abc'\nb'x'\n"
        endless = """
s.sendall(b'abc'); print(rest(s))
try:
    while True: s.sendall(b'x' * 65536)
except OSError as error: print(type(error).__name__)
"""
        done = await client(slot, forward.port, endless)
        assert done.text.split() in (["b'abc'", "ConnectionResetError"], ["b'abc'", "BrokenPipeError"])


async def test_a_slow_reader_gets_all_of_an_answer(own_rig):
    """What it has not received when the connection is closed, as it did not end its half in time, still arrives."""
    slot = await own_rig.slot()

    async def serve(connection):
        await connection.write(b"x" * 900_000)

    program = """
import time
t = socket.socket(); t.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
t.connect(s.getpeername())
time.sleep(3); print(len(rest(t)))
"""
    async with slot.forward(serve) as forward:
        assert (await client(slot, forward.port, program)).text == "900000\n"


async def test_what_a_program_does_not_read_waits(own_rig):
    slot = await own_rig.slot()
    written = 0
    full = asyncio.Event()

    async def serve(connection):
        nonlocal written
        try:
            while written < 64 << 20:
                await asyncio.wait_for(connection.write(b"x" * 65536), 1)
                written += 65536
        except TimeoutError:
            full.set()
            raise

    async with slot.forward(serve) as forward:
        running = asyncio.ensure_future(client(slot, forward.port, "import time; time.sleep(50)"))
        await asyncio.wait_for(full.wait(), 20)
        running.cancel()
    assert written < 32 << 20  # the kernel's buffers, and a window


async def test_what_nobody_reads_waits(own_rig):
    slot = await own_rig.slot()
    go = asyncio.Event()

    async def serve(connection):
        await go.wait()
        heard.append(len(await rest(connection)))

    heard = []
    program = """
s.setblocking(False)
import select
sent = 0
while select.select([], [s], [], 1)[1]:
    sent += s.send(b"x" * 65536)
print(sent, flush=True)
input()
"""
    async with slot.forward(serve) as forward:
        source = CLIENT + f"s = connected({forward.port})\n" + program
        process = await slot.start(["python3", "-c", source])
        said = await slot.log(process.process_id, wait_s=30)
        sent = int(said.data)
        assert sent < 16 << 20  # the kernel's buffers, and a window
        await slot.write(process.process_id, b"\n")
        go.set()
        await until(lambda: heard, "the end")
        assert heard == [sent]


async def test_an_error_resets_its_connection_alone(own_rig, caplog):
    slot = await own_rig.slot()

    async def serve(connection):
        word = await connection.read()
        if word == b"fail":
            raise ValueError("not served")
        if word == b"exit":
            sys.exit(3)
        await connection.write(word)

    program = """
t = connected(s.getpeername()[1]); u = connected(s.getpeername()[1])
for c, word in ((t, b"fail"), (u, b"exit"), (s, b"fine")):
    c.sendall(word)
    try: print(rest(c))
    except ConnectionResetError: print("reset")
"""
    async with slot.forward(serve) as forward:
        with caplog.at_level(logging.ERROR):
            assert (await client(slot, forward.port, program)).text == "reset\nreset\nb'fine'\n"
    assert "not served" in caplog.text and "sys.exit(3)" in caplog.text


async def test_a_program_that_breaks_its_connection(own_rig):
    slot = await own_rig.slot()

    async def serve(connection):
        await connection.write(await connection.read())
        for use in (connection.read, lambda: connection.write(b"y" * 1000)):
            try:
                while True:
                    await use()
                    await asyncio.sleep(0.01)
            except ConnectionError as error:
                heard.append(error)

    heard = []
    program = "import struct; s.sendall(b'x'); s.recv(1); s.setsockopt(1, 13, struct.pack('ii', 1, 0)); s.close()"
    async with slot.forward(serve) as forward:
        await client(slot, forward.port, program)
        await until(lambda: len(heard) == 2, "both errors")


@asynccontextmanager
async def holding(slot, serve=upper):
    """A forward, and a program that waits for the end of its connection and then says how it was."""
    open_now = asyncio.Event()

    async def served(connection):
        assert await connection.read() == b"x"
        open_now.set()
        try:
            await serve(connection)
        except ConnectionError as error:
            ends.append(type(error).__name__)
            raise

    ends = []
    program = "s.sendall(b'x')\ntry: print(rest(s))\nexcept ConnectionResetError: print('reset')"
    async with slot.forward(served) as forward:
        process = await slot.start(["python3", "-c", CLIENT + f"s = connected({forward.port})\n" + program])
        await asyncio.wait_for(open_now.wait(), 20)
        yield forward, process, ends


REFUSED = "import socket, sys; sys.exit(socket.socket().connect_ex(('127.0.0.1', int(sys.argv[1]))))"


async def test_the_end_of_the_block_resets(own_rig):
    slot = await own_rig.slot()
    async with holding(slot) as (forward, process, _):
        pass
    ended = await slot.wait(process.process_id, timeout_s=20)
    assert (ended.exit_code, (await slot.log(process.process_id)).data) == (0, b"reset\n")
    assert (await slot.run(["python3", "-c", REFUSED, str(forward.port)])).exit_code == 111
    async with slot.forward(upper, port=forward.port) as again:  # at once: nothing of it is left
        assert again.port == forward.port


def sockets(pid):
    """How many sockets a process has."""
    found = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found += os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
        except OSError:
            continue
    return found


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "kill"])
async def test_the_end_of_the_lease_resets(own_rig, reset):
    index = await own_rig.index()
    slot = own_rig.client.commands(index)
    before = sockets(own_rig.guest_pid)
    async with holding(slot) as (forward, _, ends):
        await (own_rig.client.reset_slot if reset else own_rig.client.kill_slot)(index)
        await until(lambda: ends, "the connection's end")
        assert ends == ["ConnectionResetError"]
        assert sockets(own_rig.guest_pid) <= before
        assert (await slot.run(["python3", "-c", REFUSED, str(forward.port)])).exit_code == 111


async def test_each_forward_has_a_port_and_wrong_ones_are_refused(own_rig):
    slot = await own_rig.slot()
    async with slot.forward(upper) as one, slot.forward(upper) as other:
        assert one.port != other.port and one.url == f"http://127.0.0.1:{one.port}"
        with pytest.raises(CommandError) as caught:
            async with slot.forward(upper, port=one.port):
                pass
        assert caught.value.code == "in_use"
        for forward in (one, other):
            assert (await client(slot, forward.port, "s.shutdown(1); print(rest(s))")).text == "b''\n"
    for wrong in (0, 65536, -1):
        with pytest.raises(CommandError, match="a port is"):
            slot.forward(upper, port=wrong)
    with pytest.raises(CommandError, match="most"):
        slot.forward(upper, most=0)


async def test_a_stranger_is_not_served(own_rig):
    """Where slots share a loopback, only the slot's own programs are served; elsewhere they see no port at all."""
    slot, other = await own_rig.slot(), await own_rig.slot()
    served = []

    async def serve(connection):
        served.append(await connection.read())
        await connection.write(b"secret")

    attempts = """
for word in (b"", b"stranger"):
    c = connected(%d)
    try:
        c.sendall(word); print(rest(c))
    except ConnectionError: print("reset")
import struct
for _ in range(300):
    c = connected(%d); c.sendall(b"stranger"); c.setsockopt(1, 13, struct.pack('ii', 1, 0)); c.close()
"""
    async with slot.forward(serve) as forward:
        stranger = CLIENT + attempts % (forward.port, forward.port)
        done = await other.run(["python3", "-c", stranger], timeout_s=60)
        assert "secret" not in done.text
        assert done.text == ("reset\nreset\n" if own_rig.level == "user" else "")
        assert (await client(slot, forward.port, "s.sendall(b'own'); print(rest(s))")).text == "b'secret'\n"
    assert served == [b"own"]


async def test_nothing_is_served_where_nothing_tells_slots_apart(rigs):
    slot = await (await rigs("shared")).slot()
    with pytest.raises(CommandError) as caught:
        async with slot.forward(upper):
            pass
    assert caught.value.code == "unguarded"
