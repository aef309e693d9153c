"""The tool `process`: shows output of background processes of `terminal`, sends them input, and ends them."""

from __future__ import annotations

import asyncio
import codecs
import posixpath
import signal
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import Field, model_validator

from hermes_core.errors import CommandError
from hermes_core.sandbox.commands import ProcessStatus, SlotCommands, WindowSize
from hermes_core.tools.base import CallContext, Text, Tool, ToolParams
from hermes_core.tools.limits import cut_output, time_limit
from hermes_core.tools.screen import as_seen

DESCRIPTION = """\
Manage the background processes that terminal(background=true) started. Actions: list (all of them), poll (state and \
newest output), log (output by lines: offset counts from 0 at the first line still held, leave it out for the newest \
lines or, of a process with pty, for the screen as a person would see it), wait (until it ends or the timeout passes), \
kill, write (data to its standard input as it is; \u0003 is Ctrl-C to a pty, and data that ends with \u0004, Ctrl-D, \
ends the input), submit (data and the Enter key)."""

END_OF_FILE = "\x04"
_CHUNK = 200_000
_DEFAULT_LINES = 200
_LIST_CHARS = 200
_POLL_CHARS = 1000
_WAIT_CHARS = 2000


class ProcessParams(ToolParams):
    """Parameters of `process`."""

    action: Literal["list", "poll", "log", "wait", "kill", "write", "submit"] = Field(description="What to do.")
    session_id: str | None = Field(default=None, description="The process; needed for every action but list.")
    data: Text | None = Field(default=None, description="For write and submit: what it reads on standard input.")
    timeout: float | None = Field(default=None, gt=0, description="For wait: seconds to wait at most.")
    offset: int | None = Field(default=None, ge=0, description="For log: the first line, counted from 0.")
    limit: int = Field(default=_DEFAULT_LINES, ge=1, le=2000, description="For log: lines at most.")

    @model_validator(mode="after")
    def _complete(self) -> ProcessParams:
        if self.action != "list" and not self.session_id:
            raise ValueError(f"session_id: is required for action {self.action!r}")
        if self.action == "write" and self.data is None:
            raise ValueError("data: is required for action 'write'")
        return self


Answer = dict[str, Any]


async def start_session(ctx: CallContext, command: str, cwd: str | None, *, pty: bool) -> ProcessStatus:
    """Start a background process of this trajectory. The process's id is the session id.

    The slot belongs to one trajectory and knows only its own processes, so those of others can't be seen or controlled.

    Raises:
        CommandError: the process could not be started.
    """
    # By default, Python buffers output to a pipe, and the log of a server would stay empty.
    return await ctx.require_commands().start(
        command, cwd=cwd, env={"PYTHONUNBUFFERED": "1"}, pty=WindowSize() if pty else None
    )


async def run_process(ctx: CallContext, params: ProcessParams) -> Answer:
    """Carry out `params.action`."""
    if params.action == "list":
        return await _list(ctx)
    session_id = params.session_id or ""
    try:
        return {"session_id": session_id, **await _ACTIONS[params.action](ctx, session_id, params)}
    except CommandError as error:
        if error.code == "unknown_process":
            return await _not_found(ctx, session_id)
        return {"session_id": session_id, "status": "error", "error": error.message}


async def _not_found(ctx: CallContext, session_id: str) -> Answer:
    known = ", ".join(status.process_id for status in await ctx.require_commands().processes()) or "none"
    return {"status": "not_found", "error": f"no background process {session_id!r} here; there are: {known}"}


async def _list(ctx: CallContext) -> Answer:
    commands = ctx.require_commands()
    processes = []
    for status in await commands.processes():
        started = datetime.fromtimestamp(status.started_at, UTC).isoformat(timespec="seconds")
        processes.append(
            {
                "session_id": status.process_id,
                **_state(status),
                "cwd": posixpath.normpath(status.cwd),
                "started_at": started,
            }
            | {"output_preview": await _newest(commands, status, _LIST_CHARS)}
        )
    return {"processes": processes}


def _state(status: ProcessStatus) -> Answer:
    state: Answer = {
        "command": status.command[:_LIST_CHARS],
        "status": "running" if status.running else "exited",
        "pid": status.pid,
        "uptime_seconds": round(status.uptime_s, 1),
    }
    if status.pty is not None:
        state["pty"] = True
    return state if status.running else {**state, **_ending(status)}


def _ending(status: ProcessStatus) -> Answer:
    """Return how a process ended: its exit code, or the signal that ended it and the signal's negative number."""
    if status.signal is None:
        return {"exit_code": status.exit_code}
    return {"exit_code": -status.signal, "signal": signal_name(status.signal)}


