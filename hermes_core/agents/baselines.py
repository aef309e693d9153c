"""The baseline agents: `oracle` applies the reference solution, `nop` does nothing. They bound every score."""

from __future__ import annotations

import copy

from hermes_core.agents.base import AgentResult, AgentSettings, AgentTask, StopReason
from hermes_core.errors import HermesError, InfraError, SetupFailed, UsageError


class OracleAgent:
    """Applies the environment's reference solution, to each part of the task. Its reward must be 1.0, or the task is
    broken."""

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
        await _solve(task)
        while (message := await task.follow_up()) is not None:
            task.result.messages.append(message)
            await _solve(task)
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self) -> None:
        """Do nothing, because nothing is open."""


async def _solve(task: AgentTask) -> None:
    try:
        await task.solve()
    except (SetupFailed, InfraError, UsageError):
        raise
    except Exception as error:
        said = error.message if isinstance(error, HermesError) else f"{type(error).__name__}: {error}"
        raise SetupFailed(f"the reference solution can't be applied: {said}", hint="fix the task") from error


class NopAgent:
    """Does nothing. Its reward must be 0.0, or the task is already solved at the start."""

    name = "nop"

    def __init__(self, settings: AgentSettings | None = None) -> None:
        del settings  # it needs none

    async def run(self, task: AgentTask) -> AgentResult:
        """Leave the slot as it is, in each part of the task."""
        task.result.messages.extend(copy.deepcopy(task.messages))
        while (message := await task.follow_up()) is not None:
            task.result.messages.append(message)
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self) -> None:
        """Do nothing, because nothing is open."""
