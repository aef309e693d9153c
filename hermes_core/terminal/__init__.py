"""The terminal tool for programs without a runtime: runs commands by task, each task in a sandbox of its own."""

from __future__ import annotations

import json
import threading

from hermes_core.aio import LoopEnded
from hermes_core.sandbox.pool.watches import Subscriber
from hermes_core.terminal.tasks import DEFAULT_TASK, TaskTerminals, TerminalCall, not_run

__all__ = ["cleanup_all", "cleanup_vm", "process_tool", "subscribe", "terminal_tool", "terminal_tool_async"]

_lock = threading.Lock()
_terminals: TaskTerminals | None = None


def terminal_tool(
    command: str,
    background: bool = False,
    timeout: float | None = None,
    *,
    task_id: str | None = None,
    workdir: str | None = None,
    profile: str | None = None,
    pty: bool = False,
    check_interval: float | None = None,
) -> str:
    """Run a command in the task's sandbox, which is made on first use. Blocks. May be called in a running event loop.

    The working directory and the files are kept between calls, until `cleanup_vm`, or TERMINAL_LIFETIME_SECONDS after
    the task's last command. Settings are the TERMINAL_… variables, read once; `docs/guides/terminal.md` lists them.

    Args:
        background: start the command and return at once.
        timeout: seconds after which the command is killed. None is TERMINAL_TIMEOUT.
        task_id: the task whose sandbox is used. None is the task `default`.
        workdir: the directory for this command only. None is the directory where the last one ended.
        profile: the profile of the sandbox, for the task's first command, which makes it.
        pty: run the command in a terminal.
        check_interval: for a background process, seconds between updates to subscribers, at least 30.

    Returns:
        JSON: `{"output", "exit_code", "error"}`, with exit code 124 for a time-out. If the command could not be run,
            the exit code is -1, `"status"` is `"error"`, and `error` says why and what to do. No error is raised.
    """
    request = TerminalCall(command, background, timeout, task_id or DEFAULT_TASK, workdir, profile, pty, check_interval)
    try:
        return json.dumps(_tasks().call(request))
    except LoopEnded as ended:
        return json.dumps(not_run(ended))


async def terminal_tool_async(
    command: str,
    background: bool = False,
    timeout: float | None = None,  # noqa: ASYNC109 - the tool's own name for it
    *,
    task_id: str | None = None,
    workdir: str | None = None,
    profile: str | None = None,
    pty: bool = False,
    check_interval: float | None = None,
) -> str:
    """Run `terminal_tool` without blocking the event loop. It is cancelled with its caller."""
    request = TerminalCall(command, background, timeout, task_id or DEFAULT_TASK, workdir, profile, pty, check_interval)
    try:
        return json.dumps(await _tasks().run(request))
    except LoopEnded as ended:
        return json.dumps(not_run(ended))


def process_tool(
    action: str,
    session_id: str | None = None,
    *,
    data: str | None = None,
    timeout: float | None = None,
    offset: int | None = None,
    limit: int | None = None,
    task_id: str | None = None,
) -> str:
    """Call the tool `process`, which follows, feeds and ends background processes of a task. Blocks.

    Returns:
        JSON: the tool's answer, with `"status": "error"` if the task can't be reached or has no sandbox.
    """
    options = {"session_id": session_id, "data": data, "timeout": timeout, "offset": offset, "limit": limit}
    args = {"action": action, **{key: value for key, value in options.items() if value is not None}}
    try:
        return json.dumps(_tasks().process(task_id or DEFAULT_TASK, args))
    except LoopEnded as ended:
        return json.dumps(not_run(ended))


def subscribe(subscriber: Subscriber) -> None:
    """Await `subscriber(update)` for new output and ends of processes that were started with `check_interval`.

    The subscriber runs in another thread, in the event loop of the tasks. `cleanup_all` ends the subscription.
    """
    _tasks().subscribe(subscriber)


def cleanup_vm(task_id: str | None = None, force: bool = False) -> bool:
    """End the task's sandbox and all processes in it. Return whether there was one.

    Raises:
        UsageError: the task has running background processes, and `force` is not set.
    """
    return _terminals is not None and _terminals.cleanup(task_id, force=force)


def cleanup_all() -> None:
    """End the sandboxes of all tasks, and forget the settings. The next command reads the settings again."""
    global _terminals
    with _lock:
        ending, _terminals = _terminals, None
    if ending is not None:
        ending.close()


def _tasks() -> TaskTerminals:
    """Return the tasks of this process, made on first use."""
    global _terminals
    with _lock:
        if _terminals is None or _terminals.is_closed:
            _terminals = TaskTerminals()
        return _terminals
