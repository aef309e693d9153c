"""A server made with the `mcp` package, to be run as a program: `real_server.py [stdio|sse|streamable-http PORT]`."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, TextContent

server = MCPServer("real")
notes: list[str] = []


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def remember(note: str) -> str:
    """Keep a note for as long as the server lives."""
    notes.append(note)
    return f"{len(notes)}: {', '.join(notes)}"


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ToolError(why)


@server.tool(structured_output=False)
def picture() -> list[object]:
    """Return a picture and a text."""
    return ["a pixel:", Image(data=b"\x89PNG" + bytes(96), format="png")]


@server.tool()
def about() -> dict[str, object]:
    """Say where it runs."""
    return {"pid": os.getpid(), "cwd": os.getcwd(), "word": os.environ.get("WORD"), "args": sys.argv[1:]}


@server.tool()
def bulky(size: int) -> str:
    """Return a long text."""
    return "x" * size


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(7)


@server.tool(structured_output=False)
def structured() -> CallToolResult:
    """Return structured content alone."""
    return CallToolResult(content=[], structured_content={"answer": 42})


@server.tool(structured_output=False)
def silent_failure() -> CallToolResult:
    """Fail without a word."""
    return CallToolResult(content=[TextContent(text="")], is_error=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        server.run(sys.argv[1], port=int(sys.argv[2]))
    else:
        server.run("stdio")
