"""A channel over asynchronous calls of a provider: an iterator to read, a coroutine function to write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from hermes_core.aio import TaskSet
from hermes_core.sandbox.channels.base import BUFFER_BYTES, BufferedChannel
from hermes_core.sandbox.channels.blocking import WRITES_AHEAD

PATIENCE_S = 0.5
"""If nobody reads for this long, the provider's stream is closed."""

T = TypeVar("T")


class AsyncStreamChannel(BufferedChannel):
    """A channel over asynchronous calls, with at most one call of each kind in progress.

    Cancelling a caller does not interrupt these calls: data that was read waits for the next `read`, and a write
    continues.

    Args:
        stdout: returns an iterator over non-empty chunks of standard output. The iterator raises if the transport
            breaks.
        write: writes all of its argument, or raises.
        wait: waits for the exit status, and returns it. Called once.
        stderr: returns an iterator over chunks of standard error.
        close: releases the stream. Called once, after the other calls have been cancelled.
        resumable: whether the iterator is closed if nobody reads for a while, so that it does not block its connection.
            Later, `stdout` is called again, and must continue where the iterator stopped. Otherwise, `stdout` is called
            once, and its iterator waits until somebody reads.
    """

    def __init__(
        self,
        stdout: Callable[[], AsyncGenerator[bytes, None]],
        write: Callable[[bytes], Awaitable[object]],
        *,
        wait: Callable[[], Awaitable[int]],
        stderr: Callable[[], AsyncGenerator[bytes, None]] | None = None,
        close: Callable[[], Awaitable[object]] | None = None,
        resumable: bool = True,
    ) -> None:
        super().__init__()
        self._write, self._wait, self._close = write, wait, close
        self._patience_s = PATIENCE_S if resumable else None
        self._room = asyncio.Event()
        self._turn = asyncio.Lock()
        self._permits = asyncio.Semaphore(WRITES_AHEAD)
        self._failure: Exception | None = None
        self._status: asyncio.Task[int] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._work = TaskSet()
        self._ends = TaskSet()
        self._work.spawn(self._read_on(stdout), "channel stdout")
        if stderr is not None:
            self._work.spawn(self._listen(stderr()), "channel stderr")

    async def read(self, n: int) -> bytes:
        """Return up to `n` bytes. After the data that has arrived, raise `ChannelLost` if the transport broke."""
        data = await self._inbox.take(n)
        if len(self._inbox) < BUFFER_BYTES:
            self._room.set()
        return data

    async def write(self, data: bytes) -> None:
        """Write all of `data`. Return when the provider's call has returned."""
        await self._permits.acquire()
        if self._failure is not None or self._closing is not None:
            self._permits.release()
            raise self._gone(self._failure)
        writing = self._work.spawn(self._write_on(data), "channel stdin")
        writing.add_done_callback(lambda _: self._permits.release())
        await self._outcome(writing)

    async def wait(self) -> int:
        """Return the exit status from the transport's `wait`."""
        if self._status is None:
            if self._closing is not None:
                raise self._gone(None)
            self._status = self._work.spawn(self._ask_status(), "channel status")
        return await self._outcome(self._status)

    async def aclose(self) -> None:
        """Cancel all calls in progress, and close the stream."""
        if self._closing is None:
            self._inbox.end()
            self._closing = self._ends.spawn(self._end(), "channel close")
        await asyncio.shield(self._closing)

    async def _read_on(self, source: Callable[[], AsyncGenerator[bytes, None]]) -> None:
        error: Exception | None = None
        try:
            while await self._read_until_stalled(source):
                await self._room.wait()
        except Exception as caught:
            error = caught
        self._inbox.end(None if error is None else self._gone(error))

    async def _read_until_stalled(self, source: Callable[[], AsyncGenerator[bytes, None]]) -> bool:
        """Read the stream. Return False at its end, or True if it was closed because nobody reads the data."""
        async with aclosing(source()) as chunks:
            async for data in chunks:
                self._inbox.feed(data)
                if len(self._inbox) >= BUFFER_BYTES and not await self._has_room():
                    return True
        return False

    async def _has_room(self) -> bool:
        """Wait for room in the buffer, for a limited time if the stream is resumable. Return whether there is room."""
        self._room.clear()
        try:
            async with asyncio.timeout(self._patience_s):
                await self._room.wait()
        except TimeoutError:
            return False
        return True

    async def _listen(self, chunks: AsyncGenerator[bytes, None]) -> None:
        async for data in chunks:
            self.feed_stderr(data)

    async def _write_on(self, data: bytes) -> None:
        async with self._turn:
            if self._failure is not None:
                raise self._gone(self._failure)
            try:
                await self._write(data)
            except Exception as error:
                self._failure = error
                raise self._gone(error) from error

    async def _ask_status(self) -> int:
        try:
            return await self._wait()
        except Exception as error:
            raise self._gone(error) from error

    async def _outcome(self, work: asyncio.Task[T]) -> T:
        """Return the result of a task. The task goes on if the caller is cancelled; only `aclose` cancels it."""
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                raise self._gone(None) from None
            raise

    async def _end(self) -> None:
        await self._work.aclose()
        if self._close is not None:
            try:
                await self._close()
            except Exception:
                return  # nothing else can be done to close it
