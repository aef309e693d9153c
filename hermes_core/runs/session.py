"""The one way to open a run: checks the options, loads the dataset, makes the sandboxes, and closes all at the end."""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hermes_core.agents.base import Agent, AgentSettings, CanCheckEndpoint, is_in_slot, takes_mcp
from hermes_core.agents.baselines import CHEAT, OracleAgent
from hermes_core.agents.exact.chat import Chat
from hermes_core.agents.exact.factory import AgentContext, enter_agent
from hermes_core.agents.exact.generate import TokenServer
from hermes_core.agents.parsers.base import Parser
from hermes_core.aio import exits_are_errors
from hermes_core.environment import Environment, Item
from hermes_core.errors import ConfigError, PluginError, UsageError, describe, explain_errors
from hermes_core.mcp.opening import check_installed, check_servers
from hermes_core.mcp.servers import McpServer, secrets_of
from hermes_core.plugins.calling import EnvironmentHooks
from hermes_core.records.jsonable import Redact, plain
from hermes_core.rollout.rollout import RolloutContext
from hermes_core.rollout.running import RunningRollouts
from hermes_core.runs.options import (
    BASELINES,
    COST,
    PATIENCE,
    PoolSize,
    RunOptions,
    check_slot_user,
    choose_isolation,
    pool_size,
)
from hermes_core.runs.quarantine import Quarantine
from hermes_core.runs.stall_watchdog import STALLS, stalls_noticed
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Backend, Isolation
from hermes_core.sandbox.pool.profile_check import resolve_isolation
from hermes_core.settings import Redactor, url_secrets
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import resolve_servers, resolve_tools
from hermes_core.version import __version__

log = logging.getLogger(__name__)


_NOT_CONFIGURATION: Any = {**dict.fromkeys(("api_key", *PATIENCE), True), "models": {"__all__": {"api_key"}}}
"""Settings of the agent that a run's configuration leaves out."""


