"""The slots of hermes-agent's sessions, in an event loop of their own, which hermes-agent's threads call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hermes_core import (
    Backend,
    Checkpoint,
    ConfigError,
    HermesError,
    Isolation,
    LoopThread,
    Runtime,
    Slot,
    SlotCommands,
    TaskSet,
    ToolBackend,
    UsageError,
    call_in,
)
from hermes_core.terminal.settings import explain

log = logging.getLogger(__name__)

PREFIX = "slots-"
"""The beginning of our environments' names, before the backend's name: `TERMINAL_ENV=slots-docker`."""

ORPHAN_TTL_S = 24 * 3600.0
"""Seconds for which a session's sandbox outlives its process, so that another process can take it over."""

_RELEASE_S = 60.0
"""Seconds for which a caller waits for the end of a lease. The release itself goes on."""

_LOOK_S = 0.1
"""Seconds between checks for an interruption by the user while a session waits for its slot."""

_OPTION = re.compile(r"`--backend\.(\w+)=(\w+)`")

T = TypeVar("T")


@dataclass(frozen=True)
class SessionSlot:
    """The slot of one session."""

    slot: Slot
    commands: SlotCommands
    taken_over: bool = False
    """Whether the slot comes from an earlier process, whose commands may still run there."""


@dataclass(frozen=True)
class Started:
    """Work in the event loop, started by another thread."""

    outcome: concurrent.futures.Future[Any]
    cancel: Callable[[], object]
    """Cancels the work. When the work has cleaned up, `outcome` has a UsageError."""


@dataclass
class _Open:
    """The state from the first lease on."""

    runtime: Runtime
    tools: ToolBackend
    checkpoint: Checkpoint | None
    variables: Mapping[str, str]
    """The variables of every command."""
    host_files: bool
    """Whether directories of the host are mounted in the sandboxes."""
    left: dict[str, Slot] = field(default_factory=dict)
    """The slots that an earlier process left, by session."""
    held: int = 0
    """Number of leases."""


class Slots:
    """The slots of one backend, for use from any thread. The settings are hermes-agent's variables, read at the first
    use.

    Args:
        backend: the backend's name.
    """

    def __init__(self, backend: str) -> None:
        self._name = backend
        self._opened: asyncio.Task[_Open] | None = None
        self._work = TaskSet()
        self._thread = LoopThread(f"slots of {backend}", self._end)
        self._loop, self._loop_thread = self._thread.call(_where())

    @property
    def closed(self) -> bool:
        """Return whether the slots have ended."""
        return self._thread.closed

    def lease(self, session: str, image: str | None, interrupted: Callable[[], bool]) -> SessionSlot:
        """Return the session's slot: the one that an earlier process left, or else a free one. Blocks.

        Args:
            image: an image to use instead of the configured one.
            interrupted: returns whether to give up waiting.

        Raises:
            HermesError: there is no slot, the settings are wrong, or the wait was interrupted.
        """
        started = self.start(self._lease(session, image))
        while not started.outcome.done() and not self.closed:
            concurrent.futures.wait([started.outcome], _LOOK_S)
            if interrupted():
                started.cancel()
                break
        lease: SessionSlot = started.outcome.result()
        return lease

    def release(self, lease: SessionSlot) -> None:
        """End the lease. Blocks, but not in the event loop's own thread, in which the garbage collector may call
        this."""
        with suppress(HermesError):  # the loop has ended, and the lease has ended with it
            if threading.current_thread() is self._loop_thread:
                self._work.spawn(self._release(lease), "release")
            else:
                concurrent.futures.wait([self.start(self._release(lease)).outcome], _RELEASE_S)

    def find_sessions(self) -> list[str]:
        """Return the sessions of slots that an earlier process left and that nobody has leased again. Blocks.

        Raises:
            HermesError: the settings are wrong, or a sandbox can't be taken over now.
        """
        return self._thread.call(self._find_sessions())

    def is_isolated(self) -> bool:
        """Return whether commands can't reach the host's files and processes. Blocks.

        Raises:
            HermesError: the settings are wrong.
        """
        return self._thread.call(self._is_isolated())

    def start(self, work: Coroutine[Any, Any, Any]) -> Started:
        """Start work in the event loop.

        Raises:
            UsageError: the loop has ended.
        """
        outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
        tasks: list[asyncio.Task[Any]] = []

        def begin() -> None:
            tasks.append(self._work.spawn(work, "work of hermes-agent"))
            tasks[0].add_done_callback(lambda done: _pass_on(done, outcome))

        def cancel() -> None:
            tasks[0].cancel()

        if self.closed or not call_in(self._loop, begin):  # without waiting for the loop, to save milliseconds
            work.close()
            raise UsageError("hermes-agent is ending", hint="begin another session")
        return Started(outcome, lambda: call_in(self._loop, cancel))

    def close(self) -> None:
        """End everything, and block until it is done."""
        self._thread.close()

    # --- in the event loop

    async def _open(self) -> _Open:
        """Return the state. The first caller opens it; after a failed attempt, the next caller tries again."""
        if self._opened is None or (self._opened.done() and self._opened.exception() is not None):
            self._opened = self._work.spawn(self._begin(), f"open {self._name}")
        return await asyncio.shield(self._opened)

    async def _begin(self) -> _Open:
        environ = {**os.environ, "TERMINAL_ENV": self._name}
        async with Runtime() as reading:
            settings, lines = explain(reading.config_classes(), environ)
        # The backend `ssh` looks for sandboxes of an earlier process on the hosts in its runtime's profiles.
        runtime = Runtime(reading.settings.model_copy(update={"profiles": settings.profiles}))
        checkpoint: Checkpoint | None = None
        try:
            backend = runtime.backend(self._name)
            log.debug("slots of %s: %s", self._name, "; ".join(lines))
            if settings.state_dir is not None:
                checkpoint = Checkpoint(settings.state_dir, runtime.owner)
            durable = {"orphan_ttl_s": ORPHAN_TTL_S} if checkpoint is not None else {}
            tools = runtime.tool_backend(
                self._name,
                profiles={name: {**_DEFAULTS, **durable, **own} for name, own in settings.profiles.items()},
                default_profile=settings.default_profile,
                isolation=environ.get("TERMINAL_SLOT_ISOLATION") or _level(backend),
                checkpoint=checkpoint,
            )
            host_files = any(own.get("volumes") for own in settings.profiles.values())
            opened = _Open(runtime, tools, checkpoint, _variables(environ), host_files)
            if checkpoint is not None:
                opened.left = {slot.trajectory_id or "": slot for slot in await tools.take_over()}
        except BaseException:
            if checkpoint is not None:
                checkpoint.close()
            await runtime.aclose()
            raise
        return opened

    async def _lease(self, session: str, image: str | None) -> SessionSlot:
        opened = await self._open()
        earlier = opened.left.pop(session, None)
        try:
            slot = earlier or await opened.tools.acquire(session, image=image, env=opened.variables, as_image=True)
        except HermesError as error:
            raise _in_its_words(error, self._name) from error
        opened.held += 1
        return SessionSlot(slot, opened.tools.commands(slot), taken_over=earlier is not None)

    async def _release(self, lease: SessionSlot) -> None:
        opened = await self._open()
        opened.held -= 1
        await opened.tools.release(lease.slot, reset_workspace=True)

    async def _find_sessions(self) -> list[str]:
        return [*(await self._open()).left]

    async def _is_isolated(self) -> bool:
        opened = await self._open()
        weakest = Isolation.USER if _in_containers(opened.tools.backend) else Isolation.NAMESPACE
        return opened.tools.isolation >= weakest and not opened.host_files

    async def _end(self) -> None:
        await self._work.aclose()
        if self._opened is None or self._opened.cancelled() or self._opened.exception() is not None:
            return
        opened = self._opened.result()
        try:
            await opened.tools.aclose(keep=opened.checkpoint is not None and bool(opened.held or opened.left))
        finally:
            if opened.checkpoint is not None:
                opened.checkpoint.close()
            await opened.runtime.aclose()


