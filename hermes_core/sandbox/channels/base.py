"""Parts that all channels share: a buffer for output that nobody has read yet, and the tail of standard error."""

from __future__ import annotations

import asyncio

from hermes_core.errors import ChannelLost
from hermes_core.sandbox.contract import Channel

BUFFER_BYTES = 1 << 20
"""Maximum number of buffered bytes. More data waits in the transport, which slows down the sender."""

CHUNK_BYTES = 1 << 18
"""Maximum size of one read or write of a transport, and the size of pipes, if the host allows it."""

STDERR_BYTES = 8192
"""The number of bytes of standard error that are kept."""


class Inbox:
    """A buffer for data that arrived before it was read. Use it only in the event loop's thread."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._ended = False
        self._error: Exception | None = None
        self._arrival = asyncio.Event()

    def __len__(self) -> int:
        return len(self._data)

    @property
    def has_ended(self) -> bool:
        """Whether all data has arrived."""
        return self._ended

    def feed(self, data: bytes) -> None:
        """Add data."""
        self._data += data
        self._arrival.set()

    def end(self, error: Exception | None = None) -> None:
        """Mark the end of the data. `error` is the reason if the transport broke."""
        if not self._ended:
            self._ended, self._error = True, error
            self._arrival.set()

    async def take(self, n: int) -> bytes:
        """Return 1 to n bytes, or none at the end. Raises the error passed to `end`."""
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
    """The last bytes of a stream. Safe to feed from any thread."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> None:
        """Add data."""
        self._data = (self._data + data)[-STDERR_BYTES:]

    def text(self) -> str:
        """Return the kept bytes as text."""
        return self._data.decode("utf-8", "replace").strip()


class BufferedChannel(Channel):
    """A channel that buffers output until it is read, and keeps the tail of standard error."""

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._tail = Tail()

    def feed_stderr(self, data: bytes) -> None:
        """Keep data of standard error, which `read` does not return. Can be called from any thread."""
        self._tail.feed(data)

    @property
    def stderr_tail(self) -> str:
        """Return the last bytes of standard error as text."""
        return self._tail.text()

    def _gone(self, cause: Exception | None) -> ChannelLost:
        """Return the error for a broken transport, or, if `cause` is None, for a channel that we closed."""
        reason = "it was closed" if cause is None else f"{type(cause).__name__}: {cause}"
        tail = self.stderr_tail
        error = ChannelLost(f"the channel is gone: {reason}" + (f"; its last words: {tail}" if tail else ""))
        error.__cause__ = cause
        return error
