"""The options of a run, and values derived from them: isolation level, size of the pool, agent settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from hermes_core.agents.base import Agent, AgentSettings
from hermes_core.environment import Environment
from hermes_core.errors import ConfigError, PolicyError, UsageError
from hermes_core.mcp.servers import McpServer, read_servers
from hermes_core.rollout.limits import Limits
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Backend, Isolation, SandboxConfig, SlotUser
from hermes_core.validation import validate_data

BASELINES = frozenset({"oracle", "nop"})
"""Agents that run only code of the environment."""

MOST_AT_A_TIME = 1 << 16
"""Maximum number of rollouts of a group, and of rollouts at the same time. A larger number must be a typing error."""

MOST_PREFETCHED = 1 << 10
"""Maximum number of groups whose images are made ahead."""

PATIENCE = frozenset(
    {
        *("endpoint_patience_s", "max_retries", "max_retry_wait_s", "request_timeout_s"),
        *("check_patience_s", "requests_per_minute", "tokens_per_minute", "prices", "cache_control"),
    }
)
"""Agent settings that do not affect rewards. A run that ended because of one can be resumed with a higher value."""

COST = frozenset({"prices", "max_cost"})
"""Settings of a profile that do not affect records."""

MOST_SLOTS = 32
"""Maximum number of slots of one sandbox, unless the profile sets a number."""


class RolloutOptions(Limits):
    """The options of a run that have the same name everywhere."""

    isolation: str | None = None
    """Isolation level of slots: shared, user, namespace, private-root or dedicated. None is user, or the environment's
    minimum if that is higher."""
    allow_unisolated: bool = False
    """Accept a level below the minimum of the environment or the agent."""
    stall_timeout: float | None = Field(default=1800.0, gt=0)
    """Seconds without the end of a rollout, although some run, after which the stacks of all tasks and threads are
    written to `stalls.txt` in the run's folder. Ten seconds of a blocked event loop are a stall, too. None is off."""
    prefetch: int = Field(default=4, ge=0, le=MOST_PREFETCHED)
    """Number of groups whose images are built or fetched ahead, while the groups before them run. 0 is none."""
    quarantine: str | None = None
    """File of items that the run leaves out, which `hermes-rl validate` wrote."""


class RunOptions(RolloutOptions):
    """Options of a run. Frozen. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    backend: str = "local"
    """Backend that makes the sandboxes."""
    backend_config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the backend's sandboxes. They override those of the profile."""
    profile: str | None = None
    """Profile of `HERMES_PROFILES_FILE` for items that name none. None is that file's default."""
    concurrency: int = Field(default=4, ge=1, le=MOST_AT_A_TIME)
    """How many rollouts, or other pieces of work, run at the same time."""
    group_size: int = Field(default=1, ge=1, le=MOST_AT_A_TIME)
    """Number of rollouts per item."""
    seed: int | None = None
    """Random seed for the order of items, for drawn tools and for the model's sampling, unless they have their own."""
    stop_on_infra: float | None = Field(default=None, ge=0, le=1)
    """Stop the run if more than this share (0 to 1) of the last 10 to 20 rollouts failed because of the infrastructure,
    their images or the model's endpoint."""
    mcp: Annotated[dict[str, McpServer] | None, BeforeValidator(read_servers)] = None
    """Offer the tools of these MCP servers: a JSON or YAML file with the key `mcpServers`, or the servers by name. Each
    server is a toolset of that name. All are offered, unless the environment's configuration names toolsets or a
    distribution."""
    max_cost: float | None = Field(default=None, gt=0)
    """Begin no rollout once the model's tokens have cost this many US dollars, in all sessions of the run together; it
    needs the agent's `prices`. Rollouts that run then are finished."""


def choose_isolation(options: RunOptions, environment: Environment, backend: Backend, agent: str) -> Isolation:
    """Return the isolation level of the run.

    Raises:
        UnknownNameError: there is no level with that name.
        UsageError: the level is weaker than the environment accepts, or a model would work unisolated on the driver's
            host.
    """
    least = environment.least_isolation
    if options.isolation is None:
        return max(Isolation.USER, least)
    level = Isolation.parse(options.isolation)
    if options.allow_unisolated:
        return level
    if level < least:
        needs = (
            f": each slot needs a {' and a '.join(sorted(environment.needs))} of its own" if environment.needs else ""
        )
        raise UsageError(
            f"environment {environment.name!r} accepts no isolation below {least.label!r}{needs}",
            hint=f"use --isolation {least.label}, or --allow-unisolated if you trust what runs",
        )
    if level < Isolation.USER and backend.capabilities.on_driver_host and agent not in BASELINES:
        raise UsageError(
            f"agent {agent!r} would run commands of a model on this host, with your rights (isolation {level.label!r})",
            hint="use --isolation user or namespace, another backend, or --allow-unisolated if you trust the model",
        )
    return level


