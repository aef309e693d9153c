"""A channel over a child process that does the transport."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import Mapping, Sequence

from hermes_core.aio import complete
from hermes_core.errors import ChannelLost
from hermes_core.sandbox.channels.base import BUFFER_BYTES, CHUNK_BYTES, BufferedChannel

_LAST_WORDS_S = 0.25


class AsyncioStreamChannel(BufferedChannel):
    """A channel to the standard streams of a child process that does the transport.

    Closing releases the child: it gets end-of-file and, if it has not ended by then, SIGKILL. So the child must only be
    a carrier (`ssh`, an entering process), not the program in the sandbox itself.
    """

    def __init__(self) -> None:
        super().__init__()
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
        """Start a child in a session of its own, so that Ctrl-C at our terminal does not reach it, and hold its
        streams.

        Args:
            env: the whole environment of the child; None is ours.
            pass_fds: descriptors that it inherits in addition to its standard streams.

        Raises:
            OSError: it could not be started.
        """
        channel = cls()
        start = asyncio.get_running_loop().subprocess_exec(
            lambda: _ChildProtocol(channel),
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=None if env is None else dict(env),
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )
        try:
            # asyncio waits for ever if it is cancelled between the child's start and the connection of its pipes.
            transport, _ = await complete(start)
        except asyncio.CancelledError:
            await complete(channel.aclose())
            raise
        channel._transport = transport
        for descriptor in (0, 1):
            _widen(transport.get_pipe_transport(descriptor))
        return channel

    async def read(self, n: int) -> bytes:
        """Return up to `n` bytes of the child's standard output, or `b""` once it has ended or closed it."""
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
        """Return the child's exit status. Raise `ChannelLost` if a signal ended it, because the far end may still run
        then."""
        await self._exited.wait()
        await self._last_words()
        status = None if self._transport is None else self._transport.get_returncode()
        if status is None or status < 0:
            raise await self._lost("it was closed" if self._closed else f"signal {-(status or 0)} ended it")
        return status

    async def aclose(self) -> None:
        """End the stream and release the child."""
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
        # Don't use the transport's own `close`: it polls whether the child has ended, and so may take the exit status
        # away from asyncio's watcher, which then complains of an unknown child.
        _kill_child(self._transport.get_pid())
        await self._exited.wait()  # SIGKILL takes effect at once

    def _reader(self) -> asyncio.ReadTransport:
        assert self._transport is not None
        reader = self._transport.get_pipe_transport(1)
        assert isinstance(reader, asyncio.ReadTransport)
        return reader

    async def _last_words(self) -> None:
        """Give standard error a short time to arrive, but not forever: another process may hold it open."""
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
    """Passes what asyncio reports about the child on to its channel."""

    def __init__(self, channel: AsyncioStreamChannel) -> None:
        self._channel = channel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._channel._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        channel = self._channel
        if fd == 2:
            channel.feed_stderr(data)
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
    """Kill our child, unless it was reaped. Asyncio may reap it in a thread and tell the loop later, and by then a busy
    host may have given its process id to another process."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.kill(pid, signal.SIGKILL)


def _widen(pipe: asyncio.BaseTransport | None) -> None:
    """Ask for a larger pipe, which takes fewer turns of the event loop per megabyte. A host may refuse."""
    file = None if pipe is None else pipe.get_extra_info("pipe")
    if file is not None:
        try:
            fcntl.fcntl(file.fileno(), fcntl.F_SETPIPE_SZ, CHUNK_BYTES)
        except (OSError, ValueError):  # none available, not a pipe (asyncio may use a socket), or already closed
            pass
