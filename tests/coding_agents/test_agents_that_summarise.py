"""Real coding agents whose conversations are too long go on from summaries: all of it is their own conversation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.scripted_server import FEWEST, Answer, Reply

from tests.coding_agents.test_agent_faults import work
from tests.coding_agents.test_real_agents import rollouts
from tests.rollout.test_program_faults import ROW, TOO_LONG

pytestmark = [pytest.mark.stress, pytest.mark.long, pytest.mark.loop_stall(2.0)]

TURNS = 6
TOO_LONG_AT = (3, 5)
"""The turns that are refused once."""


class Model:
    """Does the work turn by turn, whatever the history says, and writes the summaries that it is asked for."""

    def __init__(self, agent: str) -> None:
        self._work = work(agent, TURNS)
        self._turn, self._refused, self.summaries = 0, set[int](), 0

    def __call__(self, request: dict[str, Any]) -> Answer:
        if request.get("max_tokens") in FEWEST:
            return Reply("Hello")
        last = str(request["messages"][-1]["content"]).lower()
        if not request.get("tools") or "summary" in last:
            self.summaries += 1
            return Reply(f"<summary>\nPart {self.summaries} of the work was done.\n</summary>", usage=(90_000, 50))
        turn = self._turn + 1
        if turn in TOO_LONG_AT and turn not in self._refused:
            self._refused.add(turn)
            return TOO_LONG
        self._turn = turn
        return replace(self._work[turn - 1], usage=(90_000, 50))


@pytest.mark.parametrize("agent", ["opencode", "qwen-coder", "kimi-code", "claude-code"])
async def test_a_real_agent_goes_on_from_summaries(tmp_path: Path, isolates: None, indexes: None, agent: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROW) + "\n")
    model, where = Model(agent), {"dataset_name": str(tmp_path / "tasks.jsonl")}
    [record] = await rollouts(tmp_path, agent, model, "tasks", where, "user", backend_config={"network": "none"})
    reason = "program_failed" if agent == "opencode" else "finished"  # its status is 1 although it went on
    assert (record["reward"], record["failure"], record["stop_reason"]) == (1.0, None, reason), record
    commands = [json.loads(each["arguments"])["command"] for each in record["calls"]]
    assert commands == ["echo done >out.txt", *(f"true {n}" for n in range(TURNS - 2))]
    assert record["messages"][-1]["content"] == "I wrote it." and model.summaries >= len(TOO_LONG_AT)
