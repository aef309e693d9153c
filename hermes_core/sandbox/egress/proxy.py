"""The proxy for the programs of one slot: serves CONNECT and plain HTTP on the driver, as far as the rules permit."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

import h11

from hermes_core.aio import together
from hermes_core.sandbox.commands import Connection
from hermes_core.sandbox.egress.addresses import Address, is_own
from hermes_core.sandbox.egress.hosts import Destination, HostRules
from hermes_core.sandbox.egress.tls import HANDSHAKE, MAX_HELLO, Incomplete, find_server_name
from hermes_core.sandbox.egress.traffic import PhaseTraffic
from hermes_core.workers import Workers

log = logging.getLogger(__name__)

MAX_HEAD = 64 << 10
"""Maximum number of bytes of the head of a request or an answer."""

PIECE = 64 << 10

_HOP_BY_HOP = frozenset(
    {b"connection", b"proxy-connection", b"proxy-authorization", b"proxy-authenticate", b"keep-alive", b"te"}
    | {b"trailer", b"upgrade", b"expect", b"host"}
)
"""Headers that are not passed on. `host` is made from the URL, so that both name the same host."""

_RESOLVERS = Workers(16)
"""Threads that look up names. They are apart from the loop's own threads, because a slow name holds one for long."""

Resolve = Callable[[str, int], Awaitable[Iterable[Address]]]


async def resolve_name(name: str, port: int) -> list[Address]:
    """Return the addresses of a name, as the driver's system resolves it. Raises OSError if it has none."""
    found = await asyncio.get_running_loop().run_in_executor(
        _RESOLVERS, lambda: socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    )
    return [ip_address(str(where[0]).partition("%")[0]) for *_, where in found]


@dataclass(frozen=True)
class Bounds:
    """What the programs of one slot may use of the driver."""

    connections: int = 64
    """Maximum number of open connections."""
    connect_s: float = 30.0
    """Seconds for looking up a name and connecting to a server."""
    request_s: float = 60.0
    """Seconds until the head of a request has arrived."""
    idle_s: float = 300.0
    """Seconds without a byte in either direction after which a connection is closed."""
    bytes_in_all: int = 64 << 30
    """Maximum number of bytes that a phase sends and receives."""


