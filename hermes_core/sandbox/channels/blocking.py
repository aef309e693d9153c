"""A channel over any blocking stream (a socket, an object of an SDK), with a thread for each direction."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from hermes_core.sandbox.channels.base import BUFFER_BYTES, CHUNK_BYTES, STDERR_BYTES, BufferedChannel
from hermes_core.sandbox.channels.process import AsyncioStreamChannel
from hermes_core.workers import begin_thread, call_in

__all__ = [
    "BUFFER_BYTES",
    "CHUNK_BYTES",
    "STDERR_BYTES",
    "WRITES_AHEAD",
    "AsyncioStreamChannel",
    "BlockingStreamChannel",
    "in_thread",
]

WRITES_AHEAD = 4
"""Maximum number of writes in progress. Cancelled writes count too, because a blocking call can't be stopped."""


T = TypeVar("T")


class BlockingStreamChannel(BufferedChannel):
    """A channel over blocking calls, with one thread for each direction.

    Args:
        read: returns 1 to n bytes of standard output, or `b""` at the end. Raises if the transport breaks.
        write: writes all of its argument, or raises.
        close: ends the stream. A waiting `read` or `write` must then return or raise. Called once, in a thread.
        wait: blocks until there is an exit status, and returns it. Called once, in a thread.
    """

    def __init__(
        self,
        read: Callable[[int], bytes],
        write: Callable[[bytes], object],
        *,
        close: Callable[[], object],
        wait: Callable[[], int],
    ) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._blocking_read, self._blocking_write = read, write
        self._blocking_close, self._blocking_wait = close, wait
        self._room = threading.Condition()
        self._buffered = 0
        self._outbox: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._permits = asyncio.Semaphore(WRITES_AHEAD)
        self._failure: Exception | None = None
        self._status: asyncio.Future[int] | None = None
        self._closing: asyncio.Future[object] | None = None
        for name, run in (("reader", self._read_on), ("writer", self._write_on)):
            begin_thread(run, f"channel-{name}")

    async def read(self, n: int) -> bytes:
        """Return up to `n` bytes. After the data that has arrived, raise `ChannelLost` if the transport broke."""
        data = await self._inbox.take(n)
        with self._room:
            self._buffered -= len(data)
            self._room.notify()
        return data

    async def write(self, data: bytes) -> None:
        """Write all of `data`. Return when the blocking call has returned."""
        await self._permits.acquire()
        if self._failure is not None or self._closing is not None:
            self._permits.release()
            raise self._gone(self._failure)
        outcome: asyncio.Future[None] = self._loop.create_future()
        outcome.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._outbox.put((data, outcome))
        await asyncio.shield(outcome)

    async def wait(self) -> int:
        """Return the exit status from the transport's `wait`."""
        if self._closing is not None and self._status is None:
            raise self._gone(None)
        if self._status is None:
            self._status = in_thread(self._blocking_wait, "channel-wait")
        try:
            return await asyncio.shield(self._status)
        except Exception as error:
            raise self._gone(error) from error

    async def aclose(self) -> None:
        """End the stream. The threads end later, when their current calls return."""
        if self._closing is None:
            self._inbox.end()
            with self._room:
                self._buffered = -1  # the reader must not wait for room any more
                self._room.notify()
            self._outbox.put(None)
            self._closing = in_thread(self._blocking_close, "channel-close")
        try:
            await asyncio.shield(self._closing)
        except Exception:
            return  # nothing else can be done to close it

    def _read_on(self) -> None:
        error: Exception | None = None
        try:
            while data := self._blocking_read(CHUNK_BYTES):
                with self._room:
                    if self._buffered < 0 or not call_in(self._loop, self._inbox.feed, data):
                        return
                    self._buffered += len(data)
                    self._room.wait_for(lambda: self._buffered < BUFFER_BYTES)
        except Exception as caught:
            error = caught
        call_in(self._loop, self._inbox.end, None if error is None else self._gone(error))

    def _write_on(self) -> None:
        while (item := self._outbox.get()) is not None:
            data, outcome = item
            try:
                if self._failure is None:
                    self._blocking_write(data)
            except Exception as caught:
                self._failure = caught
            if not call_in(self._loop, self._finish_write, outcome):
                return

    def _finish_write(self, outcome: asyncio.Future[None]) -> None:
        self._permits.release()
        if outcome.done():
            return
        if self._failure is not None:
            outcome.set_exception(self._gone(self._failure))
        else:
            outcome.set_result(None)


def in_thread(function: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run a blocking call in a daemon thread. Unlike an executor's threads, it never delays the end of the program."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    outcome.add_done_callback(lambda future: future.cancelled() or future.exception())

    def run() -> None:
        try:
            value = function()
        except Exception as error:
            call_in(loop, outcome.set_exception, error)
        else:
            call_in(loop, outcome.set_result, value)

    begin_thread(run, name)
    return outcome
