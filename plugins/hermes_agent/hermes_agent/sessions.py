"""The environments of hermes-agent's sessions in slots, also in slots that an earlier process left running."""

from __future__ import annotations

import json
import logging
import shlex
import threading
import time
from typing import Any

from hermes_agent.environment import SlotEnvironment
from hermes_agent.slots import slots_of
from hermes_agent.version import HERMES_AGENT

with HERMES_AGENT.imports():
    from tools import process_registry, terminal_tool

log = logging.getLogger(__name__)

_IMAGES = ("docker_image", "modal_image", "daytona_image")
"""Overrides with the image of one task. hermes-agent's batch runner sets all of them."""

_LIST = 'for f in {folder}/hermes_bg_proc_*.pid; do [ -e "$f" ] && echo "$f $(cat "$f")"; done; true'


def open_environment(backend: str, session: str, cwd: str, timeout: int) -> SlotEnvironment:
    """Return the environment of a session, with the background processes of a slot that an earlier process left.

    Raises:
        HermesError: there is no slot.
    """
    overrides = terminal_tool.resolve_task_overrides(session)
    image = next((overrides[key] for key in _IMAGES if overrides.get(key)), None)
    environment = SlotEnvironment(
        slots_of(backend), session, image=image, cwd=cwd, timeout=timeout, lost=lambda: _give_up(session, environment)
    )
    if environment.lease.taken_over:
        _adopt(session, environment)
    return environment


def recover(backend: str) -> None:
    """Open the environments of the sessions whose slots an earlier process left."""
    for session in slots_of(backend).find_sessions():
        place(session)
        log.warning("session %s goes on in the slot that an earlier process left", session)


def place(session: str) -> None:
    """Open the session's environment if it has none, so that its first file tool resolves relative paths there."""
    from tools.code_execution_tool import _get_or_create_env

    environment, _ = _get_or_create_env(session)
    if terminal_tool.get_session_cwd(session) is None:
        terminal_tool.record_session_cwd(session, environment.cwd)


def _give_up(session: str, environment: SlotEnvironment) -> None:
    if terminal_tool.get_active_env(session) is environment:
        terminal_tool.cleanup_vm(session)


def read_checkpoint() -> dict[str, dict[str, Any]]:
    """Return hermes-agent's saved background processes by id. When it starts, hermes-agent itself drops the saved
    processes in sandboxes."""
    try:
        saved = json.loads(process_registry.CHECKPOINT_PATH.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {entry["session_id"]: entry for entry in saved if isinstance(entry, dict) and "session_id" in entry}


_saved: dict[str, dict[str, Any]] = {}


def remember_processes() -> None:
    """Read hermes-agent's saved background processes before it overwrites the file."""
    _saved.update(read_checkpoint())


def _adopt(session: str, environment: SlotEnvironment) -> None:
    """Register the background processes of a session's slot, which an earlier process left, with hermes-agent."""
    registry, folder = process_registry.process_registry, environment.get_temp_dir()
    listing = environment.execute(_LIST.format(folder=shlex.quote(folder)), timeout=10)
    for line in listing["output"].splitlines():
        path, _, pid = line.rpartition(" ")
        process_id = path.rpartition("/hermes_bg_")[2].removesuffix(".pid")
        if not pid.isdigit() or registry.get(process_id) is not None:
            continue
        process = _process(process_id, session, int(pid), environment)
        stem = path.removesuffix(".pid")
        files = f"{stem}.log", f"{stem}.pid", f"{stem}.exit"
        with registry._lock:
            registry._running[process_id] = process
        poller = threading.Thread(
            target=registry._env_poller_loop, args=(process, environment, *files), daemon=True, name=process_id
        )
        process._reader_thread = poller
        poller.start()
    registry._write_checkpoint()


_KEPT = (
    "command",
    "session_key",
    "cwd",
    "watcher_platform",
    "watcher_chat_id",
    "watcher_user_id",
    "watcher_user_name",
    "watcher_thread_id",
    "watcher_message_id",
    "watcher_interval",
    "notify_on_complete",
    "watch_patterns",
)
"""The fields of a background process that hermes-agent saves."""


def _process(process_id: str, session: str, pid: int, environment: SlotEnvironment) -> Any:
    saved = _saved.get(process_id, {})
    return process_registry.ProcessSession(
        id=process_id,
        task_id=session,
        pid=pid,
        pid_scope="sandbox",
        started_at=saved.get("started_at", time.time()),
        env_ref=environment,
        **{"command": "(not known)", **{name: saved[name] for name in _KEPT if name in saved}},
    )
