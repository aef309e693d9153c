"""A channel over a connected socket. It works in the event loop, so that no thread is woken for each piece of data."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from hermes_core.errors import ChannelLost
from hermes_core.sandbox.channels.base import BUFFER_BYTES, CHUNK_BYTES, BufferedChannel
from hermes_core.sandbox.channels.blocking import in_thread

STUCK_S = 1.0
"""If nothing could be sent for this many seconds, we ask whether the program has ended."""

_NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class SocketChannel(BufferedChannel):
    """A channel over a connected socket, plain or TLS.

    Args:
        connection: the socket. The channel closes it.
        wait: blocks until there is an exit status, and returns it. Called once, in a thread, by the first
            `SocketChannel.wait`. Raises after `close` was called.
        unpack: takes the next bytes that have arrived, and returns the standard output in them. Takes `b""` at the end,
            and then raises `OSError` if the stream is incomplete. Any error that it raises breaks the channel.
        early: data of the stream that was read before the channel was made.
        ended: returns whether the program has ended. Called in a thread while nothing can be sent, because some
            transports keep a stream open after the program ended without reading its input. Then the channel ends.
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
        """Return up to `n` bytes. After the data that has arrived, raise `ChannelLost` if the transport broke."""
        data = await self._inbox.take(n)
        if len(self._inbox) < BUFFER_BYTES // 2:
            self._resume()
        return data

    async def write(self, data: bytes) -> None:
        """Send all of `data`. If the call is cancelled, the rest is sent before the next call's data."""
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
            self._receive()  # TLS may hold decrypted data, for which the descriptor does not become ready

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
        except Exception as error:  # also from `unpack`; the event loop would only log it
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
        was_waiting = not self._sent.is_set()
        try:
            while self._unsent:
                self._unsent = self._unsent[self._connection.send(self._unsent[:CHUNK_BYTES]) :]
        except _NOT_NOW:
            if not was_waiting:
                self._sent.clear()
                self._loop.add_writer(self._connection.fileno(), self._send)
                if self._ended is not None and self._watching is None:
                    self._watching = self._loop.create_task(self._watch(self._ended), name="channel-stuck")
            return
        except OSError as error:
            self._fail(error)
            return
        if was_waiting:
            self._loop.remove_writer(self._connection.fileno())
            self._sent.set()

    async def _watch(self, ended: Callable[[], bool]) -> None:
        """End the channel if its program has ended without reading its input. First, read all of its output."""
        over = False
        while not self._sent.is_set():
            before = len(self._unsent), self._received
            await asyncio.sleep(STUCK_S)
            is_paused = not self._reading and not self._inbox.has_ended
            if self._sent.is_set() or is_paused or (len(self._unsent), self._received) != before:
                over = False
            elif over:
                self._inbox.end()
                self._fail(EOFError("its program ended without reading its input"))
            else:
                try:
                    over = await in_thread(ended, "channel-ended")
                except Exception:  # the transport does not answer: ask again, until it does or the connection breaks
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
