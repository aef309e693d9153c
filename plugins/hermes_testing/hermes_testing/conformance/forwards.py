"""Checks of ports in slots whose connections end on the driver. Core's own tests cover the details."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random

import pytest

from hermes_core import CommandResult, Connection, Isolation, Network, SlotCommands
from hermes_testing.conformance.apart import SHARED
from hermes_testing.conformance.kit import Kit
from hermes_testing.conformance.transport import open_tampered_slot
from hermes_testing.conformance.waiting import expect_refusal, until, within

FORWARD = "ports whose connections end on the driver"
"""A feature that a sandbox without Python lacks."""

BODY = 10_000_000
"""Number of bytes of a large body."""

PROGRAM = """
import hashlib, socket, sys, threading
def connected():
    sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    sock.settimeout(60)
    return sock
def rest(sock):
    parts = []
    while True:
        try: data = sock.recv(65536)
        except ConnectionError: return b"reset"
        if not data: return b"".join(parts)
        parts.append(data)
s = connected()
"""
"""The beginning of the programs in slots, which opens a connection `s` to the port."""


async def run(slot: SlotCommands, port: int, program: str) -> CommandResult:
    """Run a program in the slot."""
    return await slot.run(["python3", "-c", PROGRAM + program, str(port)], timeout_s=80)


async def with_python(kit: Kit, *slots: SlotCommands) -> None:
    """Skip the check if a slot has no Python for the programs."""
    for slot in slots:
        done = await slot.run("python3 -c 'import socket, threading'")
        if not done.ok:
            pytest.skip(f"no Python can be run in a slot: {done.error_text.strip()[-200:]}")


async def rest(connection: Connection) -> bytes:
    """Return everything that the program still sends."""
    parts = []
    while data := await connection.read():
        parts.append(data)
    return b"".join(parts)


async def upper(connection: Connection) -> None:
    """Send everything that the program sends back to it, in capitals."""
    await connection.write((await rest(connection)).upper())


@pytest.mark.levels(documented=SHARED)
@pytest.mark.needs(FORWARD)
async def a_port_leads_to_the_driver(kit: Kit) -> None:
    """A program's connection to a port in its slot ends on the driver, and either side may end its half first."""
    slot = await kit.slot()
    await with_python(kit, slot)
    async with slot.forward(upper) as forward:
        done = await run(slot, forward.port, "s.sendall(b'hello'); s.shutdown(1); print(rest(s))")
        assert (done.text, done.error_text) == ("b'HELLO'\n", ""), "the answer that the program got"
    heard: list[bytes] = []

    async def first(connection: Connection) -> None:
        await connection.write(b"greeting")
        await connection.finish()
        heard.append(await rest(connection))

    async with slot.forward(first) as forward:
        done = await run(slot, forward.port, "print(rest(s)); s.sendall(b'after'); s.close()")
        assert done.text == "b'greeting'\n", "what the program got from a driver that ends first"

        async def ended() -> bool:
            return bool(heard)

        await until(ended, 20, "the program's end did not arrive")
    assert heard == [b"after"], "what the program sent after the driver's end"


@pytest.mark.levels(documented=SHARED)
@pytest.mark.needs(FORWARD)
async def a_neighbour_s_port_to_the_driver_is_closed(kit: Kit) -> None:
    """A slot gets nothing from a neighbour's port to the driver."""
    slot, other = await kit.neighbours()
    await with_python(kit, slot, other)
    served: list[bytes] = []

    async def serve(connection: Connection) -> None:
        served.append(await rest(connection))
        await connection.write(b"secret")

    async with slot.forward(serve) as forward:
        talk = "s.sendall(b'%s'); s.shutdown(1); print(rest(s))"
        for _ in range(3):
            assert "secret" not in (await run(other, forward.port, talk % "stranger")).text, "a neighbour was served"
        assert (await run(slot, forward.port, talk % "own")).text == "b'secret'\n", (
            "the answer to the slot's own program"
        )
    assert served == [b"own"], "what was served"


@pytest.mark.least(Isolation.USER)
@pytest.mark.needs(FORWARD)
async def a_port_carries_large_bodies(kit: Kit) -> None:
    """10 MB each way at once through one connection are exact."""
    slot = await kit.slot()
    await with_python(kit, slot)
    await _exchange(slot, random.Random(1).randbytes(BODY))


async def _exchange(slot: SlotCommands, data: bytes) -> None:
    """Let a program and the driver send `data` to each other at the same time."""
    await slot.write_file("mine", data)
    heard = asyncio.get_running_loop().create_future()

    async def serve(connection: Connection) -> None:
        async with asyncio.TaskGroup() as tasks:
            hearing = tasks.create_task(rest(connection))
            await connection.write(data)
            await connection.finish()
        heard.set_result(hearing.result())

    send = "threading.Thread(target=lambda: (s.sendall(open('mine', 'rb').read()), s.shutdown(1))).start()"
    async with slot.forward(serve) as forward:
        done = await run(slot, forward.port, f"{send}; print(hashlib.sha256(rest(s)).hexdigest())")
        assert done.text.strip() == hashlib.sha256(data).hexdigest(), "the digest of what the program got"
        got = await within(30, heard, "the rest of what the program sent")
    if got != data:
        pytest.fail(f"the driver got other bytes than the program sent: {len(got)} of {len(data)}")


