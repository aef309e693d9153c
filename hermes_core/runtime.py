"""The runtime owns the settings, the plugins and everything made from them. Several can exist side by side."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from pydantic import BaseModel

from hermes_core.agents.base import Agent, AgentSettings
from hermes_core.agents.baselines import CHEAT, CheatAgent
from hermes_core.agents.loop import CanUseModel, SharesModel
from hermes_core.agents.parsers.base import Parser
from hermes_core.aio import exits_are_errors
from hermes_core.environment import Environment
from hermes_core.errors import (
    BUG_HINT,
    ConfigError,
    HermesError,
    PluginError,
    UnknownNameError,
    UsageError,
    describe,
    explain_errors,
    plugin_fault,
)
from hermes_core.plugins.manager import PluginManager
from hermes_core.plugins.registry import PluginEntry, import_hint
from hermes_core.sandbox.contract import Backend, Isolation, SandboxConfig
from hermes_core.sandbox.pool.checkpoint import Checkpoint
from hermes_core.sandbox.pool.provision import PrepareSandbox
from hermes_core.sandbox.promises import check_declarations
from hermes_core.settings import Settings
from hermes_core.sink import Sink
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry
from hermes_core.validation import validate_data

log = logging.getLogger(__name__)

T = TypeVar("T")


class Closable(Protocol):
    """Something that is closed with the runtime. Closing it twice does no harm."""

    async def aclose(self) -> None:
        """Release everything that this object holds."""


Thing = TypeVar("Thing", bound=Closable)

CLOSE_S = 30.0
"""Seconds that a backend may take to release its connection."""


class Runtime:
    """Makes backends, tool backends, environments and agents by name, and closes them when it is closed.

        async with Runtime() as runtime:
            async with runtime.tool_backend("local", isolation="user") as backend:
                ...

    Args:
        settings: None reads them from the environment, once, now.
        plugins: plugin objects in addition to the installed plugins.
        load_entry_points: whether installed plugins are loaded.

    Raises:
        ConfigError: an environment variable is wrong, or a file that a variable names.
        PluginError: a plugin in `plugins` is broken. A broken plugin that is installed is only reported.
    """

    def __init__(
        self, settings: Settings | None = None, *, plugins: Sequence[object] = (), load_entry_points: bool = True
    ) -> None:
        self.settings = Settings.load() if settings is None else settings
        self.owner = self.settings.owner or _new_owner()
        """The owner in the labels of this runtime's sandboxes."""
        self.redact = self.settings.redactor()
        """Removes the secrets that the driver knows from a text."""
        self._made: list[Closable] = []
        self.plugin_manager = PluginManager(
            allow=self.settings.plugins, extra=plugins, load_entry_points=load_entry_points
        )
        self.backends = self.plugin_manager.registry("backend")
        self.agents = self.plugin_manager.registry("agent")
        self.parsers = self.plugin_manager.registry("parser")
        self.environments = self.plugin_manager.registry("environment")
        self.sinks = self.plugin_manager.registry("sink")
        self.commands = self.plugin_manager.registry("command")
        self._tools: ToolRegistry | None = None
        self._backends: dict[str, Backend] = {}
        self._closed = False
        if self.settings.telemetry:
            self._start_telemetry()

    def _start_telemetry(self) -> None:
        """Make the observers that plugins registered for telemetry.

        Raises:
            ConfigError: no plugin registered observers.
            PluginError: an observer can't be made, or has no valid hook.
        """
        observers = self.plugin_manager.registry("observer")
        if not observers.entries():
            absent = [plugin.hint for plugin in observers.absent if plugin.name == "otel"]
            raise ConfigError(
                "telemetry is on, and no plugin in use sends it", hint=(absent or ["pip install hermes-rl-otel"])[0]
            )
        for entry in observers.entries():
            self.plugin_manager.observe(entry, self._keep(self._make(entry)))

    @property
    def tools(self) -> ToolRegistry:
        """Return every tool, toolset and distribution that the plugins registered."""
        if self._tools is None:
            self._tools = self._new_tools()
        return self._tools

    def backend(self, name: str) -> Backend:
        """Return the backend with this name. It is made on first use and closed with the runtime.

        Raises:
            UnknownNameError: no plugin provides this name.
            PluginError: two plugins claim the name, or the backend can't be made here, or has an impossible
                declaration.
        """
        entry = self.backends.entry(name)
        if entry.name not in self._backends:
            self._backends[entry.name] = self._keep(self.new_backend(name))
        return self._backends[entry.name]

    def new_backend(self, name: str) -> Backend:
        """Return a new backend with this name, which the caller closes. Raise as `backend` does."""
        entry = self.backends.entry(name)
        backend = _set_name(self._make(entry, self.settings), entry)
        what = f"backend {name!r} of {entry.plugin.label}"
        if not isinstance(backend, Backend):
            raise PluginError(f"{what} made {backend!r}, which is not a Backend")
        check_declarations(backend, what)
        return backend

    def config_classes(self) -> dict[str, Callable[[], type[SandboxConfig]]]:
        """Return, for each backend, a function that returns its `config_class`. The function makes the backend, and
        raises as `backend` does."""
        return {name: partial(self._config_class, name) for name in self.backends.names()}

    def _config_class(self, name: str) -> type[SandboxConfig]:
        return self.backend(name).config_class

    def profiles(
        self,
        name: str,
        given: Mapping[str, Mapping[str, Any] | SandboxConfig] | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        default_profile: str | None = None,
    ) -> dict[str, SandboxConfig]:
        """Return the profiles by name, as instances of the backend's `config_class`.

        Args:
            given: profiles by name; None is the settings' profiles.
            config: keys set in every profile.
            default_profile: the profile that is used when none is named; None is the settings' default. A default
                profile called `default` need not be defined.

        Raises:
            UnknownNameError: the backend, the default profile or a key does not exist.
            ConfigError: a profile has a wrong value.
        """
        backend = self.backend(name)
        used, where = default_profile or self.settings.default_profile, "" if default_profile else "in default_profile"
        named = dict(self.settings.profiles if given is None else given)
        if used == "default":
            named.setdefault(used, {})
        if used not in named:
            raise UnknownNameError("profile", used, named, where=where)
        return {name: _profile(backend, name, profile, config or {}) for name, profile in named.items()}

    def tool_backend(
        self,
        name: str,
        *,
        profiles: Mapping[str, Mapping[str, Any] | SandboxConfig] | None = None,
        isolation: str | Isolation = Isolation.USER,
        config: Mapping[str, Any] | None = None,
        prepare_sandbox: PrepareSandbox | None = None,
        checkpoint: Checkpoint | None = None,
        default_profile: str | None = None,
    ) -> ToolBackend:
        """Return a new tool backend on the backend with this name. It is an async context manager, and is closed with
        the runtime at the latest.

        Args:
            profiles: profiles by name; None is the settings' profiles.
            isolation: the minimum isolation between slots.
            config: keys set in every profile.
            prepare_sandbox: prepares each new sandbox of a profile whose network is `setup`.
            checkpoint: file with the state that a later driver needs to take over the sandboxes.
            default_profile: the profile that is used when none is named, as for `profiles`.

        Raises:
            UnknownNameError: the backend, the isolation level, the default profile or a key does not exist.
            ConfigError: a profile has a wrong value.
            PluginError: as `backend` does.
        """
        from hermes_core.tool_backend import ToolBackend

        level = Isolation.parse(isolation)
        backend = self.backend(name)
        return self._keep(
            ToolBackend(
                backend,
                profiles=self.profiles(name, profiles, config, default_profile=default_profile),
                tools=self.tools,
                isolation=level,
                owner=self.owner,
                default_profile=default_profile or self.settings.default_profile,
                events=self.plugin_manager.events,
                prepare_sandbox=prepare_sandbox,
                take_over=self.settings.owner is not None,
                checkpoint=checkpoint,
                on_closed=self._forget,
            )
        )

    def environment(self, name: str, config: Mapping[str, Any] | BaseModel | None = None) -> Environment:
        """Return a new environment with this name. The caller must call its `setup` and `aclose`.

        Args:
            config: the environment's settings, which its `config_class` checks; or an instance of this class.

        Raises:
            UnknownNameError: no plugin provides this name, or the environment has no such setting.
            ConfigError: a setting has a wrong value.
            PluginError: two plugins claim the name, or the environment can't be imported or made.
        """
        kind = self.environment_class(name)
        if not isinstance(config, kind.config_class):
            settings = config.model_dump(exclude_unset=True) if isinstance(config, BaseModel) else config or {}
            config = validate_data(kind.config_class, settings, f"environment {name!r}")
        entry = self.environments.entry(name)
        environment: Environment = _set_name(self._make(entry, config), entry)
        return environment

    def environment_class(self, name: str) -> type[Environment]:
        """Return the class of the environment with this name, for its `config_class`. Raise as `environment` does."""
        from hermes_core.environment import Environment, EnvironmentConfig

        entry = self.environments.entry(name)
        kind = entry.load()
        what = f"environment {name!r} of {entry.plugin.label}"
        if not (isinstance(kind, type) and issubclass(kind, Environment)):
            raise PluginError(
                f"{what} is {kind!r}, which is not an Environment class", hint="register a subclass of it"
            )
        if not (isinstance(kind.config_class, type) and issubclass(kind.config_class, EnvironmentConfig)):
            raise PluginError(
                f"{what} has {kind.config_class!r} as config_class", hint="make it a subclass of EnvironmentConfig"
            )
        return kind

    def agent(
        self,
        name: str,
        settings: Mapping[str, Any] | AgentSettings | None = None,
        *,
        model: SharesModel | None = None,
    ) -> Agent:
        """Return a new agent with this name. It is closed by `close`, or with the runtime.

        The agent `cheat:NAME` does the cheat NAME of its environment. An agent that is a `CanOpen`, such as `model`
        with a `tool_call_parser`, is opened by the run that uses it.

        Args:
            settings: the agent's settings; the model, endpoint and key that they do not set come from the runtime.
            model: an agent whose model this agent asks, instead of the model in its settings. It is closed with this
                agent.

        Raises:
            UnknownNameError: no plugin provides this name, or the agent has no such setting.
            UsageError, ConfigError: the agent refuses these settings, or can't be given a model.
            PluginError: two plugins claim the name, or the agent can't be imported or made.
        """
        if model is not None:
            return self._keep(self._agent_on(name, settings, model))
        filled = self.agent_settings(settings, name)
        if name.startswith(CHEAT):
            return CheatAgent(name.removeprefix(CHEAT))
        return self._keep(self._make_mixture(name, filled) if filled.models else self._agent(name, filled))

    def _make_mixture(self, name: str, settings: AgentSettings) -> Agent:
        """Return an agent that draws one of the settings' models for each rollout."""
        from hermes_core.agents.mixture import MixedAgent

        weights = [choice.weight for choice in (settings.models or {}).values()]
        agents = [self._agent(name, own) for own in settings.each_model().values()]
        return MixedAgent([*zip(agents, weights, strict=True)], settings.seed or 0)

    def _agent_on(self, name: str, settings: Mapping[str, Any] | AgentSettings | None, model: SharesModel) -> Agent:
        """Return an agent that asks this model."""
        factory = None if name.startswith(CHEAT) else self.agents.load(name)
        if not isinstance(factory, CanUseModel):
            raise UsageError(
                f"agent {name!r} can't be given a model", hint="use `model`, or an agent that is a program"
            )
        filled = self.agent_settings(settings, name)
        if filled.models:
            raise ConfigError("the agent is given one model, and its settings have several", hint="leave out models")
        return self._agent(name, filled, make=partial(factory.on_model, model=model))

    def _agent(self, name: str, filled: AgentSettings, make: Callable[..., Any] | None = None) -> Agent:
        entry = self.agents.entry(name)
        agent: Agent = _set_name(self._make(entry, filled, factory=make), entry)
        if not all(callable(getattr(agent, each, None)) for each in ("run", "aclose")):
            hint = "give it `async run(task)` and `async aclose()`; a subclass of Agent has both"
            raise PluginError(f"agent {name!r} of {entry.plugin.label} made {agent!r}, which is no Agent", hint=hint)
        return agent

    def agent_config_class(self, name: str) -> type[AgentSettings]:
        """Return the settings class of the agent with this name. Raise as `agent` does."""
        from hermes_core.agents.base import AgentSettings, find_retyped_settings

        if name.startswith(CHEAT):
            return AgentSettings
        entry = self.agents.entry(name)
        kind = getattr(entry.load(), "config_class", AgentSettings)
        if not (isinstance(kind, type) and issubclass(kind, AgentSettings)):
            raise PluginError(
                f"agent {name!r} of {entry.plugin.label} has {kind!r} as config_class",
                hint="make it a subclass of AgentSettings",
            )
        if retyped := find_retyped_settings(kind):
            raise PluginError(
                f"agent {name!r} of {entry.plugin.label} gives {', '.join(retyped)} of AgentSettings another type",
                hint="give its setting another name; `hermes-rl agents nop` lists those that are taken",
            )
        return kind

    def parser(self, name: str) -> Parser:
        """Return the tool-call parser with this name. It keeps no state, and serves any number of rollouts.

        Raises:
            UnknownNameError: no plugin provides this name.
            PluginError: two plugins claim the name, or the parser can't be imported or made, or is no parser.
        """
        from hermes_core.agents.parsers.base import Parser

        entry = self.parsers.entry(name)
        parser = self._make(entry)
        if not isinstance(parser, Parser):
            raise PluginError(f"parser {name!r} of {entry.plugin.label} made {parser!r}, which is not a Parser")
        return parser

    def sink(self, name: str, target: str = "") -> Sink:
        """Return a new sink with this name. The caller closes it.

        Args:
            target: the place to which the records go, in a form that the sink defines: a path, a URL.

        Raises:
            UnknownNameError: no plugin provides this name.
            UsageError, ConfigError: the sink refuses this target.
            PluginError: two plugins claim the name, or the sink can't be imported or made, or is no sink.
        """
        from hermes_core.sink import Sink

        entry = self.sinks.entry(name)
        made = self._make(entry, target)
        if not isinstance(made, Sink):
            hint = "give it `async write(record)` and `async aclose()`"
            raise PluginError(f"sink {name!r} of {entry.plugin.label} made {made!r}, which is no Sink", hint=hint)
        return made

    def agent_settings(
        self, given: Mapping[str, Any] | AgentSettings | None = None, agent: str | None = None
    ) -> AgentSettings:
        """Return the settings of an agent. The model, endpoint and key that were not given come from this runtime.

        Args:
            given: values, which the agent's `config_class` checks, or an instance of this class.
            agent: the agent's name. None stands for an agent whose `config_class` is `AgentSettings`.

        Raises:
            UnknownNameError, ConfigError: a key or a value is wrong, or there is no agent with that name.
        """
        from hermes_core.agents.base import AgentSettings

        kind = AgentSettings if agent is None else self.agent_config_class(agent)
        if not isinstance(given, kind):
            values = given.model_dump(exclude_unset=True) if isinstance(given, BaseModel) else given or {}
            given = validate_data(kind, values, "the agent" if agent is None else f"agent {agent!r}")
        ours = {"model": "model", **{key: f"{given.settings_prefix}{key}" for key in ("base_url", "api_key")}}
        unset = ours.keys() - given.model_fields_set
        return given.model_copy(update={key: getattr(self.settings, ours[key]) for key in unset})

    async def close(self, thing: Closable) -> None:
        """Close an object of this runtime now, instead of at the end of the runtime."""
        await thing.aclose()
        self._forget(thing)

    async def aclose(self) -> None:
        """Close all objects that this runtime made, in reverse order. Continue after a failure. Idempotent.

        Raises:
            ExceptionGroup: the failures.
        """
        self._closed = True
        errors: list[Exception] = []
        cancelled: asyncio.CancelledError | None = None
        while self._made:
            try:
                await close(self._made.pop())
            except asyncio.CancelledError as error:
                cancelled = error
            except Exception as error:
                errors.append(error)
        self._backends.clear()
        failed = ExceptionGroup("closing the runtime", errors) if errors else None
        if cancelled is not None:
            raise cancelled from failed
        if failed is not None:
            raise failed

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def _make(self, entry: PluginEntry, *arguments: Any, factory: Callable[..., Any] | None = None) -> Any:
        """Return the result of the entry's factory for these arguments.

        Args:
            factory: a method of the entry's factory; None is the factory itself.
        """
        self._check_open()
        make: Callable[..., Any] = factory or entry.load()

        def fault(error: Exception) -> PluginError:
            return PluginError(
                f"{entry.kind} {entry.name!r} of {entry.plugin.label} cannot be made: {describe(error)}",
                hint=import_hint(error, entry.plugin) if isinstance(error, ImportError) else BUG_HINT,
            )

        with explain_errors(fault), exits_are_errors():
            return make(*arguments)

    def _keep(self, thing: Thing) -> Thing:
        self._made.append(thing)
        return thing

    def _forget(self, thing: Closable) -> None:
        self._made = [each for each in self._made if each is not thing]

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this runtime is closed", hint="make a new Runtime")

    def _new_tools(self) -> ToolRegistry:
        from hermes_core.tools.registry import ToolRegistry

        refused: dict[tuple[str, str], HermesError] = {}

        def explain(kind: str, name: str) -> HermesError | None:
            return refused.get((kind, name)) or self.plugin_manager.registry(kind).explain(name)

        tools = ToolRegistry(explain)
        claimed = self.plugin_manager.registry("tool")
        for entry in claimed.entries():
            tools.add(entry.value)
        clashes = claimed.clashes()
        for entry in claimed.claims:
            if entry.name in clashes:  # the tool's toolsets would be incomplete
                refused.update({("toolset", name): clashes[entry.name] for name in entry.value.toolsets})
        for kind, add in (("toolset", tools.add_toolset), ("distribution", tools.add_distribution)):
            for entry in self.plugin_manager.registry(kind).entries():
                try:
                    add(entry.name, **entry.value, summary=entry.summary)
                except HermesError as error:
                    # A mistake in one plugin must not make all tools unusable. Callers that ask for this tool get the
                    # error.
                    log.warning("%s %r of %s: %s", kind, entry.name, entry.plugin.label, error)
                    refused[kind, entry.name] = error
        return tools


