"""Sandboxes that an earlier driver of the same owner left, for the next one to go on with."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets

from hermes_core.aio import SingleFlight, TaskSet
from hermes_core.errors import HermesError
from hermes_core.sandbox.contract import Backend, Isolation, SandboxConfig, SandboxStatus
from hermes_core.sandbox.promises import listed
from hermes_core.version import __version__

log = logging.getLogger(__name__)

LIST_LIMIT_S = 30.0
"""How long the provider may take to say what there is."""

_OF_THE_POOL = {
    *("min_sandboxes", "max_sandboxes", "reserve_slots", "idle_timeout", "acquire_timeout_s", "execution_timeout_s"),
    *("prices", "max_cost"),
}
"""Settings that say nothing of a single sandbox."""


def new_creation_id(config: SandboxConfig, isolation: Isolation) -> str:
    """Return an id that nobody else has, and that says what the sandbox is to be: 32 hexadecimal digits."""
    return _mark(config, isolation) + secrets.token_hex(8)


def _mark(config: SandboxConfig, isolation: Isolation) -> str:
    """Return a mark that two sandboxes share if, and only if, one is as good as the other."""
    settings = config.model_dump(mode="json", exclude=_OF_THE_POOL)
    text = json.dumps([__version__, isolation.label, type(config).__name__, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Adoption:
    """The creation ids of an owner's sandboxes, looked up once, before the first sandbox is made.

    Args:
        owner: None looks for none.
        tasks: own the look.
    """

    def __init__(self, backend: Backend, owner: str | None, tasks: TaskSet) -> None:
        self._backend = backend
        self._owner = owner
        self._tasks = tasks
        self._found: SingleFlight[list[str]] = SingleFlight("the look for what an earlier driver left", keep=True)

    async def take(self, config: SandboxConfig, isolation: Isolation) -> str | None:
        """Return the creation id of a sandbox that is as this profile wants it; each is given once."""
        if self._owner is None:
            return None
        creation_ids = await self._found.get(self._tasks, self._look)
        mark = _mark(config, isolation)
        found = next((each for each in creation_ids if each.startswith(mark)), None)
        if found is not None:
            creation_ids.remove(found)
        return found

    async def _look(self) -> list[str]:
        try:
            async with asyncio.timeout(LIST_LIMIT_S):
                found = await listed(self._backend, self._owner)
        except (HermesError, TimeoutError) as error:
            log.warning("what an earlier driver left could not be looked up: %s", error)
            return []
        running = [each for each in found if each.status is SandboxStatus.RUNNING]
        return [each.creation_id for each in sorted(running, key=lambda each: -each.created)]
