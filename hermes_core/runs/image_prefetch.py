"""Makes the images of a run's next groups while the current ones run, so that slots do not wait for builds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hermes_core.aio import TaskSet
from hermes_core.environment import Environment, Item
from hermes_core.tool_backend import ToolBackend


class Prefetch:
    """Keeps the images of some groups ahead of those that run.

    An image that can't be had is not reported here. The rollouts that need it get the error.

    Args:
        profile: for items that name none.
        items: the items of the run's groups, in the order in which these begin.
        ahead: number of groups after the last one that has begun.
    """

    def __init__(
        self, environment: Environment, backend: ToolBackend, profile: str | None, items: Iterator[Item], ahead: int
    ) -> None:
        self._environment = environment
        self._backend = backend
        self._profile = profile
        self._items = items
        self._step = ahead + 1
        self._tasks = TaskSet()

    def group_begins(self) -> None:
        """Begin to make the images of the next groups, up to `ahead`. Call it when a group begins."""
        for item in itertools.islice(self._items, self._step):
            self._tasks.spawn(self._make(item), "images of a group")
        self._step = 1

    async def _make(self, item: Item) -> None:
        profile = self._environment.profile(item) or self._profile
        for image in self._environment.images(item):
            await self._backend.prepare_image(image, profile=profile)

    async def aclose(self) -> None:
        """Cancel what is under way. Idempotent."""
        await self._tasks.aclose()