class Refused(Exception):
    """A request is answered with an error.

    Attributes:
        status: the status code of the answer.
        reason: a sentence for people.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class EgressProxy:
    """Serves the connections of one slot's programs to its proxy.

    Names are looked up here, and connections go to the addresses that were judged, so a name can't lead elsewhere
    between the two. TLS is passed on as it is; only the name of its server is read.

    Args:
        rules: what may be reached. All rules must permit it.
        traffic: counts what is reached and refused.
        resolve: looks up the addresses of a name.
    """

    def __init__(
        self,
        rules: Sequence[HostRules],
        traffic: PhaseTraffic,
        bounds: Bounds = Bounds(),
        *,
        resolve: Resolve = resolve_name,
    ) -> None:
        self.bounds = bounds
        self._rules = rules
        self._traffic = traffic
        self._resolve = resolve

    async def serve(self, connection: Connection) -> None:
        """Serve one connection of a program, with one request after the other."""
        client = _Client(connection)
        try:
            while (request := await self._next_request(client)) is not None:
                try:
                    await self._answer(client, request)
                except Refused as refusal:
                    await client.refuse(refusal)
                if not client.begin_next():
                    return
        except h11.RemoteProtocolError as error:
            with suppress(h11.LocalProtocolError):
                await client.refuse(Refused(400, f"this is no request to a proxy: {error}"))

    async def _next_request(self, client: _Client) -> h11.Request | None:
        try:
            async with asyncio.timeout(self.bounds.request_s):
                event = await client.next_event()
        except TimeoutError:
            return None
        return event if isinstance(event, h11.Request) else None

    async def _answer(self, client: _Client, request: h11.Request) -> None:
        target = request.target.decode("ascii", "backslashreplace")
        if request.method == b"CONNECT":
            async with self._connect(_parse_authority(target)) as (wanted, upstream):
                await client.send(h11.Response(status_code=200, headers=[], reason=b"Connected"))
                await self._tunnel(client, wanted, upstream)
            return
        try:
            url = urlsplit(target)
            if url.scheme != "http" or not url.hostname:
                raise ValueError("a proxy takes http:// URLs and CONNECT, and this is neither")
            wanted = Destination.parse(url.hostname, 80 if url.port is None else url.port)
        except ValueError as error:
            raise Refused(400, str(error)) from error
        async with self._connect(wanted) as (_, upstream):
            path = (url.path or "/") + (f"?{url.query}" if url.query else "")
            await self._exchange(client, request, path, url.netloc.rpartition("@")[2], upstream)

    @asynccontextmanager
    async def _connect(self, wanted: Destination) -> AsyncIterator[tuple[Destination, _Upstream]]:
        """Connect to a destination, if the rules permit that.

        Raises:
            Refused: they don't, or the server can't be reached.
        """
        if (reason := _first(rules.explain_refusal(wanted) for rules in self._rules)) is not None:
            self._traffic.count_refused(wanted)
            raise Refused(403, reason)
        try:
            async with asyncio.timeout(self.bounds.connect_s):
                reader, writer = await self._open(wanted)
        except TimeoutError as error:
            self._traffic.failed += 1
            raise Refused(504, f"{wanted} does not answer within {self.bounds.connect_s:g} s") from error
        except OSError as error:
            self._traffic.failed += 1
            raise Refused(502, f"{wanted} can't be reached: {error.strerror or error}") from error
        self._traffic.count_reached(wanted)
        try:
            yield wanted, _Upstream(reader, writer, self._traffic, self.bounds)
        finally:
            writer.transport.abort()

    async def _open(self, wanted: Destination) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection to the first address that is permitted and answers."""
        addresses = [wanted.address] if wanted.address else await self._resolve(wanted.host, wanted.port)
        refusal, failure = None, OSError("it has no address")
        for address in dict.fromkeys(addresses):
            own = is_own(address)
            reason = _first(rules.explain_address_refusal(wanted, address, own=own) for rules in self._rules)
            if reason is not None:
                refusal = refusal or reason
                continue
            try:
                return await asyncio.open_connection(str(address), wanted.port, limit=4 * PIECE)
            except OSError as error:
                failure = error
        if refusal is not None:
            self._traffic.count_refused(wanted)
            raise Refused(403, refusal)
        raise failure

    async def _tunnel(self, client: _Client, wanted: Destination, upstream: _Upstream) -> None:
        """Carry bytes in both directions until both have ended, or until nothing moves for too long."""
        async with upstream.idle_limit(), together() as tasks:
            tasks.create_task(self._carry_up(client, wanted, upstream))
            tasks.create_task(_carry_down(client.connection, upstream))

    async def _carry_up(self, client: _Client, wanted: Destination, upstream: _Upstream) -> None:
        data = client.rest() or await client.connection.read(PIECE)
        if data[:1] == bytes([HANDSHAKE]):
            data = await self._check_server_name(data, client.connection, wanted)
        while data:
            await upstream.write(data)
            data = await client.connection.read(PIECE)
        await upstream.finish()

    async def _check_server_name(self, data: bytes, connection: Connection, wanted: Destination) -> bytes:
        """Return everything that the client has sent, once it is known which server it asks for.

        Raises:
            ConnectionAbortedError: it may not ask for this server.
        """
        while True:
            try:
                name = find_server_name(data)
                break
            except Incomplete:
                more = await connection.read(PIECE)
                if not more or len(data) > 2 * MAX_HELLO:
                    raise ConnectionAbortedError("the first TLS message is not complete") from None
                data += more
            except ValueError as error:
                raise ConnectionAbortedError(str(error)) from error
        if name is None:
            return data
        reason = _first(rules.explain_server_name_refusal(wanted, name) for rules in self._rules)
        if reason is not None:
            self._traffic.count_refused(f"{name} behind {wanted}")
            raise ConnectionAbortedError(reason)
        return data

    async def _exchange(self, client: _Client, request: h11.Request, path: str, host: str, upstream: _Upstream) -> None:
        """Pass on one request, and its answer."""
        server = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        named = {
            each.strip().lower()
            for name, value in request.headers
            if name == b"connection"
            for each in value.split(b",")
        } | _HOP_BY_HOP
        headers = [(name, value) for name, value in request.headers if name not in named]
        headers += [(b"host", host.encode("ascii", "replace")), (b"connection", b"close")]
        try:
            async with upstream.idle_limit():
                head = h11.Request(method=request.method, target=path.encode("ascii"), headers=headers)
                await upstream.write(server.send(head) or b"")
                await client.ask_for_body()
                while not isinstance(event := await client.next_event(), h11.EndOfMessage):
                    assert isinstance(event, h11.Data)
                    await upstream.write(server.send(event) or b"")
                await upstream.write(server.send(h11.EndOfMessage()) or b"")
                await _pass_answer(server, client, upstream)
        except (OSError, h11.ProtocolError) as error:
            if client.answered:
                raise ConnectionAbortedError(f"the server broke off: {error}") from error
            raise Refused(502, f"the server gave no whole answer: {error}") from error