def check_slot_user(environment: Environment, profile: SandboxConfig, isolation: Isolation) -> None:
    """Refuse slots with another user than the environment needs, and slots of root if the environment hides files from
    slots.

    Raises:
        PolicyError: the profile gives slots such a user.
    """
    if environment.slot_user not in (None, profile.slot_user):
        raise PolicyError(
            f"environment {environment.name!r} needs slots with slot_user {str(environment.slot_user)!r}, and profile "
            f"{profile.name!r} has {str(profile.slot_user)!r}",
            hint="leave out slot_user",
        )
    if environment.hides_files and profile.root_of_sandbox(isolation):
        raise PolicyError(
            f"environment {environment.name!r} hides files from its slots, and profile {profile.name!r} has slot_user "
            "'root', from whom nothing can be hidden",
            hint="leave out slot_user",
        )


@dataclass(frozen=True)
class PoolSize:
    """The size of a profile's pool in a run."""

    defaults: Mapping[str, Any]
    """Values for settings that neither the profile nor the caller sets."""
    given: Mapping[str, Any]
    """The caller's settings, which override the profile's."""
    concurrency: int
    """Number of rollouts that have room at the same time; at most the requested number."""

    def apply_to(self, profile: SandboxConfig, *, warm: bool) -> SandboxConfig:
        """Return the profile with this size.

        Args:
            warm: whether to make sandboxes in advance, before the first rollout, unless the profile sets their number.

        Raises:
            UnknownNameError, ConfigError: the caller's settings are wrong.
        """
        defaults = self.defaults if warm else {**self.defaults, "min_sandboxes": 0}
        settings = {**defaults, **profile.model_dump(exclude_unset=True), **self.given, "name": profile.name}
        return validate_data(type(profile), settings, f"profile {profile.name!r}")


def pool_size(
    options: RunOptions,
    isolation: Isolation,
    profile: SandboxConfig,
    slot_user: SlotUser | None = None,
    *,
    share_network: bool = False,
) -> PoolSize:
    """Return a size with slots for the agents of all concurrent rollouts, and as many reserved for verification.

    Args:
        slot_user: the user of slots for a profile that does not name one.
        share_network: whether slots with private roots share the sandbox's network, for a profile that does not set
            this.

    Raises:
        UsageError: the profile has no slots besides those reserved for verification.
    """
    settings = {**profile.model_dump(exclude_unset=True), **options.backend_config}
    reserve = _number(settings, "reserve_slots", options.concurrency)
    slots_wanted = options.concurrency + reserve
    most = 1 if isolation is Isolation.DEDICATED else MOST_SLOTS
    least_sandboxes = math.ceil(slots_wanted / _number(settings, "slots_per_sandbox", most))
    slots = _number(settings, "slots_per_sandbox", math.ceil(slots_wanted / least_sandboxes))
    # Verifying an untouched environment takes a second slot, beside the slot in which it was set up.
    most_slots = options.concurrency + max(reserve, 2)
    sandboxes = _number(settings, "max_sandboxes", math.ceil(most_slots / slots))
    room = slots * sandboxes - reserve
    if room < 1:
        raise UsageError(
            f"profile {profile.name!r}: {slots} slots in {sandboxes} sandboxes leave no slot for agents beside the "
            f"reserve of {reserve}",
            hint="raise slots_per_sandbox or max_sandboxes, or lower reserve_slots",
        )
    defaults: dict[str, Any] = {
        "slots_per_sandbox": slots,
        "max_sandboxes": sandboxes,
        "min_sandboxes": min(sandboxes, least_sandboxes),
        "reserve_slots": reserve,
        "acquire_timeout_s": 300.0,
        "execution_timeout_s": 180.0,
    }
    if slot_user is not None:
        defaults["slot_user"] = slot_user
    if share_network and isolation is Isolation.PRIVATE_ROOT:
        defaults["share_network"] = True
    return PoolSize(defaults, options.backend_config, min(room, options.concurrency))


def _number(given: Mapping[str, Any], key: str, default: int) -> int:
    """Return a whole number from the profile. A value of another type is left for the backend's own check to refuse."""
    try:
        return int(given[key]) if int(given.get(key, 0)) > 0 or given.get(key) == 0 else default
    except (TypeError, ValueError):
        return default


def check_price(agent: str | Agent, settings: AgentSettings, max_cost: float | None) -> None:
    """Refuse a cost limit if the model's prices are not known.

    Raises:
        ConfigError: `max_cost` is set, and the prices are not known.
    """
    unpriced = [each.model for each in settings.each_model().values() or (settings,) if each.price is None]
    if max_cost is not None and agent not in BASELINES and unpriced:
        raise ConfigError(
            f"max_cost is set, and the prices of model {unpriced[0]!r} are not known",
            hint="set --agent.prices=FILE, with `MODEL: {prompt: USD, completion: USD}`, each per million tokens",
        )


def agent_settings(
    runtime: Runtime, agent: str | Agent, given: Mapping[str, Any] | AgentSettings | None, seed: int | None
) -> AgentSettings:
    """Return the agent's settings. A missing seed comes from the run; a missing model, endpoint or API key from the
    runtime.

    Raises:
        UnknownNameError, ConfigError: a key or a value is wrong.
    """
    filled = runtime.agent_settings(given, agent if isinstance(agent, str) else None)
    return filled if filled.seed is not None else filled.model_copy(update={"seed": seed})
