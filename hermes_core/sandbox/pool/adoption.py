"""Finds sandboxes that an earlier driver of the same owner left, and that a pool can use."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets

from hermes_core.aio import SingleFlight, TaskSet
from hermes_core.errors import HermesError
from hermes_core.sandbox.contract import Backend, Isolation, SandboxConfig, SandboxStatus
from hermes_core.sandbox.promises import list_sandboxes
from hermes_core.version import __version__

log = logging.getLogger(__name__)

LIST_LIMIT_S = 30.0
"""Time limit in seconds for the provider's list of sandboxes."""

_POOL_SETTINGS = {
    *("min_sandboxes", "max_sandboxes", "reserve_slots", "idle_timeout", "acquire_timeout_s", "execution_timeout_s"),
    *("prices", "max_cost", "allowed_hosts", "denied_hosts", "setup_network", "verify_network"),
}
"""Settings that do not concern a single sandbox."""


def new_creation_id(config: SandboxConfig, isolation: Isolation) -> str:
    """Return a new unique id of 32 hexadecimal digits. Its first half is the same for sandboxes of equal settings."""
    return _settings_digest(config, isolation) + secrets.token_hex(8)


def _settings_digest(config: SandboxConfig, isolation: Isolation) -> str:
    """Return a digest of the settings. Sandboxes with the same digest can replace each other."""
    settings = config.model_dump(mode="json", exclude=_POOL_SETTINGS)
    text = json.dumps([__version__, isolation.label, type(config).__name__, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Adoption:
    """The creation ids of an owner's sandboxes, listed once, before the first sandbox is made.

    Args:
        owner: the owner of the sandboxes. None: nothing is adopted.
        tasks: owns the task that lists the sandboxes.
    """

    def __init__(self, backend: Backend, owner: str | None, tasks: TaskSet) -> None:
        self._backend = backend
        self._owner = owner
        self._tasks = tasks
        self._list: SingleFlight[list[str]] = SingleFlight("the look for what an earlier driver left", keep=True)

    async def take(self, config: SandboxConfig, isolation: Isolation) -> str | None:
        """Return the creation id of a sandbox with these settings, and don't return it again. None: there is none."""
        if self._owner is None:
            return None
        creation_ids = await self._list.get(self._tasks, self._look)
        digest = _settings_digest(config, isolation)
        creation_id = next((each for each in creation_ids if each.startswith(digest)), None)
        if creation_id is not None:
            creation_ids.remove(creation_id)
        return creation_id

    async def _look(self) -> list[str]:
        try:
            async with asyncio.timeout(LIST_LIMIT_S):
                infos = await list_sandboxes(self._backend, self._owner)
        except (HermesError, TimeoutError) as error:
            log.warning("what an earlier driver left could not be looked up: %s", error)
            return []
        running = [info for info in infos if info.status is SandboxStatus.RUNNING]
        return [info.creation_id for info in sorted(running, key=lambda info: -info.created)]
