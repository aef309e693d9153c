"""`ModalToolBackend`: slots of Modal sandboxes for programs that have no `Runtime`, with the methods of Atropos."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

from hermes_core import (
    ConfigError,
    ExecutionResult,
    Isolation,
    Runtime,
    Settings,
    Slot,
    ToolBackend,
    UnknownNameError,
    UsageError,
)
from hermes_core.aio import LoopThread
from hermes_modal import plugin
from hermes_modal.config import DEFAULT_APP, ModalSandboxConfig, load_profiles_and_default

T = TypeVar("T")


class ModalToolBackend:
    """Slots in Modal sandboxes. An async context manager that also starts by itself when the first slot is requested.

    The sandboxes live in an event loop of their own, so any loop may use them. Without `async with` or `stop()` they
    end with the program.

    Args:
        config: the only profile; None is the default one of `load_profiles()`. `with_profiles` takes several.
        isolation: the minimum isolation of every slot.
        settings: None reads them from the environment when it starts.
    """

    def __init__(
        self,
        config: ModalSandboxConfig | None = None,
        *,
        isolation: str | Isolation = Isolation.USER,
        settings: Settings | None = None,
    ) -> None:
        if config is None:
            profiles, default = load_profiles_and_default()
            config = profiles[default]
        self._profiles = {config.name: _all_slots(config)}
        self._default = config.name
        self._isolation = Isolation.parse(isolation)
        self._settings = settings
        self._engine: _Engine | None = None
        self._opening = threading.Lock()

    @classmethod
    def with_profiles(
        cls,
        app_name: str = DEFAULT_APP,
        profiles: Mapping[str, ModalSandboxConfig] | None = None,
        default_profile: str | None = None,
        profiles_file: str | Path | None = None,
        *,
        isolation: str | Isolation = Isolation.USER,
        settings: Settings | None = None,
    ) -> Self:
        """Return a tool backend with several profiles. Each has a pool of its own, made when it is first requested.

        Args:
            app_name: profiles without an app get `{app_name}-{name}`.
            profiles: the profiles by name; None is `load_profiles(profiles_file)`.
            default_profile: the profile to use if none is named; None is the default of the profiles' file, or
                `default`.

        Raises:
            UnknownNameError: there is no such default profile.
            ConfigError: a profile is wrong, or its name differs from its key.
        """
        default = default_profile
        if profiles is None:
            profiles, default_of_file = load_profiles_and_default(profiles_file)
            default = default or default_of_file
        default = default or ("default" if "default" in profiles else next(iter(profiles), "default"))
        if default not in profiles:
            raise UnknownNameError("profile", default, profiles, where="in default_profile")
        backend = cls(profiles[default], isolation=isolation, settings=settings)
        backend._profiles = {}
        for name, config in profiles.items():
            if config.name != name:
                raise ConfigError(f"profile {name!r} has the name {config.name!r}", hint=f"set name={name!r}")
            backend._profiles[name] = _all_slots(config if config.app_name else config.with_app_name(app_name))
        return backend

    @property
    def default_timeout_s(self) -> float:
        """Return the time limit in seconds of a command that names none."""
        return self._profiles[self._default].execution_timeout_s

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, profiles_to_start: Sequence[str] | None = None) -> None:
        """Make the warm sandboxes of these profiles in parallel; None is the default profile. Raise as
        `ToolBackend.start`."""
        engine = await self._open_in_thread()
        await engine.thread.run(engine.tools.start(profiles_to_start))

    def stop(self, *, purge: bool = False) -> Coroutine[Any, Any, None]:
        """Begin to end all sandboxes. Await the result to wait for their end; this is optional. Idempotent. A later
        `acquire` starts the tool backend again. `purge` has no effect, because nothing is kept."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.thread.begin_close()
        return _Droppable(_close(engine))

    aclose = stop

    async def acquire(self, trajectory_id: str | None = None, profile: str | None = None) -> Slot:
        """Return a slot of the profile; None is the default profile. Callers are served in order of arrival. Raise as
        `ToolBackend.acquire`."""
        engine = await self._open_in_thread()
        return await engine.thread.run(engine.tools.acquire(trajectory_id, profile=profile), engine.tools.release)

    async def release(self, slot: Slot, *, reset_workspace: bool = False) -> None:
        """End the lease of `slot`: kill its processes and, if `reset_workspace`, remove its files. Idempotent."""
        if (engine := self._engine) is not None:
            await engine.thread.run(engine.tools.release(slot, reset_workspace=reset_workspace))

    async def execute(
        self, slot: Slot, tool_name: str, args: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> ExecutionResult:
        """Call a tool in the slot. Raise as `ToolBackend.execute`."""
        engine = self._require_engine()
        return await engine.thread.run(engine.tools.execute(slot, tool_name, args, timeout_s=timeout_s))

    async def execute_batch(
        self, requests: Sequence[tuple[Slot, str, Mapping[str, Any]]], *, timeout_s: float | None = None
    ) -> list[ExecutionResult]:
        """Call many tools at the same time, in slots of any profiles. The results have the order of the requests."""
        engine = self._require_engine()
        return await engine.thread.run(engine.tools.execute_batch(requests, timeout_s=timeout_s))

    def get_status(self) -> dict[str, Any]:
        """Return the counts of sandboxes and slots: over all profiles, and by profile under `pools`."""
        return self._open().ask(ToolBackend.get_status)

    def list_profiles(self) -> dict[str, dict[str, Any]]:
        """Return the profiles' settings, and whether each has been started."""
        return self._open().ask(ToolBackend.list_profiles)

    async def _open_in_thread(self) -> _Engine:
        """Call `_open` in a thread if nothing is open yet, because it imports the SDK, which takes up to a second."""
        running = self._running()
        return running if running is not None else await asyncio.to_thread(self._open)

    def _open(self) -> _Engine:
        with self._opening:
            engine = self._running()
            if engine is None:
                engine = self._engine = _Engine(self._profiles, self._default, self._isolation, self._settings)
            return engine

    def _running(self) -> _Engine | None:
        engine = self._engine
        return None if engine is None or engine.thread.closed else engine

    def _require_engine(self) -> _Engine:
        if (engine := self._running()) is None:
            raise UsageError("the backend is stopped, and its slots with it", hint="acquire slots first")
        return engine


async def _close(engine: _Engine | None) -> None:
    if engine is not None:
        await asyncio.to_thread(engine.thread.close)


class _Droppable(Coroutine[Any, Any, None]):
    """A coroutine that need not be awaited: its work continues by itself, and Python gives no warning."""

    def __init__(self, waiting: Coroutine[Any, Any, None]) -> None:
        self._waiting = waiting

    def __await__(self) -> Generator[Any, Any, None]:
        return (yield from self._waiting.__await__())  # a generator, so that this object lives as long as the await

    def send(self, value: Any) -> Any:
        return self._waiting.send(value)

    def throw(self, *error: Any) -> Any:
        return self._waiting.throw(*error)

    def close(self) -> None:
        self._waiting.close()

    def __del__(self) -> None:
        self._waiting.close()


class _Engine:
    """A runtime in an event loop of its own. Its sandboxes outlive the caller's loop, and end before the program."""

    def __init__(
        self,
        profiles: Mapping[str, ModalSandboxConfig],
        default_profile: str,
        isolation: Isolation,
        settings: Settings | None,
    ) -> None:
        runtime = Runtime(settings, plugins=[plugin], load_entry_points=False)
        opened = AsyncExitStack()
        opened.push_async_callback(runtime.aclose)

        async def make() -> ToolBackend:
            tools = ToolBackend(
                runtime.backend("modal"),
                profiles=profiles,
                tools=runtime.tools,
                isolation=isolation,
                owner=runtime.owner,
                default_profile=default_profile,
                take_over=runtime.settings.owner is not None,
            )
            opened.push_async_callback(tools.aclose)
            return tools

        self.thread = LoopThread("Modal sandboxes", opened.aclose)
        try:
            self.tools = self.thread.call(make())
        except BaseException:
            self.thread.close()
            raise

    def ask(self, question: Callable[[ToolBackend], T]) -> T:
        """Call `question` with the tool backend, in the tool backend's own loop."""

        async def call() -> T:
            return question(self.tools)

        return self.thread.call(call())


def _all_slots(config: ModalSandboxConfig) -> ModalSandboxConfig:
    """Return the config without reserved slots, because nobody requests slots for verification here. A reserve that the
    config sets itself stays."""
    return config if "reserve_slots" in config.model_fields_set else config.model_copy(update={"reserve_slots": 0})
