"""Makes the images of a run's next groups while earlier groups run, so that slots need not wait for builds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hermes_core.aio import TaskSet
from hermes_core.environment import Environment, Item
from hermes_core.tool_backend import ToolBackend


class Prefetch:
    """Makes the images of the next `ahead` groups whenever a group begins.

    If an image can't be made, nothing is reported here. The rollouts that need the image fail with the error.

    Args:
        profile: the profile of items that don't name one.
        items: the item of each group of the run, in the order in which the groups begin.
        ahead: number of groups, counted after the last one that has begun.
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
        """Begin to make the images of the next `ahead` groups. Call this when a group begins."""
        for item in itertools.islice(self._items, self._step):
            self._tasks.spawn(self._make(item), "images of a group")
        self._step = 1

    async def _make(self, item: Item) -> None:
        profile = self._environment.profile(item) or self._profile
        for image in self._environment.images(item):
            await self._backend.prepare_image(image, profile=profile)

    async def aclose(self) -> None:
        """Stop making images. Idempotent."""
        await self._tasks.aclose()
