"""What a channel holds of its streams: what has arrived and was not asked for yet, and the end of standard error."""

from __future__ import annotations

import asyncio

BUFFER_BYTES = 1 << 20
"""Bytes read ahead of the caller at most; what is more waits in the transport, and so slows the far end."""

CHUNK_BYTES = 1 << 18
"""The most that one read or write of a transport carries, and the size that we ask pipes to have."""

STDERR_BYTES = 8192
"""Bytes of standard error that are kept."""


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
