"""The driver's ends of a request's streams. Each resumes at its byte offset after a lost channel."""

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
    """The receiving end of a stream: pieces in order, none twice, with the sender limited by a window."""

    def __init__(self) -> None:
        self.received = 0
        self.complete = False
        """Whether the sender has said that this is all: not so if the request ended first."""
        self._taken = 0
        self._confirmed = 0
        self._pieces: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self._identity = ""
        self._post: Post | None = None

    def attach(self, identity: str, post: Post) -> None:
        """Bind it to its request."""
        self._identity, self._post = identity, post

    def feed(self, offset: int, data: bytes, eof: bool = False) -> None:
        """Take a piece that starts at `offset`. Known bytes are left out.

        Raises:
            ChannelLost: bytes are missing before this piece, so the channel can't be trusted.
        """
        if offset > self.received:
            raise ChannelLost(f"a stream jumped from byte {self.received} to {offset}")
        fresh = data[self.received - offset :]
        if fresh:
            self.received += len(fresh)
            self._pieces.append(fresh)
            self._changed.set()
        if eof:
            self.complete = True
            self.end()

    def end(self) -> None:
        """Note that no more pieces will come."""
        self._ended = True
        self._changed.set()

    async def read(self, n: int = CHUNK) -> bytes:
        """Return up to `n` bytes, as soon as there are some; empty at the end."""
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
    """The sending end of a stream. It is never more than a window ahead of what the program has taken."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._base = 0
        self._sent = 0
        self._finished = False
        self._ended = False
        self._room = asyncio.Event()
        self._identity = ""
        self._post: Post | None = None

    def attach(self, identity: str, post: Post) -> None:
        """Bind it to its request."""
        self._identity, self._post = identity, post

    def resume(self) -> None:
        """Send again everything that the program may not have: on a new channel, after the request itself."""
        self._sent = self._base
        self._send_kept()

    def taken(self, offset: int) -> None:
        """Note that the program has everything before `offset`."""
        if offset > self._base:
            del self._kept[: offset - self._base]
            self._base = offset
            self._sent = max(self._sent, offset)
            self._room.set()

    def end(self) -> None:
        """Note that the request has ended, so that nothing more will be taken."""
        self._ended = True
        self._room.set()

    async def write(self, data: bytes) -> bool:
        """Send bytes, waiting for room before each piece; whether that is of use still: not once it has ended."""
        for start in range(0, len(data), CHUNK):
            if not await self._below(WINDOW):
                return False
            self._kept += data[start : start + CHUNK]
            self._send_kept()
        return not self._ended

    def finish(self) -> None:
        """Say that this was all. Idempotent."""
        if not self._finished:
            self._finished = True
            self._send_kept()

    async def flush(self) -> bool:
        """Wait until all has been taken; False if the request ended first."""
        return await self._below(1)

    async def pump(self, source: AsyncIterator[bytes]) -> None:
        """Send the source to its end."""
        async for data in source:
            if not await self.write(data):
                return
        self.finish()

    async def _below(self, size: int) -> bool:
        """Wait until fewer bytes than this are waiting to be taken; False if the request ended first."""
        while len(self._kept) >= size and not self._ended:
            self._room.clear()
            await self._room.wait()
        return not self._ended

    def _send_kept(self) -> None:
        data = bytes(self._kept[self._sent - self._base :])
        if self._post is not None and (data or self._finished):
            self._post({"op": "in", "id": self._identity, "off": self._sent, "eof": self._finished}, data)
            self._sent += len(data)


class SendRequest(Protocol):
    """A request to the guest: `GuestClient.request`."""

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


async def fed(work: Coroutine[Any, Any, T], feeding: Coroutine[Any, Any, None]) -> T:
    """Return the outcome of `work`, which gets its input meanwhile. It may end before all input is sent. If sending
    fails, so does this."""
    async with alongside(work) as working, alongside(feeding) as feeder:
        await asyncio.wait({working, feeder}, return_when=asyncio.FIRST_COMPLETED)
        if feeder.done() and not working.done():
            feeder.result()
        return await working
