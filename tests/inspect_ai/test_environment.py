"""Inspect's tasks as an environment: the prompt, the slot, the scores, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hermes_core import HermesError, Runtime
from hermes_core.agents.base import AgentResult, AgentTask, StopReason
from hermes_core.runs.runner import run_rollouts

pytestmark = [
    pytest.mark.full,
    pytest.mark.entry_points,
    pytest.mark.usefixtures("inspect_extra"),
    pytest.mark.filterwarnings("ignore:The 'initial' parameter:DeprecationWarning"),  # Inspect of tenacity
]

FILE = Path(__file__).with_name("tasks_of_inspect.py")


class Saying:
    """An agent that runs a command with the model's tool, if it has tools, and then says something."""

    name = "saying"

    def __init__(self, said: str = "Paris", command: str = "echo $((2 * $(cat given))) >answer") -> None:
        self.said, self.command = said, command
        self.tasks: list[AgentTask] = []

    async def run(self, task: AgentTask) -> AgentResult:
        self.tasks.append(task)
        result = task.result
        result.messages = list(task.messages)
        if task.tool_schemas:
            call = {"id": "1", "type": "function", "function": {"name": "terminal", "arguments": "{}"}}
            answer = await task.tool_handler("terminal", {"command": self.command, "timeout": 60}, task.trajectory_id)
            result.messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            result.messages.append({"role": "tool", "tool_call_id": "1", "name": "terminal", "content": str(answer)})
        result.messages.append({"role": "assistant", "content": self.said})
        result.turns_used = 1
        result.stop(StopReason.FINISHED)
        return result

    async def aclose(self) -> None:
        return


async def run(task: str, agent: Any = None, **env: Any) -> list[dict[str, Any]]:
    """The records of a task's rollouts, by the order of their items."""
    records: list[dict[str, Any]] = []
    async with Runtime() as runtime:
        await run_rollouts(
            runtime,
            "inspect",
            agent or Saying(),
            env={"task": f"{FILE}@{task}", **env},
            on_record=records.append,
            concurrency=2,
            infra_retries=0,
        )
    return sorted(records, key=lambda record: str(record["item_id"]))


async def test_files_setup_and_scorer_use_the_slot_of_the_agent(leak_check: None) -> None:
    records = await run("doubling", task_args={"count": 2})
    assert [(record["item_id"], record["reward"], record["failure"]) for record in records] == [
        ("double-1", 1.0, None),
        ("double-2", 1.0, None),
    ]
    assert records[1]["details"]["scores"]["doubled"] == {"value": "C", "answer": "4\n", "explanation": None}


async def test_wrong_work_scores_nothing_and_missing_work_is_what_the_scorer_says() -> None:
    [record] = await run("doubling", Saying(command="echo 7 >answer"), task_args={"count": 1})
    assert (record["reward"], record["failure"]) == (0.0, None)
    [record] = await run("doubling", Saying(command="true"), task_args={"count": 1})
    assert record["reward"] is None
    assert record["failure"]["kind"] == "verifier"
    assert "answer" in record["failure"]["message"]


async def test_the_solver_writes_the_prompt_and_a_sample_without_a_sandbox_has_no_tools() -> None:
    agent = Saying("The capital is Paris")
    [record] = await run("question", agent)
    [task] = agent.tasks
    assert [(message["role"], message["content"]) for message in task.messages] == [
        ("system", "Be brief."),
        ("user", "What is the capital of France? (Hint: seine)"),
    ]
    assert not task.tool_schemas
    assert (record["reward"], record["failure"], record["item_id"]) == (1.0, None, "1")


async def test_without_the_solver_the_prompt_is_the_input() -> None:
    agent = Saying("London")
    [record] = await run("question", agent, use_solver=False, system_prompt="Think.")
    assert [message["content"] for message in agent.tasks[0].messages] == ["Think.", "What is the capital of France?"]
    assert record["reward"] == 0.0


