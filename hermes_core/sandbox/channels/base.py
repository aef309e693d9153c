"""What channels have in common: output that arrived before it was asked for, and the end of standard error."""

from __future__ import annotations

import asyncio

from hermes_core.errors import ChannelLost
from hermes_core.sandbox.contract import Channel

BUFFER_BYTES = 1 << 20
"""Maximum number of bytes read ahead of the caller. More data waits in the transport, which slows down the sender."""

CHUNK_BYTES = 1 << 18
"""Maximum size of one read or write of a transport, and the size that pipes are asked to have."""

STDERR_BYTES = 8192
"""Number of bytes kept of standard error."""


class Inbox:
    """Data that was read but not yet asked for. Used only in the event loop's thread."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._ended = False
        self._error: Exception | None = None
        self._arrival = asyncio.Event()

    def __len__(self) -> int:
        return len(self._data)

    @property
    def ended(self) -> bool:
        """Whether all data has arrived."""
        return self._ended

    def feed(self, data: bytes) -> None:
        """Add data."""
        self._data += data
        self._arrival.set()

    def end(self, error: Exception | None = None) -> None:
        """Mark the end of the data; `error` if the reason is that the transport broke."""
        if not self._ended:
            self._ended, self._error = True, error
            self._arrival.set()

    async def take(self, n: int) -> bytes:
        """Return 1 to n bytes, or none at the end. Raise the `error` that `end` was given."""
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
    """A channel that keeps what arrives until it is asked for, and the end of standard error."""

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._tail = Tail()

    def feed_stderr(self, data: bytes) -> None:
        """Keep data that the transport carried as standard error, which `read` does not return. Call it from any
        thread."""
        self._tail.feed(data)

    @property
    def stderr_tail(self) -> str:
        """Return the end of standard error."""
        return self._tail.text()

    def _gone(self, cause: Exception | None) -> ChannelLost:
        """Return the error of a channel whose transport has broken, or, without a cause, which we closed."""
        reason = "it was closed" if cause is None else f"{type(cause).__name__}: {cause}"
        tail = self.stderr_tail
        error = ChannelLost(f"the channel is gone: {reason}" + (f"; its last words: {tail}" if tail else ""))
        error.__cause__ = cause
        return error
