"""The entry point of the plugin `hermes-rl` of hermes-agent."""

from __future__ import annotations

from typing import Any

from hermes_agent import seams
from hermes_agent.slots import PREFIX
from hermes_agent.version import HERMES_AGENT
from hermes_core import HermesError, Runtime

_IN_SANDBOX = frozenset({"terminal", "process", "read_file", "write_file", "patch", "search_files", "execute_code"})
"""The tools that work in a session's slot."""

_parents = seams.Parents()
_recovered = False


def register(ctx: Any) -> None:
    """Add an environment `slots-BACKEND` for each backend that is installed.

    Raises:
        PluginError: this version of hermes-agent is too different. hermes-agent then refuses to run with such an
            environment.
    """
    with HERMES_AGENT.imports():
        from tools import terminal_tool

        from hermes_agent import sessions
    terminal_tool._ensure_terminal_env_bridged()
    seams.install([PREFIX + name for name in Runtime().backends.names()], _parents)
    sessions.remember_processes()
    ctx.register_hook("pre_tool_call", _before_tool)
    ctx.register_hook("subagent_start", _subagent_begins)
    ctx.register_hook("on_session_finalize", _session_ends)


def _before_tool(tool_name: str = "", task_id: str = "", session_id: str = "", **_: Any) -> dict[str, str] | None:
    """Lease the session's slot. If there is none, block the tool call: the tool would try several times to get a slot,
    and then give the model our traceback."""
    backend = seams.current_backend()
    if backend is None:
        return None
    _parents.note_call(session_id, task_id)
    if tool_name not in _IN_SANDBOX:
        return None
    try:
        _lease(backend, task_id or "default")
    except HermesError as error:
        return {"action": "block", "message": f"The sandbox failed: {error}"}
    return None


def _lease(backend: str, session: str) -> None:
    global _recovered
    from hermes_agent import sessions

    if not _recovered:
        _recovered = True
        sessions.recover(backend)
    sessions.place(session)


def _subagent_begins(parent_session_id: str = "", child_subagent_id: str = "", **_: Any) -> None:
    _parents.note_subagent(parent_session_id, child_subagent_id)


def _session_ends(session_id: str = "", **_: Any) -> None:
    """Release the slot of a session that is over: `/new`, or the end of the program."""
    from tools import terminal_tool

    if seams.current_backend() is not None and session_id:
        _parents.forget(session_id)
        terminal_tool.cleanup_vm(session_id)
