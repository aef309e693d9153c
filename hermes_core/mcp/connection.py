"""One open connection to an MCP server: opened, asked for its tools, called and closed, by one owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    Implementation,
    ListToolsRequest,
    ListToolsResult,
    PaginatedRequestParams,
    Tool,
)
from pydantic import ValidationError

from hermes_core.aio import TaskSet, cancel
from hermes_core.errors import CommandError, HermesError, ToolArgumentError, describe
from hermes_core.mcp.messages import MAX_LISTED
from hermes_core.mcp.servers import McpServer
from hermes_core.mcp.transports import transport_to
from hermes_core.sandbox.commands import SlotCommands
from hermes_core.version import __version__

log = logging.getLogger(__name__)

MAX_PAGES = 100
"""Maximum number of pages of a server's list of tools."""

CLOSE_S = 15.0
"""Seconds after which a connection that does not close is cut."""

SIGN_S = 2.0
"""Seconds that a server may take to answer a ping."""

_MESSAGE_CHARS = 2000

_HINTS = {
    True: "check its `command` and `args`, and that the program is installed on the driver's host",
    False: "check its `command` and `args`, and that the slot has the program and its packages: those of the image, or "
    "on `local` what the profile names in `visible_paths`; `where: driver` runs it on this host",
}
"""Hints about a program that ends too early: for True, it runs on the driver; for False, in the slot."""


class ServerFailed(HermesError):
    """An MCP server can't be used, for the reason in the message. The caller decides whose fault this is."""


