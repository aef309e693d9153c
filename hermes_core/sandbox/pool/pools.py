"""The pools of one tool backend: one for each profile, and one for each image that tasks name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from hermes_core.errors import ConfigError, PolicyError, UnknownNameError
from hermes_core.sandbox.contract import SandboxConfig
from hermes_core.sandbox.pool.cost import Meter, Usage
from hermes_core.sandbox.pool.pool import Pool
from hermes_core.validation import validated


class Pools:
    """Pools by name.

    Args:
        profiles: by name.
        make: the pool of a profile, with a meter of its own if it is given none.

    Raises:
        ConfigError: a profile's name is not its own. One that can't be served is refused when it is asked for.
    """

    def __init__(
        self, profiles: Mapping[str, SandboxConfig], make: Callable[[SandboxConfig, Meter | None], Pool]
    ) -> None:
        self._make = make
        self._pools: dict[str, Pool] = {}
        self._refused: dict[str, PolicyError] = {}
        for name, config in profiles.items():
            if config.name != name:
                raise ConfigError(
                    f"profile {name!r} has the name {config.name!r} in its settings", hint=f"set name: {name}"
                )
            try:
                self._pools[name] = make(config, None)
            except PolicyError as error:  # of no matter to those who use another one
                self._refused[name] = error

    def __getitem__(self, name: str) -> Pool:
        if (refused := self._refused.get(name)) is not None:
            raise refused.twin() from refused
        try:
            return self._pools[name]
        except KeyError:
            raise UnknownNameError("profile", name, [*self._pools, *self._refused]) from None

    def __contains__(self, name: object) -> bool:
        return name in self._pools

    def values(self) -> Collection[Pool]:
        """All of them."""
        return self._pools.values()

    def of_image(self, profile: str, image: str) -> Pool:
        """The pool of a profile with another image; made when it is first asked for.

        Raises:
            UnknownNameError: there is no such profile.
            ConfigError: it can't be had with another image.
        """
        pool = self[profile]
        name = f"{profile}@{image}"
        if name not in self._pools:
            changes = {"name": name, "image": image, "min_sandboxes": 0}
            settings = {**pool.config.model_dump(exclude_unset=True), **changes}
            config = validated(type(pool.config), settings, f"profile {name!r}")
            self._pools[name] = self._make(config, pool.meter)
        return self._pools[name]

    def status(self, default_profile: str) -> dict[str, Any]:
        """`ToolBackend.get_status`."""
        pools = {name: pool.status() for name, pool in self._pools.items()}
        summed = ("sandboxes", "healthy_sandboxes", "max_sandboxes", "total_slots", "available_slots", "waiting")
        return {
            **{key: sum(status[key] for status in pools.values()) for key in summed},
            "slots_per_sandbox": pools[default_profile]["slots_per_sandbox"],
            "default_profile": default_profile,
            "profiles": list(pools),
            "active_pools": [name for name, pool in self._pools.items() if pool.begun],
            "pools": pools,
        }

    def usage(self) -> dict[str, Usage]:
        """`ToolBackend.usage`."""
        return {pool.meter.profile: pool.meter.usage() for pool in self._pools.values() if pool.begun}

    def settings(self) -> dict[str, dict[str, Any]]:
        """`ToolBackend.list_profiles`."""
        return {
            name: {
                "image": pool.config.image,
                "gpu": getattr(pool.config, "gpu", None),
                "cpu": pool.config.cpu,
                "memory": pool.config.memory,
                "slots_per_sandbox": pool.slots,
                "min_sandboxes": pool.config.min_sandboxes,
                "max_sandboxes": pool.config.max_sandboxes,
                "active": pool.begun,
            }
            for name, pool in self._pools.items()
        }
