"""What becomes of rollouts whose agent is a program when its endpoint has trouble: what lasts is no reward, and
what passes does not reach the agent."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hermes_agents
import pytest
from hermes_agents.serving import gateway
from hermes_testing.scripted_server import Answer, Fault, Reply, ScriptedServer, call

from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
OURS = "python3 -c " + shlex.quote((ROOT / "examples/agent_program/agent.py").read_text("utf-8"))
ROW = {"id": "one", "prompt": "Write the word done into out.txt.", "check": "grep -qx done out.txt"}
WORK = [Reply(None, [call("bash", command="echo done >out.txt")], usage=(10, 5)), Reply("I wrote it.", usage=(10, 5))]

FAULTS: dict[str, Answer] = {
    "429 with Retry-After": Fault(429, "fault-429", headers={"Retry-After": "1"}),
    "429": Fault(429, "fault-429"),
    "500": Fault(500, "fault-500"),
    "a cut answer": Fault(cut=True, body=b'{"choices": [{"message": {"content": "I am'),
    "not JSON": Fault(body=b"<html>Bad gateway</html>"),
    "401": Fault(401, "fault-401", "invalid_api_key"),
    "a hung endpoint": Fault(500, delay_s=60.0),
    "abort": Reply("I am", finish_reason="abort"),
}
SETTINGS: dict[str, Any] = {"endpoint_patience_s": 1.5, "request_timeout_s": 1.0, "max_retry_wait_s": 1.0}
TOO_LONG = Fault(400, "This model's maximum context length is 10 tokens.", "context_length_exceeded")


class FaultyEndpoint:
    """A model that says what is in `work`, turn by turn, and whose requests meet faults.

    Args:
        faults: what the requests of these turns meet.
        times: how often each of them meets it; None is always.
    """

    def __init__(self, work: Sequence[Reply], faults: Mapping[int, Answer], *, times: int | None = None) -> None:
        self._work, self._faults, self._times = work, faults, times
        self.met: Counter[int] = Counter()
        """How often each turn has met its fault."""
        self.asked = 0
        self._before: int | None = None

    def __call__(self, request: dict[str, Any]) -> Answer:
        if request.get("max_tokens") == 1:
            return Reply("Hello")
        said = json.dumps(request["messages"])
        assert not any(f"fault-{each}" in said for each in (401, 429, 500))
        self.asked += 1
        if "summar" in str(request["messages"][-1]["content"]).lower():
            return Reply("The file is to be written.", usage=(10, 5))  # the program shortens its conversation
        answers = sum(message["role"] == "assistant" for message in request["messages"])
        self._before = answers if self._before is None else self._before  # some begin with examples
        turn = max(0, answers - self._before)
        if (fault := self._faults.get(turn)) is not None and self.met[turn] != self._times:
            self.met[turn] += 1
            return fault
        return self._work[min(turn, len(self._work) - 1)]


async def rolled_out(
    tmp_path: Path, endpoint: FaultyEndpoint, *, limits: Mapping[str, float] | None = None, **settings: Any
) -> dict[str, Any]:
    """The only record."""
    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROW) + "\n")
    records: list[dict[str, Any]] = []
    async with (
        ScriptedServer(endpoint) as server,
        Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False, plugins=[hermes_agents]) as runtime,
    ):
        await run_rollouts(
            runtime,
            "tasks",
            "program",
            env={"dataset_name": str(tmp_path / "tasks.jsonl")},
            settings={"command": OURS, "model": "scripted", "base_url": server.base_url, **SETTINGS, **settings},
            isolation="user",
            concurrency=1,
            **(limits or {}),
            on_record=lambda record: records.append(dict(record)),
        )
    [record] = records
    return record


def outcome(record: Mapping[str, Any]) -> tuple[float | None, str | None, str]:
    """Its reward, its kind of failure, and the reason to stop."""
    return record["reward"], record["failure"] and record["failure"]["kind"], record["stop_reason"]


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_that_lasts_is_no_reward(tmp_path: Path, fault: str) -> None:
    """Although the work was done by then, and whatever the program's exit status is."""
    record = await rolled_out(tmp_path, FaultyEndpoint(WORK, {1: FAULTS[fault]}))
    assert outcome(record) == (None, "model", "model_error"), record
    assert record["program"]["requests"]["answered"] == 1
    assert record["program"]["requests"]["calls"] == 2  # it ends with the first refusal


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_that_passes_does_not_reach_the_program(tmp_path: Path, fault: str) -> None:
    endpoint = FaultyEndpoint(WORK, {1: FAULTS[fault]}, times=1)
    record = await rolled_out(tmp_path, endpoint, endpoint_patience_s=30.0)
    assert outcome(record) == (1.0, None, "finished"), record
    assert endpoint.met == {1: 1} and endpoint.asked == 3
    requests = record["program"]["requests"]
    assert (requests["calls"], requests["answered"], len(record["turns"])) == (2, 2, 2)


