"""The baseline agents: `oracle` applies the reference solution, `nop` does nothing. They bound every score."""

from __future__ import annotations

import copy

from hermes_core.agents.base import AgentResult, AgentSettings, AgentTask, StopReason
from hermes_core.errors import HermesError, InfraError, SetupFailed, UsageError


class OracleAgent:
    """Applies the environment's reference solution. Its reward must be 1.0, or the task is broken."""

    name = "oracle"

    def __init__(self, settings: AgentSettings | None = None) -> None:
        del settings  # it needs none

    async def run(self, task: AgentTask) -> AgentResult:
        """Apply the reference solution in the agent's slot.

        Raises:
            SetupFailed: it can't be applied. This is the task's fault, because there is no model.
            InfraError, UsageError: as `task.solve` raises them.
        """
        task.result.messages.extend(copy.deepcopy(task.messages))
        try:
            await task.solve()
        except (SetupFailed, InfraError, UsageError):
            raise
        except Exception as error:
            said = error.message if isinstance(error, HermesError) else f"{type(error).__name__}: {error}"
            raise SetupFailed(f"the reference solution can't be applied: {said}", hint="fix the task") from error
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self) -> None:
        """Do nothing, because nothing is open."""


class NopAgent:
    """Does nothing. Its reward must be 0.0, or the task is already solved at the start."""

    name = "nop"

    def __init__(self, settings: AgentSettings | None = None) -> None:
        del settings  # it needs none

    async def run(self, task: AgentTask) -> AgentResult:
        """Leave the slot as it is."""
        task.result.messages.extend(copy.deepcopy(task.messages))
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self) -> None:
        """Do nothing, because nothing is open."""