async def _pass_answer(server: h11.Connection, client: _Client, upstream: _Upstream) -> None:
    while True:
        event = server.next_event()
        if event is h11.NEED_DATA:
            server.receive_data(await upstream.read())
        elif isinstance(event, h11.Response):
            headers = [(name, value) for name, value in event.headers if name not in _HOP_BY_HOP]
            await client.send(h11.Response(status_code=event.status_code, headers=headers, reason=event.reason))
        elif isinstance(event, h11.Data):
            await client.send(event)
        elif isinstance(event, h11.EndOfMessage):
            await client.send(h11.EndOfMessage())
            return
        elif not isinstance(event, h11.InformationalResponse):
            raise ConnectionAbortedError("the server's answer is not complete")


async def _carry_down(connection: Connection, upstream: _Upstream) -> None:
    while data := await upstream.read():
        await connection.write(data)
    await connection.finish()


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _parse_authority(target: str) -> Destination:
    """Return the destination of a CONNECT request.

    Raises:
        Refused: it is none.
    """
    host, _, port = target.rpartition(":")
    try:
        if not port.isdecimal() or len(port) > 5:
            raise ValueError("CONNECT takes HOST:PORT")
        return Destination.parse(host, int(port))
    except ValueError as error:
        raise Refused(400, str(error)) from error


class _Client:
    """The program's end: its requests, and the answers to it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self._asks_for_head = False
        """Whether the answer to the present request has no body."""

    @property
    def answered(self) -> bool:
        """Return whether the answer to the present request has begun."""
        return self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE)

    def rest(self) -> bytes:
        """Return what was received after a CONNECT request."""
        data, _ = self._http.trailing_data
        return bytes(data)

    async def next_event(self) -> h11.Event:
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Request):
                self._asks_for_head = event.method == b"HEAD"
            if isinstance(event, h11.Event):
                return event
            if event is h11.PAUSED:  # there is more than what was asked for
                raise ConnectionAbortedError("the program does not wait for its answer")
            self._http.receive_data(await self.connection.read(PIECE))

    async def ask_for_body(self) -> None:
        """Tell the program to send the body of its request, if it waits for that."""
        if self._http.they_are_waiting_for_100_continue:
            await self.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))

    async def send(self, event: h11.Event) -> None:
        if data := self._http.send(event):
            await self.connection.write(data)

    async def refuse(self, refusal: Refused) -> None:
        """Answer a request with an error and close the connection, because the rest of the request may come yet."""
        body = f"hermes-rl: {refusal.reason}\n".encode()
        headers = [("content-type", "text/plain"), ("content-length", str(len(body))), ("connection", "close")]
        line = refusal.reason.encode("ascii", "replace")[:200]  # many programs show only this
        await self.send(h11.Response(status_code=refusal.status, headers=headers, reason=line))
        if not self._asks_for_head:
            await self.send(h11.Data(data=body))
        await self.send(h11.EndOfMessage())

    def begin_next(self) -> bool:
        """Make ready for the next request. Return False if there can be none."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            return True
        return False


class _Upstream:
    """The connection to a server. It counts bytes, and closes the connection when nothing moves for too long."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, traffic: PhaseTraffic, bounds: Bounds
    ) -> None:
        self._reader, self._writer, self._traffic, self._bounds = reader, writer, traffic, bounds
        self._idle: asyncio.Timeout | None = None

    @asynccontextmanager
    async def idle_limit(self) -> AsyncIterator[None]:
        """Raise ConnectionAbortedError if nothing was read or written for too long during the block."""
        try:
            async with asyncio.timeout(self._bounds.idle_s) as self._idle:
                yield
        except TimeoutError as error:
            raise ConnectionAbortedError(f"nothing moved for {self._bounds.idle_s:g} s") from error

    async def read(self) -> bytes:
        """Return 1 byte or more from the server; empty at the end."""
        data = await self._reader.read(PIECE)
        self._traffic.bytes_received += len(data)
        self._note_move()
        return data

    async def write(self, data: bytes) -> None:
        self._traffic.bytes_sent += len(data)
        self._writer.write(data)
        await self._writer.drain()
        self._note_move()

    async def finish(self) -> None:
        """Send the end of our data."""
        if self._writer.can_write_eof():
            self._writer.write_eof()

    def _note_move(self) -> None:
        if self._traffic.bytes_sent + self._traffic.bytes_received > self._bounds.bytes_in_all:
            raise ConnectionAbortedError(f"the slot has moved more than {self._bounds.bytes_in_all} bytes")
        if self._idle is not None and not self._idle.expired():
            self._idle.reschedule(asyncio.get_running_loop().time() + self._bounds.idle_s)
