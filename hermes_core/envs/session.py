"""What a run is made of: the environment, the backend, the agent, and what the rollouts of it have in common."""

from __future__ import annotations

import logging
import platform
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from hermes_core.agents.base import Agent, AgentSettings
from hermes_core.agents.baselines import OracleAgent
from hermes_core.environment import Environment
from hermes_core.envs.options import RunOptions, pool_size
from hermes_core.envs.rollout import RolloutContext
from hermes_core.envs.trajectory import Redact
from hermes_core.errors import HermesError, PluginError, UnknownNameError
from hermes_core.plugins.calling import EnvironmentHooks
from hermes_core.plugins.registry import describe
from hermes_core.sandbox.contract import Isolation
from hermes_core.settings import Redactor, url_secrets

if TYPE_CHECKING:
    from hermes_core.runtime import Runtime
    from hermes_core.tool_backend import ToolBackend

log = logging.getLogger(__name__)


def make_environment(
    runtime: Runtime, environment: str | Environment, config: Mapping[str, Any] | None, seed: int | None
) -> Environment:
    """The environment of that name, with the run's seed where it has none of its own; its dataset is not loaded yet."""
    if isinstance(environment, Environment):
        return environment
    seeded = {} if seed is None else {"seed": seed}
    return runtime.environment(environment, {**seeded, **(config or {})})


@asynccontextmanager
async def set_up(environment: Environment) -> AsyncIterator[None]:
    """The environment's dataset is loaded; it is closed at the end.

    Raises:
        DatasetError, ConfigError: as its `setup` says.
        PluginError: its `setup` is broken.
    """
    try:
        try:
            await environment.setup()
        except HermesError:
            raise
        except Exception as error:
            raise broken(environment, "setup()", error) from error
        yield
    finally:
        await environment.aclose()


def broken(environment: Environment, where: str, error: Exception) -> PluginError:
    """The error for an environment that fails in a way that it should not."""
    return PluginError(
        f"environment {environment.name!r} failed in {where}: {describe(error)}",
        hint="report this to its author; `hermes-rl --traceback …` shows where",
    )


def new_backend(
    runtime: Runtime, environment: Environment, options: RunOptions, isolation: Isolation, rollouts: int | None = None
) -> tuple[ToolBackend, int]:
    """The tool backend, not started yet, large enough for the run; and how many rollouts to do at a time.

    Args:
        rollouts: how many there are to do, if that is known: there is no use in room for more.

    Raises:
        UsageError, PolicyError: the backend can't be had as it is asked for.
    """
    if rollouts is not None:
        options = options.model_copy(update={"concurrency": max(1, min(options.concurrency, rollouts))})
    isolation = runtime.backend(options.backend).capabilities.least(isolation)
    profiles = runtime.profiles(options.backend)
    used = options.profile or runtime.settings.default_profile
    if used not in profiles:
        raise UnknownNameError("profile", used, profiles)
    sizes = {name: pool_size(options, isolation, profile) for name, profile in profiles.items()}
    if sizes[used].concurrency < options.concurrency:
        room = sizes[used].concurrency
        log.warning("profile %s has room for %d rollouts at a time, not for %d", used, room, options.concurrency)
    backend = runtime.tool_backend(
        options.backend,
        isolation=isolation,
        profiles={
            # Only what every rollout takes is made before one asks for it.
            name: sizes[name].applied(profile, warm=name == used and not environment.item_images)
            for name, profile in profiles.items()
        },
        prepare_sandbox=environment.prepare_sandbox,
    )
    return backend, 0 if rollouts == 0 else sizes[used].concurrency


def hooks_for(runtime: Runtime, environment: Environment, agent: str) -> EnvironmentHooks:
    """The environment's hooks, for this agent.

    Raises:
        PluginError: one of them can't work.
        UsageError: the agent is `oracle`, and the environment has no reference solution.
    """
    hooks = EnvironmentHooks(environment, runtime.plugin_manager.hooks.list_name_plugin())
    if agent == OracleAgent.name:
        hooks.check_solve()
    return hooks


@asynccontextmanager
async def open_agent(runtime: Runtime, agent: str | Agent, settings: AgentSettings) -> AsyncIterator[Agent]:
    """The agent; closed at the end if it was made here."""
    if not isinstance(agent, str):
        yield agent
        return
    made = runtime.agent(agent, settings)
    try:
        yield made
    finally:
        await runtime.close(made)


async def check_endpoint(agent: Agent) -> None:
    """Find out, before the first sandbox is made, whether the agent's model can be asked.

    Raises:
        ModelError: it can't.
    """
    if (check := getattr(agent, "check_endpoint", None)) is not None:
        await check()


def new_context(
    runtime: Runtime,
    environment: Environment,
    agent: Agent,
    backend: ToolBackend,
    options: RunOptions,
    *,
    hooks: EnvironmentHooks | None = None,
    redact: Redact | None = None,
) -> RolloutContext:
    """What the rollouts of an agent have in common. Raises as `hooks_for` does, if it is not given what that gave."""
    return RolloutContext(
        environment=environment,
        hooks=hooks or hooks_for(runtime, environment, agent.name),
        agent=agent,
        backend=backend,
        tools=runtime.tools,
        backend_name=options.backend,
        profile=options.profile or runtime.settings.default_profile,
        limits=options.limits,
        redact=redact or runtime.redact,
    )


def redactor(runtime: Runtime, settings: AgentSettings | None = None) -> Redact:
    """What takes the secrets that the driver knows out of a text, the agent's key and its URL's password included."""
    if settings is None:
        return runtime.redact
    known = url_secrets("the agent's base_url", settings.base_url or "")
    if settings.api_key is not None:
        known["the agent's api_key"] = settings.api_key.get_secret_value()
    own = Redactor(known)
    return lambda text: own(runtime.redact(text))


def versions(runtime: Runtime) -> dict[str, str]:
    """What ran: Python, hermes-rl, and every plugin's distribution."""
    from hermes_core.version import __version__

    plugins = {plugin.distribution: plugin.version for plugin in runtime.plugin_manager.plugins if plugin.distribution}
    return {"python": platform.python_version(), "hermes-rl": __version__, **plugins}
