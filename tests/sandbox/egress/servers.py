"""Servers on the driver's loopback, which a test's rules allow or not, and a proxy without a slot."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from hermes_core.sandbox.egress.proxy import EgressProxy

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handle: Handler, tls: ssl.SSLContext | None = None, *, host: str = "127.0.0.1") -> AsyncIterator[int]:
    """Serve connections on a port of the loopback, which is yielded."""

    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # cancelled at the test's end: asyncio would print this
        finally:
            writer.close()

    async with await asyncio.start_server(closing, host, 0, ssl=tls) as server:
        yield server.sockets[0].getsockname()[1]


async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each HTTP request with its first line and its body."""
    while head := await reader.readuntil(b"\r\n\r\n"):
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        body = head.split(b"\r\n")[0] + b"\n" + await reader.readexactly(length)
        writer.write(b"HTTP/1.1 200 OK\r\nX-Seen: yes\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()


class Piped:
    """A `Connection` over a pair of streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, n: int = 65536) -> bytes:
        return await self._reader.read(n)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def finish(self) -> None:
        self._writer.write_eof()


@asynccontextmanager
async def listening(proxy: EgressProxy, errors: list[BaseException] | None = None) -> AsyncIterator[int]:
    """Let a proxy listen on the driver's loopback, as it does in a slot."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await proxy.serve(Piped(reader, writer))
        except ConnectionError as error:
            writer.transport.abort()
            if errors is not None:
                errors.append(error)

    async with serving(handle) as port:
        yield port
