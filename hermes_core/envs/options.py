"""What a run can be told, and what follows from it: the isolation level, the size of the pool, the configuration."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from hermes_core.agents.base import AgentSettings
from hermes_core.envs.base import Environment
from hermes_core.envs.rollout import Limits
from hermes_core.errors import UsageError
from hermes_core.sandbox.contract import Isolation, SandboxConfig
from hermes_core.settings import validated

if TYPE_CHECKING:
    from hermes_core.runtime import Runtime

log = logging.getLogger(__name__)

BASELINES = frozenset({"oracle", "nop"})
"""Agents that run nothing but what the environment itself provides."""

ON_DRIVER_HOST = frozenset({"local"})
"""Backends whose sandboxes are on the driver's own host."""

MOST_AT_A_TIME = 1 << 16
"""Rollouts of a group, and at the same time, at most: more is a slip of the keyboard."""

COST = frozenset({"prices", "max_cost"})
"""Settings of a profile that change nothing in a record."""

MOST_SLOTS = 32
"""Slots of one sandbox at most, unless the profile says otherwise."""


class RunOptions(BaseModel):
    """How to run rollouts. Frozen; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    backend: str = "local"
    """The backend's name."""
    backend_config: dict[str, Any] = Field(default_factory=dict)
    """Settings of its sandboxes, in the backend's own terms; they come before the profile's."""
    isolation: str | None = None
    """The level between slots; None is `user`, or more where the environment asks for more."""
    allow_unisolated: bool = False
    """Whether a level below what the environment or the agent asks for is accepted."""
    concurrency: int = Field(default=4, ge=1, le=MOST_AT_A_TIME)
    """Rollouts at the same time."""
    group_size: int = Field(default=1, ge=1, le=MOST_AT_A_TIME)
    """Rollouts of each item."""
    seed: int | None = None
    """Seed of the order of items, the tools drawn, and the model's sampling, where those have none of their own."""
    rollout_timeout: float | None = Field(default=3600.0, gt=0)
    """Seconds for the agent; over it the rollout is verified as it is. None is no limit."""
    setup_timeout: float = Field(default=1800.0, gt=0)
    """Seconds for the set-up of a workspace."""
    verify_timeout: float = Field(default=3600.0, gt=0)
    """Seconds for the verification."""
    infra_retries: int = Field(default=2, ge=0)
    """How often a rollout that met an infrastructure failure is begun anew."""
    stop_on_infra: float | None = Field(default=None, ge=0, le=1)
    """Stop when more than this share of the last rollouts (at least 10, at most 20) were infrastructure failures."""

    @property
    def limits(self) -> Limits:
        """The limits of one rollout."""
        return Limits(self.rollout_timeout, self.setup_timeout, self.verify_timeout, self.infra_retries)


def granted_isolation(options: RunOptions, environment: Environment, backend: str, agent: str) -> Isolation:
    """The level to run at.

    Raises:
        UnknownNameError: there is no level of that name.
        UsageError: it is weaker than the environment accepts, or a model would work unisolated on the driver's host.
    """
    if options.isolation is None:
        return max(Isolation.USER, environment.isolation)
    level = Isolation.parse(options.isolation)
    if options.allow_unisolated:
        return level
    if level < environment.isolation:
        raise UsageError(
            f"environment {environment.name!r} accepts no isolation below {environment.isolation.label!r}",
            hint=f"use --isolation {environment.isolation.label}, or --allow-unisolated if you trust what runs",
        )
    if level < Isolation.USER and backend in ON_DRIVER_HOST and agent not in BASELINES:
        raise UsageError(
            f"agent {agent!r} would run commands of a model on this host, with your rights (isolation {level.label!r})",
            hint="use --isolation user or namespace, another backend, or --allow-unisolated if you trust the model",
        )
    return level


