"""A channel over a child process that carries its data, such as `ssh`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Self

from hermes_core.aio import complete
from hermes_core.errors import ChannelLost
from hermes_core.sandbox.channels.base import BUFFER_BYTES, CHUNK_BYTES, BufferedChannel

_LAST_WORDS_S = 0.25


class AsyncioStreamChannel(BufferedChannel):
    """A channel over the standard streams of a child process that carries its data.

    Closing the channel closes the child's streams and kills the child. So the child must only be a carrier, such as
    `ssh`, and not the program in the sandbox itself.
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
    ) -> Self:
        """Start a child in a new session, so that Ctrl-C at our terminal does not reach it.

        Args:
            env: the whole environment of the child. None is this process's environment.
            pass_fds: descriptors that the child inherits in addition to its standard streams.

        Raises:
            OSError: the child could not be started.
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
            # Asyncio hangs if it is cancelled between the start of the child and the connection of the child's pipes.
            transport, _ = await complete(start)
        except asyncio.CancelledError:
            await complete(channel.aclose())
            raise
        channel._transport = transport
        for descriptor in (0, 1):
            _widen(transport.get_pipe_transport(descriptor))
        return channel

    async def read(self, n: int) -> bytes:
        """Return up to `n` bytes of the child's standard output; `b""` at its end."""
        data = await self._inbox.take(n)
        if self._paused and len(self._inbox) <= BUFFER_BYTES // 2:
            self._paused = False
            self._reader().resume_reading()
        return data

    async def write(self, data: bytes) -> None:
        """Write to the child's standard input, waiting while its pipe is full."""
        writer = None if self._transport is None else self._transport.get_pipe_transport(0)
        if self._closed or writer is None or writer.is_closing():
            raise await self._channel_lost("its standard input is closed")
        assert isinstance(writer, asyncio.WriteTransport)
        writer.write(data)
        await self._writable.wait()
        if self._closed or writer.is_closing():
            raise await self._channel_lost("it stopped reading")

    async def wait(self) -> int:
        """Return the child's exit status. Raises `ChannelLost` after a signal, because the far end may still run."""
        await self._exited.wait()
        await self._last_words()
        status = None if self._transport is None else self._transport.get_returncode()
        if status is None or status < 0:
            raise await self._channel_lost("it was closed" if self._closed else f"signal {-(status or 0)} ended it")
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
        # Don't use the transport's `close`. It polls the child, and so may reap it before asyncio's watcher does, which
        # then complains of an unknown child.
        _kill_child(self._transport.get_pid())
        await self._exited.wait()  # SIGKILL takes effect at once

    def _reader(self) -> asyncio.ReadTransport:
        assert self._transport is not None
        reader = self._transport.get_pipe_transport(1)
        assert isinstance(reader, asyncio.ReadTransport)
        return reader

    async def _last_words(self) -> None:
        """Wait a short time for the end of standard error. It may never come, if another process holds it open."""
        try:
            async with asyncio.timeout(0 if self._closed else _LAST_WORDS_S):
                await self._silent.wait()
        except TimeoutError:
            pass

    async def _channel_lost(self, reason: str) -> ChannelLost:
        await self._last_words()
        tail = self.stderr_tail
        return ChannelLost(f"the channel's process is gone: {reason}" + (f"; it said: {tail}" if tail else ""))


class _ChildProtocol(asyncio.SubprocessProtocol):
    """Passes asyncio's reports about the child on to its channel."""

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
    """Kill our child, unless it was reaped. Asyncio reaps it in a thread and tells the loop later. By then, another
    process may have its pid."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        os.kill(pid, signal.SIGKILL)


def _widen(pipe: asyncio.BaseTransport | None) -> None:
    """Enlarge a pipe if the host allows it, so that the event loop needs fewer turns per megabyte."""
    file = None if pipe is None else pipe.get_extra_info("pipe")
    if file is not None:
        try:
            fcntl.fcntl(file.fileno(), fcntl.F_SETPIPE_SZ, CHUNK_BYTES)
        except (OSError, ValueError):  # over the host's limit, not a pipe (asyncio may use a socket), or closed
            pass
