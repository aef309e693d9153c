"""Tasksets of verifiers as an environment: the prompt, the slot as the box, the rewards, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hermes_core import HermesError, Runtime
from hermes_core.agents.base import AgentResult, AgentTask, StopReason
from hermes_core.runs.runner import run_rollouts

pytestmark = [pytest.mark.full, pytest.mark.entry_points, pytest.mark.usefixtures("verifiers_extra", "taskset")]


@pytest.fixture
def taskset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The taskset of this folder can be imported."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


class Doubling:
    """An agent that runs a command with the model's tool, and then says that it is done."""

    name = "doubling"

    def __init__(self, command: str = "echo $((2 * $(cat given))) >answer") -> None:
        self.command = command
        self.tasks: list[AgentTask] = []

    async def run(self, task: AgentTask) -> AgentResult:
        self.tasks.append(task)
        call = {"id": "1", "type": "function", "function": {"name": "terminal", "arguments": "{}"}}
        answer = await task.tool_handler("terminal", {"command": self.command, "timeout": 60}, task.trajectory_id)
        task.result.messages = [
            *task.messages,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "name": "terminal", "content": str(answer)},
            {"role": "assistant", "content": "Done."},
        ]
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self) -> None:
        return


async def run(kind: str, agent: Doubling | None = None, **env: Any) -> list[dict[str, Any]]:
    """The records of the rollouts of a taskset of this kind, by their items."""
    records: list[dict[str, Any]] = []
    async with Runtime() as runtime:
        await run_rollouts(
            runtime,
            "verifiers",
            agent or Doubling(),
            env={"taskset": "doubling_taskset", "settings": {"kind": kind}, **env},
            on_record=records.append,
            concurrency=2,
            infra_retries=0,
        )
    return sorted(records, key=lambda record: str(record["item_id"]))


async def test_hooks_and_rewards_use_the_slot_of_the_agent(leak_check: None) -> None:
    records = await run("plain")
    assert [(record["item_id"], record["reward"], record["failure"]) for record in records] == [
        ("double-1", 1.5, None),
        ("double-2", 1.5, None),
    ]
    assert records[0]["details"] == {"rewards": {"doubled": 1.0, "spoken": 0.5}, "metrics": {"listed": 1.0}}


async def test_wrong_work_loses_its_reward() -> None:
    records = await run("plain", Doubling("echo 7 >answer"))
    assert [record["reward"] for record in records] == [0.5, 0.5]


async def test_a_conversation_and_a_system_prompt_begin_the_rollout() -> None:
    agent = Doubling()
    [record] = await run("talk", agent, settings={"kind": "talk", "count": 1}, system_prompt="Be quick.")
    said = [(message["role"], message["content"]) for message in agent.tasks[0].messages]
    assert said == [("system", "Be quick."), ("user", "Hi"), ("assistant", "Hi."), ("user", "Double")]
    assert record["reward"] == 1.5  # answers of the prompt are not turns of the agent


@pytest.mark.parametrize(("kind", "failure"), [("setup fails", "setup"), ("reward fails", "verifier")])
async def test_a_broken_task_has_no_reward(kind: str, failure: str) -> None:
    for record in await run(kind):
        assert record["reward"] is None
        assert record["failure"]["kind"] == failure
        assert "is broken" in record["failure"]["message"]


@pytest.mark.parametrize(
    ("kind", "env", "said"),
    [
        ("user first", {}, "lets a user open the conversation"),
        ("network", {}, "rules for the network"),
        ("environment", {}, "environment variables"),
        ("plain", {"taskset": "no_such_taskset"}, "can't be loaded.*no_such_taskset"),
        ("plain", {"settings": {"countt": 1}}, "can't be loaded.*countt"),
        ("plain", {"settings": {"count": 0}}, "has no tasks"),
    ],
)
async def test_what_does_not_fit_is_refused_when_it_is_loaded(kind: str, env: dict[str, Any], said: str) -> None:
    with pytest.raises(HermesError, match=f"(?s){said}"):
        await run(kind, **env)


async def test_an_image_is_used_if_asked_for() -> None:
    from hermes_verifiers.environment import VerifiersConfig, VerifiersEnvironment

    for use_images, image, cwd in ((False, None, None), (True, "python:3.12", "/work")):
        config = VerifiersConfig(taskset="doubling_taskset", settings={"kind": "image"}, use_images=use_images)
        environment = VerifiersEnvironment(config)
        await environment.setup()
        item = environment.items()[0]
        assert (environment.image(item), environment.cwd(item)) == (image, cwd)