@dataclass(frozen=True)
class PoolSize:
    """How large the pool of a run is."""

    config: Mapping[str, Any]
    """The settings that make it so, without those that the profile or the caller made."""
    concurrency: int
    """Rollouts that it has room for at the same time, as many as asked for at most."""


def pool_size(options: RunOptions, isolation: Isolation, profile: Mapping[str, Any] | SandboxConfig) -> PoolSize:
    """Slots for the agents of all concurrent rollouts, and a reserve of as many for their verification.

    Raises:
        UsageError: the profile has no slot beside its reserve.
    """
    if isinstance(profile, SandboxConfig):
        profile = profile.model_dump(exclude_unset=True)
    given = {**profile, **options.backend_config}
    reserve = _number(given, "reserve_slots", options.concurrency)
    wanted = options.concurrency + reserve
    most = 1 if isolation is Isolation.DEDICATED else MOST_SLOTS
    least_sandboxes = math.ceil(wanted / _number(given, "slots_per_sandbox", most))
    slots = _number(given, "slots_per_sandbox", math.ceil(wanted / least_sandboxes))
    sandboxes = _number(given, "max_sandboxes", least_sandboxes)
    room = slots * sandboxes - reserve
    if room < 1:
        raise UsageError(
            f"{slots} slots in {sandboxes} sandboxes leave none for agents beside the reserve of {reserve}",
            hint="raise slots_per_sandbox or max_sandboxes, or lower reserve_slots",
        )
    if room < options.concurrency:
        log.warning("the profile has room for %d rollouts at a time, not for %d", room, options.concurrency)
    defaults = {
        "slots_per_sandbox": slots,
        "max_sandboxes": sandboxes,
        "min_sandboxes": min(sandboxes, least_sandboxes),
        "reserve_slots": reserve,
        "acquire_timeout_s": 300.0,
        "execution_timeout_s": 180.0,
    }
    config = {key: value for key, value in defaults.items() if key not in profile} | options.backend_config
    return PoolSize(config, min(room, options.concurrency))


def _number(given: Mapping[str, Any], key: str, default: int) -> int:
    """A whole number of the profile; one of the wrong form is left for the backend's own check to refuse."""
    try:
        return int(given[key]) if int(given.get(key, 0)) > 0 or given.get(key) == 0 else default
    except (TypeError, ValueError):
        return default


def agent_settings(
    runtime: Runtime, given: Mapping[str, Any] | AgentSettings | None, seed: int | None
) -> AgentSettings:
    """The settings of the agent, with the run's seed and the runtime's model, endpoint and key where it has none.

    Raises:
        UnknownNameError, ConfigError: a key or a value of them is wrong.
    """
    if not isinstance(given, AgentSettings):
        given = validated(AgentSettings, given or {}, "the agent")
    inherited = {key: getattr(runtime.settings, key) for key in ("model", "base_url", "api_key")}
    missing = {key: value for key, value in {**inherited, "seed": seed}.items() if getattr(given, key) is None}
    return given.model_copy(update=missing)


def run_configuration(
    options: RunOptions, environment: Environment, agent: str, settings: AgentSettings | None, isolation: Isolation
) -> dict[str, Any]:
    """Everything that decides what a run's records say, as JSON values and without secrets.

    How many rollouts run at a time, and when the run gives up (for its cost, too), is not part of it.
    """
    backend_config = {key: value for key, value in options.backend_config.items() if key not in COST}
    model = settings.model_dump(mode="json", exclude={"api_key"}) if settings and agent not in BASELINES else None
    return {
        "environment": environment.name,
        "env": environment.config.model_dump(mode="json"),
        "agent": agent,
        "agent_settings": model,
        "backend": options.backend,
        "backend_config": backend_config,
        "isolation": isolation.label,
        "group_size": options.group_size,
        "seed": options.seed,
        "rollout_timeout": options.rollout_timeout,
        "setup_timeout": options.setup_timeout,
        "verify_timeout": options.verify_timeout,
    }
