"""The bridge from asynchronous calls: bytes, backpressure, cancellation, ends and breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from hermes_core.errors import ChannelLost
from hermes_core.sandbox.channels.blocking import BUFFER_BYTES, STDERR_BYTES
from hermes_core.sandbox.channels.streams import PATIENCE_S, AsyncStreamChannel


class Far:
    """The far end of a channel."""

    def __init__(self) -> None:
        self.out: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.err: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.given: list[bytes] = []
        self.writable = asyncio.Event()
        self.writable.set()
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.closed = 0
        self.sent = 0
        self.opened = 0
        self.open = 0

    async def chunks(self, queue: asyncio.Queue[bytes | Exception | None]) -> AsyncGenerator[bytes, None]:
        self.open += 1
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                self.sent += len(item)
                yield item
        finally:
            self.open -= 1

    def stdout(self) -> AsyncGenerator[bytes, None]:
        self.opened += 1
        return self.chunks(self.out)

    async def write(self, data: bytes) -> None:
        await self.writable.wait()
        if data == b"refuse":
            raise OSError("no more of that")
        self.given.append(data)

    async def wait(self) -> int:
        return await asyncio.shield(self.status)

    async def close(self) -> None:
        self.closed += 1
        raise OSError("closing is never an error")

    def channel(self, *, resumable: bool = True) -> AsyncStreamChannel:
        return AsyncStreamChannel(
            self.stdout,
            self.write,
            wait=self.wait,
            stderr=lambda: self.chunks(self.err),
            close=self.close,
            resumable=resumable,
        )


async def test_bytes_both_ways_and_the_status() -> None:
    far = Far()
    channel = far.channel()
    await channel.write(b"one")
    await channel.write(b"two")
    assert far.given == [b"one", b"two"]
    far.out.put_nowait(b"hello")
    assert await channel.read(2) == b"he"
    assert await channel.read(100) == b"llo"
    far.err.put_nowait(b"x" * STDERR_BYTES)
    far.err.put_nowait(b"last words")
    far.out.put_nowait(None)
    assert await channel.read(1) == b""
    far.status.set_result(7)
    assert await channel.wait() == await channel.wait() == 7
    assert channel.stderr_tail.endswith("xlast words") and len(channel.stderr_tail) == STDERR_BYTES
    await channel.aclose()
    await channel.aclose()
    assert far.closed == 1


async def test_a_slow_reader_slows_the_far_end() -> None:
    far = Far()
    channel = far.channel()
    for _ in range(100):
        far.out.put_nowait(b"x" * (BUFFER_BYTES // 4))
    far.out.put_nowait(None)
    await asyncio.sleep(0.05)
    assert far.sent <= 2 * BUFFER_BYTES and (far.open, far.opened) == (2, 1)
    await asyncio.sleep(2 * PATIENCE_S)
    assert far.open == 1, "what waits for a slow reader holds nobody else up"
    total = 0
    while data := await channel.read(1 << 16):
        total += len(data)
    assert total == 25 * BUFFER_BYTES
    await channel.aclose()


async def test_a_stream_that_can_not_be_resumed_waits_for_its_reader() -> None:
    far = Far()
    channel = far.channel(resumable=False)
    for _ in range(12):
        far.out.put_nowait(b"x" * (BUFFER_BYTES // 4))
    far.out.put_nowait(None)
    await asyncio.sleep(2 * PATIENCE_S)
    assert far.sent <= 2 * BUFFER_BYTES and (far.open, far.opened) == (2, 1)
    total = 0
    while data := await channel.read(1 << 16):
        total += len(data)
    assert total == 3 * BUFFER_BYTES and far.opened == 1
    await channel.aclose()


async def test_a_break_comes_after_what_had_arrived() -> None:
    far = Far()
    channel = far.channel()
    far.out.put_nowait(b"the last")
    far.out.put_nowait(OSError("cut"))
    await asyncio.sleep(0)
    assert await channel.read(100) == b"the last"
    for _ in range(2):
        with pytest.raises(ChannelLost, match="OSError: cut"):
            await channel.read(100)
    far.status.set_exception(OSError("unknown"))
    with pytest.raises(ChannelLost, match="OSError: unknown"):
        await channel.wait()
    with pytest.raises(ChannelLost, match="no more of that"):
        await channel.write(b"refuse")
    with pytest.raises(ChannelLost, match="no more of that"):
        await channel.write(b"later")
    assert far.given == []
    await channel.aclose()


async def test_a_cancelled_caller_cuts_nothing_off() -> None:
    far = Far()
    channel = far.channel()
    reading = asyncio.create_task(channel.read(10))
    far.writable.clear()
    writing = asyncio.create_task(channel.write(b"under way"))
    waiting = asyncio.create_task(channel.wait())
    await asyncio.sleep(0.01)
    for task in (reading, writing, waiting):
        task.cancel()
    await asyncio.wait([reading, writing, waiting])
    far.writable.set()
    await channel.write(b"next")
    assert far.given == [b"under way", b"next"]
    far.out.put_nowait(b"kept")
    assert await channel.read(10) == b"kept"
    far.status.set_result(3)
    assert await channel.wait() == 3
    await channel.aclose()


async def test_closing_ends_everyone_who_waits() -> None:
    far = Far()
    channel = far.channel()
    far.writable.clear()
    reading = asyncio.create_task(channel.read(10))
    writing = [asyncio.create_task(channel.write(b"x")) for _ in range(8)]
    waiting = asyncio.create_task(channel.wait())
    await asyncio.sleep(0.01)
    await channel.aclose()
    assert await reading == b""
    for task in (*writing, waiting):
        with pytest.raises(ChannelLost):
            await task
    for late in (channel.write(b"y"), channel.wait()):
        with pytest.raises(ChannelLost, match="it was closed"):
            await late
