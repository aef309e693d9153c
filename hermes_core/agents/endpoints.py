"""Several OpenAI endpoints behind one agent. Each rollout stays on the one that was least busy when it began."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from hermes_core.agents.base import AgentResult, AgentSettings, AgentTask
from hermes_core.agents.loop import ChatServer
from hermes_core.agents.model import ModelAgent, OpenAIServer
from hermes_core.agents.retries import Choice


class _Limited:
    """A server with a maximum number of requests at the same time."""

    def __init__(self, server: ChatServer, at_once: int) -> None:
        self._server = server
        self._room = asyncio.Semaphore(at_once)

    async def chat_completion(self, **request: Any) -> Any:
        """Return one completion, when there is room."""
        async with self._room:
            return await self._server.chat_completion(**request)


class SharedAgent:
    """The model loop on several servers.

    Args:
        endpoints: for each, its settings, the server (this agent closes it), and the maximum number of requests at a
            time.
    """

    name = "model"

    def __init__(self, endpoints: Sequence[tuple[AgentSettings, OpenAIServer, int]]) -> None:
        self._servers = [server for _, server, _ in endpoints]
        self._agents = [ModelAgent(settings, _Limited(server, room)) for settings, server, room in endpoints]
        self._choice = Choice([server.endpoint for server in self._servers])

    async def run(self, task: AgentTask) -> AgentResult:
        """Work on one task until the model is done or has to stop; see `Agent.run`."""
        with self._choice.one() as chosen:
            return await self._agents[chosen].run(task)

    @asynccontextmanager
    async def session(self, **options: Any) -> AsyncIterator[ChatServer]:
        """Give what answers the model calls of one rollout; see `ModelAgent.session`."""
        with self._choice.one() as chosen:
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
