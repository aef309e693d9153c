"""An agent made of several others: for each rollout, it draws the agent that works on the rollout's task."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing

from hermes_core.agents.base import Agent, AgentResult, AgentTask, CanCheckEndpoint, is_in_slot
from hermes_core.agents.exact.factory import AgentContext, enter_agent


class MixedAgent:
    """Agents of the same kind with different models.

    Args:
        choices: the agents with their weights; `aclose` closes all of them.
        seed: seed of the draws. A draw depends only on this seed and on the task's `seed_key`, so it is the same in
            every process.
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
            if isinstance(agent, CanCheckEndpoint):
                await agent.check_endpoint()

    async def open(self, context: AgentContext) -> MixedAgent:
        """Open each agent that has to be opened; see `CanOpen`."""
        async with AsyncExitStack() as stack:
            opened = [
                await stack.enter_async_context(aclosing(await enter_agent(agent, context))) for agent in self._agents
            ]
            stack.pop_all()
        return MixedAgent([*zip(opened, self._weights, strict=True)], self._seed)

    async def aclose(self) -> None:
        """Close the agents."""
        async with AsyncExitStack() as stack:
            for agent in self._agents:
                stack.push_async_callback(agent.aclose)