def signal_name(number: int) -> str:
    """Return a signal's name, such as `SIGKILL` for 9; `signal 99` for a number without a name on this host."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


async def _poll(ctx: CallContext, process_id: str, params: ProcessParams) -> Answer:
    commands = ctx.require_commands()
    status = await commands.poll(process_id)
    return {**_state(status), "output_preview": await _newest(commands, status, _POLL_CHARS)}


async def _log(ctx: CallContext, process_id: str, params: ProcessParams) -> Answer:
    commands = ctx.require_commands()
    status = await commands.poll(process_id)
    running = status.running
    data, start = await _read_kept(commands, process_id)
    if status.pty is not None and params.offset is None:
        return await _screen(data, start, status, status.pty)
    if start:  # drop a first line whose start is gone
        partial = data.find(b"\n") + 1
        data, start = data[partial:], start + partial
    text = _decode(data, starts_inside=start > 0, ends_inside=running)
    lines = (text if status.pty is not None else as_seen(text)).split("\n")
    if not lines[-1]:
        lines.pop()
    first = max(0, len(lines) - params.limit) if params.offset is None else params.offset
    shown = lines[first : first + params.limit]
    output, _ = cut_output("\n".join(shown).encode())
    answer: Answer = {
        "status": "running" if running else "exited",
        "output": output,
        "total_lines": len(lines),
        "showing": f"lines {first} to {first + len(shown) - 1}" if shown else "no lines",
        "dropped_bytes": start,
    }
    if start:
        answer["note"] = f"the first {start} bytes were dropped: line 0 is the first line still held"
    return answer


async def _screen(data: bytes, start: int, status: ProcessStatus, size: WindowSize) -> Answer:
    from hermes_core.tools.screen import render

    screen = await asyncio.to_thread(render, data, size)
    return {
        "status": "running" if status.running else "exited",
        "screen": screen.text,
        "cursor": {"row": screen.row, "column": screen.column},
        "size": {"rows": size.rows, "columns": size.columns},
        "dropped_bytes": start,
        "note": "this is the screen; give an offset (from 0) for the output as it was written, by lines",
    }


async def _wait(ctx: CallContext, process_id: str, params: ProcessParams) -> Answer:
    commands = ctx.require_commands()
    limit_s, note = time_limit(ctx, params.timeout)
    status = await commands.wait(process_id, timeout_s=limit_s)
    answer: Answer = {"status": "timeout"} if status.running else {"status": "exited", **_ending(status)}
    answer["output"] = await _newest(commands, status, _WAIT_CHARS)
    if status.running:
        note = f"{note}; " if note else ""
        note += f"still running after {limit_s:g} s: wait again, or go on and poll it later"
    return {**answer, "timeout_note": note} if note else answer


async def _kill(ctx: CallContext, process_id: str, params: ProcessParams) -> Answer:
    commands = ctx.require_commands()
    before = await commands.poll(process_id)
    status = await commands.kill(process_id)
    if not before.running:
        left = status.left_killed - before.left_killed
        note = {"note": f"{left} processes that it had left running were killed"} if left else {}
        return {"status": "already_exited", **_ending(status), **note}
    if status.running:
        return {"status": "error", "error": f"it is still running (pid {status.pid}) after SIGTERM and SIGKILL"}
    return {"status": "killed", **_ending(status)}


async def _write(ctx: CallContext, process_id: str, params: ProcessParams) -> Answer:
    commands = ctx.require_commands()
    status = await commands.poll(process_id)
    if not status.running:
        return {"status": "already_exited", "error": "it has exited and reads nothing more", **_ending(status)}
    text, eof = params.data or "", False
    if params.action == "submit":
        text += "\n" if status.pty is None else "\r"  # the character of the Enter key
    elif status.pty is None and text.endswith(END_OF_FILE):
        text, eof = text[:-1], True
    data = text.encode()
    written = await commands.write(process_id, data, eof=eof)
    if written < len(data):
        error = f"only {written} of {len(data)} bytes were taken: it does not read its standard input now"
        return {"status": "error", "error": error, "bytes_written": written}
    return {"status": "ok", "bytes_written": written}


_ACTIONS: dict[str, Callable[[CallContext, str, ProcessParams], Awaitable[Answer]]] = {
    "poll": _poll,
    "log": _log,
    "wait": _wait,
    "kill": _kill,
    "write": _write,
    "submit": _write,
}


async def _read_kept(commands: SlotCommands, process_id: str) -> tuple[bytes, int]:
    """Return the output that the slot still holds, and the offset of its first byte in the whole output."""
    chunk = await commands.log(process_id, offset=0, limit=_CHUNK)
    start, end, data = chunk.offset, chunk.total, bytearray(chunk.data)
    while chunk.data and start + len(data) < end:
        chunk = await commands.log(process_id, offset=start + len(data), limit=_CHUNK)
        if chunk.dropped:  # the process wrote faster than this reads: drop the output before the gap
            start, data = chunk.offset, bytearray()
        data += chunk.data
    return bytes(data), start


async def _newest(commands: SlotCommands, status: ProcessStatus, chars: int) -> str:
    """Return the last `chars` characters of output."""
    chunk = await commands.log(status.process_id, offset=max(0, status.output_bytes - 4 * chars), limit=4 * chars)
    return as_seen(_decode(chunk.data, starts_inside=chunk.offset > 0, ends_inside=status.running))[-chars:]


def _decode(data: bytes, *, starts_inside: bool, ends_inside: bool) -> str:
    """Return bytes of a longer stream as text, without partial characters at either end."""
    if starts_inside:
        skip = next((n for n, byte in enumerate(data[:3]) if byte & 0xC0 != 0x80), min(3, len(data)))
        data = data[skip:]
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=not ends_inside)


PROCESS = Tool("process", ProcessParams, run_process, DESCRIPTION, toolsets=("terminal",))