@pytest.mark.least(Isolation.USER)
@pytest.mark.needs(FORWARD)
async def a_port_has_a_limit_of_connections(kit: Kit) -> None:
    """No more connections than asked for are open at once; the others wait and are served later."""
    slot = await kit.slot()
    await with_python(kit, slot)
    now, most, go = 0, 0, asyncio.Event()

    async def serve(connection: Connection) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await go.wait()
        await connection.write(await connection.read())
        now -= 1

    async def full() -> bool:
        return now == 2

    program = """
many = [s, *(connected() for _ in range(5))]
for each in many: each.sendall(b"x")
print(b"".join(rest(each) for each in many if not each.shutdown(1)))
"""
    async with slot.forward(serve, most=2) as forward:
        running = asyncio.ensure_future(run(slot, forward.port, program))
        await until(full, 20, "two connections were not open at once")
        await asyncio.sleep(0.3)
        go.set()
        assert (await within(60, running, "six connections, two at a time")).text == "b'xxxxxx'\n", "the answers"
    assert most == 2, "the most connections at once"


@pytest.mark.least(Isolation.USER)
@pytest.mark.needs(FORWARD)
async def a_port_ends_with_its_lease(kit: Kit) -> None:
    """At the end of its lease a slot's port is closed and its connections are reset; the next lease finds nothing."""
    async with kit.tools(seats=1, per_sandbox=1) as tools, contextlib.AsyncExitStack() as stack:
        slot = await tools.acquire()
        commands = tools.commands(slot)
        await with_python(kit, commands)
        begun, ended = asyncio.Event(), asyncio.get_running_loop().create_future()

        async def serve(connection: Connection) -> None:
            begun.set()
            try:
                ended.set_result(await rest(connection))
            except ConnectionError:
                ended.set_result("reset")

        forward = await stack.enter_async_context(commands.forward(serve))
        await commands.start(["python3", "-c", PROGRAM + "rest(s)", str(forward.port)])
        await within(20, begun.wait(), "a connection")
        await tools.release(slot, reset_workspace=True)
        assert await within(20, ended, "the connection's end") == "reset", "its end"
        commands = tools.commands(await tools.acquire())
        found = await run(commands, forward.port, "")
        assert "Refused" in found.error_text, f"the next lease found the port open: {found.error_text[-200:]}"


ASK = """
import os, socket, sys
proxy = int(os.environ["HTTP_PROXY"].rpartition(":")[2])
def ask(host, port, line):
    try:
        with socket.create_connection((host, port), 10) as sock:
            sock.sendall(line + b"\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
            return (sock.recv(1000).split() or [b"", b"nothing"])[1].decode()
    except OSError: return "unreachable"
def udp():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(1)
        try: sock.sendto(bytes(12), ("8.8.8.8", 53)); return str(sock.recv(100))
        except OSError: return "unreachable"
for port in sys.argv[1:]: print(ask("127.0.0.1", proxy, b"GET http://127.0.0.1:%s/ HTTP/1.1" % port.encode()))
for port in sys.argv[1:]: print(ask("127.0.0.1", int(port), b"GET / HTTP/1.1"))
for host in ("8.8.8.8", "169.254.169.254", "2001:4860:4860::8888"): print(ask(host, 80, b"GET / HTTP/1.1"))
print(udp())
"""
"""Prints a status for each server, through the proxy and without it, and what is reached outside."""


@pytest.mark.least(Isolation.USER)
@pytest.mark.needs(FORWARD)
async def only_allowed_hosts_are_reached(kit: Kit) -> None:
    """With `network: allow`, a slot reaches an allowed server of the driver through the proxy, and nothing else."""
    if Network.ALLOW not in kit.backend.capabilities.policies:
        pytest.skip("it can't cut its sandboxes off from the network")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(await asyncio.start_server(answer, "127.0.0.1", 0)) for _ in "ab"]
        allowed, other = (server.sockets[0].getsockname()[1] for server in servers)
        hosts = [f"127.0.0.1:{allowed}"]
        tools = await stack.enter_async_context(kit.tools(seats=1, network="allow", allowed_hosts=hosts))
        commands = tools.commands(await tools.acquire())
        await with_python(kit, commands)
        done = await commands.run(["python3", "-c", ASK, str(allowed), str(other)], timeout_s=80)
        expected = ["200", "403", *["unreachable"] * 6]
        assert done.text.split() == expected, f"what the slot reached: {done.text} {done.error_text[-300:]}"


async def no_port_is_told(kit: Kit) -> None:
    """Where nothing can keep others from a port, or nothing can carry its connections, there is none, with a reason."""
    if not (kit.direct or kit.level is Isolation.SHARED):
        pytest.skip("its slots can have ports")
    slot = await kit.slot()

    async def attempt() -> None:
        async with slot.forward(upper):
            pass

    await expect_refusal(attempt(), "no_forward" if kit.direct else "unguarded")


@pytest.mark.least(Isolation.USER)
@pytest.mark.needs(FORWARD)
@pytest.mark.limit(120)
async def a_cut_channel_loses_nothing_of_a_connection(kit: Kit) -> None:
    """What flows through a port while the channel is cut, again and again, arrives once and whole, both ways."""
    async with open_tampered_slot(kit) as (backend, slot):
        await with_python(kit, slot)
        exchanging = asyncio.ensure_future(_exchange(slot, random.Random(2).randbytes(BODY)))
        for _ in range(5):
            await asyncio.sleep(0.1)
            await backend.channels[-1].cut()
        await within(90, exchanging, "a connection whose channel was cut five times")