@dataclass
class Session:
    """An open run, with checked options and a loaded dataset; see `open_session`."""

    runtime: Runtime
    name: str
    """The environment's registered name if the environment was given by name; else the instance's own name."""
    environment: Environment
    agent: Agent
    options: RunOptions
    isolation: Isolation
    slots: ToolBackend
    """A tool backend that answers which slots are possible; never started."""
    hooks: EnvironmentHooks
    tools: Tools
    redact: Redact
    """Removes the secrets that the driver knows from a text."""
    settings: AgentSettings | None = None
    """The settings of an agent given by name, else None."""
    quarantine: Quarantine | None = None
    """The items that the run leaves out."""
    room: int = 0
    """Maximum number of rollouts at the same time; set when the sandboxes are made."""

    @property
    def backend(self) -> Backend:
        """Return the backend of the run's sandboxes."""
        return self.runtime.backend(self.options.backend)

    @property
    def backend_name(self) -> str:
        """Return the backend's name for records. The options may have an alias of it."""
        return self.runtime.backends.entry(self.options.backend).name

    def _why_dedicated(self) -> str:
        """Return a hint where to read why only the level `dedicated` is granted: at the backend or the profile."""
        name, declared = self.options.backend, self.backend.capabilities.least(self.isolation)
        if declared is Isolation.DEDICATED:
            return f"`hermes-rl doctor {name}` says why"
        return f"the profile's settings exclude {declared.label}: `hermes-rl backends {name}` lists the settings"

    def configuration(self) -> dict[str, Any]:
        """Return everything that affects the run's records, as JSON values and without secrets.

        The concurrency, and the conditions for an early stop (such as the cost limit), are left out.
        """
        options, agent = self.options, self.agent.name
        settings = None if self.settings is None or agent in BASELINES or agent.startswith(CHEAT) else self.settings
        configuration = {
            "environment": self.name,
            "env": self.environment.config.model_dump(mode="json"),
            "agent": agent,
            "agent_settings": settings and settings.model_dump(mode="json", exclude=_NOT_CONFIGURATION),
            "backend": self.backend_name,
            "backend_config": {key: value for key, value in options.backend_config.items() if key not in COST},
            **({"profile": options.profile} if options.profile else {}),
            "isolation": self.isolation.label,
            "group_size": options.group_size,
            "seed": options.seed,
            "rollout_timeout": options.rollout_timeout,
            "model_timeout": options.model_timeout,
            "setup_timeout": options.setup_timeout,
            "verify_timeout": options.verify_timeout,
            **({"deadline": options.deadline} if options.deadline else {}),
            **(
                {"mcp": {name: server.without_secrets() for name, server in options.mcp.items()}} if options.mcp else {}
            ),
            **({"quarantine": self.quarantine.to_configuration()} if self.quarantine else {}),
        }
        kept: dict[str, Any] = plain(configuration, self.redact)
        return kept

    @asynccontextmanager
    async def sandboxes(
        self, rollouts: int | None = None, *, start: bool = True, stalls: Path | None = None
    ) -> AsyncIterator[RolloutContext]:
        """Check that the model's endpoint can be used, make sandboxes, and end them afterwards.

        Args:
            rollouts: number of rollouts to do, if known. No more slots than this are made; for 0, nothing is started.
            start: make sandboxes now; otherwise the caller starts the context's backend.
            stalls: the file for the stacks of a run that stalls; None is a file in the runtime's state directory.

        Raises:
            ModelError: the endpoint is unreachable, or refuses the key or the model; no sandbox was made.
            InfraError: the backend could not be started.
        """
        backend, self.room = _new_backend(self.runtime, self.environment, self.options, self.isolation, rollouts)
        if self.room and self.isolation < backend.isolation is Isolation.DEDICATED:
            log.warning(
                "backend %s grants no %s here, so each slot is a sandbox of its own (dedicated), which takes longer to "
                "start; %s",
                *(self.options.backend, self.isolation.label, self._why_dedicated()),
            )
        running, state = RunningRollouts(), self.runtime.settings.state_dir
        async with AsyncExitStack() as stack:
            stack.push_async_callback(backend.aclose)
            stack.push_async_callback(running.aclose)
            await stack.enter_async_context(
                stalls_noticed(running, stalls or state / STALLS, self.options.stall_timeout)
            )
            if self.room:
                await check_endpoint(self.agent)
                await check_servers(self.tools.servers)
                if start:
                    await backend.start()
            yield RolloutContext(
                environment=self.environment,
                hooks=self.hooks,
                agent=self.agent,
                backend=backend,
                tools=self.runtime.tools,
                backend_name=self.backend_name,
                profile=self.options.profile or self.runtime.settings.default_profile,
                limits=self.options,
                redact=self.redact,
                seed=self.options.seed,
                versions=versions(self.runtime, self.agent),
                running=running,
                controls=asyncio.Semaphore(max(1, self.room // 2)),
            )


@asynccontextmanager
async def open_session(
    runtime: Runtime,
    environment: str | Environment,
    agent: str | Agent,
    options: RunOptions,
    *,
    env: Mapping[str, Any] | None = None,
    settings: AgentSettings | None = None,
    work_of: str | None = None,
    server: Callable[[Chat], TokenServer] | None = None,
    load: Callable[[], Awaitable[None]] | None = None,
    redact: Redactor | None = None,
) -> AsyncIterator[Session]:
    """Open a run, except for its sandboxes. The options are checked before the dataset is read.

    Args:
        environment: the environment's name, or an instance, which is set up and closed here.
        agent: the agent's name, or an instance (which the caller closes).
        env: the environment's configuration, for an environment given by name.
        settings: the agent's settings, for an agent given by name.
        work_of: the name of another agent, if that agent's work runs in the sandboxes; its name decides the isolation.
        server: makes the token server of the agent `model` from the chat template; rollouts are then token-exact. None
            is the server at the settings' `base_url`.
        load: called instead of the environment's `setup`.
        redact: removes secrets; None removes the secrets of the runtime and of `settings`.

    Raises:
        UsageError, PolicyError: something given by name does not exist, or an option is impossible.
        DatasetError: the dataset can't be used.
        ConfigError: the quarantine file can't be used, or does not fit this dataset.
        PluginError: a plugin or the environment is broken.
    """
    runtime.backends.entry(options.backend)
    quarantine = await asyncio.to_thread(Quarantine.read, options.quarantine) if options.quarantine else None
    made = make_environment(runtime, environment, env, options.seed)
    servers = options.mcp or {}
    tools = Tools(runtime, made, options.seed, servers)
    async with open_agent(
        runtime,
        agent,
        settings or AgentSettings(),
        tools=bool(servers or tools.names()),
        system=bool(made.config.system_prompt),
        server=server,
    ) as worker:
        if servers and not takes_mcp(worker):
            raise ConfigError(
                f"agent {worker.name!r} is a program with tools of its own, and can't be given MCP servers",
                hint="leave out --mcp, or use another agent: `hermes-rl agents NAME` says whether it takes them",
            )
        isolation = choose_isolation(options, made, runtime.backend(options.backend), work_of or worker.name)
        if is_in_slot(worker) and isolation is Isolation.SHARED:
            raise UsageError(
                f"agent {worker.name!r} asks its model at a port of its slot, and at level shared nothing keeps others "
                "from it",
                hint="give --isolation user, or a higher level",
            )
        slots, _ = _new_backend(runtime, made, options, isolation, None)
        session = Session(
            runtime=runtime,
            name=environment if isinstance(environment, str) else environment.name,
            environment=made,
            agent=worker,
            options=options,
            isolation=isolation,
            slots=slots,
            hooks=hooks_for(runtime, made, worker.name),
            tools=tools,
            redact=(redact or redactor(runtime, *([settings] if settings else []))).with_secrets(secrets_of(servers)),
            settings=settings if isinstance(agent, str) else None,
            quarantine=quarantine,
        )
        made.left_out = quarantine.item_ids if quarantine else frozenset()  # before `set_up`, which selects the items
        async with set_up(made, load):
            if quarantine is not None:
                await _check_quarantine(quarantine, session.name, made)
            yield session


def make_environment(
    runtime: Runtime, environment: str | Environment, config: Mapping[str, Any] | None, seed: int | None
) -> Environment:
    """Return the environment with this name, without loading its dataset. An environment without a seed gets the run's
    seed."""
    if isinstance(environment, Environment):
        return environment
    seeded = {} if seed is None else {"seed": seed}
    return runtime.environment(environment, {**seeded, **(config or {})})


def check_scored(environment: Environment) -> None:
    """Refuse an environment whose rollouts get no reward.

    Raises:
        UsageError: the rollouts of the environment get no reward.
    """
    if not environment.scored:
        raise UsageError(
            f"environment {environment.name!r} gives no rewards", hint="`hermes-rl rollout` makes data with it"
        )


@asynccontextmanager
async def set_up(environment: Environment, load: Callable[[], Awaitable[None]] | None = None) -> AsyncIterator[None]:
    """Load the environment's dataset, and close the environment at the end.

    Args:
        load: called in place of the environment's `setup`.

    Raises:
        DatasetError, ConfigError: as the environment's `setup` raises them.
        PluginError: the environment's `setup` is broken.
    """
    try:
        with explain_errors(partial(environment_error, environment, "setup()")):
            await (load or environment.setup)()
        yield
    finally:
        await environment.aclose()


async def _check_quarantine(quarantine: Quarantine, name: str, environment: Environment) -> None:
    """Check that the quarantine belongs to the environment's dataset.

    Raises:
        ConfigError: the quarantine belongs to another dataset.
        PluginError: the environment is broken.
    """
    with explain_errors(partial(environment_error, environment, ITEMS)):
        await asyncio.to_thread(quarantine.check, name, environment)


ITEMS = "items() or item_id()"
"""The argument `where` of `environment_error`, if an environment's items can't be read."""


def environment_error(environment: Environment, where: str, error: Exception) -> PluginError:
    """Return the error for an environment that fails in an unexpected way."""
    return PluginError(
        f"environment {environment.name!r} failed in {where}: {describe(error)}",
        hint="report this to its author; `hermes-rl --traceback …` shows where",
    )


def _new_backend(
    runtime: Runtime, environment: Environment, options: RunOptions, isolation: Isolation, rollouts: int | None
) -> tuple[ToolBackend, int]:
    """Return the tool backend for the run, not started yet, and the number of concurrent rollouts that it has room for.

    Raises:
        UsageError, PolicyError: the backend can't be made with these options.
    """
    if rollouts is not None:
        options = options.model_copy(update={"concurrency": max(1, min(options.concurrency, rollouts))})
    profiles = runtime.profiles(options.backend, default_profile=options.profile)
    asked = [PoolSize({}, options.backend_config, 0).apply_to(profile, warm=True) for profile in profiles.values()]
    isolation = resolve_isolation(runtime.backend(options.backend), isolation, asked)
    used = options.profile or runtime.settings.default_profile
    sizes = {
        name: pool_size(options, isolation, profile, environment.slot_user, share_network=environment.share_network)
        for name, profile in profiles.items()
    }
    if sizes[used].concurrency < options.concurrency:
        room = sizes[used].concurrency
        log.warning("profile %s has room for %d rollouts at a time, not for %d", used, room, options.concurrency)
    profiles = {
        # Only sandboxes that every rollout can use are made in advance.
        name: sizes[name].apply_to(profile, warm=name == used and not environment.item_images)
        for name, profile in profiles.items()
    }
    check_slot_user(environment, profiles[used], isolation)
    backend = runtime.tool_backend(
        options.backend,
        isolation=isolation,
        profiles=profiles,
        prepare_sandbox=environment.prepare_sandbox,
        default_profile=used,
    )
    return backend, 0 if rollouts == 0 else sizes[used].concurrency


def hooks_for(runtime: Runtime, environment: Environment, agent: str) -> EnvironmentHooks:
    """Return the environment's hooks, after checking that they can work with this agent.

    Raises:
        PluginError: one of the hooks can't work.
        UsageError: the agent is `oracle`, and the environment has no reference solution; or the agent is a cheat that
            the environment does not have.
    """
    hooks = EnvironmentHooks(environment, runtime.plugin_manager.registered)
    if agent == OracleAgent.name:
        hooks.check_solve()
    if agent.startswith(CHEAT):
        hooks.check_cheat(agent.removeprefix(CHEAT))
    return hooks


@asynccontextmanager
async def open_agent(
    runtime: Runtime,
    agent: str | Agent,
    settings: AgentSettings,
    *,
    tools: bool = False,
    system: bool = False,
    server: Callable[[Chat], TokenServer] | None = None,
) -> AsyncIterator[Agent]:
    """Make the agent with this name, and close it at the end. An agent that was passed in is left open.

    Args:
        tools, system: whether rollouts have tools, and a system message. It is checked that a token-exact agent can
            handle these.
        server: see `open_session`.
    """
    async with AsyncExitStack() as stack:
        made = agent if not isinstance(agent, str) else runtime.agent(agent, settings)
        if isinstance(agent, str):
            stack.push_async_callback(runtime.close, made)
        opened = await enter_agent(made, AgentContext(partial(parsers_with, runtime), tools, system, server))
        if opened is not made:
            await stack.enter_async_context(aclosing(opened))
        yield opened


def parsers_with(runtime: Runtime, name: str) -> dict[str, Parser]:
    """Return all parsers by name: first the parser with this name or alias, then all in the order of registration.

    Formats of many models are registered before formats of few models.

    Raises:
        UnknownNameError: there is no such parser.
        PluginError: a parser can't be made.
    """
    return {each: runtime.parser(each) for each in (name, *runtime.parsers.in_order())}


async def check_endpoint(agent: Agent) -> None:
    """Check that the agent's model can be used.

    Raises:
        ModelError: the model can't be used.
        PluginError: the agent's check itself is broken.
    """
    if not isinstance(agent, CanCheckEndpoint):
        return

    def fault(error: Exception) -> PluginError:
        message = f"agent {agent.name!r} failed in check_endpoint(): {describe(error)}"
        return PluginError(message, hint="report this to its author; `hermes-rl --traceback …` shows where")

    with explain_errors(fault), exits_are_errors():
        await agent.check_endpoint()


def redactor(runtime: Runtime, *settings: AgentSettings) -> Redactor:
    """Return a function that removes secrets from a text: all that the driver knows, including those in these
    settings."""
    return runtime.redact.with_secrets(*map(_secrets, settings))


def _secrets(settings: AgentSettings) -> dict[str, str]:
    known: dict[str, str] = {}
    for name, own in {"the agent": settings, **settings.each_model()}.items():
        known |= url_secrets(f"{name}'s base_url", own.base_url or "")
        if own.api_key is not None:
            known.setdefault(f"{name}'s api_key", own.api_key.get_secret_value())
    return known


def versions(runtime: Runtime, agent: Agent | None = None) -> dict[str, str]:
    """Return the versions of Python, hermes-rl, every plugin's distribution, and the agent if it has a version."""
    own: str | None = getattr(agent, "version", None)
    agents = {agent.name: own} if agent is not None and own is not None else {}
    plugins = {plugin.distribution: plugin.version for plugin in runtime.plugin_manager.plugins if plugin.distribution}
    return {"python": platform.python_version(), "hermes-rl": __version__, **plugins, **agents}


class Tools:
    """Chooses the tools and MCP servers of each group. All rollouts of an item have the same ones; if they come from a
    distribution, they are drawn anew for each item.

    Args:
        servers: the run's MCP servers.

    Raises:
        UnknownNameError: the environment's configuration names a toolset or a distribution that does not exist.
        ConfigError: `servers` is not empty, and MCP servers can't be used here.
    """

    def __init__(
        self,
        runtime: Runtime,
        environment: Environment,
        seed: int | None,
        servers: Mapping[str, McpServer] | None = None,
    ) -> None:
        config = environment.config
        self.servers = servers or {}
        self._registry = runtime.tools.with_toolsets(self.servers)
        self._environment = environment
        self._distribution = config.distribution
        self._toolsets = config.enabled_toolsets
        if self._toolsets is None:
            self._toolsets = (*environment.default_toolsets, *self.servers)
        self._disabled = config.disabled_toolsets
        self._seed = seed or 0
        self._of_toolsets: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._schemas: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        self.names()
        if self.servers:
            check_installed()
            self._check_offered()

    def _check_offered(self) -> None:
        """Warn if there are servers that no rollout is offered, unless items or a distribution choose the tools."""
        if self._distribution is None:
            offered = resolve_servers(
                self._registry, self.servers, enabled_toolsets=self._toolsets, disabled_toolsets=self._disabled
            )
            for name in self.servers.keys() - offered:
                log.warning("MCP server %r is in no enabled toolset: name it as one to offer its tools", name)

    def names(self, item: Item | None = None, group: str = "") -> tuple[str, ...]:
        """Return the names of the tools that the rollouts of an item can call, without those of MCP servers. None
        stands for an item that names no tools.

        Raises:
            UnknownNameError: the item names a toolset or a distribution that does not exist.
        """
        toolsets, distribution, seed = self._choice(item, group)
        if toolsets is None:
            return tuple(resolve_tools(self._registry, None, self._disabled, distribution, seed))
        if toolsets not in self._of_toolsets:
            self._of_toolsets[toolsets] = tuple(resolve_tools(self._registry, toolsets, self._disabled))
        return self._of_toolsets[toolsets]

    def servers_for(self, item: Item, group: str) -> dict[str, McpServer]:
        """Return the run's MCP servers that the rollouts of an item can use."""
        if not self.servers:
            return {}
        toolsets, distribution, seed = self._choice(item, group)
        chosen = resolve_servers(
            self._registry,
            self.servers,
            enabled_toolsets=toolsets,
            disabled_toolsets=self._disabled,
            distribution=distribution,
            seed=seed,
        )
        return {name: self.servers[name] for name in chosen}

    def _choice(self, item: Item | None, group: str) -> tuple[tuple[str, ...] | None, str | None, str]:
        """Return toolsets, distribution, and seed of the draw for an item's rollouts. Toolsets or distribution, or
        both, are None."""
        toolsets, distribution = self._toolsets, self._distribution
        if item is not None:
            if (own := self._environment.toolsets(item)) is not None:
                toolsets, distribution = tuple(own), None
            else:
                distribution = self._environment.distribution(item) or distribution
        return (None if distribution is not None else toolsets), distribution, f"{self._seed}:{group}"

    def need_slot(self, item: Item, group: str) -> bool:
        """Return whether the item's rollouts need a slot: for a hook, for a tool, or for an MCP server."""
        if self._environment.uses_slot(item):
            return True
        names = self.names(item, group)
        servers = {**self._environment.mcp_servers(item), **self.servers_for(item, group)}
        return any(self._registry.get(name).where == "sandbox" for name in names) or not all(
            server.on_driver for server in servers.values()
        )

    def offer_tools(self, context: RolloutContext, item: Item, group: str) -> RolloutContext:
        """Return a copy of the context with the tools of the item's group. An agent that is a program in the slot
        brings its own tools, and gets only those of MCP servers."""
        servers = self.servers_for(item, group)
        if is_in_slot(context.agent):
            return replace(context, tool_names=(), tool_schemas=(), mcp_servers=servers, needs_slot=True)
        names = self.names(item, group)
        if names not in self._schemas:
            self._schemas[names] = self._registry.schemas(names)
        schemas, slot = self._schemas[names], self.need_slot(item, group)
        return replace(context, tool_names=names, tool_schemas=schemas, mcp_servers=servers, needs_slot=slot)
