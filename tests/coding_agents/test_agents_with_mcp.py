"""Real coding agents call a real MCP server of the driver, which nothing in their slot could reach."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hermes_agents.kimi_code import KimiCode

pytest.importorskip("mcp")

from hermes_testing.scripted_server import Reply, call

from hermes_core.errors import ConfigError
from tests.coding_agents.test_real_agents import rollouts, stressed
from tests.mcp.mcp_servers import real

pytestmark = [pytest.mark.full, pytest.mark.loop_stall(2.0)]

TOOLS = {
    "codex": "mcp__real__",
    "claude-code": "mcp__real__",
    "pi": "mcp__real__",
    "kimi-code": "mcp__real__",
    "opencode": "real_",
    "qwen-coder": "mcp__real__",
    "hermes": "mcp__real__",
    "gemini-cli": "mcp_real_",
}
"""What each agent puts before the names of the server's tools."""

SUM = {"gemini-cli": "expected record, received number"}
"""What an agent makes of the result 5, if it is not that. Gemini CLI takes JSON for structured content, an object."""

AGENTS = [pytest.param(name, marks=() if name in ("codex", "claude-code") else pytest.mark.stress) for name in TOOLS]


def script(agent: str) -> Any:
    """A model that adds two numbers, and fails at something else, with the tools of the server."""
    add, fail = TOOLS[agent] + "add", TOOLS[agent] + "fail"

    def answer(request: dict[str, Any]) -> Reply:
        if request.get("max_tokens") == 1:
            return Reply("Hello")
        answers = [message for message in request["messages"] if message["role"] == "tool"]
        if not any("of no luck" in str(each["content"]) for each in answers):
            return Reply(None, [call(add, a=2, b=3), call(fail, why="of no luck")], usage=(100, 5))
        [added, lost] = [str(each["content"]) for each in answers[-2:]]
        assert SUM.get(agent, "5") in added and "of no luck" in lost, answers
        return Reply("I did it.", usage=(100, 5))

    return answer


@pytest.mark.long
@pytest.mark.parametrize("agent", AGENTS)
async def test_a_real_agent_calls_the_tools_of_a_server(
    tmp_path: Path, isolates: None, indexes: None, agent: str
) -> None:
    await called(tmp_path, agent, "namespace", backend_config={"network": "none"})


@pytest.mark.long
@pytest.mark.parametrize("agent", ["codex", stressed("claude-code"), stressed("qwen-coder")])
async def test_a_real_agent_in_a_container_calls_the_tools_of_a_server(
    tmp_path: Path, docker_images: tuple[str, str], indexes: None, agent: str
) -> None:
    container = {"image": docker_images[0], "network": "none", "read_only": True}
    await called(tmp_path, agent, "user", backend="docker", backend_config=container)


@pytest.mark.long
@pytest.mark.stress
async def test_a_real_agent_is_told_of_a_server_by_acp(tmp_path: Path, isolates: None, indexes: None) -> None:
    program = KimiCode.program
    install = str(await program.fetch())
    env = [f"{name}={value}" for name, value in program.env.items()]
    command = shlex.join(["env", *env, *(word.replace("{install}", install) for word in program.argv[:2]), "acp"])
    place = {"network": "none", "visible_paths": [install]}
    await called(tmp_path, "acp", "namespace", like="kimi-code", settings={"command": command}, backend_config=place)


@pytest.mark.parametrize("agent", ["mini-swe-agent", "aider"])
async def test_a_real_agent_without_mcp_is_refused(tmp_path: Path, agent: str) -> None:
    with pytest.raises(ConfigError, match=f"{agent}' is a program with tools of its own, and can't be given MCP"):
        await rollouts(tmp_path, agent, script("codex"), "tasks", where(tmp_path), "namespace", mcp={"real": real()})


async def called(tmp_path: Path, agent: str, level: str, *, like: str | None = None, **options: Any) -> None:
    """Run the agent with a server of the driver, whose tools it calls.

    Args:
        like: the agent whose names of tools it uses; None is itself.
    """
    like, servers = like or agent, {"real": real(where="driver", tools=("add", "fail"))}
    [record] = await rollouts(tmp_path, agent, script(like), "tasks", where(tmp_path), level, mcp=servers, **options)
    assert (record["reward"], record["failure"], record["stop_reason"]) == (1.0, None, "finished"), record
    names = {TOOLS[like] + tool for tool in ("add", "fail")}
    assert {each["name"] for each in record["calls"]} == names
    offered = {tool["function"]["name"] for tool in record["tool_schemas"]}
    assert names <= offered and not any("remember" in name for name in offered)
    assert record["program"]["requests"]["fork"] == 0


def where(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"id": "add", "prompt": "Add 2 and 3.", "check": "true"}) + "\n")
    return {"dataset_name": str(tmp_path / "tasks.jsonl")}
