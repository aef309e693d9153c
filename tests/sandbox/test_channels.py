"""Both bridges: bytes, backpressure, cancellation, ends and breaks."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hermes_core.errors import ChannelLost
from hermes_core.sandbox.channels.blocking import BUFFER_BYTES, AsyncioStreamChannel, BlockingStreamChannel
from hermes_core.sandbox.channels.sockets import SocketChannel
from hermes_core.sandbox.contract import Channel


@asynccontextmanager
async def child(*argv: str, **options: object) -> AsyncIterator[AsyncioStreamChannel]:
    channel = await AsyncioStreamChannel.spawn(argv, **options)
    try:
        yield channel
    finally:
        await channel.aclose()


def by_threads(near: socket.socket, wait: Callable[[], int]) -> BlockingStreamChannel:
    def close() -> None:
        near.shutdown(socket.SHUT_RDWR)
        near.close()

    return BlockingStreamChannel(near.recv, near.sendall, close=close, wait=wait)


def by_loop(near: socket.socket, wait: Callable[[], int]) -> SocketChannel:
    return SocketChannel(near, wait=wait)


Bridge = Callable[[socket.socket, Callable[[], int]], Any]


@pytest.fixture(params=[by_threads, by_loop])
def bridge(request: pytest.FixtureRequest) -> Bridge:
    return request.param


@pytest.fixture
def tls(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context and a client's that trusts it."""
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with openssl: apt-get install openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=daemon", "-days", "2"]
    subprocess.run(["openssl", *words, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(certificate)
    return server, client


@asynccontextmanager
async def over_socket(bridge: Bridge, status: int = 0) -> AsyncIterator[tuple[Any, socket.socket]]:
    near, far = socket.socketpair()
    channel = bridge(near, lambda: status)
    try:
        yield channel, far
    finally:
        await channel.aclose()
        far.close()


async def everything(channel: Channel) -> bytes:
    parts = []
    while data := await channel.read(1 << 20):
        parts.append(data)
    return b"".join(parts)


# --- a child process -----------------------------------------------------------------------------------------------


async def test_a_child_answers_and_its_status_arrives() -> None:
    async with child("/bin/sh", "-c", 'read line; printf "<%s>" "$line"; echo oh dear >&2; exit 7') as channel:
        await channel.write(b"hello\n")
        assert await everything(channel) == b"<hello>"
        assert await channel.wait() == 7
        assert await channel.read(10) == b""
        assert channel.stderr_tail == "oh dear"


async def test_a_read_gives_no_more_than_asked() -> None:
    async with child("/bin/sh", "-c", "printf abcdef") as channel:
        assert await channel.read(2) == b"ab"
        assert await everything(channel) == b"cdef"


async def test_a_child_has_a_session_and_an_environment_of_its_own() -> None:
    async with child(
        "/bin/sh", "-c", "cut -d' ' -f6 /proc/$$/stat; env", env={"ONLY": "this", "PATH": "/usr/bin:/bin"}
    ) as channel:
        text = (await everything(channel)).decode()
    assert int(text.split()[0]) != os.getsid(0)
    assert "ONLY=this" in text and "HOME=" not in text


async def test_megabytes_go_through_in_both_directions() -> None:
    data = os.urandom(1 << 20) * 8
    async with child("/bin/cat") as channel, asyncio.TaskGroup() as group:

        async def send() -> None:
            for start in range(0, len(data), 100_000):
                await channel.write(data[start : start + 100_000])

        group.create_task(send())
        received = bytearray()
        while len(received) < len(data):
            received += await channel.read(1 << 18)
        assert received == data


async def test_a_slow_reader_slows_the_child_and_memory_stays_bounded() -> None:
    writes = (
        "import sys\nfor n in range(64): sys.stdout.buffer.write(bytes(1 << 20)); print(n, file=sys.stderr, flush=True)"
    )
    async with child(sys.executable, "-I", "-S", "-c", writes) as channel:
        await channel.read(1)
        written: list[str] = []
        async with asyncio.timeout(30):
            while not written or written[-1:] != channel.stderr_tail.split()[-1:]:  # until it writes no more
                written = channel.stderr_tail.split()
                await asyncio.sleep(0.5)
        assert int(written[-1]) < 8
        assert len(channel._inbox) <= BUFFER_BYTES + (1 << 18)
        assert len(await everything(channel)) == (64 << 20) - 1


async def test_writes_wait_for_a_child_that_does_not_read() -> None:
    async with child("/bin/sleep", "60") as channel:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                for _ in range(1000):
                    await channel.write(bytes(1 << 16))


async def test_writing_to_a_child_that_has_ended_is_a_lost_channel() -> None:
    async with child("/bin/sh", "-c", "echo no such sandbox >&2; exit 1") as channel:
        await channel.read(1)
        with pytest.raises(ChannelLost, match="no such sandbox"):
            for _ in range(50):
                await channel.write(b"x")
                await asyncio.sleep(0.01)


async def test_a_killed_child_has_no_status() -> None:
    async with child("/bin/sh", "-c", "kill -9 $$") as channel:
        assert await channel.read(1) == b""
        with pytest.raises(ChannelLost, match="signal 9"):
            await channel.wait()


async def test_closing_gives_end_of_file_is_quick_and_frees_whoever_waits() -> None:
    async with child("/bin/sleep", "60") as channel, asyncio.TaskGroup() as group:
        reading = group.create_task(channel.read(1))
        await asyncio.sleep(0.05)
        begin = time.monotonic()
        await channel.aclose()
        await channel.aclose()
        assert await reading == b""
        assert time.monotonic() - begin < 20
        with pytest.raises(ChannelLost):
            await channel.write(b"x")
        with pytest.raises(ChannelLost):
            await channel.wait()


async def test_a_cancelled_read_loses_nothing() -> None:
    async with child("/bin/sh", "-c", "read line; printf late") as channel:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.read(10), 0.05)
        await channel.write(b"\n")
        assert await everything(channel) == b"late"


async def test_a_program_that_does_not_exist() -> None:
    with pytest.raises(FileNotFoundError):
        await AsyncioStreamChannel.spawn(["/no/such/program"])


# --- a socket, by two threads or by the event loop -------------------------------------------------------------------


async def test_a_socket_carries_bytes_and_the_status_comes_from_its_owner(bridge: Bridge) -> None:
    async with over_socket(bridge, status=3) as (channel, far):
        await channel.write(b"ping")
        assert far.recv(10) == b"ping"
        far.sendall(b"pong")
        assert await channel.read(2) == b"po"
        assert await channel.read(10) == b"ng"
        far.shutdown(socket.SHUT_WR)
        assert await channel.read(10) == b""
        assert await channel.wait() == 3
        assert await channel.wait() == 3
        channel.feed_stderr(b"x" * 20_000 + b"end")
        assert channel.stderr_tail.endswith("xend") and len(channel.stderr_tail) <= 8192


async def test_a_slow_reader_slows_the_far_end_of_a_socket(bridge: Bridge) -> None:
    async with over_socket(bridge) as (channel, far):
        sent = 0
        far.setblocking(False)
        for _ in range(200):
            try:
                sent += far.send(bytes(1 << 18))
            except BlockingIOError:
                await asyncio.sleep(0.005)
        assert BUFFER_BYTES // 2 < sent < 4 * BUFFER_BYTES
        received = 0
        far.shutdown(socket.SHUT_WR)
        while data := await channel.read(1 << 20):
            received += len(data)
        assert received == sent


async def test_a_write_that_blocks_can_be_cancelled_and_order_is_kept(bridge: Bridge) -> None:
    async with over_socket(bridge) as (channel, far):
        block = bytes(8 << 20)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.write(block), 0.1)

        def drain() -> bytes:
            data = bytearray()
            while len(data) < len(block) + 5:
                data += far.recv(1 << 20)
            return bytes(data)

        draining = asyncio.create_task(asyncio.to_thread(drain))
        await channel.write(b"after")
        assert await draining == block + b"after"


