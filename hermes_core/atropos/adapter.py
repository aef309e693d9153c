"""A subclass of `HermesAgentBaseEnv` as core sees it: an `Environment` whose hooks are that subclass's methods."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hermes_core.environment import Environment, EnvironmentConfig, Item
from hermes_core.envs.tool_context import ToolContext
from hermes_core.errors import DatasetError, VerifierError

if TYPE_CHECKING:
    from hermes_core.atropos.env import HermesAgentBaseEnv
    from hermes_core.envs.rollout import Rollout


class AdaptedEnvironment(Environment):
    """The items come from Atropos one at a time, so `items` is empty."""

    name = "atropos"

    def __init__(self, env: HermesAgentBaseEnv) -> None:
        super().__init__(EnvironmentConfig(**env.config.environment_settings()))
        self.name = str(env.name)  # type: ignore[misc]  # of this instance, as its class serves many
        self._env = env
        self.isolation = env.isolation
        if (setup := getattr(env, "setup_trajectory_workspace", None)) is not None:
            self.setup_trajectory_workspace = setup
        own = getattr(env, "verify_and_score_trajectory", None)
        self.verify_and_score_trajectory = own if own is not None else self._compute_reward

    def items(self) -> Sequence[Item]:
        """None: they come one at a time."""
        return ()

    def format_prompt(self, item: Item) -> str:
        """As the subclass says."""
        return self._env.format_prompt(item)

    def item_id(self, item: Item) -> str:
        """The item's id, or a digest of what it says."""
        try:
            return super().item_id(item)
        except (DatasetError, AttributeError):
            text = json.dumps(item, sort_keys=True, default=repr)
            return f"item-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def image(self, item: Item) -> str | None:
        """The image of the item's sandboxes, where the subclass names one."""
        return self._env.image(item)

    async def _compute_reward(self, item: Item, result: Any, rollout: Rollout) -> tuple[float, Mapping[str, Any]]:
        """The subclass's reward, in the rollout's own slot; what that started is killed."""
        context = ToolContext(rollout)

        async def computed() -> Any:
            reward: Any = self._env.compute_reward(item, result, context)
            return await reward if inspect.isawaitable(reward) else reward

        try:
            reward = await context.calls.all_awaited(computed())
        finally:
            await context.cleanup()
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise VerifierError(
                f"compute_reward of {self.name!r} gave {reward!r}", hint="return a finite number, such as 0.0 or 1.0"
            )
        return reward, {}
