"""Real coding agents tell their model of the instructions and skills of a task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.scripted_server import Reply

from hermes_core.datasets.tasks import TasksEnvironment
from tests.coding_agents.test_real_agents import rollouts

pytestmark = [pytest.mark.full, pytest.mark.loop_stall(2.0)]

SKILL = "---\\nname: brewing\\ndescription: How tea is brewed.\\n---\\nBoil water.\\n"
ROW = {
    "id": "tea",
    "prompt": "Make tea.",
    "setup": [f"mkdir -p sk/brewing && printf -- '{SKILL}' >sk/brewing/SKILL.md"],
    "check": "true",
}


class Taught(TasksEnvironment):
    """Its task has instructions and a skill."""

    def initial_messages(self, item: Any) -> list[dict[str, Any]]:
        return [{"role": "system", "content": "Always whisper."}, *super().initial_messages(item)]

    def skills(self, item: Any) -> str:
        return "sk"


ALWAYS, OTHERS = ("codex", "claude-code"), ("pi", "kimi-code", "opencode", "qwen-coder", "hermes")
AGENTS = [*ALWAYS, *(pytest.param(agent, marks=pytest.mark.stress) for agent in OTHERS)]
INSTRUCTIONS_IN_PROMPT = ("hermes",)


@pytest.mark.long
@pytest.mark.parametrize("agent", AGENTS)
async def test_a_real_agent_is_told_of_instructions_and_skills(
    tmp_path: Path, isolates: None, indexes: None, agent: str
) -> None:
    told: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> Reply:
        if request.get("max_tokens") == 1:
            return Reply("Hello")
        told.append(request)
        return Reply("I did it.", usage=(100, 5))

    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROW) + "\n")
    environment = Taught(Taught.config_class(dataset_name=str(tmp_path / "tasks.jsonl")))
    where = {"backend_config": {"network": "none"}}
    [record] = await rollouts(tmp_path, agent, answer, environment, None, "namespace", **where)
    assert (record["reward"], record["failure"], record["stop_reason"]) == (1.0, None, "finished"), record
    said = [str(message["content"]) for message in told[0]["messages"]]
    [prompt] = [text for text in said if "Make tea." in text]
    assert ("Always whisper." in prompt) == (agent in INSTRUCTIONS_IN_PROMPT)
    assert any("Always whisper." in text for text in said), said
    assert "How tea is brewed." in json.dumps(told[0]), said  # qwen-coder describes its tool for skills by them
    assert len(record["turns"]) == 1 and record["program"]["requests"]["root"] == 1
