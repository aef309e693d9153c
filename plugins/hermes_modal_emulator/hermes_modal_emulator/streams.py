"""Output of a command by byte offset, so that a reader whose stream was cut can read the same bytes again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

CHUNK_BYTES = 1 << 16
KEPT_BYTES = 16 << 20
"""Number of bytes that are kept behind the furthest reader."""
AHEAD_BYTES = 4 << 20
"""Number of bytes ahead of the furthest reader at which the command has to wait."""
UNREAD_BYTES = 64 << 20
"""Number of bytes at which the command has to wait if nobody has read yet."""


class OffsetTooOld(Exception):
    """The bytes at this offset are no longer kept."""


class ByteLog:
    """An append-only stream of bytes with a bounded memory.

    Args:
        tail: number of last bytes to keep, without ever making the command wait, as in the streams of V2 sandboxes.
        on_room: called when the log is no longer `full`.
    """

    def __init__(self, tail: int | None = None, on_room: Callable[[], object] = lambda: None) -> None:
        self.ended = False
        self.start = 0
        """The offset of the first byte that is kept."""
        self._data = bytearray()
        self._tail = tail
        self._furthest: int | None = None
        self._on_room = on_room
        self._news = asyncio.Event()

    @property
    def end(self) -> int:
        """Return the offset after the last byte."""
        return self.start + len(self._data)

    @property
    def full(self) -> bool:
        """Return whether the command has to wait for a reader."""
        if self._tail is not None:
            return False
        if self._furthest is None:
            return len(self._data) >= UNREAD_BYTES
        return self.end - self._furthest >= AHEAD_BYTES

    def discard(self) -> None:
        """Keep no output from now on, because nobody will read it."""
        self._tail = 0

    def feed(self, data: bytes) -> None:
        """Append data, and drop the oldest bytes beyond the limit."""
        self._data += data
        if self._tail is not None:
            self._keep_from(self.end - self._tail)
        elif self._furthest is not None:
            self._keep_from(self._furthest - KEPT_BYTES)
        self._tell()

    def close(self) -> None:
        """End the output."""
        self.ended = True
        self._tell()

    async def read_from(self, offset: int) -> AsyncIterator[tuple[int, bytes]]:
        """Yield each chunk with its offset, until the end. With `tail`, bytes that were dropped are left out.

        Raises:
            OffsetTooOld: the data at this offset is no longer kept.
        """
        while True:
            if offset < self.start:
                if self._tail is None:
                    raise OffsetTooOld(f"offset {offset} is before {self.start}, where what is kept begins")
                offset = self.start
            if offset < self.end:
                at = offset - self.start
                chunk = bytes(self._data[at : at + CHUNK_BYTES])
                yield offset, chunk
                offset += len(chunk)
                self._note_reader(offset)
            elif self.ended:
                return
            else:
                self._note_reader(offset)
                await self._news.wait()

    def _note_reader(self, offset: int) -> None:
        was_full = self.full
        self._furthest = max(self._furthest or 0, offset)
        if was_full and not self.full:
            self._on_room()

    def _keep_from(self, offset: int) -> None:
        extra = offset - self.start
        # Not for every chunk, because the deletion moves the rest of the buffer.
        if extra >= KEPT_BYTES // 4 or (self._tail is not None and extra > 0):
            del self._data[:extra]
            self.start += extra

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