async def test_a_conversation_that_is_too_long_is_scored(tmp_path: Path) -> None:
    record = await rolled_out(tmp_path, FaultyEndpoint(WORK, {1: TOO_LONG}))
    assert outcome(record) == (1.0, None, "context_length"), record


SUMMARISES = (
    OURS.replace("def ask(messages):", "def ask(messages, tools=(BASH,)):").replace('"tools": [BASH]', '"tools": tools')
).replace(
    "        message = ask(messages)\n",
    """        try:
            message = ask(messages)
        except urllib.request.HTTPError:
            asked = {"role": "user", "content": "Write a summary of this: " + messages[1]["content"]}
            message = ask([asked], [])
            messages[1:] = [{"role": "user", "content": "What was done so far?"}, message]
            continue
""",
)
"""The program, which begins anew from a summary if its conversation is too long: without the task."""


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_program_may_go_on_from_a_summary(tmp_path: Path, goes_on: bool) -> None:
    command = SUMMARISES if goes_on else SUMMARISES.replace("continue", "return")
    record = await rolled_out(tmp_path, FaultyEndpoint(WORK, {1: TOO_LONG}, times=1), command=command)
    assert outcome(record) == (1.0, None, "finished" if goes_on else "context_length"), record
    assert [turn["compacted"] for turn in record["turns"]] == ([False, True, False] if goes_on else [False])
    texts = [message["content"] for message in record["messages"][4:]]
    assert texts[1:] == (["The file is to be written.", "What was done so far?", "I wrote it."] if goes_on else [])


async def test_a_task_that_is_too_long_is_no_reward(tmp_path: Path) -> None:
    record = await rolled_out(tmp_path, FaultyEndpoint(WORK, {0: TOO_LONG}))
    assert outcome(record)[:2] == (None, "model"), record


WAITS = OURS.replace("import json", "import json, sys, time\nsys.excepthook = lambda *_: time.sleep(600)", 1)
"""The program, which never ends after a call that failed."""


async def test_a_program_that_does_not_end_after_the_endpoint_failed_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "GRACE_S", 0.1)
    record = await rolled_out(
        tmp_path, FaultyEndpoint(WORK, {1: FAULTS["401"]}), command=WAITS, endpoint_patience_s=0.0
    )
    assert outcome(record) == (None, "model", "model_error"), record
    assert record["program"]["exit_code"] is None and "fault-401" in record["failure"]["message"]


@pytest.mark.full
@pytest.mark.parametrize("limit", [{"rollout_timeout": 5.0}, {"deadline": 10.0}], ids=str)
async def test_a_time_limit_after_the_endpoint_failed_is_no_reward(tmp_path: Path, limit: dict[str, float]) -> None:
    endpoint = FaultyEndpoint(WORK, {1: FAULTS["401"]})
    record = await rolled_out(tmp_path, endpoint, limits=limit, command=WAITS, endpoint_patience_s=0.0)
    assert outcome(record) == (None, "model", "model_error"), record