async def close(made: Closable) -> None:
    """Close an object of the runtime. A backend gets a time limit, because it has no more sandboxes to end.

    Raises:
        ProvisionError: a backend's `aclose` failed or took too long.
    """
    if not isinstance(made, Backend):
        await made.aclose()
        return
    try:
        with exits_are_errors():
            async with asyncio.timeout(CLOSE_S) as clock:
                await made.aclose()
    except HermesError:
        raise
    except Exception as error:
        late = isinstance(error, TimeoutError) and clock.expired()
        what = TimeoutError(f"it did not return within {CLOSE_S:g} s") if late else error
        raise plugin_fault(made, "aclose", what) from error


def _set_name(made: T, entry: PluginEntry) -> T:
    """Give a plugin's object the name under which it is registered. Users write this name, so records and messages have
    it, even if the class has another name."""
    if getattr(made, "name", None) != entry.name:
        with suppress(AttributeError):  # the name may be a property
            object.__setattr__(made, "name", entry.name)
    return made


def _profile(
    backend: Backend, name: str, given: Mapping[str, Any] | SandboxConfig, config: Mapping[str, Any]
) -> SandboxConfig:
    """Return one profile, with the keys of `config` set in it."""
    what = f"profile {name!r} of backend {backend.name!r}"
    if not isinstance(given, SandboxConfig):
        given = backend.config_class.from_dict(name, given)
    elif not isinstance(given, backend.config_class):
        raise ConfigError(f"{what} is a {type(given).__name__}", hint=f"use {backend.config_class.__name__}")
    return validate_data(backend.config_class, {**given.model_dump(exclude_unset=True), **config, "name": name}, what)


def _new_owner() -> str:
    """Return an id that no other runtime has, in letters that every provider accepts in a label."""
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")[:24]
    return f"{host or 'host'}-{os.getpid()}-{secrets.token_hex(4)}"
