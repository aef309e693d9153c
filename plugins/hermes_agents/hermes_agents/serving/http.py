"""HTTP/1.1 over the connections of a slot. Clients are not trusted, so sizes and times are limited everywhere."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from hermes_core import Connection

if TYPE_CHECKING:
    import h11

_HEAD_BYTES = 64 << 10
_LINGER_S = 2.0
"""Seconds for which a refused client may go on sending. If the connection were closed at once, the client could notice
this before it reads the refusal."""
_MOST_PIECES = 20_000
"""Maximum number of pieces in which a body may arrive, because even a small piece takes time."""
_AT_A_TIME = 256
"""Number of pieces after which the event loop's other tasks get a turn."""
_DECODERS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""The accepted encodings of a body, each with zlib's argument `wbits`."""


@dataclass(frozen=True)
class HttpLimits:
    """The limits for one connection."""

    body_bytes: int = 16 << 20
    """Maximum size of a request's body in bytes, before and after it is decompressed."""
    request_s: float = 120.0
    """Seconds from a request's first byte to its last."""
    idle_s: float = 900.0
    """Seconds for which a connection may wait for its next request."""
    write_s: float = 120.0
    """Seconds for which a client may leave a piece of its answer unread."""


class UnreadableRequest(Exception):
    """A request can't be read. Nothing more is read from its connection."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(eq=False)
class Room:
    """A limit on the bytes of request bodies that are held at the same time by all connections that share it."""

    limit: int
    held: int = 0

    @contextmanager
    def part(self) -> Iterator[Take]:
        """Yield a function that reserves room for a number of bytes until the end of the block. The function raises
        `UnreadableRequest` if there is too little room."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self.held + size > self.limit:
                raise UnreadableRequest(413, "too much is being sent at once")
            self.held += size
            taken += size

        try:
            yield take
        finally:
            self.held -= taken


Take = Callable[[int], None]


@dataclass(eq=False)
class ConnectionPace:
    """Lets a number of callers pass at once, and the others at a fixed rate."""

    at_once: int
    a_second: float
    _due: float = 0.0
    """The time at which the last caller would have passed at the fixed rate."""

    async def turn(self) -> None:
        """Wait until it is the caller's turn."""
        now = asyncio.get_running_loop().time()
        self._due = max(self._due, now - self.at_once / self.a_second) + 1 / self.a_second
        if self._due > now:
            await asyncio.sleep(self._due - now)


Handle = Callable[["Exchange"], Awaitable[None]]
"""Answers one request. It may raise `UnreadableRequest` and `ConnectionError`."""