@pytest.mark.parametrize(("said", "reward"), [("ANSWER: B", 1.0), ("ANSWER: C", 0.0), ("I don't know", 0.0)])
async def test_choices_are_offered_and_read(said: str, reward: float) -> None:
    agent = Saying(said)
    [record] = await run("choices", agent)
    assert "B) two" in agent.tasks[0].messages[-1]["content"]
    assert (record["reward"], record["failure"]) == (reward, None)


@pytest.mark.parametrize(
    ("value", "reward"),
    [("C", 1.0), ("P", 0.5), ("I", 0.0), ("N", 0.0), ("Yes", 1.0), ("0.3", 0.3), (-2, -2.0), ({"only": 0.4}, 0.4)],
)
async def test_what_becomes_of_a_score(value: Any, reward: float) -> None:
    [record] = await run("scored", task_args={"value": value})
    assert (record["reward"], record["failure"]) == (reward, None)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("raise", "the scorer is broken"),
        ("none", "gave no score"),
        ("nan", "no reward"),
        ("perhaps", "no reward"),
        ({"a": 1, "b": 2}, "several values: a, b"),
    ],
)
async def test_a_scorer_that_gives_no_reward_is_a_failure_of_the_verifier(value: Any, said: str) -> None:
    [record] = await run("scored", task_args={"value": value})
    assert record["reward"] is None
    assert record["failure"]["kind"] == "verifier"
    assert said in record["failure"]["message"]


async def test_a_sandbox_that_is_lost_while_a_scorer_runs_is_no_score() -> None:
    [record] = await run("losing", Saying(command="true"))
    assert record["reward"] is None
    assert record["failure"]["kind"] == "infra"


@pytest.mark.parametrize(("score", "reward"), [("match", 1.0), ("valued/b", 0.75), ("valued1", 0.5)])
async def test_of_several_scores_one_is_named(score: str, reward: float) -> None:
    [record] = await run("two_scorers", score=score)
    assert record["reward"] == reward
    assert list(record["details"]["scores"]) == ["match", "valued", "valued1"]


async def test_a_scorer_asks_the_model_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    output = ModelOutput.from_content("mockllm/model", "GRADE: C")
    output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)  # else it downloads a tokenizer
    model = get_model("mockllm/model", custom_outputs=[output])
    monkeypatch.setattr(
        "hermes_inspect.task.get_model", lambda name: model if name == "mockllm/model" else get_model(name)
    )
    [record] = await run("graded", grader="mockllm/model")
    assert (record["reward"], record["failure"]) == (1.0, None)


@pytest.mark.parametrize(
    ("task", "env", "said"),
    [
        ("missing", {}, "can't be loaded"),
        ("with_setup", {}, "has a setup solver"),
        ("without_scorer", {}, "has no scorer"),
        ("with_agent", {}, "before `generate`.*use_solver"),
        ("asking_itself", {}, "before `generate`"),
        ("asking_twice", {}, "more than once"),
        ("criticising", {}, "asks the model itself"),
        ("two_services", {}, "services a, b"),
        ("graded", {}, "asks a model"),
        ("two_scorers", {}, "several scorers: match, valued, valued1"),
        ("question", {"score": "other"}, "no scorer 'other'.*match"),
    ],
)
async def test_what_does_not_fit_is_refused_when_it_is_loaded(task: str, env: dict[str, Any], said: str) -> None:
    with pytest.raises(HermesError, match=f"(?s){said}"):
        await run(task, **env)


async def test_an_agent_of_inspect_is_replaced() -> None:
    [record] = await run("with_agent", use_solver=False)
    assert record["reward"] == 1.0


async def test_an_image_is_used_if_asked_for() -> None:
    from hermes_inspect.environment import InspectConfig, InspectEnvironment

    for use_images, image, cwd in ((False, None, None), (True, "python:3.12", "/work")):
        environment = InspectEnvironment(InspectConfig(task=f"{FILE}@with_image", use_images=use_images))
        await environment.setup()
        [item] = environment.items()
        assert environment.uses_slot(item)
        assert (environment.image(item), environment.cwd(item)) == (image, cwd)
