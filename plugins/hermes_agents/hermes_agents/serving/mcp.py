"""MCP servers for the programs of one slot: the tools of a rollout's servers, over streamable HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import mcp_types
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError

from hermes_agents.serving.http import Exchange, Handle, Room, UnreadableRequest
from hermes_core import AgentTask, __version__, alongside

MAX_CALLS = 10_000
"""Maximum number of calls of tools in one rollout."""

QUIET_S = 10.0
"""Seconds without an answer after which a stream begins, and between two signs of life in the stream. Some clients give
up if no answer begins within a minute."""

MAX_MESSAGE = 4 << 20
"""Maximum number of bytes of a message from a program, the same as for messages from MCP servers."""

_OBJECTS = 30_000
"""Maximum number of objects and lists in a message, because parsing them blocks the event loop."""

_ROOM = 8 * MAX_MESSAGE
"""Maximum total of bytes of the messages that are being handled at the same time."""

_STREAM = {"content-type": "text/event-stream", "cache-control": "no-cache"}


@asynccontextmanager
async def mcp_routes(task: AgentTask) -> AsyncIterator[dict[str, Handle]]:
    """Serve the tools of each MCP server of a rollout during the block. Yield the handlers by their paths.

    The package `mcp` serves the tools without sessions, so that no state is kept for a client. A call runs in the same
    way as a call by the agent `model`.
    """
    calls = _Calls(task)
    managers = {
        f"/mcp/{name}": StreamableHTTPSessionManager(
            calls.server(name, tools), json_response=True, stateless=True, max_request_body_size=MAX_MESSAGE
        )
        for name, tools in task.mcp_tools.items()
    }
    ready = asyncio.Event()

    async def run() -> None:
        """Run the servers in a task of their own, because their task groups would wrap the errors of the block."""
        async with AsyncExitStack() as running:
            for manager in managers.values():
                await running.enter_async_context(manager.run())
            ready.set()
            await asyncio.Event().wait()

    async with alongside(run()):
        await ready.wait()
        room = Room(_ROOM)
        yield {path: partial(_answer, manager, room) for path, manager in managers.items()}


class _Calls:
    """Calls the tools of a task for its programs."""

    def __init__(self, task: AgentTask) -> None:
        self._task = task
        self._schemas = {schema["function"]["name"]: schema["function"] for schema in task.tool_schemas}
        self._left = MAX_CALLS

    def server(self, name: str, tools: Mapping[str, str]) -> Server[Any]:
        """Return a server that offers these tools.

        Args:
            tools: the name of each tool in the task, by its name on this server.
        """
        listed = mcp_types.ListToolsResult(
            tools=[
                mcp_types.Tool(name=own, description=schema["description"], input_schema=schema["parameters"])
                for own, schema in ((own, self._schemas[tool]) for own, tool in tools.items())
            ]
        )

        async def list_tools(ctx: Any, params: Any) -> mcp_types.ListToolsResult:
            return listed

        async def call_tool(ctx: Any, params: mcp_types.CallToolRequestParams) -> mcp_types.CallToolResult:
            if params.name not in tools:
                raise MCPError(mcp_types.INVALID_PARAMS, f"there is no tool {params.name[:64]!r}")
            return await self._call(tools[params.name], params.arguments or {})

        return Server(name, version=__version__, on_list_tools=list_tools, on_call_tool=call_tool)

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> mcp_types.CallToolResult:
        if not self._left:
            return _result(f"the rollout has had its {MAX_CALLS} calls of tools", failed=True)
        self._left -= 1
        answer = await self._task.tool_handler(tool, arguments, self._task.trajectory_id)
        said = json.loads(answer)
        return _result(str(said.get("error") or said.get("output", "")), failed=bool(said.get("error")))


def _result(text: str, *, failed: bool) -> mcp_types.CallToolResult:
    return mcp_types.CallToolResult(content=[mcp_types.TextContent(text=text)], is_error=failed)


async def _answer(manager: StreamableHTTPSessionManager, room: Room, exchange: Exchange) -> None:
    """Answer a request of a program. After `QUIET_S` seconds without an answer, begin a stream whose only event is the
    answer.

    Raises:
        UnreadableRequest: the message is too large.
        ConnectionError: the program is gone. Its tool call is cancelled.
    """
    if exchange.method != "POST":  # the server sends no notifications, and has no sessions
        await exchange.answer(405, b"", {"allow": "POST"})
        return
    async with exchange.body(room) as body:
        if body.count(b"{") + body.count(b"[") > _OBJECTS:
            raise UnreadableRequest(413, "the message has too many objects")
    async with alongside(_call_app(manager, exchange, body)) as asked:
        while not (await asyncio.wait({asked}, timeout=QUIET_S))[0]:
            if not exchange.begun:
                await exchange.begin(_STREAM)
            await exchange.send(b": not yet\n\n")
        status, headers, answer = asked.result()
    if exchange.begun:
        await exchange.send(b"event: message\ndata: " + answer + b"\n\n")
        await exchange.end()
    else:
        await exchange.answer(status, answer, headers)


async def _call_app(
    manager: StreamableHTTPSessionManager, exchange: Exchange, body: bytes
) -> tuple[int, dict[str, str], bytes]:
    """Return the answer of an ASGI application: the status, the headers, and JSON in one line."""
    status, headers, parts = 500, {}, []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "method": exchange.method,
        "path": exchange.path,
        "query_string": b"",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in exchange.headers.items()],
    }
    await manager.handle_request(scope, receive, send)
    return status, headers, b"".join(parts)
