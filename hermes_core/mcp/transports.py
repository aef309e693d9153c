"""Transports to MCP servers, in the form that the `mcp` package takes: over a program's streams, and over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from hermes_core.aio import alongside
from hermes_core.mcp.messages import MAX_MESSAGE, MessageInbox
from hermes_core.mcp.processes import ServerProcess, running
from hermes_core.mcp.servers import McpServer
from hermes_core.sandbox.commands import SlotCommands
from hermes_core.sandbox.programs import ENDING_S, Flooded, ProgramEnded

Messages = MemoryObjectReceiveStream[SessionMessage | Exception]
Streams = tuple[Messages, MemoryObjectSendStream[SessionMessage]]

_CONNECT_S = 30.0
_READ_S = 3600.0
"""Maximum seconds of silence in an open HTTP response. Each call also has a time limit of its own."""


class ProgramTransport:
    """The transport to a server that is a program: one message per line.

    Args:
        commands: the commands of the slot in which the program runs; None runs it on the driver.
    """

    def __init__(self, server: McpServer, commands: SlotCommands | None) -> None:
        self._server = server
        self._commands = commands
        self._inbox = MessageInbox()
        self._program: ServerProcess | None = None
        self._flood: str | None = None
        self.ended = False
        """Whether the program will send no more messages."""

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[Streams]:
        """Run the program during the block, and yield the streams of messages to and from it.

        Raises:
            CommandError: the driver can't start the program.
        """
        async with running(self._server, self._commands) as self._program, AsyncExitStack() as stack:
            incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
            write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
            for end in (incoming, read, write, outgoing):
                stack.callback(end.close)
            receiving = await stack.enter_async_context(alongside(self._receive(self._program, incoming)))
            await stack.enter_async_context(alongside(self._send(self._program, outgoing)))
            # The output ends with the program, and then also requests end that were not answered.
            receiving.add_done_callback(lambda _: self._over(outgoing))
            yield read, write

    def _over(self, outgoing: MemoryObjectReceiveStream[SessionMessage]) -> None:
        self.ended = True
        outgoing.close()

    def expect_answer(self) -> None:
        """Note that a request is sent now."""
        self._inbox.allow()

    async def fault(self, wait_s: float = ENDING_S) -> str:
        """Return why the program gives no more answers; empty if no reason is known.

        Args:
            wait_s: seconds to wait for the end of the program.

        Raises:
            InfraError: the sandbox in which the program ran is gone.
        """
        reason = self._flood
        if reason is None and self._program is not None:
            reason = await self._program.ending(wait_s)
        if self._inbox.junk:
            reason = f"{reason or ''}; its standard output is not only MCP: {self._inbox.junk!r}".removeprefix("; ")
        return reason or ""

    async def _receive(
        self, program: ServerProcess, incoming: MemoryObjectSendStream[SessionMessage | Exception]
    ) -> None:
        with incoming:
            try:
                while data := await program.read():
                    for message in self._inbox.feed(data):
                        await incoming.send(SessionMessage(message))
            except Flooded as error:
                self._flood = str(error)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return  # the session is over

    async def _send(self, program: ServerProcess, outgoing: MemoryObjectReceiveStream[SessionMessage]) -> None:
        with outgoing:
            try:
                async for each in outgoing:
                    text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                    await program.write(text.encode() + b"\n")
            except (ProgramEnded, anyio.ClosedResourceError):
                return


class HttpTransport:
    """The transport to a server at a URL."""

    ended = False
    """Always False, because only a program ends."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._refusal = ""

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[Streams]:
        """Connect to the server during the block, and yield the streams of messages to and from it."""
        server = self._server
        assert server.url is not None
        async with AsyncExitStack() as stack:
            way: AbstractAsyncContextManager[Streams]
            if server.transport == "sse":
                way = sse_client(
                    server.url,
                    headers=dict(server.headers),
                    timeout=_CONNECT_S,
                    sse_read_timeout=_READ_S,
                    httpx_client_factory=self._client,
                )
            else:
                client = await stack.enter_async_context(self._client(server.headers))
                way = streamable_http_client(server.url, http_client=client, max_sse_event_size=MAX_MESSAGE)
            yield await stack.enter_async_context(way)

    def expect_answer(self) -> None:
        """Note that a request is sent now."""

    async def fault(self, wait_s: float = 0) -> str:
        """Return the HTTP status of the last answer, if it was a refusal; else an empty text."""
        return self._refusal

    def _client(
        self,
        headers: Mapping[str, str] | None = None,
        timeout: httpx2.Timeout | None = None,
        auth: httpx2.Auth | None = None,
    ) -> httpx2.AsyncClient:
        """Return an HTTP client that reads no more bytes of an answer than a message may have."""
        return httpx2.AsyncClient(
            headers=dict(headers or {}) | {"accept-encoding": "identity"},
            timeout=timeout or httpx2.Timeout(_CONNECT_S, read=_READ_S),
            auth=auth,
            event_hooks={"response": [self._note, _bound_body]},
        )

    async def _note(self, response: httpx2.Response) -> None:
        refused = response.status_code >= 400 and response.request.method == "POST"
        self._refusal = f"HTTP status {response.status_code}" if refused else ""


def transport_to(server: McpServer, commands: SlotCommands | None) -> ProgramTransport | HttpTransport:
    """Return the transport to a server.

    Args:
        commands: the slot's commands, for a program that runs in the slot.
    """
    if server.url is not None:
        return HttpTransport(server)
    return ProgramTransport(server, None if server.on_driver else commands)


async def _bound_body(response: httpx2.Response) -> None:
    """Limit the size of an answer, unless it is a stream of events, because the `mcp` package limits each event itself.

    Raises:
        DecodingError: the answer is compressed, so its size can't be known.
    """
    if response.headers.get("content-encoding", "identity") != "identity":
        raise httpx2.DecodingError("the server compresses its answers, although it was asked not to")
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedBody(response.stream)


class _BoundedBody(httpx2.AsyncByteStream):
    """A body of bounded size."""

    def __init__(self, body: httpx2.AsyncByteStream) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for piece in self._body:
            size += len(piece)
            if size > MAX_MESSAGE:
                raise httpx2.DecodingError(f"an answer of more than {MAX_MESSAGE} bytes")
            yield piece

    async def aclose(self) -> None:
        """Close the body."""
        await self._body.aclose()
