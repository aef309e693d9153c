"""Several openai endpoints behind one agent: each rollout stays on the one that had least to do when it began."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hermes_core.agents.base import AgentResult, AgentSettings, AgentTask
from hermes_core.agents.loop import ChatServer
from hermes_core.agents.model import ModelAgent, OpenAIServer
from hermes_core.agents.retries import Choice


class _Limited:
    """A server that has so many requests under way at a time, at most."""

    def __init__(self, server: ChatServer, at_once: int) -> None:
        self._server = server
        self._room = asyncio.Semaphore(at_once)

    async def chat_completion(self, **request: Any) -> Any:
        """One completion, when there is room."""
        async with self._room:
            return await self._server.chat_completion(**request)


class SharedAgent:
    """The model loop on several servers.

    Args:
        endpoints: for each, how to ask it, the server (the caller's to close), and how many requests at a time.
    """

    name = "model"

    def __init__(self, endpoints: Sequence[tuple[AgentSettings, OpenAIServer, int]]) -> None:
        self._agents = [ModelAgent(settings, _Limited(server, room)) for settings, server, room in endpoints]
        self._choice = Choice([server.endpoint for _, server, _ in endpoints])

    async def run(self, task: AgentTask) -> AgentResult:
        """Work on one task until the model is done or has to stop; see `Agent.run`."""
        with self._choice.one() as chosen:
            return await self._agents[chosen].run(task)

    async def aclose(self) -> None:
        """Holds nothing open."""
