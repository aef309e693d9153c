"""Bridges to `Channel`: one from a child process's pipes, one from any blocking stream (a socket, an SDK's object)."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from hermes_core.errors import ChannelLost
from hermes_core.sandbox.contract import Channel

BUFFER_BYTES = 1 << 20
"""Bytes read ahead of the caller at most; what is more waits in the transport, and so slows the far end."""

CHUNK_BYTES = 1 << 18
"""The most that one read or write of a transport carries, and the size that we ask pipes to have."""

STDERR_BYTES = 8192
"""Bytes of standard error that are kept."""

_LAST_WORDS_S = 0.25

WRITES_AHEAD = 4
"""Writes that may be under way in a blocking stream; cancelled ones stay under way, as they can't be taken back."""


T = TypeVar("T")


class Inbox:
    """What has been read but not yet asked for. Lives in the event loop's thread."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._ended = False
        self._error: Exception | None = None
        self._arrival = asyncio.Event()

    def __len__(self) -> int:
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """More data has come."""
        self._data += data
        self._arrival.set()

    def end(self, error: Exception | None = None) -> None:
        """No more data; `error` if that is because the transport broke."""
        if not self._ended:
            self._ended, self._error = True, error
            self._arrival.set()

    async def take(self, n: int) -> bytes:
        """Up to n bytes, at least one; none at the end. Raises the `error` that `end` was given."""
        while not self._data:
            if self._error is not None:
                raise self._error
            if self._ended:
                return b""
            self._arrival.clear()
            await self._arrival.wait()
        data = bytes(self._data[:n])
        del self._data[:n]
        return data


class Tail:
    """The end of a byte stream, by a bound. Safe to feed from any thread."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> None:
        """More has come."""
        self._data = (self._data + data)[-STDERR_BYTES:]

    def text(self) -> str:
        """What is kept, as text."""
        return self._data.decode("utf-8", "replace").strip()


class AsyncioStreamChannel(Channel):
    """A channel to the standard streams of a child process of ours, which does the transporting.

    Closing lets go of the child: it gets end-of-file and, if it has not ended by then, SIGKILL. So the child is to be a
    mere carrier (`ssh`, an entering process), not the thing in the sandbox itself.
    """

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._tail = Tail()
        self._writable = asyncio.Event()
        self._writable.set()
        self._exited = asyncio.Event()
        self._silent = asyncio.Event()
        self._closed = False
        self._transport: asyncio.SubprocessTransport | None = None
        self._paused = False

    @classmethod
    async def spawn(
        cls, argv: Sequence[str], *, env: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
    ) -> AsyncioStreamChannel:
        """Start a child in a session of its own (so that Ctrl-C at our terminal is ours alone) and hold its streams.

        Args:
            env: the whole environment of the child; None is ours.
            pass_fds: descriptors that it inherits besides its standard streams.

        Raises:
            OSError: it could not be started.
        """
        channel = cls()
        transport, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: _ChildProtocol(channel),
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=None if env is None else dict(env),
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )
        channel._transport = transport
        for descriptor in (0, 1):
            _widen(transport.get_pipe_transport(descriptor))
        return channel

    async def read(self, n: int) -> bytes:
        """Up to `n` bytes of the child's standard output; `b""` once it has ended or closed it."""
        data = await self._inbox.take(n)
        if self._paused and len(self._inbox) <= BUFFER_BYTES // 2:
            self._paused = False
            self._reader().resume_reading()
        return data

    async def write(self, data: bytes) -> None:
        """Write to the child's standard input, waiting while its pipe is full."""
        writer = None if self._transport is None else self._transport.get_pipe_transport(0)
        if self._closed or writer is None or writer.is_closing():
            raise await self._lost("its standard input is closed")
        assert isinstance(writer, asyncio.WriteTransport)
        writer.write(data)
        await self._writable.wait()
        if self._closed or writer.is_closing():
            raise await self._lost("it stopped reading")

    async def wait(self) -> int:
        """The child's exit status; `ChannelLost` if a signal ended the child, as then the far end may live on."""
        await self._exited.wait()
        await self._last_words()
        status = None if self._transport is None else self._transport.get_returncode()
        if status is None or status < 0:
            raise await self._lost("it was closed" if self._closed else f"signal {-(status or 0)} ended it")
        return status

    async def aclose(self) -> None:
        """End the stream and let the child go."""
        self._closed = True
        self._inbox.end()
        self._writable.set()
        if self._transport is None:
            return
        if self._exited.is_set():
            self._transport.close()
            return
        for descriptor in (0, 1, 2):
            pipe = self._transport.get_pipe_transport(descriptor)
            if pipe is not None:
                pipe.close()
        # Not by the transport's own `close`: it looks whether the child has ended, and so may take the exit status
        # away from asyncio's watcher, which then complains of an unknown child.
        _kill_child(self._transport.get_pid())
        await self._exited.wait()  # SIGKILL does not wait for anything

    @property
    def stderr_tail(self) -> str:
        """The last of the child's standard error."""
        return self._tail.text()

    def _reader(self) -> asyncio.ReadTransport:
        assert self._transport is not None
        reader = self._transport.get_pipe_transport(1)
        assert isinstance(reader, asyncio.ReadTransport)
        return reader

    async def _last_words(self) -> None:
        """Give standard error the moment that it may need to arrive; something else may hold it open for ever."""
        try:
            async with asyncio.timeout(0 if self._closed else _LAST_WORDS_S):
                await self._silent.wait()
        except TimeoutError:
            pass

    async def _lost(self, reason: str) -> ChannelLost:
        await self._last_words()
        tail = self.stderr_tail
        return ChannelLost(f"the channel's process is gone: {reason}" + (f"; it said: {tail}" if tail else ""))