class McpConnection:
    """A connection to one server. After `open`, call `aclose` in any case.

    The `mcp` package requires that the task that opened its parts also closes them, so one task does both.

    Args:
        commands: the slot's commands, for a server that runs in the slot.
    """

    def __init__(self, name: str, server: McpServer, commands: SlotCommands | None) -> None:
        self.name = name
        self.server = server
        self.listed: list[Tool] = []
        """The server's tools, once the connection is open."""
        self._commands = commands
        self._tasks = TaskSet()
        self._serving: asyncio.Task[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self._transport = transport_to(self.server, self._commands)
        self._opened = asyncio.Event()
        self._closing = asyncio.Event()
        self._session: ClientSession | None = None
        self._failure: Exception | None = None

    async def open(self) -> None:
        """Connect, and list the tools.

        Raises:
            ServerFailed: the server can't be used.
            InfraError: the sandbox in which the server runs is gone.
        """
        self._serving = self._tasks.spawn(self._serve(), f"MCP server {self.name}")
        try:
            async with asyncio.timeout(self.server.startup_timeout_s):
                await self._opened.wait()
        except TimeoutError as error:
            fault = await self._transport.fault(wait_s=0)
            raise ServerFailed(
                f"{self} was not ready within {self.server.startup_timeout_s:g} s" + (f": {fault}" if fault else ""),
                hint="look at what it waits for, or raise its startup_timeout_s",
            ) from error
        if self._failure is not None:
            raise await self._explain(self._failure) from self._failure

    async def reopen(self) -> None:
        """Connect again if the server's program has ended. The program's state is lost; the list of tools stays.

        Raises:
            InfraError: the sandbox in which the server runs is gone.
        """
        if not await self._has_ended():
            return
        await self._close()
        self._begin()
        try:
            await self.open()
        except ServerFailed as error:  # an agent may have caused this, so it is no failure of the setup
            log.warning("%s was not started again: %s", self, error.message)

    async def _has_ended(self) -> bool:
        """Return whether the server's program has ended. The server is pinged, because the message about its end may
        still be on its way."""
        if self._transport.ended or self._session is None or self.server.url is not None:
            return self._transport.ended
        self._transport.expect_answer()
        try:
            async with asyncio.timeout(SIGN_S):
                await self._session.send_ping()
        except MCPError as error:
            return bool(error.code == CONNECTION_CLOSED)
        except (TimeoutError, ValidationError):  # the server may be faulty, but its program runs
            pass
        return False

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Call a tool by the server's own name for it.

        Raises:
            ToolArgumentError: the server does not accept these arguments.
            CommandError: the server failed, or is gone.
            InfraError: the sandbox in which the server ran is gone.
        """
        if self._session is None or self._failure is not None:
            raise await self._gone()
        self._transport.expect_answer()
        request = CallToolRequest(params=CallToolRequestParams(name=tool, arguments=dict(arguments)))
        try:
            # `session.call_tool` would also check the answer by a schema of the server, which may take for ever.
            return await self._session.send_request(request, CallToolResult)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise await self._gone(error.message) from error
            if error.code == INVALID_PARAMS:
                raise ToolArgumentError(error.message[:_MESSAGE_CHARS]) from error
            refusal = await self._transport.fault() if self.server.url else ""
            raise CommandError(": ".join(filter(None, [error.message[:_MESSAGE_CHARS], refusal]))) from error
        except ValidationError as error:
            raise CommandError(f"{self} gave an answer that is not a tool's result: {_problem(error)}") from error

    async def aclose(self) -> None:
        """Close the connection, and end the server's program if one was started. Idempotent."""
        try:
            await self._close()
        finally:
            await self._tasks.aclose()

    async def _close(self) -> None:
        self._closing.set()
        if self._serving is None:
            return
        if self._session is not None:
            await asyncio.wait([self._serving], timeout=CLOSE_S)
        await cancel([self._serving])
        await asyncio.wait([self._serving])

    def __str__(self) -> str:
        return f"MCP server {self.name!r}"

    async def _serve(self) -> None:
        try:
            async with self._transport.streams() as (read, write):
                client = Implementation(name="hermes-rl", version=__version__)
                async with ClientSession(read, write, client_info=client) as session:
                    await session.initialize()
                    self.listed = await self._list(session)
                    self._session = session
                    self._opened.set()
                    await self._closing.wait()
        except Exception as error:
            self._failure = error
            log.debug("%s: the connection failed", self, exc_info=error)
        finally:
            self._opened.set()

    async def _list(self, session: ClientSession) -> list[Tool]:
        if session.server_capabilities is None or session.server_capabilities.tools is None:
            raise ServerFailed(f"{self} has no tools", hint="leave it out")
        found: list[Tool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            self._transport.expect_answer()
            params = None if cursor is None else PaginatedRequestParams(cursor=cursor)
            page = await session.send_request(ListToolsRequest(params=params), ListToolsResult)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found
            if len(found) > MAX_LISTED:
                break
        raise ServerFailed(f"{self} lists tools without an end", hint="leave it out")

    async def _explain(self, error: Exception) -> HermesError:
        """Return the error for a connection that could not be opened."""
        while isinstance(error, ExceptionGroup):  # of the task groups inside the `mcp` package
            error = error.exceptions[0]
        if isinstance(error, ServerFailed):
            return error
        closed = isinstance(error, MCPError) and error.code == CONNECTION_CLOSED
        if isinstance(error, CommandError):
            reason, hint = error.message, _HINTS[True]
        elif closed and (reason := await self._transport.fault()):
            hint = _HINTS[self.server.on_driver]
        elif isinstance(error, ValidationError):
            reason, hint = f"its answer is not MCP: {_problem(error)}", "report this to its author, or leave it out"
        else:
            refusal = await self._transport.fault(wait_s=0)
            reason = ": ".join(
                filter(None, [error.message if isinstance(error, MCPError) else describe(error), refusal])
            )
            hint = "check `url` and `headers`" if self.server.url else "check that it is an MCP server"
        return ServerFailed(f"{self} can't be used: {reason}", hint=hint)

    async def _gone(self, said: str = "") -> CommandError:
        """Return the error for a call that gets no answer.

        Raises:
            InfraError: the sandbox is gone.
        """
        why = await self._transport.fault() or (describe(self._failure) if self._failure is not None else said)
        return CommandError(f"{self} gave no answer" + (f": {why[:_MESSAGE_CHARS]}" if why else ""))


def _problem(error: ValidationError) -> str:
    """Return the fault of an answer, in a few words."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}"[:300]