_DEFAULTS: dict[str, Any] = {"min_sandboxes": 0, "reserve_slots": 0}
"""Default settings of a profile. Sessions need no slots for verification."""


async def _where() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    return asyncio.get_running_loop(), threading.current_thread()


def _pass_on(done: asyncio.Task[Any], outcome: concurrent.futures.Future[Any]) -> None:
    if done.cancelled():
        outcome.set_exception(UsageError("interrupted", hint="run it again"))
    elif (error := done.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(done.result())


def _in_its_words(error: HermesError, backend: str) -> HermesError:
    """Return a copy of the error in which hermes-agent's settings replace our options."""
    copy, setting = error.twin(), rf"`hermes config set terminal.{backend}_\1 \2`"
    copy.message = _OPTION.sub(setting, error.message)
    copy.hint = error.hint and _OPTION.sub(setting, error.hint)
    return copy


def _in_containers(backend: Backend) -> bool:
    """Return whether the sandboxes are containers or machines, which hide the host by themselves."""
    return Isolation.DEDICATED in backend.capabilities.isolation


def _level(backend: Backend) -> Isolation:
    """Return the level at which sessions share sandboxes."""
    return Isolation.USER if _in_containers(backend) else Isolation.NAMESPACE


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that hermes-agent's `docker_env` and `docker_forward_env` set for commands."""
    configured: dict[str, str] = _json(environ, "TERMINAL_DOCKER_ENV", {})
    names: list[str] = _json(environ, "TERMINAL_DOCKER_FORWARD_ENV", [])
    forwarded = {name: environ[name] for name in map(str, names) if name in environ}
    return {str(name): str(value) for name, value in {**configured, **forwarded}.items()}


def _json(environ: Mapping[str, str], name: str, empty: T) -> T:
    try:
        value = json.loads(environ[name]) if environ.get(name) else empty
    except ValueError:
        value = None
    if not isinstance(value, type(empty)):
        raise ConfigError(f"{name} is {environ[name]!r}", hint=f"write JSON: a {type(empty).__name__}")
    return value


# ---------------------------------------------------------------------- of this process

_lock = threading.Lock()
_opened: dict[str, Slots] = {}


def slots_of(backend: str) -> Slots:
    """Return the slots of this process on a backend."""
    with _lock:
        slots = _opened.get(backend)
        if slots is None or slots.closed:
            slots = _opened[backend] = Slots(backend)
        return slots


def close_all() -> None:
    """End the slots of this process."""
    with _lock:
        for slots in _opened.values():
            slots.close()
        _opened.clear()


def _forget() -> None:
    """Forget the parent's slots in a forked process, which has none of the parent's threads."""
    global _lock
    _lock = threading.Lock()
    _opened.clear()


os.register_at_fork(after_in_child=_forget)
