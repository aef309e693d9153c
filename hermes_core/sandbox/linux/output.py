"""Bounded output: the head and the tail of a stream. Counts every byte, and cuts no UTF-8 character in two."""

from __future__ import annotations

_LONGEST_CHARACTER = 4


def trim_end(data: bytes) -> bytes:
    """Return `data` without an incomplete UTF-8 character at its end."""
    for back in range(1, min(_LONGEST_CHARACTER, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue  # a continuation byte: its lead is further back
        return data[:-back] if _character_length(byte) > back else data
    return data


def trim_start(data: bytes) -> bytes:
    """Return `data` without the continuation bytes (at most three) at its start."""
    cut = 0
    while cut < min(_LONGEST_CHARACTER - 1, len(data)) and data[cut] & 0xC0 == 0x80:
        cut += 1
    return data[cut:]


def _character_length(lead: int) -> int:
    if lead >= 0xF0:
        return 4
    if lead >= 0xE0:
        return 3
    return 2 if lead >= 0xC0 else 1


def join_capture(head: bytes, tail: bytes, total: int) -> bytes:
    """Join the head and the tail of a stream of `total` bytes. If bytes are missing, a notice between them says so."""
    if len(head) + len(tail) >= total:
        return head + tail
    head, tail = trim_end(head), trim_start(tail)
    return head + b"\n... [%d bytes omitted] ...\n" % (total - len(head) - len(tail)) + tail


class HeadTail:
    """The first and the last bytes of a stream, in bounded memory.

    Args:
        limit: maximum number of bytes kept: half for the head, half for the tail.
    """

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError("an output limit is at least 0, not %d" % limit)
        self.limit = limit
        self.total = 0
        self._head = bytearray()
        self._head_limit = limit // 2
        self._tail = Rolling(limit - self._head_limit)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail.feed(data)

    @property
    def truncated(self) -> bool:
        """Return whether bytes were dropped."""
        return self.total > self.limit

    def value(self) -> bytes:
        """Return the kept bytes, with a notice between head and tail if bytes were dropped."""
        return join_capture(bytes(self._head), self._tail.value(), self.total)


class Rolling:
    """The last bytes of a stream, addressed by their offset in the stream.

    Args:
        limit: maximum number of bytes kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._data = bytearray()

    @property
    def start(self) -> int:
        """Return the offset of the oldest byte that is certainly kept."""
        return max(0, self.total - self.limit)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total += len(data)
        if len(data) > self.limit:
            data = data[len(data) - self.limit :]
            self._data.clear()
        self._data += data
        # Cut only when the buffer has doubled, because removing bytes from the front moves all the others.
        if len(self._data) > 2 * self.limit:
            del self._data[: len(self._data) - self.limit]

    def read(self, offset: int, limit: int) -> tuple[bytes, int]:
        """Return up to `limit` bytes, and the offset of the first: `offset`, or that of the oldest byte kept."""
        begin = min(max(offset, self.start), self.total)
        at = begin - (self.total - len(self._data))
        return bytes(self._data[at : at + max(limit, 0)]), begin

    def value(self) -> bytes:
        """Return the last `limit` bytes."""
        return self.read(0, self.limit)[0]
