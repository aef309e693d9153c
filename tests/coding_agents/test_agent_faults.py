"""What becomes of rollouts of real coding agents when their model's endpoint has trouble, printed as a table.

What lasts is no reward, although the work was done by then, and ends each agent soon. What passes does not reach it.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hermes_agents
import pytest
from hermes_agents.program import ProgramAgent
from hermes_testing.scripted_server import Reply, ScriptedServer, call

from hermes_core.agents.base import AgentResult, AgentTask
from hermes_core.agents.endpoint.errors import EndpointDown
from hermes_core.errors import ModelError
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from tests.coding_agents.test_real_agents import END, TOOLS
from tests.rollout.test_program_faults import FAULTS, ROW, SETTINGS, TOO_LONG, FaultyEndpoint, outcome

pytestmark = [pytest.mark.full, pytest.mark.long, pytest.mark.loop_stall(2.0)]

TERMINUS = "terminus-2"
LACKING = (sys.version_info < (3, 12) and "Python 3.12") or (shutil.which("tmux") is None and "tmux") or ""
"""What Terminus 2 needs and does not have here."""

# Others than the first take minutes.
AGENTS = [
    *(name if name == "codex" else pytest.param(name, marks=pytest.mark.stress) for name in (*TOOLS, "aider")),
    pytest.param(TERMINUS, marks=[pytest.mark.stress, pytest.mark.skipif(bool(LACKING), reason=f"it needs {LACKING}")]),
]

LATE_S = 12.0
"""Seconds after which a stream has begun, so that a refusal can no longer have a status of its own."""
LATE = {"endpoint_patience_s": LATE_S, "request_timeout_s": 2 * LATE_S}
PASSES = {"endpoint_patience_s": 60.0}

MODEL, DONE, TOO_MUCH = (None, "model", "model_error"), (1.0, None, "finished"), (1.0, None, "context_length")
"""What becomes of a rollout: its reward, its kind of failure, and the reason to stop."""

ENDS = 5
"""The most calls of an agent that meets a fault: some ask again, at once."""
SHORTENS = 50
"""The most calls of an agent that shortens its conversation: some do so until they have had all 30 model calls, and
Terminus 2 then asks three times more for each way that it knows."""


@dataclass(frozen=True)
class Cell:
    """A rollout in which some requests meet a fault, and what is to become of it."""

    endpoint: FaultyEndpoint
    outcomes: tuple[Any, ...]
    calls: int
    """The most calls that the agent may make."""
    settings: Mapping[str, Any]


def work(agent: str, turns: int) -> list[Reply]:
    """Return what the model says in so many turns. The first one does the task, if the agent has tools."""
    if agent == "aider":  # it has none, and asks again if a file has no name
        return [*(Reply(f"```\n{n}\n```\n") for n in range(turns - 1)), Reply("out.txt\n```\ndone\n```\n")]
    commands = ["echo done >out.txt", *(f"true {n}" for n in range(turns - 2)), END.get(agent, "")]
    if agent == TERMINUS:  # it asks once more whether it has done the task
        return [_keys(each, done=n >= turns - 2) for n, each in enumerate(commands)]
    name, argument, others = TOOLS[agent]
    last = Reply("I wrote it.", usage=(10, 5))
    calls = [Reply(None, [call(name, **{argument: each}, **others)], usage=(10, 5)) for each in commands]
    return calls if agent in END else [*calls[:-1], last]


def _keys(command: str, *, done: bool) -> Reply:
    """Type a command into the terminal of Terminus 2."""
    keys = [{"keystrokes": f"{command}\n", "duration": 0.5}]
    said = {"analysis": "I look.", "plan": "I write it.", "commands": keys, "task_complete": done}
    return Reply(json.dumps(said), usage=(10, 5))


def cells(agent: str) -> dict[str, Cell]:
    """Return the table of an agent: each fault that lasts, those that pass one after the other, and what is too
    long."""
    short = work(agent, 2)
    scored: tuple[Any, ...] = (TOO_MUCH, DONE, (1.0, None, "max_turns"), (1.0, None, "program_failed"))
    scored = scored if agent != "aider" else ((0.0, None, "context_length"),)
    late = replace(TOO_LONG, delay_s=LATE_S)
    found = {name: Cell(FaultyEndpoint(short, {1: fault}), (MODEL,), ENDS, SETTINGS) for name, fault in FAULTS.items()}
    found["500, in a stream that has begun"] = Cell(
        FaultyEndpoint(short, {1: FAULTS["500"]}), (MODEL,), ENDS, {**SETTINGS, **LATE}
    )
    found |= {
        "too long, once": Cell(FaultyEndpoint(short, {1: TOO_LONG}, times=1), scored, SHORTENS, SETTINGS),
        "too long": Cell(FaultyEndpoint(short, {1: TOO_LONG}), scored, SHORTENS, SETTINGS),
        "too long, in a stream that has begun": Cell(
            FaultyEndpoint(short, {1: late}, times=1), scored, SHORTENS, {**SETTINGS, **LATE}
        ),
        "a task that is too long": Cell(FaultyEndpoint(short, {0: TOO_LONG}), (MODEL,), SHORTENS, SETTINGS),
    }
    for names in _parts(FAULTS, 3 if agent == "aider" else len(FAULTS)):  # it asks again three times at most
        turns = len(names) + 1
        endpoint = FaultyEndpoint(work(agent, turns), {n: FAULTS[name] for n, name in enumerate(names, 1)}, times=2)
        found[f"passing: {', '.join(names)}"] = Cell(endpoint, (DONE,), turns, {**SETTINGS, **PASSES})
    return found


def _parts(names: Iterable[str], most: int) -> Iterator[list[str]]:
    left = list(names)
    while left:
        yield left[:most]
        del left[:most]


class EachItsOwn:
    """The same agent with an endpoint for each task. One that is down is no reason to end the run."""

    in_slot = True

    def __init__(self, agents: Mapping[str, ProgramAgent]) -> None:
        self._agents = agents
        self.name = next(iter(agents.values())).name

    async def run(self, task: AgentTask) -> AgentResult:
        assert task.seed_key is not None
        try:
            return await self._agents[task.seed_key.rpartition(":")[0]].run(task)
        except EndpointDown as error:
            failure = ModelError(error.message, hint=error.hint, trajectory_id=error.trajectory_id)
            failure.result = error.result
            raise failure from error

    async def check_endpoint(self) -> None:
        for agent in self._agents.values():
            await agent.check_endpoint()

    async def aclose(self) -> None:
        """The runtime closes them."""


async def records_of(tmp_path: Path, agent: str, tried: Mapping[str, Cell]) -> dict[str, dict[str, Any]]:
    """Return the record of each cell. They are rollouts of one run, so that the agent is sent to one sandbox, once."""
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({**ROW, "id": name}) + "\n" for name in tried))
    records: dict[str, dict[str, Any]] = {}
    async with AsyncExitStack() as stack:
        own = Settings(state_dir=tmp_path / "state")
        runtime = await stack.enter_async_context(Runtime(own, load_entry_points=False, plugins=[hermes_agents]))
        agents = {}
        for name, cell in tried.items():
            server = await stack.enter_async_context(ScriptedServer(cell.endpoint))
            settings = {"model": "scripted", "base_url": server.base_url, **cell.settings}
            made = runtime.agent(agent, runtime.agent_settings(settings, agent))
            assert isinstance(made, ProgramAgent)
            agents[name] = made
        await run_rollouts(
            runtime,
            "tasks",
            EachItsOwn(agents),
            env={"dataset_name": str(tmp_path / "tasks.jsonl")},
            isolation="user",
            backend_config={"network": "none"},
            concurrency=3,
            on_record=lambda record: records.update({record["item_id"]: dict(record)}),
        )
    return records


@pytest.mark.parametrize("agent", AGENTS)
async def test_no_fault_of_the_endpoint_is_a_reward(
    tmp_path: Path, isolates: None, indexes: None, agent: str, record_property: Callable[[str, object], None]
) -> None:
    tried = cells(agent)
    records = await records_of(tmp_path, agent, tried)
    wrong = []
    for name, cell in tried.items():
        record = records[name]
        program, asked = record["program"], record["program"]["requests"]["calls"]
        reward, kind, reason = outcome(record)
        record_property(
            "figure",
            f"{agent} | {name} | {kind or reward} | {reason} | {record['timings']['agent_s']:.0f} s | "
            f"{cell.endpoint.asked} upstream | {asked} calls | exit {program['exit_code']}",
        )
        if outcome(record) not in cell.outcomes or asked > cell.calls:
            wrong.append(f"{name}: {outcome(record)}, {program}, {record['failure']}")
    assert not wrong, "\n".join(wrong)
