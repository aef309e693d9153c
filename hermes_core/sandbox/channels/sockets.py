"""A channel over a connected socket, on the event loop itself, so that no thread has to be woken for each piece of
data."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from hermes_core.errors import ChannelLost
from hermes_core.sandbox.channels.base import BUFFER_BYTES, CHUNK_BYTES, BufferedChannel
from hermes_core.sandbox.channels.blocking import in_thread

STUCK_S = 1.0
"""Seconds for which nothing can be sent until the far end is asked whether its program still runs."""

_NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class SocketChannel(BufferedChannel):
    """A channel over a connected socket, plain or TLS.

    Args:
        connection: belongs to the channel from now on.
        wait: blocks until there is an exit status, and returns it. Called once, in a thread, when `SocketChannel.wait`
            is first called. Raises once `close` was called.
        unpack: returns the standard output in the bytes that have arrived. Called with every piece, and with `b""` at
            the end, where it raises `OSError` if that is too early. The channel is lost with what it raises.
        early: data of the stream that was read before the channel was made.
        ended: blocks until it knows whether the program has ended; called in a thread while nothing can be sent. For
            transports that keep a stream open whose program ended without reading its input. The channel ends then.
        close: called once, after the connection has been shut down.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        wait: Callable[[], int],
        unpack: Callable[[bytes], bytes] = bytes,
        early: bytes = b"",
        ended: Callable[[], bool] | None = None,
        close: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._blocking_wait, self._unpack, self._ended, self._close = wait, unpack, ended, close
        self._unsent = memoryview(b"")
        self._sent = asyncio.Event()
        self._sent.set()
        self._turn = asyncio.Lock()
        self._status: asyncio.Future[int] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._received = 0
        self._lost: ChannelLost | None = None
        self._closed = self._reading = False
        connection.setblocking(False)
        if early:
            self._feed(early)
        self._resume()

    async def read(self, n: int) -> bytes:
        """Return up to `n` bytes. Raise `ChannelLost` if the transport broke, after the data that had arrived
        before."""
        data = await self._inbox.take(n)
        if len(self._inbox) < BUFFER_BYTES // 2:
            self._resume()
        return data

    async def write(self, data: bytes) -> None:
        """Send all of `data`. If the call is cancelled, the rest is still sent, before the next data."""
        async with self._turn:
            await self._sent.wait()
            self._check()
            self._unsent = memoryview(data)
            self._send()
            await self._sent.wait()
            self._check()

    async def wait(self) -> int:
        """Return the exit status from the transport's `wait`."""
        if self._status is None:
            if self._closed:
                raise self._gone(None)
            self._status = in_thread(self._blocking_wait, "channel-wait")
        try:
            return await asyncio.shield(self._status)
        except Exception as error:
            raise self._gone(error) from error

    async def aclose(self) -> None:
        """End the stream."""
        if self._closed:
            return
        self._closed = True
        self._inbox.end()
        self._fail(None)
        if self._watching is not None:
            self._watching.cancel()
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the far end closed first
            pass
        self._connection.close()
        if self._close is not None:
            self._close()

    # --- in ---------------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        if not self._reading and self._lost is None:
            self._reading = True
            self._loop.add_reader(self._connection.fileno(), self._receive)
            self._receive()  # data that TLS has decrypted already does not make the descriptor ready

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._connection.fileno())

    def _receive(self) -> None:
        try:
            while self._reading:
                data = self._connection.recv(CHUNK_BYTES)
                self._feed(data)
                if not data or not isinstance(self._connection, ssl.SSLSocket):
                    return
        except _NOT_NOW:
            return
        except Exception as error:  # also `unpack`'s, which would be lost in the event loop
            self._fail(error)

    def _feed(self, data: bytes) -> None:
        self._received += len(data)
        self._inbox.feed(self._unpack(data))
        if not data:
            self._pause()
            self._inbox.end()
        elif len(self._inbox) >= BUFFER_BYTES:
            self._pause()

    # --- out --------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        waited = not self._sent.is_set()
        try:
            while self._unsent:
                self._unsent = self._unsent[self._connection.send(self._unsent[:CHUNK_BYTES]) :]
        except _NOT_NOW:
            if not waited:
                self._sent.clear()
                self._loop.add_writer(self._connection.fileno(), self._send)
                if self._ended is not None and self._watching is None:
                    self._watching = self._loop.create_task(self._watch(self._ended), name="channel-stuck")
            return
        except OSError as error:
            self._fail(error)
            return
        if waited:
            self._loop.remove_writer(self._connection.fileno())
            self._sent.set()

    async def _watch(self, ended: Callable[[], bool]) -> None:
        """End the channel if its program ends before it has read what was sent, and all of its output is here."""
        over = False
        while not self._sent.is_set():
            before = len(self._unsent), self._received
            await asyncio.sleep(STUCK_S)
            held_back = not self._reading and not self._inbox.ended
            if self._sent.is_set() or held_back or (len(self._unsent), self._received) != before:
                over = False
            elif over:
                self._inbox.end()
                self._fail(EOFError("its program ended without reading its input"))
            else:
                try:
                    over = await in_thread(ended, "channel-ended")
                except Exception:  # the transport does not answer: the next time it may, or the connection breaks
                    over = False
        self._watching = None

    # --- the end ----------------------------------------------------------------------------------------------------

    def _fail(self, cause: Exception | None) -> None:
        if self._lost is not None:
            return
        self._lost = self._gone(cause)
        self._pause()
        self._inbox.end(self._lost)
        self._loop.remove_writer(self._connection.fileno())
        self._unsent = memoryview(b"")
        self._sent.set()

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost
