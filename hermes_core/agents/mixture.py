"""Several agents behind one: each rollout draws the one that works on it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hermes_core.agents.base import Agent, AgentResult, AgentTask, is_in_slot


class MixedAgent:
    """Agents of the same kind with different models.

    Args:
        choices: the agents with their weights; they are closed by whoever made them.
        seed: seed of the draws. A draw depends on it and on the task's `seed_key`, so it is the same in every process.
    """

    def __init__(self, choices: Sequence[tuple[Agent, float]], seed: int) -> None:
        self._agents = [agent for agent, _ in choices]
        self._weights = [weight for _, weight in choices]
        self._seed = seed
        self.name = self._agents[0].name
        self.version: str | None = getattr(self._agents[0], "version", None)
        self.in_slot = is_in_slot(self._agents[0])

    async def run(self, task: AgentTask) -> AgentResult:
        """Let the drawn agent work on the task; see `Agent.run`."""
        draw = random.Random(f"{self._seed}:{task.seed_key or task.trajectory_id}")
        return await draw.choices(self._agents, self._weights)[0].run(task)

    async def check_endpoint(self) -> None:
        """Check the endpoint of each agent that has one, as `ModelAgent.check_endpoint` does."""
        for agent in self._agents:
            if (check := getattr(agent, "check_endpoint", None)) is not None:
                await check()

    async def aclose(self) -> None:
        """Do nothing, because nothing is open."""