@dataclass(eq=False)
class Exchange:
    """One request, and the way to answer it."""

    method: str
    path: str
    """The path of the request's URL, without the query."""
    query: str
    headers: Mapping[str, str]
    """The headers by their names in lower case. Of several headers with the same name, this is the last."""
    _wire: _Wire = field(repr=False)
    begun: bool = False
    """Whether the answer has begun, so that its status can't change any more."""

    @asynccontextmanager
    async def body(self, room: Room) -> AsyncIterator[bytes]:
        """Yield the decompressed body.

        Args:
            room: the limit in which the body's bytes are reserved during the block.

        Raises:
            UnreadableRequest: the body is too long, arrives too slowly, or has an unknown encoding.
        """
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity" and encoding not in _DECODERS:
            raise UnreadableRequest(415, f"the encoding {encoding[:40]!r} is not known; send the body as it is")
        with room.part() as take:
            body = await self._wire.body(self.headers, take)
            if encoding != "identity":
                take(self._wire.limits.body_bytes)
                body = await asyncio.to_thread(_decompress, body, encoding, self._wire.limits.body_bytes)
            yield body

    async def answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Send a whole answer."""
        self.begun = True
        await self._wire.begin(status, {**headers, "content-length": str(len(body))})
        if self.method != "HEAD":
            await self._wire.send(body)
        await self._wire.end()

    async def begin(self, headers: Mapping[str, str]) -> None:
        """Begin an answer that is sent in pieces."""
        self.begun = True
        await self._wire.begin(200, headers)

    async def send(self, piece: bytes) -> None:
        """Send a piece of the answer."""
        await self._wire.send(piece)

    async def end(self) -> None:
        """End an answer that was sent in pieces."""
        await self._wire.end()


async def serve_http(connection: Connection, handle: Handle, limits: HttpLimits) -> None:
    """Serve one connection to its end, one request after the other.

    Raises:
        ConnectionError: an answer that has begun can't be completed.
    """
    wire = _Wire(connection, limits)
    with suppress(ConnectionError, TimeoutError):
        while (exchange := await wire.next_request()) is not None:
            try:
                await handle(exchange)
            except UnreadableRequest as refused:
                if not exchange.begun:
                    await exchange.answer(refused.status, refused.message.encode(), {"connection": "close"})
            if not await wire.next_cycle():
                break
        await connection.finish()
        await wire.linger()
        return
    raise ConnectionResetError("the client is gone, or does not read")


class _Wire:
    """A connection whose bytes are read and written as events of `h11`."""

    def __init__(self, connection: Connection, limits: HttpLimits) -> None:
        import h11

        self.limits = limits
        self._connection = connection
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)
        self._due: float | None = None
        """When the current request has to be complete; None between requests."""

    async def next_request(self) -> Exchange | None:
        """Return the next request; None at the end of the connection."""
        import h11

        self._due = None
        try:
            event = await self._event()
            if isinstance(event, h11.Request) and not _has_body(event):
                await self._event()  # the request's end, which costs nothing to read
        except h11.RemoteProtocolError as error:
            await self._refuse(error.error_status_hint, str(error))
            return None
        except TimeoutError:
            if self._due is not None:
                await self._refuse(408, "the request did not come in time")
            return None
        if not isinstance(event, h11.Request):
            return None
        if event.method == b"CONNECT":
            await self._refuse(405, "this is no proxy")
            return None
        path, _, query = event.target.decode("latin-1").partition("?")
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in event.headers}
        return Exchange(event.method.decode("latin-1"), unquote(path), query, headers, self)

    async def body(self, headers: Mapping[str, str], take: Take) -> bytes:
        """Return the body of the request whose head was read."""
        import h11

        if self._h11.their_state is not h11.SEND_BODY:
            return b""
        limit = self.limits.body_bytes
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 19 or int(length) > limit:
            raise UnreadableRequest(413, f"the body is longer than {limit} bytes")
        body, pieces = bytearray(), 0
        try:
            if self._h11.they_are_waiting_for_100_continue:
                await self._write(self._h11.send(h11.InformationalResponse(status_code=100, headers=[])))
            while not isinstance(event := await self._event(), h11.EndOfMessage):
                if not isinstance(event, h11.Data):
                    raise UnreadableRequest(400, "the request ended before its body")
                if len(body) + len(event.data) > limit:
                    raise UnreadableRequest(413, f"the body is longer than {limit} bytes")
                pieces += 1
                if pieces > _MOST_PIECES:
                    raise UnreadableRequest(413, f"the body comes in more than {_MOST_PIECES} pieces")
                if not pieces % _AT_A_TIME:
                    await asyncio.sleep(0)
                take(len(event.data))
                body += event.data
        except h11.RemoteProtocolError as error:
            raise UnreadableRequest(400, str(error)) from error
        except TimeoutError as error:
            raise UnreadableRequest(408, "the request did not come in time") from error
        return bytes(body)

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the head of an answer. If the request was not read to its end, the connection ends after the answer."""
        import h11

        last = {} if self._h11.their_state is h11.DONE else {"connection": "close"}
        sent = [(name.encode("ascii"), value.encode("ascii", "replace")) for name, value in {**headers, **last}.items()]
        await self._write(self._h11.send(h11.Response(status_code=status, headers=sent)))

    async def send(self, data: bytes) -> None:
        """Send a part of an answer's body."""
        import h11

        if data:
            await self._write(self._h11.send(h11.Data(data=data)))

    async def end(self) -> None:
        """End the answer."""
        import h11

        await self._write(self._h11.send(h11.EndOfMessage()))

    async def next_cycle(self) -> bool:
        """Get ready for the next request. Return whether the connection may have another one."""
        import h11

        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        return True

    async def linger(self) -> None:
        """Drop what the client still sends, for a short time."""
        import h11

        if self._h11.their_state in (h11.SEND_BODY, h11.MUST_CLOSE, h11.ERROR):
            with suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(_LINGER_S):
                    while await self._connection.read():
                        pass

    async def _event(self) -> Any:
        """Return the next event of the client.

        Raises:
            TimeoutError: no event came in time.
            h11.RemoteProtocolError: the client does not speak HTTP.
        """
        import h11

        clock = asyncio.get_running_loop().time
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            if self._due is None and self._h11.trailing_data[0]:
                self._due = clock() + self.limits.request_s
            async with asyncio.timeout_at(clock() + self.limits.idle_s if self._due is None else self._due):
                data = await self._connection.read()
            if self._due is None:
                self._due = clock() + self.limits.request_s
            self._h11.receive_data(data)
        if self._due is None:  # its first bytes came together with the previous request
            self._due = clock() + self.limits.request_s
        return event

    async def _refuse(self, status: int, message: str) -> None:
        """Answer bytes that are no valid request with an error, if an answer can still be sent."""
        import h11

        if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = message.encode()
            await self.begin(status, {"content-length": str(len(body)), "connection": "close"})
            await self.send(body)
            await self.end()

    async def _write(self, data: bytes | None) -> None:
        if data:
            async with asyncio.timeout(self.limits.write_s):
                await self._connection.write(data)


def _has_body(request: h11.Request) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
        for name, value in request.headers
    )


def _decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Return a decompressed body. At most `limit` bytes are decompressed."""
    decoder = zlib.decompressobj(_DECODERS[encoding])
    try:
        plain = decoder.decompress(body, limit + 1)
    except zlib.error as error:
        raise UnreadableRequest(400, f"the body is not {encoding}: {error}") from error
    if len(plain) > limit:
        raise UnreadableRequest(413, f"the body is longer than {limit} bytes")
    return plain
