"""The tools of MCP servers as tools of a rollout: their names, their schemas, and their answers to the model."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mcp_types

from hermes_core.errors import ConfigError, ErrorKind, nearest_hint
from hermes_core.mcp.connection import McpConnection, ServerFailed
from hermes_core.sandbox.commands import ExecutionResult
from hermes_core.tools.base import CallContext, Tool
from hermes_core.tools.limits import cut_output

MAX_TOOLS = 128
"""Maximum number of tools of one server that a model is offered."""

MAX_SCHEMA, MAX_SCHEMAS = 64 << 10, 256 << 10
"""Maximum number of bytes of the schema of one tool, and of all tools of a server."""

MAX_DEPTH = 32
"""Maximum depth of a schema."""

MAX_DESCRIPTION = 8000
"""Number of characters kept of a description."""

_MAX_NAME = 64
_OTHER_CHARACTER = re.compile(r"[^A-Za-z0-9_-]")


def tools_of(connection: McpConnection) -> dict[str, Tool]:
    """Return the tools that a server offers, by the server's own names for them.

    Raises:
        ServerFailed: the server has too many tools, lacks a tool that its settings name, or has a schema that can't be
            used.
    """
    offered = _choose(connection)
    if len(offered) > MAX_TOOLS:
        raise ServerFailed(
            f"{connection} has {len(offered)} tools, more than {MAX_TOOLS}", hint="name those to offer in its `tools`"
        )
    size = 0
    tools: dict[str, Tool] = {}
    for each in offered:
        tool, bytes_of_schema = _tool(connection, each)
        if each.name in tools:
            raise ServerFailed(f"{connection} lists the tool {each.name!r} twice", hint="leave it out")
        tools[each.name] = tool
        size += bytes_of_schema
    if size > MAX_SCHEMAS:
        raise ServerFailed(
            f"the schemas of {connection} have {size} bytes, more than {MAX_SCHEMAS}",
            hint="name the tools to offer in its `tools`",
        )
    return tools


def tool_name(server: str, tool: str) -> str:
    """Return the name by which the model calls a tool: `SERVER__TOOL`.

    No two tools of a run get the same name. If the tool's own name is too long or has characters that endpoints refuse,
    the result ends with a hash of the tool's own name.
    """
    name = f"{server}__{tool}"
    if tool and len(name) <= _MAX_NAME and not _OTHER_CHARACTER.search(tool):
        return name
    digest = hashlib.sha256(tool.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    plain = _OTHER_CHARACTER.sub("_", name)[: _MAX_NAME - len(digest) - 1]
    return f"{plain}_{digest}"


def _choose(connection: McpConnection) -> Sequence[mcp_types.Tool]:
    names = connection.server.tools
    if names is None:
        return connection.listed
    listed = {tool.name: tool for tool in connection.listed}
    for name in names:
        if name not in listed:
            raise ServerFailed(f"{connection} has no tool {name!r}", hint=nearest_hint(name, listed))
    return [listed[name] for name in dict.fromkeys(names)]


def _tool(connection: McpConnection, listed: mcp_types.Tool) -> tuple[Tool, int]:
    """Return a tool, and the size of its schema in bytes."""
    what = f"tool {listed.name[:_MAX_NAME]!r} of {connection}"
    hint = "name the other tools in its `tools`, or report this to its author"
    schema = {"type": "object", **listed.input_schema}
    if _deeper_than(schema, MAX_DEPTH):
        raise ServerFailed(f"the schema of {what} is nested more than {MAX_DEPTH} levels deep", hint=hint)
    size = len(json.dumps(schema))
    if size > MAX_SCHEMA:
        raise ServerFailed(f"the schema of {what} has {size} bytes, more than {MAX_SCHEMA}", hint=hint)
    description = (listed.description or "").strip() or listed.title or f"Tool {listed.name} of {connection.name}."

    async def call(ctx: CallContext, arguments: Mapping[str, Any]) -> ExecutionResult:
        async with asyncio.timeout(ctx.timeout_s):
            return result_of(await connection.call(listed.name, arguments))

    try:
        tool = Tool(
            name=tool_name(connection.name, listed.name),
            params=schema,
            handler=call,
            description=description[:MAX_DESCRIPTION],
            where="driver" if connection.server.on_driver else "sandbox",
            toolsets=(connection.name,),
            timeout_s=connection.server.timeout_s,
            # The schema is not ours, and checking arguments by it may take for ever. The server itself checks the
            # arguments.
            checks_arguments=False,
        )
    except ConfigError as error:
        raise ServerFailed(f"{what} can't be offered: {error.message}", hint=hint) from error
    return tool, size


def _deeper_than(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper_than(part, levels - 1) for part in parts)


def result_of(result: mcp_types.CallToolResult) -> ExecutionResult:
    """Return the answer as text for the model. The text names parts of the answer that are no text."""
    parts = [*_texts(result.content)]
    if result.structured_content is not None and not any(part.type == "text" for part in result.content):
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))  # usually the text says the same
    text, dropped = cut_output("\n".join(parts).encode("utf-8", "replace"))
    metadata = {"bytes_dropped": dropped, "truncated": dropped > 0}
    if result.is_error:
        text = text or "the tool failed, and did not say why"
        return ExecutionResult(
            False, error=text, error_kind=ErrorKind.COMMAND, metadata=metadata, answer={"error": text}
        )
    return ExecutionResult(True, output=text, metadata=metadata, answer={"output": text})


def _texts(content: Sequence[mcp_types.ContentBlock]) -> Iterator[str]:
    for part in content:
        match part:
            case mcp_types.TextContent():
                yield part.text
            case mcp_types.ImageContent() | mcp_types.AudioContent():
                yield _omission_text(part.type, part.mime_type, part.data)
            case mcp_types.ResourceLink():
                yield f"[link to {part.name}: {part.uri}]"
            case mcp_types.EmbeddedResource(resource=mcp_types.TextResourceContents() as resource):
                yield resource.text
            case mcp_types.EmbeddedResource(resource=mcp_types.BlobResourceContents() as resource):
                yield _omission_text("file", resource.mime_type or "of unknown type", resource.blob)


def _omission_text(kind: str, mime_type: str, data: str) -> str:
    return f"[{kind}, {mime_type}, {len(data) * 3 // 4} bytes: left out, as only text is shown]"
