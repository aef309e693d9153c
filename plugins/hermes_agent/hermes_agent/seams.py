"""Puts our environments into hermes-agent, which has no plugin point for environments: replaces some functions and
settings of hermes-agent's modules."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Collection
from typing import Any

from hermes_agent.slots import PREFIX, close_all, slots_of
from hermes_agent.version import HERMES_AGENT
from hermes_core import PluginError

_NAMES = {
    "tools.terminal_tool": "_CONTAINER_BACKENDS",
    "agent.prompt_builder": "_REMOTE_TERMINAL_BACKENDS",
    "tools.env_probe": "_REMOTE_BACKENDS",
    "tools.skills_tool": "_REMOTE_ENV_BACKENDS",
}
"""hermes-agent's sets with the names of environments that are not the host. For these environments, paths are not the
host's, and the prompt says where commands run."""

_MARK = "_hermes_rl"

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


class Parents:
    """Finds the slot of a task. A subagent works in its parent's slot, as in hermes-agent's own environments."""

    def __init__(self) -> None:
        self._task_of: dict[str, str] = {}
        """The task of each session's last tool call."""
        self._parent_of: dict[str, str] = {}

    def note_call(self, session_id: str, task_id: str) -> None:
        """Record the task of a session's tool call."""
        self._task_of[session_id] = task_id

    def note_subagent(self, parent_session: str, subagent: str) -> None:
        """Record the parent of a subagent."""
        if (parent := self._task_of.get(parent_session)) is not None:
            self._parent_of[subagent] = parent

    def forget(self, session_id: str) -> None:
        """Forget a session."""
        self._task_of.pop(session_id, None)
        self._parent_of = {child: parent for child, parent in self._parent_of.items() if parent != session_id}

    def slot_of(self, task_id: str | None) -> str:
        """Return the name of the lease for a task."""
        name = task_id or "default"
        while name in self._parent_of:
            name = self._parent_of[name]
        return name


def current_backend() -> str | None:
    """Return the backend whose slots this process uses; None if it uses one of hermes-agent's environments."""
    name = os.environ.get("TERMINAL_ENV", "")
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else None


def install(names: Collection[str], parents: Parents) -> None:
    """Add environments with these names to hermes-agent. Idempotent.

    Raises:
        PluginError: this version of hermes-agent is too different.
    """
    wrappers: dict[tuple[str, str], Wrapper] = {
        ("tools.terminal_tool", "_create_environment"): _creating,
        ("tools.terminal_tool", "_resolve_container_task_id"): functools.partial(_resolving, parents),
        ("tools.terminal_tool", "check_terminal_requirements"): _checking,
        ("tools.terminal_tool", "cleanup_all_environments"): _ending,
        ("tools.approval", "_should_skip_container_guards"): _guarding,
    }
    places = [*_NAMES.items(), *wrappers]
    missing = [f"{module}.{name}" for module, name in places if not hasattr(importlib.import_module(module), name)]
    if missing:
        raise PluginError(
            f"this version of hermes-agent has no {', '.join(missing)}",
            hint=f"install the version that this was tested with: pip install 'hermes-agent=={HERMES_AGENT.tested}'",
        )
    for name, attribute in _NAMES.items():
        module = importlib.import_module(name)
        setattr(module, attribute, frozenset({*getattr(module, attribute), *names}))
    for (name, attribute), wrap in wrappers.items():
        module = importlib.import_module(name)
        own = getattr(module, attribute)
        own = getattr(own, _MARK, own)
        wrapped = functools.wraps(own)(wrap(own))
        setattr(wrapped, _MARK, own)
        setattr(module, attribute, wrapped)
    _check_tool()


def _check_tool() -> None:
    """Make our check the one that hermes-agent's registry has for the tool `terminal`."""
    from tools import terminal_tool
    from tools.registry import registry

    entry = registry.get_entry("terminal")
    entry.check_fn = terminal_tool.check_terminal_requirements


def _creating(own: Callable[..., Any]) -> Callable[..., Any]:
    def create(env_type: str, image: str, cwd: str, timeout: int, *args: Any, **options: Any) -> Any:
        if not env_type.startswith(PREFIX):
            return own(env_type, image, cwd, timeout, *args, **options)
        from hermes_agent.sessions import open_environment

        return open_environment(env_type.removeprefix(PREFIX), options.get("task_id") or "default", cwd, timeout)

    return create


def _resolving(parents: Parents, own: Callable[..., Any]) -> Callable[..., Any]:
    def resolve(task_id: str | None) -> Any:
        return own(task_id) if current_backend() is None else parents.slot_of(task_id)

    return resolve


def _checking(own: Callable[[], bool]) -> Callable[[], bool]:
    def check() -> bool:
        from tools import terminal_tool

        name = terminal_tool._get_env_config()["env_type"]
        # Any backend passes. If it is missing or does not work, the first command gets an error that says what to do.
        return True if name.startswith(PREFIX) else own()

    return check


def _ending(own: Callable[[], int]) -> Callable[[], int]:
    def end() -> int:
        """Call `own`, and end the sandboxes here, because `hermes -z` then exits by `os._exit`, without any cleanup."""
        try:
            return own()
        finally:
            close_all()

    return end


def _guarding(own: Callable[..., bool]) -> Callable[..., bool]:
    def skip(env_type: str, has_host_access: bool = False) -> bool:
        if not env_type.startswith(PREFIX):
            return own(env_type, has_host_access=has_host_access)
        return slots_of(env_type.removeprefix(PREFIX)).is_isolated()

    return skip
