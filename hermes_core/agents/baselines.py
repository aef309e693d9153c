"""The baseline agents: `oracle` applies the reference solution, `nop` does nothing. They bound every score."""

from __future__ import annotations

import copy

from hermes_core.agents.base import AgentResult, AgentSettings, AgentTask, StopReason


class OracleAgent:
    """Asks the environment for its reference solution. Its reward must be 1.0, or the task is broken."""

    name = "oracle"

    def __init__(self, settings: AgentSettings | None = None) -> None:
        del settings  # it needs none

    async def run(self, task: AgentTask) -> AgentResult:
        """Apply the reference solution in the agent's slot; raises what `task.solve` raises."""
        task.result.messages.extend(copy.deepcopy(task.messages))
        await task.solve()
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self) -> None:
        """Holds nothing open."""


class NopAgent:
    """Does nothing. Its reward must be 0.0, or the task is solved before anyone touched it."""

    name = "nop"

    def __init__(self, settings: AgentSettings | None = None) -> None:
        del settings  # it needs none

    async def run(self, task: AgentTask) -> AgentResult:
        """Leave the slot as it is."""
        task.result.messages.extend(copy.deepcopy(task.messages))
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self) -> None:
        """Holds nothing open."""
