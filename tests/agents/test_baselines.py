"""The two agents that bound every score."""

from __future__ import annotations

import pytest

from hermes_core.agents.base import Agent, AgentSettings, AgentTask, StopReason
from hermes_core.agents.baselines import NopAgent, OracleAgent
from hermes_core.errors import SandboxLost


def task(solve) -> AgentTask:
    async def handler(name, arguments, task_id):
        raise AssertionError("baselines call no tool")

    return AgentTask("t1", [{"role": "user", "content": "fix it"}], [], handler, solve)


@pytest.mark.parametrize(("kind", "solved"), [(OracleAgent, 1), (NopAgent, 0)])
async def test_the_oracle_solves_and_nop_does_not(kind, solved):
    calls = []

    async def solve():
        calls.append(1)

    agent = kind(AgentSettings())
    assert isinstance(agent, Agent)
    the_task = task(solve)
    result = await agent.run(the_task)
    await agent.aclose()
    assert len(calls) == solved
    assert result is the_task.result
    assert (result.stop_reason, result.finished_naturally, result.turns_used) == (StopReason.FINISHED, True, 0)
    assert result.messages == the_task.messages
    assert result.messages[0] is not the_task.messages[0]


async def test_what_the_solution_raises_comes_out_and_the_result_is_not_finished():
    async def solve():
        raise SandboxLost("gone")

    the_task = task(solve)
    with pytest.raises(SandboxLost):
        await OracleAgent().run(the_task)
    assert the_task.result.stop_reason is StopReason.INTERRUPTED
    assert the_task.result.messages == the_task.messages
