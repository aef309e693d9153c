"""The driver's ends of a request's streams. On a new channel, each resumes at its byte offset."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from hermes_core.aio import alongside
from hermes_core.errors import ChannelLost
from hermes_core.sandbox.guest.wire import CHUNK, WINDOW

Post = Callable[[Mapping[str, Any], bytes], None]
Answer = tuple[dict[str, Any], bytes]
T = TypeVar("T")


class OutputStream:
    """The receiving end of a stream. It returns the pieces in order, and limits the sender by a window."""

    def __init__(self) -> None:
        self.received = 0
        self.complete = False
        """Whether the sender has marked the end. False if the request ended first."""
        self._taken = 0
        self._confirmed = 0
        self._pieces: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self._identity = ""
        self._post: Post | None = None

    def attach(self, identity: str, post: Post) -> None:
        """Set the id of the request, and how frames are sent."""
        self._identity, self._post = identity, post

    def feed(self, offset: int, data: bytes, eof: bool = False) -> None:
        """Take a piece that starts at `offset`. Bytes that were received before are dropped.

        Raises:
            ChannelLost: bytes are missing before this piece, so the channel can't be trusted.
        """
        if offset > self.received:
            raise ChannelLost(f"a stream jumped from byte {self.received} to {offset}")
        piece = data[self.received - offset :]
        if piece:
            self.received += len(piece)
            self._pieces.append(piece)
            self._changed.set()
        if eof:
            self.complete = True
            self.end()

    def end(self) -> None:
        """End the stream: no more pieces will come."""
        self._ended = True
        self._changed.set()

    async def read(self, n: int = CHUNK) -> bytes:
        """Return 1 to `n` bytes; empty at the end."""
        while not self._pieces:
            if self._ended:
                return b""
            self._changed.clear()
            await self._changed.wait()
        piece = self._pieces.popleft()
        if len(piece) > n:
            self._pieces.appendleft(piece[n:])
            piece = piece[:n]
        self._taken += len(piece)
        if self._taken - self._confirmed >= WINDOW // 2 and self._post is not None and not self._ended:
            self._confirmed = self._taken
            self._post({"op": "credit", "id": self._identity, "off": self._taken}, b"")
        return piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := await self.read():
            yield piece


class InputStream:
    """The sending end of a stream. It is never more than a window ahead of the program."""

    def __init__(self) -> None:
        self._unconfirmed = bytearray()
        self._base = 0
        """The offset of the first unconfirmed byte."""
        self._sent = 0
        """The offset of the first byte that was not sent on this channel."""
        self._finished = False
        self._ended = False
        self._room = asyncio.Event()
        self._identity = ""
        self._post: Post | None = None

    def attach(self, identity: str, post: Post) -> None:
        """Set the id of the request, and how frames are sent."""
        self._identity, self._post = identity, post

    def resume(self) -> None:
        """Send all unconfirmed bytes. On a new channel, call this after the request was sent again."""
        self._sent = self._base
        self._send_rest()

    def confirm(self, offset: int) -> None:
        """Record that the program has everything before `offset`."""
        if offset > self._base:
            del self._unconfirmed[: offset - self._base]
            self._base = offset
            self._sent = max(self._sent, offset)
            self._room.set()

    def end(self) -> None:
        """Stop waiting for confirmations, because the request has ended."""
        self._ended = True
        self._room.set()

    async def write(self, data: bytes) -> bool:
        """Send bytes, and wait for room before each piece. Return False if the request has ended."""
        for start in range(0, len(data), CHUNK):
            if not await self._wait_until_below(WINDOW):
                return False
            self._unconfirmed += data[start : start + CHUNK]
            self._send_rest()
        return not self._ended

    def finish(self) -> None:
        """Mark the end of the stream. Idempotent."""
        if not self._finished:
            self._finished = True
            self._send_rest()

    async def flush(self) -> bool:
        """Wait until everything is confirmed. Return False if the request ended first."""
        return await self._wait_until_below(1)

    async def pump(self, source: AsyncIterator[bytes]) -> None:
        """Send everything from `source`, and then the end."""
        async for data in source:
            if not await self.write(data):
                return
        self.finish()

    async def _wait_until_below(self, size: int) -> bool:
        """Wait until fewer than `size` bytes are unconfirmed. Return False if the request ended first."""
        while len(self._unconfirmed) >= size and not self._ended:
            self._room.clear()
            await self._room.wait()
        return not self._ended

    def _send_rest(self) -> None:
        data = bytes(self._unconfirmed[self._sent - self._base :])
        if self._post is not None and (data or self._finished):
            self._post({"op": "in", "id": self._identity, "off": self._sent, "eof": self._finished}, data)
            self._sent += len(data)


class SendRequest(Protocol):
    """The type of `GuestClient.request`."""

    def __call__(
        self,
        header: dict[str, Any],
        body: bytes = b"",
        *,
        output: OutputStream | None = None,
        input: InputStream | None = None,  # noqa: A002
    ) -> Coroutine[Any, Any, Answer]: ...


async def once(data: bytes) -> AsyncIterator[bytes]:
    """Yield one piece."""
    yield data


async def run_with_input(work: Coroutine[Any, Any, T], feeding: Coroutine[Any, Any, None]) -> T:
    """Return the result of `work` while `feeding` sends its input. `work` may end first. If `feeding` fails first, its
    error is raised."""
    async with alongside(work) as working, alongside(feeding) as feeder:
        await asyncio.wait({working, feeder}, return_when=asyncio.FIRST_COMPLETED)
        if feeder.done() and not working.done():
            feeder.result()
        return await working
