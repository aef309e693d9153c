"""Opens the MCP servers of a rollout, and checks the MCP servers of a run before the run begins."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from hermes_core.aio import together
from hermes_core.errors import ConfigError, HermesError, InfraError, SetupFailed
from hermes_core.mcp.servers import McpServer
from hermes_core.sandbox.commands import SlotCommands
from hermes_core.tools.base import Tool


async def _nothing() -> None:
    """Do nothing."""


def check_installed() -> None:
    """Check that MCP servers can be used at all.

    Raises:
        ConfigError: the package `mcp` is missing.
    """
    if importlib.util.find_spec("mcp") is None or importlib.util.find_spec("mcp_types") is None:
        raise ConfigError("MCP servers need the package mcp", hint="pip install 'hermes-rl[mcp]'")


async def check_servers(servers: Mapping[str, McpServer]) -> None:
    """Connect to the servers that the driver runs or reaches, list their tools, and close them again.

    Raises:
        ConfigError: a server can't be used. The error names it.
    """
    if servers:
        check_installed()
    try:
        async with open_servers({name: server for name, server in servers.items() if server.on_driver}, None):
            pass
    except InfraError as error:
        raise ConfigError(error.message, hint=error.hint) from error


@dataclass(frozen=True)
class OpenServers:
    """Servers that are connected, with their tools."""

    by_server: Mapping[str, Mapping[str, Tool]] = field(default_factory=dict)
    """The tools of each server, by the server's own names for them."""
    reopen: Callable[[], Awaitable[None]] = _nothing
    """Connect again to servers whose program has ended. Raises `InfraError` if the sandbox is gone."""

    @property
    def tools(self) -> list[Tool]:
        """Return the tools of all servers."""
        return [tool for tools in self.by_server.values() for tool in tools.values()]


@asynccontextmanager
async def open_servers(
    servers: Mapping[str, McpServer], commands: SlotCommands | None, *, of_item: Collection[str] = ()
) -> AsyncIterator[OpenServers]:
    """Connect to servers, all at the same time, and close them at the end of the block.

    Args:
        commands: the slot's commands, for servers that run in the slot.
        of_item: the names of the item's own servers; the others are the run's.

    Raises:
        SetupFailed: a server of the item can't be used.
        InfraError: a server of the run can't be used, which is no fault of the item; or the sandbox is gone.
    """
    if not servers:
        yield OpenServers()
        return
    check_installed()
    await asyncio.to_thread(importlib.import_module, "hermes_core.mcp.tools")  # the package takes a second to import
    from hermes_core.mcp.connection import McpConnection, ServerFailed
    from hermes_core.mcp.tools import tools_of

    connections = [McpConnection(name, server, commands) for name, server in servers.items()]

    async def open_one(connection: McpConnection) -> dict[str, Tool]:
        try:
            await connection.open()
            return tools_of(connection)
        except ServerFailed as error:
            kind: type[HermesError] = SetupFailed if connection.name in of_item else InfraError
            raise kind(error.message, hint=error.hint) from error

    async def reopen() -> None:
        for connection in connections:
            await connection.reopen()

    try:
        async with together() as group:
            opening = [group.create_task(open_one(connection)) for connection in connections]
        yield OpenServers({name: task.result() for name, task in zip(servers, opening, strict=True)}, reopen)
    finally:
        async with asyncio.TaskGroup() as group:
            for connection in connections:
                group.create_task(connection.aclose())