async def test_cancelled_writes_do_not_pile_up(bridge: Bridge) -> None:
    async with over_socket(bridge) as (channel, _far):
        tracemalloc.start()
        try:
            for _ in range(20):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(channel.write(bytes(8 << 20)), 0.01)
            assert tracemalloc.get_traced_memory()[0] < 6 * (8 << 20)
        finally:
            tracemalloc.stop()


async def test_a_transport_that_breaks_is_a_lost_channel_after_what_had_arrived() -> None:
    parts = [b"last", None]

    def read(n: int) -> bytes:
        part = parts.pop(0)
        if part is None:
            raise ConnectionResetError("the peer reset it")
        return part

    def write(data: bytes) -> None:
        raise BrokenPipeError("nobody there")

    def wait() -> int:
        raise OSError("no answer")

    channel = BlockingStreamChannel(read, write, close=lambda: None, wait=wait)
    assert await channel.read(10) == b"last"
    with pytest.raises(ChannelLost, match="the peer reset it"):
        await channel.read(10)
    for _ in range(2):
        with pytest.raises(ChannelLost, match="nobody there"):
            await channel.write(b"x")
    with pytest.raises(ChannelLost, match="no answer"):
        await channel.wait()
    await channel.aclose()


async def test_closing_frees_a_blocked_reader_and_its_thread(bridge: Bridge) -> None:
    before = threading.active_count()
    async with over_socket(bridge) as (channel, _far), asyncio.TaskGroup() as group:
        reading = group.create_task(channel.read(1))
        await asyncio.sleep(0.05)
        await channel.aclose()
        assert await reading == b""
        with pytest.raises(ChannelLost):
            await channel.write(b"x")
    deadline = time.monotonic() + 3
    while threading.active_count() > before and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert threading.active_count() <= before


