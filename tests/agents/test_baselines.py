"""The agents that bound every score."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hermes_core.agents.base import Agent, AgentSettings, AgentTask, StopReason
from hermes_core.agents.baselines import CheatAgent, NopAgent, OracleAgent
from hermes_core.errors import SandboxLost, SetupFailed, UsageError


def task(solve, **fields) -> AgentTask:
    async def handler(name, arguments, task_id):
        raise AssertionError("baselines call no tool")

    return AgentTask("t1", [{"role": "user", "content": "fix it"}], [], handler, solve, **fields)


@pytest.mark.parametrize(("kind", "solved"), [(OracleAgent, 3), (NopAgent, 0)])
async def test_both_go_through_all_parts_of_a_task(kind, solved):
    calls, said = [], [{"role": "user", "content": "two"}, {"role": "user", "content": "three"}, None]

    async def solve():
        calls.append(1)

    async def follow_up():
        return said.pop(0)

    result = await kind(AgentSettings()).run(task(solve, follow_up=follow_up))
    assert (len(calls), [each["content"] for each in result.messages]) == (solved, ["fix it", "two", "three"])


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


async def test_a_cheat_is_named_and_one_that_is_broken_is_not_the_agents_work():
    done = []

    async def cheat(name):
        done.append(name)
        if name == "broken":
            raise KeyError("oops")

    agent = CheatAgent("plants")
    assert isinstance(agent, Agent) and agent.name == "cheat:plants"
    the_task = replace(task(None), cheat=cheat)
    assert (await agent.run(the_task)).stop_reason is StopReason.FINISHED
    assert the_task.result.messages == the_task.messages
    with pytest.raises(SetupFailed, match="the cheat 'broken' is broken: KeyError: 'oops'"):
        await CheatAgent("broken").run(replace(task(None), cheat=cheat))
    assert done == ["plants", "broken"]
    with pytest.raises(UsageError, match="has no cheat 'plants'"):
        await agent.run(task(None))
