"""The baseline agents: `oracle` applies the reference solution, `nop` does nothing, and `cheat:NAME` cheats.

They bound every score: a task is sound if `oracle` gets the reward 1.0 and the others get 0.0.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Awaitable, Callable

from hermes_core.agents.base import AgentResult, AgentSettings, AgentTask, StopReason
from hermes_core.errors import HermesError, InfraError, SetupFailed, UsageError

CHEAT = "cheat:"
"""The names of agents that cheat begin with this; the cheat's name follows."""


class _Baseline:
    """An agent without settings, which holds nothing open."""

    def __init__(self, settings: AgentSettings | None = None) -> None:
        del settings  # it needs none

    async def aclose(self) -> None:
        """Do nothing, because nothing is open."""


class OracleAgent(_Baseline):
    """Applies the environment's reference solution, to each part of the task. If the reward is not 1.0, the task is
    broken."""

    name = "oracle"

    async def run(self, task: AgentTask) -> AgentResult:
        """Apply the reference solution in the agent's slot.

        Raises:
            SetupFailed: the solution can't be applied. This is the task's fault, because there is no model.
            InfraError, UsageError: as `task.solve` raises them.
        """
        return await _in_each_part(task, task.solve, "the reference solution can't be applied", "fix the task")


class NopAgent(_Baseline):
    """Does nothing. If the reward is not 0.0, the task is already solved at the start."""

    name = "nop"

    async def run(self, task: AgentTask) -> AgentResult:
        """Leave the slot as it is, in each part of the task."""
        task.result.messages.extend(copy.deepcopy(task.messages))
        while (message := await task.follow_up()) is not None:
            task.result.messages.append(message)
        task.result.stop(StopReason.FINISHED)
        return task.result


class CheatAgent(_Baseline):
    """Does one of the environment's cheats. The reward must be no higher than the reward of `nop`.

    Args:
        cheat: the cheat's name.
    """

    def __init__(self, cheat: str) -> None:
        super().__init__()
        self.name = f"{CHEAT}{cheat}"
        self._cheat = cheat

    async def run(self, task: AgentTask) -> AgentResult:
        """Cheat in the agent's slot, in each part of the task.

        Raises:
            SetupFailed: the cheat is broken, so the rollout says nothing about the task.
            InfraError, UsageError: as `task.cheat` raises them.
        """
        if (cheat := task.cheat) is None:
            raise UsageError(f"this task has no cheat {self._cheat!r}", hint="the environment names them in cheats()")
        work = functools.partial(cheat, self._cheat)
        return await _in_each_part(task, work, f"the cheat {self._cheat!r} is broken", "fix the cheat")


async def _in_each_part(task: AgentTask, work: Callable[[], Awaitable[None]], broken: str, hint: str) -> AgentResult:
    """Await `work` in each part of the task. Return the result of an agent that finished.

    Args:
        broken: the message of the error if `work` fails.
        hint: the hint of this error.

    Raises:
        SetupFailed: `work` failed.
        InfraError, UsageError: as `work` raised them.
    """
    task.result.messages.extend(copy.deepcopy(task.messages))
    while True:
        try:
            await work()
        except (SetupFailed, InfraError, UsageError):
            raise
        except Exception as error:
            message_of_error = error.message if isinstance(error, HermesError) else f"{type(error).__name__}: {error}"
            raise SetupFailed(f"{broken}: {message_of_error}", hint=hint) from error
        if (message := await task.follow_up()) is None:
            break
        task.result.messages.append(message)
    task.result.stop(StopReason.FINISHED)
    return task.result
