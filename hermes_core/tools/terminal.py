"""The tool `terminal`: runs a command line in the slot, to its end or in the background."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from pydantic import Field

from hermes_core.errors import CommandError, ErrorKind
from hermes_core.sandbox.commands import CommandResult, ExecutionResult, WindowSize
from hermes_core.tools.base import CallContext, CommandText, Tool, ToolParams
from hermes_core.tools.limits import OUTPUT_BYTES, cut_output, time_limit
from hermes_core.tools.process import signal_name, start_session
from hermes_core.tools.screen import as_seen, of_terminal
from hermes_core.tools.slot_tools import command_error_kind, command_metadata

NOT_RUN = -1
"""The `exit_code` of a command that could not be started."""

_COMPOUND = re.compile(r"[;&|()`!\n]")
"""Characters of command lines for which the shell stays and starts programs as children. For a simple command, the
shell itself becomes the program."""

_MOST_BYTES = 100_000
"""Maximum length in bytes of an environment variable. This is also the maximum for an argument of a command line."""

_FROM_ENVIRONMENT = '_command=$HERMES_SHELL_TEXT; unset HERMES_SHELL_TEXT; eval "$_command"'

DESCRIPTION = """\
Run a shell command in the workspace and get its output (stdout and stderr together) and exit code. Each command has a \
fresh shell that starts in the workspace: `cd` and variables do not carry over, files do. Long output keeps its start \
and end. For servers and long jobs set background=true and follow them with the process tool; for programs that want a \
terminal (an editor, a debugger, a REPL) add pty=true, and type by process(action='write' or 'submit')."""


class TerminalParams(ToolParams):
    """Parameters of `terminal`."""

    command: CommandText = Field(min_length=1, description="The shell command line.")
    background: bool = Field(default=False, description="Start it and return at once with a session_id for `process`.")
    timeout: float | None = Field(default=None, gt=0, description="Seconds after which it is killed.")
    workdir: CommandText | None = Field(default=None, description="Directory to run in; the workspace if not given.")
    pty: bool = Field(default=False, description="Give it a terminal of 30 rows and 120 columns.")
    check_interval: float | None = Field(
        default=None, gt=0, description="With background: seconds between updates to the user, 30 at least."
    )


async def run_terminal(ctx: CallContext, params: TerminalParams) -> ExecutionResult:
    """Run the command. The answer is `{output, exit_code, error}`, with exit code 124 for a time-out."""
    try:
        cwd = None if params.workdir is None else await ctx.path(params.workdir)
        return await (_background if params.background else _foreground)(ctx, params, cwd)
    except CommandError as error:
        text = f"{error.message} ({error.hint})" if error.hint else error.message
        answer = {"output": "", "exit_code": NOT_RUN, "error": f"the command was not run: {text}"}
        metadata = {"exit_code": NOT_RUN, "code": error.code}
        return ExecutionResult(False, "", text, metadata, error_kind=ErrorKind.COMMAND, answer=answer)


async def _foreground(ctx: CallContext, params: TerminalParams, cwd: str | None) -> ExecutionResult:
    limit_s, note = time_limit(ctx, params.timeout)
    command, env = _out_of_sight(params.command)
    result = await ctx.require_commands().run(
        command,
        cwd=cwd,
        env=env,
        timeout_s=limit_s,
        output_limit=OUTPUT_BYTES,
        merge_stderr=True,
        pty=WindowSize() if params.pty else None,
    )
    data = await asyncio.to_thread(of_terminal, result.stdout, WindowSize()) if params.pty else result.stdout
    seen = as_seen(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    output, dropped = cut_output(seen, result.stdout_bytes - len(result.stdout) + len(seen))
    answer: dict[str, Any] = {"output": output, "exit_code": result.returncode, "error": _ending(result, limit_s)}
    if note:
        answer["timeout_note"] = note
    kind = command_error_kind(result)
    metadata = {**command_metadata(result), "truncated": dropped > 0, "bytes_dropped": dropped}
    return ExecutionResult(kind is None, output, answer["error"] or "", metadata, error_kind=kind, answer=answer)


def _out_of_sight(command: str) -> tuple[str, dict[str, str]]:
    """Return a command line that does not show the command, and environment variables that hold the command. Otherwise
    commands that look for a program by its command line (`pkill -f`, `ps | grep`) would find the shell, or kill it."""
    if not _COMPOUND.search(command) or len(command.encode()) > _MOST_BYTES:
        return command, {}
    return _FROM_ENVIRONMENT, {"HERMES_SHELL_TEXT": command}


def _ending(result: CommandResult, limit_s: float) -> str | None:
    """Return a text if a time-out or a signal ended the command; None if the command exited by itself, even with exit
    code 124 or 137."""
    if result.timed_out:
        return (
            f"timed out after {limit_s:g} s: the command and what it started were killed"
            " (give a longer timeout, or background=true)"
        )
    if result.signal is not None:
        return f"killed by signal {result.signal} ({signal_name(result.signal)})"
    return None


async def _background(ctx: CallContext, params: TerminalParams, cwd: str | None) -> ExecutionResult:
    status = await start_session(ctx, params.command, cwd, pty=params.pty)
    session_id = status.process_id
    answer: dict[str, Any] = {
        "output": "Background process started",
        "session_id": session_id,
        "pid": status.pid,
        "exit_code": 0,
        "error": None,
        "note": f"follow it with process(action='poll' or 'log' or 'wait', session_id='{session_id}')",
    }
    if params.timeout is not None:
        answer["timeout_note"] = "timeout does not apply to background processes: end it with process(action='kill')"
    if params.check_interval is not None:
        answer["check_interval_note"] = _start_watch(ctx, session_id, params.check_interval)
    metadata = {"exit_code": 0, "session_id": session_id, "pid": status.pid}
    return ExecutionResult(True, answer["output"], metadata=metadata, answer=answer)


def _start_watch(ctx: CallContext, session_id: str, wanted_s: float) -> str:
    if ctx.watch is None:
        return "nobody can be told here: poll it"
    interval_s = ctx.watch(session_id, wanted_s)
    raised = f" (raised from {wanted_s:g} s)" if interval_s > wanted_s else ""
    return f"what is new is told every {interval_s:g} s{raised}, and its end"


TERMINAL = Tool("terminal", TerminalParams, run_terminal, DESCRIPTION, toolsets=("terminal",))
