"""The agent `model` on several servers. Each rollout stays on the server that was least busy when the rollout began."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from hermes_core.agents.base import AgentResult, AgentTask
from hermes_core.agents.endpoint.balancer import LoadBalancer
from hermes_core.agents.loop import ChatServer
from hermes_core.agents.model import ModelAgent, OpenAIServer


class BalancedAgent:
    """The model loop on several servers.

    Args:
        servers: the servers, which this agent closes.
    """

    name = "model"

    def __init__(self, servers: Sequence[OpenAIServer]) -> None:
        self._servers = servers
        self._agents = [ModelAgent(server.settings, server) for server in servers]
        self._balancer = LoadBalancer([server.endpoint for server in servers])

    async def run(self, task: AgentTask) -> AgentResult:
        """Work on one task until the model is done or has to stop; see `Agent.run`."""
        with self._balancer.choose() as chosen:
            return await self._agents[chosen].run(task)

    @asynccontextmanager
    async def session(self, **options: Any) -> AsyncIterator[ChatServer]:
        """Open the server that answers the model calls of one rollout; see `ModelAgent.session`."""
        with self._balancer.choose() as chosen:
            async with self._agents[chosen].session(**options) as server:
                yield server

    async def check_endpoint(self) -> None:
        """Check that every server can be used. Raise as `OpenAIServer.check`."""
        for server in self._servers:
            await server.check()

    async def aclose(self) -> None:
        """Close the connections to the servers."""
        for server in self._servers:
            await server.aclose()
