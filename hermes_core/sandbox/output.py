"""Output within bounds: the head and the tail of a stream, every byte counted, no UTF-8 character cut in two."""

from __future__ import annotations

from collections import deque

LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character."""


def trim_end(data: bytes) -> bytes:
    """`data` without the first bytes of a character that its end cuts in two; other bytes stay as they are."""
    for back in range(1, min(LONGEST_CHARACTER, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue  # a continuation byte: its lead is further back
        return data[:-back] if _character_length(byte) > back else data
    return data


def trim_start(data: bytes) -> bytes:
    """`data` without the last bytes of a character whose beginning was cut off, three at most."""
    cut = 0
    while cut < min(LONGEST_CHARACTER - 1, len(data)) and data[cut] & 0xC0 == 0x80:
        cut += 1
    return data[cut:]


def _character_length(lead: int) -> int:
    if lead >= 0xF0:
        return 4
    if lead >= 0xE0:
        return 3
    return 2 if lead >= 0xC0 else 1


class HeadTail:
    """The first and the last bytes of a stream, in bounded memory.

    Args:
        limit: bytes kept, half of them the head and half the tail; all of the stream if it is no longer than that.
    """

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"an output limit is at least 0, not {limit}")
        self.limit = limit
        self.total = 0
        self._head = bytearray()
        self._head_limit = limit // 2
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._feed_tail(data)

    def _feed_tail(self, data: bytes) -> None:
        room = self.limit - self._head_limit
        if len(data) >= room:
            self._tail.clear()
            self._tail_bytes = 0
            data = data[len(data) - room :]
        self._tail.append(data)
        self._tail_bytes += len(data)
        # Whole pieces are dropped while what is left still fills the tail: no copy per piece.
        while self._tail_bytes - len(self._tail[0]) >= room and len(self._tail) > 1:
            self._tail_bytes -= len(self._tail.popleft())

    @property
    def truncated(self) -> bool:
        """Whether something was left out."""
        return self.total > self.limit

    def value(self) -> bytes:
        """What was kept, with a notice between head and tail that says how much is missing."""
        tail = b"".join(self._tail)
        if not self.truncated:
            return bytes(self._head) + tail
        room = self.limit - self._head_limit
        return join_capture(bytes(self._head), tail[len(tail) - room :], self.total)


def join_capture(head: bytes, tail: bytes, total: int) -> bytes:
    """Head and tail of a stream of `total` bytes, with a notice in between of how much is missing, if it is."""
    if len(head) + len(tail) >= total:
        return head + tail
    head, tail = trim_end(head), trim_start(tail)
    return head + b"\n... [%d bytes omitted] ...\n" % (total - len(head) - len(tail)) + tail


class Rolling:
    """The last bytes of a stream, addressed by their offset in all of it.

    Args:
        limit: bytes kept at most.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._data = bytearray()

    @property
    def start(self) -> int:
        """The offset of the oldest byte still held."""
        return self.total - len(self._data)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total += len(data)
        self._data += data
        # Cut only now and then: removing from the front moves all the rest.
        if len(self._data) > 2 * self.limit:
            del self._data[: len(self._data) - self.limit]

    def read(self, offset: int, limit: int) -> tuple[bytes, int]:
        """Up to `limit` bytes from `offset` on, or from the oldest held; and the offset that they start at."""
        begin = min(max(offset, self.total - self.limit, self.start, 0), self.total)
        at = begin - self.start
        return bytes(self._data[at : at + max(limit, 0)]), begin
