"""What becomes of rollouts whose agent is a program when its endpoint has trouble: what lasts is no reward, and
what passes does not reach the agent."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_core.envs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from hermes_core.testing.scripted_server import Answer, Fault, Reply, ScriptedServer, call

ROOT = Path(__file__).resolve().parents[2]
OURS = "python3 -c " + shlex.quote((ROOT / "examples/agent_program/agent.py").read_text("utf-8"))
ROW = {"id": "one", "prompt": "Write the word done into out.txt.", "check": "grep -qx done out.txt"}
TOOLS = {"program": ("bash", "command"), "codex": ("exec_command", "cmd"), "pi": ("bash", "command")}
"""The tool of each agent that runs a command, and its argument."""

FAULTS: dict[str, Answer] = {
    "429 with Retry-After": Fault(429, "fault-429", headers={"Retry-After": "1"}),
    "429": Fault(429, "fault-429"),
    "500": Fault(500, "fault-500"),
    "a cut answer": Fault(cut=True, body=b'{"choices": [{"message": {"content": "I am'),
    "not JSON": Fault(body=b"<html>Bad gateway</html>"),
    "401": Fault(401, "incorrect API key provided", "invalid_api_key"),
    "a hung endpoint": Fault(500, delay_s=60.0),
    "abort": Reply("I am", finish_reason="abort"),
}
SETTINGS: dict[str, Any] = {"endpoint_patience_s": 1.5, "request_timeout_s": 1.0, "max_retry_wait_s": 1.0}
TOO_LONG = Fault(400, "This model's maximum context length is 10 tokens.", "context_length_exceeded")


class Endpoint:
    """A model that writes the file and then says so; one of its requests meets a fault.

    Args:
        turn: which of the agent's turns it meets.
        times: how often; None is always.
    """

    def __init__(self, agent: str, fault: Answer, *, turn: int = 1, times: int | None = None) -> None:
        self._tool, self._argument = TOOLS[agent]
        self._fault, self._turn = fault, turn
        self.left = times
        self.asked = 0

    def __call__(self, request: dict[str, Any]) -> Answer:
        if request.get("max_tokens") == 1:
            return Reply("Hello")
        assert "fault-429" not in (said := json.dumps(request["messages"])) and "fault-500" not in said
        self.asked += 1
        turn = sum(message["role"] == "assistant" for message in request["messages"])
        if turn == self._turn and self.left != 0:
            self.left = None if self.left is None else self.left - 1
            return self._fault
        if turn:
            return Reply("I wrote it.", usage=(10, 5))
        return Reply(None, [call(self._tool, **{self._argument: "echo done >out.txt"})], usage=(10, 5))


async def rolled_out(tmp_path: Path, agent: str, endpoint: Endpoint, **settings: Any) -> dict[str, Any]:
    """The only record."""
    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROW) + "\n")
    records: list[dict[str, Any]] = []
    plugins: list[Any] = []
    if agent == "program":
        settings["command"] = OURS
    else:
        plugins.append(pytest.importorskip("hermes_agents"))
    began = time.monotonic()
    async with (
        ScriptedServer(endpoint) as server,
        Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False, plugins=plugins) as runtime,
    ):
        await run_rollouts(
            runtime,
            "tasks",
            agent,
            env={"dataset_name": str(tmp_path / "tasks.jsonl")},
            settings={"model": "scripted", "base_url": server.base_url, **SETTINGS, **settings},
            isolation="user",
            concurrency=1,
            on_record=lambda record: records.append(dict(record)),
        )
    [record] = records
    print(f"{time.monotonic() - began:.1f} s in all, {record['timings'].get('agent_s')} s for the agent")
    return record


def outcome(record: dict[str, Any]) -> tuple[float | None, str | None, str]:
    return record["reward"], record["failure"] and record["failure"]["kind"], record["stop_reason"]


AGENTS = ["program", *(pytest.param(agent, marks=[pytest.mark.full, pytest.mark.long]) for agent in ("codex", "pi"))]


@pytest.fixture
def there(request: pytest.FixtureRequest, require: Callable[[str, str | None], None]) -> None:
    """The agent of the test was fetched before, or it is a program of ours."""
    agent = request.getfixturevalue("agent")
    if agent != "program":
        packages = pytest.importorskip("hermes_agents.packages")
        fetched = list(packages.cache().glob(f"{agent}-*"))
        require("agents", None if fetched else f"{agent} was not fetched: hermes-rl agents install {agent}")


@pytest.mark.loop_stall(2.0)
@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_that_lasts_is_no_reward(tmp_path: Path, there: None, agent: str, fault: str) -> None:
    """Although the work was done by then, and whatever the agent's exit status is."""
    record = await rolled_out(tmp_path, agent, Endpoint(agent, FAULTS[fault]))
    assert outcome(record) == (None, "model", "model_error"), record
    assert record["program"]["requests"]["answered"] == 1
    assert record["program"]["requests"]["calls"] == 2  # it ends with the first refusal


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("fault", [each for each in FAULTS if each != "401"])
async def test_a_fault_that_passes_does_not_reach_the_agent(
    tmp_path: Path, there: None, agent: str, fault: str
) -> None:
    endpoint = Endpoint(agent, FAULTS[fault], times=1)
    record = await rolled_out(tmp_path, agent, endpoint, endpoint_patience_s=30.0)
    assert outcome(record) == (1.0, None, "finished"), record
    assert endpoint.left == 0 and endpoint.asked == 3
    requests = record["program"]["requests"]
    assert (requests["calls"], requests["answered"], len(record["turns"])) == (2, 2, 2)


@pytest.mark.parametrize("agent", AGENTS)
async def test_a_conversation_that_is_too_long_is_scored(tmp_path: Path, there: None, agent: str) -> None:
    record = await rolled_out(tmp_path, agent, Endpoint(agent, TOO_LONG))
    assert outcome(record) == (1.0, None, "context_length"), record


@pytest.mark.parametrize("agent", AGENTS)
async def test_a_task_that_is_too_long_is_no_reward(tmp_path: Path, there: None, agent: str) -> None:
    record = await rolled_out(tmp_path, agent, Endpoint(agent, TOO_LONG, turn=0))
    assert outcome(record)[:2] == (None, "model"), record
