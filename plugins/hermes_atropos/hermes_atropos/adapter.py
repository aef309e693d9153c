"""`AdaptedEnvironment`: a core `Environment` whose hooks are methods of a subclass of `HermesAgentBaseEnv`."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from hermes_core import (
    AgentResult,
    DatasetError,
    Environment,
    EnvironmentConfig,
    Image,
    Isolation,
    Item,
    RolloutHandle,
    ToolContext,
    VerifierError,
)


class AdaptedEnvironment(Environment):
    """The environment of a rollout. Its items come from Atropos one at a time, so `items` is empty.

    Args:
        compute_reward: returns the reward of a rollout. It is called only if there is no `verify`.
        image: returns the image of an item's sandboxes, or None.
        setup: the hook `setup_trajectory_workspace`, or None.
        verify: the hook `verify_and_score_trajectory`, or None.
    """

    name = "atropos"

    def __init__(
        self,
        name: str,
        config: EnvironmentConfig,
        isolation: Isolation,
        *,
        format_prompt: Callable[[Item], str],
        compute_reward: Callable[[Item, AgentResult, ToolContext], Awaitable[float]],
        image: Callable[[Item], Image | None],
        setup: Callable[..., Any] | None = None,
        verify: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(config)
        self.name = name  # type: ignore[misc]  # set on the instance, because environments of all names share the class
        self.isolation = isolation
        self._format_prompt, self._compute_reward, self._image = format_prompt, compute_reward, image
        if setup is not None:
            self.setup_trajectory_workspace = setup
        self.verify_and_score_trajectory = verify if verify is not None else self._score_by_reward

    def items(self) -> Sequence[Item]:
        """Return an empty sequence, because items come one at a time."""
        return ()

    def format_prompt(self, item: Item) -> str:
        """Return the prompt that the subclass makes of the item."""
        return self._format_prompt(item)

    def item_id(self, item: Item) -> str:
        """Return the item's id, or a digest of its contents."""
        try:
            return super().item_id(item)
        except (DatasetError, AttributeError):
            text = json.dumps(item, sort_keys=True, default=repr)
            return f"item-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def image(self, item: Item) -> Image | None:
        """Return the image that the subclass names for the item's sandboxes, or None."""
        return self._image(item)

    async def _score_by_reward(
        self, item: Item, result: Any, rollout: RolloutHandle
    ) -> tuple[float, Mapping[str, Any]]:
        """Return the reward that the subclass computes in the rollout's slot, and kill what the computation started."""
        context = ToolContext(rollout)

        async def compute() -> Any:
            reward: Any = self._compute_reward(item, result, context)
            return await reward if inspect.isawaitable(reward) else reward

        try:
            reward = await context.calls.all_awaited(compute())
        finally:
            await context.cleanup()
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise VerifierError(
                f"compute_reward of {self.name!r} gave {reward!r}", hint="return a finite number, such as 0.0 or 1.0"
            )
        return reward, {}
