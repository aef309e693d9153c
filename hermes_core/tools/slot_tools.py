"""The three raw tools of every slot, for hooks and batches: `bash`, `read_file` and `write_file`, with uncut output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from hermes_core.errors import ErrorKind
from hermes_core.sandbox.commands import CommandResult, ExecutionResult
from hermes_core.tools.base import CallContext, CommandText, Text, Tool, ToolParams


class BashParams(ToolParams):
    """Parameters of the slot tool `bash`."""

    command: CommandText = Field(description="The command line, run by the slot's shell.")
    cwd: CommandText | None = Field(default=None, description="Directory to run it in; the workspace if not given.")
    env: dict[CommandText, CommandText] | None = Field(default=None, description="Further environment variables.")
    stdin: Text | None = Field(default=None, description="What the command reads; nothing if not given.")
    merge_stderr: bool = Field(default=False, description="Both streams in the output, in the order written.")


class SlotReadParams(ToolParams):
    """Parameters of the slot tool `read_file`."""

    path: CommandText = Field(description="The file; a relative path starts at the workspace.")


class SlotWriteParams(ToolParams):
    """Parameters of the slot tool `write_file`."""

    path: CommandText = Field(description="The file; a relative path starts at the workspace.")
    content: Text = Field(description="The whole new content.")


def command_metadata(result: CommandResult) -> dict[str, Any]:
    """Return the `ExecutionResult.metadata` of a command that ran."""
    return {
        "exit_code": result.returncode,
        "signal": result.signal,
        "timed_out": result.timed_out,
        "truncated": result.truncated,
        "duration_s": result.duration_s,
        "stdout_bytes": result.stdout_bytes,
        "bytes_dropped": result.bytes_dropped,
    }


def command_error_kind(result: CommandResult) -> ErrorKind | None:
    """Return the kind of error of a command that ran; None if the command did not fail."""
    if result.timed_out:
        return ErrorKind.TIMEOUT
    return None if result.ok else ErrorKind.COMMAND


async def _bash(ctx: CallContext, params: BashParams) -> ExecutionResult:
    result = await ctx.require_commands().run(
        params.command,
        cwd=params.cwd,
        env=params.env,
        stdin=None if params.stdin is None else params.stdin.encode(),
        timeout_s=ctx.timeout_s,
        merge_stderr=params.merge_stderr,
    )
    kind = command_error_kind(result)
    return ExecutionResult(kind is None, result.text, result.error_text, command_metadata(result), error_kind=kind)


async def _read_file(ctx: CallContext, params: SlotReadParams) -> ExecutionResult:
    content = await ctx.require_commands().read_file(params.path)
    metadata = {"size": content.size, "truncated": content.size > len(content.data)}
    return ExecutionResult(True, content.data.decode("utf-8", "replace"), metadata=metadata)


async def _write_file(ctx: CallContext, params: SlotWriteParams) -> ExecutionResult:
    data = params.content.encode()
    await ctx.require_commands().write_file(params.path, data)
    return ExecutionResult(True, metadata={"bytes_written": len(data)})


SLOT_TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool("bash", BashParams, _bash, "Run a command line in the slot and give its output as it is."),
        Tool("read_file", SlotReadParams, _read_file, "Give a file's content as it is.", parallel_safe=True),
        Tool("write_file", SlotWriteParams, _write_file, "Replace a file's content."),
    )
}
"""The slot tools by name. They are in no registry: a model gets a slot tool only if a hook's author offers it."""