def test_a_stream_left_open_does_not_hold_up_the_end_of_the_loop(bridge: Bridge) -> None:
    near, far = socket.socketpair()

    async def leave() -> None:
        channel = bridge(near, lambda: time.sleep(60) or 0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.wait(), 0.05)

    begin = time.monotonic()
    asyncio.run(leave())
    assert time.monotonic() - begin < 20
    far.close()
    near.close()


async def test_a_loop_socket_that_breaks_is_a_lost_channel_after_what_had_arrived() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    listener.close()
    channel = SocketChannel(near, wait=lambda: 1 // 0)
    far.sendall(b"last")
    assert await channel.read(10) == b"last"
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()  # which resets the connection
    with pytest.raises(ChannelLost, match="ConnectionResetError"):
        await channel.read(10)
    with pytest.raises(ChannelLost, match="ConnectionResetError"):
        await channel.write(b"x")
    with pytest.raises(ChannelLost, match="ZeroDivisionError"):
        await channel.wait()
    await channel.aclose()
    assert near.fileno() == -1


async def test_a_stream_that_ends_too_early_for_its_frames_is_a_lost_channel() -> None:
    def unpack(data: bytes) -> bytes:
        if not data:
            raise ConnectionError("in the middle")
        return data.upper()

    near, far = socket.socketpair()
    channel = SocketChannel(near, wait=lambda: 0, unpack=unpack, early=b"early ")
    far.sendall(b"late")
    far.close()
    with pytest.raises(ChannelLost, match="in the middle"):
        await everything(channel)
    await channel.aclose()


async def test_frames_that_make_no_sense_are_a_lost_channel() -> None:
    near, far = socket.socketpair()
    channel = SocketChannel(near, wait=lambda: 0, unpack=lambda data: bytes([int(data)]))
    far.sendall(b"no number")
    with pytest.raises(ChannelLost, match="ValueError: invalid literal"):
        await asyncio.wait_for(everything(channel), 20)
    await channel.aclose()
    far.close()


async def test_tls_goes_through_in_both_directions(tls: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    """What OpenSSL has decrypted already makes no descriptor ready."""
    near, far = socket.socketpair()
    for end in (near, far):
        end.settimeout(20)
    secure_far = asyncio.create_task(asyncio.to_thread(tls[0].wrap_socket, far, server_side=True))
    secure_near = await asyncio.to_thread(tls[1].wrap_socket, near)
    far = await secure_far
    data = os.urandom(5 << 20)

    def echo() -> None:
        left = len(data)
        while left:
            piece = far.recv(1 << 14)
            left -= len(piece)
            far.sendall(piece)
        far.unwrap()

    channel = SocketChannel(secure_near, wait=lambda: 0)
    echoing = asyncio.create_task(asyncio.to_thread(echo))
    async with asyncio.TaskGroup() as group:
        group.create_task(channel.write(data))
        received = group.create_task(everything(channel))
    assert received.result() == data
    await channel.aclose()
    await asyncio.gather(echoing, return_exceptions=True)
    far.close()


async def test_closing_kills_no_process_that_is_not_its_own_any_more(monkeypatch):
    """asyncio may have reaped the child in a thread without having told the loop: its number is free by then."""
    killed = []

    def kill(pid: int, number: int) -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises if it is no child of ours
        killed.append(pid)

    for _ in range(3):
        channel = await AsyncioStreamChannel.spawn(["true"])
        time.sleep(0.2)  # the loop does not hear of its end
        monkeypatch.setattr(os, "kill", kill)
        await asyncio.wait_for(channel.aclose(), 5)
        monkeypatch.undo()


async def test_a_cancelled_start_ends_whenever_it_comes() -> None:
    for turns in range(12):
        starting = asyncio.create_task(AsyncioStreamChannel.spawn(["sh", "-c", "cat; true"]))
        for _ in range(turns):
            await asyncio.sleep(0)
        time.sleep(0.02)  # until the shell has a child, which holds the pipes
        starting.cancel()
        done, _ = await asyncio.wait([starting], timeout=10)
        assert done, f"cancelled after {turns} turns of the loop, the start never ended"
        if not starting.cancelled():
            await starting.result().aclose()


@pytest.mark.parametrize("end_of_output", [False, True])
async def test_a_channel_ends_whose_program_ended_without_reading_its_input(
    end_of_output: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hermes_core.sandbox.channels.sockets.STUCK_S", 0.02)
    near, far = socket.socketpair()
    running = threading.Event()
    channel = SocketChannel(near, wait=lambda: 0, ended=running.is_set)
    with far:
        far.sendall(b"last words")
        if end_of_output:
            far.shutdown(socket.SHUT_WR)
        writing = asyncio.create_task(channel.write(bytes(8 << 20)))
        await asyncio.sleep(0.2)
        assert not writing.done(), "it ended although its program runs"
        running.set()
        with pytest.raises(ChannelLost, match="without reading its input"):
            await asyncio.wait_for(writing, 10)
        assert await channel.read(100) == b"last words"
        assert await channel.read(100) == b""
        assert await channel.wait() == 0
        await channel.aclose()
