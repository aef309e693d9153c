"""Checks whether a backend can serve a profile, before any sandbox is made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hermes_core.errors import ConfigError, PolicyError
from hermes_core.sandbox.contract import Backend, Isolation, Network, SandboxConfig, SlotUser
from hermes_core.sandbox.promises import levels_of


def resolve_isolation(backend: Backend, isolation: Isolation, profiles: Iterable[SandboxConfig]) -> Isolation:
    """Return the weakest level that is at least `isolation` and that the backend can grant with all of these profiles.

    If there is none, return `isolation`, which `check_profile` will refuse.
    """
    levels = backend.capabilities.isolation.intersection(*(levels_of(backend, config) for config in profiles))
    return replace(backend.capabilities, isolation=levels).least(isolation)


def slots_per_sandbox(config: SandboxConfig, isolation: Isolation) -> int:
    """Return the number of slots in one sandbox: one at level `dedicated`, otherwise as configured."""
    return 1 if isolation is Isolation.DEDICATED else config.slots_per_sandbox


def check_profile(backend: Backend, isolation: Isolation, config: SandboxConfig, *, prepares: bool) -> None:
    """Refuse a profile that the backend can't serve, or that contradicts itself.

    Args:
        isolation: the weakest level that every slot must get.
        prepares: whether the environment prepares sandboxes.

    Raises:
        PolicyError: the backend can't grant the isolation, the network policy or a setting, or makes no snapshots.
        ConfigError: the profile belongs to another backend, or its settings contradict each other.
    """
    can = backend.capabilities
    possible = levels_of(backend, config)
    if not any(level >= isolation for level in possible):
        raise _no_such_level(backend, isolation, config, possible)
    if config.network not in can.policies:
        policies = ", ".join(sorted(can.policies))
        raise PolicyError(
            f"backend {backend.name!r} can't give profile {config.name!r} network {config.network.value!r}",
            hint=f"it offers: {policies}",
        )
    if config.snapshot and not can.snapshot:
        raise PolicyError(
            f"backend {backend.name!r} can't make snapshots, which profile {config.name!r} asks for",
            hint="leave `snapshot` out, or use a backend that can",
        )
    if (config.network is Network.SETUP or config.snapshot) and not prepares:
        asks = f"the network {config.network.value!r}" if config.network is Network.SETUP else "snapshot: true"
        raise ConfigError(
            f"profile {config.name!r} has {asks}, and nothing prepares its sandboxes",
            hint="use an environment with `prepare_sandbox`, or network: none or open and no snapshot",
        )
    if not isinstance(config, backend.config_class):
        expected = backend.config_class.__name__
        raise ConfigError(
            f"profile {config.name!r} is a {type(config).__name__}, backend {backend.name!r} takes {expected}",
            hint=f"build it with {expected}(name={config.name!r}, ...)",
        )
    for key in config.unsupported:
        if getattr(config, key) is not None:
            raise PolicyError(
                f"profile {config.name!r} sets {key}, which backend {backend.name!r} can't give",
                hint="leave it out, or use a backend with containers",
            )
    _check_slot_user(config, isolation)
    if config.network_plan.filters:
        check_ways_out(backend, isolation, config)
    if config.share_network and isolation < Isolation.PRIVATE_ROOT:
        raise PolicyError(
            f"profile {config.name!r} has share_network, which is for slots of level 'private-root', not "
            f"{isolation.label!r}",
            hint="leave it out",
        )
    if config.min_sandboxes > config.max_sandboxes:
        raise ConfigError(
            f"profile {config.name!r}: min_sandboxes {config.min_sandboxes} is above "
            f"max_sandboxes {config.max_sandboxes}",
            hint="raise max_sandboxes or lower min_sandboxes",
        )
    most = slots_per_sandbox(config, isolation) * config.max_sandboxes
    if most <= config.reserve_slots:
        raise ConfigError(
            f"profile {config.name!r} has {most} slots at most and reserves {config.reserve_slots} of them "
            "for verification: none is left for rollouts",
            hint="raise max_sandboxes or slots_per_sandbox, or lower reserve_slots",
        )


def check_ways_out(backend: Backend, isolation: Isolation, config: SandboxConfig) -> None:
    """Refuse a profile whose slots can't have a proxy as their only way out.

    Raises:
        PolicyError: the backend can't cut sandboxes off from the network, or nobody can tell whose a connection is.
    """
    if Network.ALLOW not in backend.capabilities.policies:
        reason, hint = "its sandboxes always have a network", "use another backend, or leave out the lists of hosts"
    elif isolation is Isolation.SHARED:
        reason = "at level 'shared' the connections of a slot can't be told from those of its neighbours"
        hint = "use level user or higher, or network: none"
    elif config.root_of_sandbox(isolation):
        reason = "with slot_user 'root' there is no guest in the sandbox that could carry connections"
        hint = "use level private-root, leave out slot_user, or use network: none"
    else:
        return
    raise PolicyError(
        f"backend {backend.name!r} can't give profile {config.name!r} lists of hosts: {reason}", hint=hint
    )


def _no_such_level(
    backend: Backend, isolation: Isolation, config: SandboxConfig, possible: Iterable[Isolation]
) -> PolicyError:
    """Return the error for a level that the backend can't grant, or not with the settings of this profile."""
    levels = ", ".join(level.label for level in sorted(possible)) or "none"
    message = f"backend {backend.name!r} can't grant isolation {isolation.label!r} here"
    if not any(level >= isolation for level in backend.capabilities.isolation):
        return PolicyError(message, hint=f"it grants: {levels}; `hermes-rl doctor` says what keeps it from more")
    hint = f"the profile's settings allow only: {levels}; `hermes-rl backends {backend.name}` lists the settings"
    return PolicyError(f"{message} with profile {config.name!r}", hint=hint)


def _check_slot_user(config: SandboxConfig, isolation: Isolation) -> None:
    if config.slot_user is SlotUser.OWN and isolation is Isolation.PRIVATE_ROOT:
        raise PolicyError(
            f"profile {config.name!r} has slot_user 'own': at level 'private-root' slots are root of their own root",
            hint="use level namespace, or leave out slot_user",
        )
    if config.slot_user is SlotUser.OWN and isolation is Isolation.SHARED:
        raise PolicyError(
            f"profile {config.name!r} has slot_user 'own': at level 'shared' slots run as the sandbox's own user",
            hint="use level user or higher, or leave out slot_user",
        )
    if not config.root_of_sandbox(isolation):
        return
    if isolation is not Isolation.DEDICATED:
        raise PolicyError(
            f"profile {config.name!r} has slot_user 'root' at level {isolation.label!r}: root of a sandbox is above "
            "all of its slots",
            hint="use level private-root or dedicated (one slot per sandbox), or leave out slot_user",
        )
    if config.has_secrets:
        raise PolicyError(
            f"profile {config.name!r} has secrets and slot_user 'root', from whom nothing in a sandbox can be hidden",
            hint="leave out the secrets or slot_user",
        )
