"""Output of a command, by byte offset. A reader whose stream was cut can request the same bytes again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

CHUNK_BYTES = 1 << 16
KEPT_BYTES = 16 << 20
"""How much output behind the furthest reader is kept."""
AHEAD_BYTES = 4 << 20
"""How far the output may get ahead of the furthest reader before the command has to wait."""
UNREAD_BYTES = 64 << 20
"""How much of it is kept for a reader that has not come yet."""


class OffsetTooOld(Exception):
    """The bytes at this offset are no longer kept."""


class ByteLog:
    """An append-only stream of bytes with a bounded memory.

    Args:
        tail: keep only the last so many bytes and never make the command wait, as the streams of V2 sandboxes do.
        on_room: called when the command may go on after `full`.
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
        """Return whether the command has to wait for its reader."""
        if self._tail is not None:
            return False
        if self._furthest is None:
            return len(self._data) >= UNREAD_BYTES
        return self.end - self._furthest >= AHEAD_BYTES

    def discard(self) -> None:
        """Keep nothing, as nobody will read it."""
        self._tail = 0

    def feed(self, data: bytes) -> None:
        """Append data, and forget what nobody can request any more."""
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
        """Yield chunks with the offset of each, until the end. What a `tail` has dropped is left out.

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
        if extra >= KEPT_BYTES // 4 or (self._tail is not None and extra > 0):  # not for every chunk: it moves the rest
            del self._data[:extra]
            self.start += extra

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
