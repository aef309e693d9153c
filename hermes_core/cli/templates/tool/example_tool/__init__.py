"""The tool `example_tool` for hermes-rl: counts the lines, words and characters of a text file."""

from typing import Annotated

from pydantic import Field

from hermes_core import CallContext, ToolRegistrar, function_tool, hookimpl

MAX_BYTES = 1_000_000
"""What is read of a file at most: an agent can make files of any size."""


async def count_text(
    ctx: CallContext,
    path: Annotated[str, Field(min_length=1, description="The file, relative to the workspace.")],
) -> dict[str, int | bool]:
    """Count the lines, words and characters of a text file."""
    content = await ctx.require_commands().read_file(path, limit=MAX_BYTES)
    text = content.data.decode(errors="replace")
    return {
        "lines": len(text.splitlines()),
        "words": len(text.split()),
        "characters": len(text),
        "truncated": content.size > len(content.data),
    }


@hookimpl
def hermes_register_tools(registry: ToolRegistrar) -> None:
    """Register the tool, in a toolset of its own."""
    registry.add(
        function_tool(count_text, name="example_tool", toolsets="example_tool", parallel_safe=True, timeout_s=30)
    )