class _ChildProtocol(asyncio.SubprocessProtocol):
    """Carries what asyncio reports of the child to its channel."""

    def __init__(self, channel: AsyncioStreamChannel) -> None:
        self._channel = channel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._channel._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        channel = self._channel
        if fd == 2:
            channel._tail.feed(data)
            return
        channel._inbox.feed(data)
        if not channel._paused and len(channel._inbox) >= BUFFER_BYTES:
            channel._paused = True
            channel._reader().pause_reading()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 0:
            self._channel._writable.set()
        elif fd == 1:
            self._channel._inbox.end()
        else:
            self._channel._silent.set()

    def pause_writing(self) -> None:
        self._channel._writable.clear()

    def resume_writing(self) -> None:
        self._channel._writable.set()

    def process_exited(self) -> None:
        channel = self._channel
        channel._exited.set()
        if channel._closed and channel._transport is not None:
            channel._transport.close()


def _kill_child(pid: int) -> None:
    """Kill a child of ours, unless it was reaped: asyncio may do that in a thread and tell the loop later, and by then
    a busy host has given the number to somebody else's process."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.kill(pid, signal.SIGKILL)


def _widen(pipe: asyncio.BaseTransport | None) -> None:
    """Ask for a larger pipe: fewer turns of the event loop per megabyte. A host that is short of them says no."""
    file = None if pipe is None else pipe.get_extra_info("pipe")
    if file is not None:
        try:
            fcntl.fcntl(file.fileno(), fcntl.F_SETPIPE_SZ, CHUNK_BYTES)
        except (OSError, ValueError):  # none to be had, not a pipe (asyncio may take a socket), or closed already
            pass


class BlockingStreamChannel(Channel):
    """A channel over blocking calls, with one thread for each direction.

    Args:
        read: at most n bytes of standard output, at least one; `b""` at the end. Raises when the transport breaks.
        write: takes all of its argument, or raises.
        close: ends the stream; makes a `read` or `write` that is waiting return or raise. Called once, in a thread.
        wait: the exit status, blocking until there is one; called once, in a thread.
    """

    def __init__(
        self,
        read: Callable[[int], bytes],
        write: Callable[[bytes], object],
        *,
        close: Callable[[], object],
        wait: Callable[[], int],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._blocking_read, self._blocking_write = read, write
        self._blocking_close, self._blocking_wait = close, wait
        self._inbox = Inbox()
        self._tail = Tail()
        self._room = threading.Condition()
        self._buffered = 0
        self._outbox: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._permits = asyncio.Semaphore(WRITES_AHEAD)
        self._failure: Exception | None = None
        self._status: asyncio.Future[int] | None = None
        self._closing: asyncio.Future[object] | None = None
        for name, run in (("reader", self._read_on), ("writer", self._write_on)):
            threading.Thread(target=run, name=f"channel-{name}", daemon=True).start()

    async def read(self, n: int) -> bytes:
        """Up to `n` bytes; `ChannelLost` when the transport broke, after what had arrived before that."""
        data = await self._inbox.take(n)
        with self._room:
            self._buffered -= len(data)
            self._room.notify()
        return data

    async def write(self, data: bytes) -> None:
        """Write all of `data`; returns once the blocking call has."""
        await self._permits.acquire()
        if self._failure is not None or self._closing is not None:
            self._permits.release()
            raise self._lost(self._failure)
        done: asyncio.Future[None] = self._loop.create_future()
        done.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._outbox.put((data, done))
        await asyncio.shield(done)

    async def wait(self) -> int:
        """The exit status, as the transport's `wait` gives it."""
        if self._closing is not None and self._status is None:
            raise self._lost(None)
        if self._status is None:
            self._status = in_thread(self._blocking_wait, "channel-wait")
        try:
            return await asyncio.shield(self._status)
        except Exception as error:
            raise self._lost(error) from error

    async def aclose(self) -> None:
        """End the stream. Does not wait for the threads, which end with the calls that they are in."""
        if self._closing is None:
            self._inbox.end()
            with self._room:
                self._buffered = -1  # the reader is not to wait for room any more
                self._room.notify()
            self._outbox.put(None)
            self._closing = in_thread(self._blocking_close, "channel-close")
        try:
            await asyncio.shield(self._closing)
        except Exception:
            return  # a stream that can't even be closed is closed

    def feed_stderr(self, data: bytes) -> None:
        """Keep what the transport carried as standard error, apart from what `read` gives. From any thread."""
        self._tail.feed(data)

    @property
    def stderr_tail(self) -> str:
        """The last of what `feed_stderr` was given."""
        return self._tail.text()

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
        call_in(self._loop, self._inbox.end, None if error is None else self._lost(error))

    def _write_on(self) -> None:
        while (item := self._outbox.get()) is not None:
            data, done = item
            try:
                if self._failure is None:
                    self._blocking_write(data)
            except Exception as caught:
                self._failure = caught
            if not call_in(self._loop, self._written, done):
                return

    def _written(self, done: asyncio.Future[None]) -> None:
        self._permits.release()
        if done.done():
            return
        if self._failure is not None:
            done.set_exception(self._lost(self._failure))
        else:
            done.set_result(None)

    def _lost(self, error: Exception | None) -> ChannelLost:
        return channel_gone(error, self.stderr_tail)


def in_thread(function: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run a blocking call in a daemon thread: unlike the executor's, it never holds up the end of the program."""
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

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> bool:
    """Call in the event loop's thread; False if the loop is closed, and with it everyone who could care."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return False
    return True


def channel_gone(cause: Exception | None, last_words: str) -> ChannelLost:
    """What a channel raises once its transport has broken, or, without a cause, was closed by us."""
    reason = "it was closed" if cause is None else f"{type(cause).__name__}: {cause}"
    error = ChannelLost(f"the channel is gone: {reason}" + (f"; its last words: {last_words}" if last_words else ""))
    error.__cause__ = cause
    return error
