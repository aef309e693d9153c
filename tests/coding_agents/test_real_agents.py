"""Real coding agents, from their packages, solve the tasks that ship with the SWE-smith plugin, without a network.

The model is a script that speaks to each in its own dialect, through the gateway.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hermes_agents
import hermes_docker
import hermes_swe_smith
import pytest
from hermes_swe_smith.demo import ENVIRONMENT, FIXES, Fix
from hermes_testing.scripted_server import FEWEST, Answer, Reply, ScriptedServer, call

from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings

pytestmark = [pytest.mark.full, pytest.mark.loop_stall(2.0)]

TOOLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "codex": ("exec_command", "cmd", {}),
    "pi": ("bash", "command", {}),
    "claude-code": ("Bash", "command", {}),
    "mini-swe-agent": ("bash", "command", {}),
    "kimi-code": ("Bash", "command", {}),
    "opencode": ("bash", "command", {"description": "Run it"}),
    "hermes": ("terminal", "command", {}),
    "qwen-coder": ("run_shell_command", "command", {"is_background": False}),
    "gemini-cli": ("run_shell_command", "command", {}),
}
"""The tool of each agent that runs a command, its argument with the command, and others that it wants."""

ALWAYS = ("codex", "pi")
"""The agents that are tried with each change; `.ci/agents` tries the others."""

WHOLE = "calc.py\n```\ndef add(a, b):\n    return a + b\n```\n"
"""What a model answers aider, which has no tools."""


def stressed(agent: str) -> Any:
    """An agent as a parameter of tests that only `make stress` runs with it."""
    return pytest.param(agent, marks=pytest.mark.stress)


AGENTS = [name if name in ALWAYS else stressed(name) for name in TOOLS]

END = {"mini-swe-agent": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}
"""With what command an agent ends that does not end with a text."""

REPLACE = "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.write_text(p.read_text().replace(*sys.argv[2:]))"

OUT = "import os, socket; print(os.strerror(socket.socket().connect_ex(('192.0.2.1', 80))))"
"""Says why nothing outside of the slot can be reached."""


def script(agent: str, reasoning: str | None = None) -> Callable[[dict[str, Any]], Reply]:
    """A model that fixes the bug of which the prompt tells, with the tool that the agent offers."""
    name, argument, others = TOOLS[agent]

    def answer(request: dict[str, Any]) -> Reply:
        if request.get("max_tokens") in FEWEST:
            return Reply("Hello")
        assert name in {tool["function"]["name"] for tool in request["tools"]}
        said = str([message["content"] for message in request["messages"] if message["role"] == "user"])
        [fix] = [fix for fix in (*FIXES, CALC) if fix.issue in said]
        path = fix.path if fix is CALC else f"ledgerline/ledgerline/{fix.path}"
        steps = [
            [f"cat {path}", shlex.join(["python3", "-c", OUT])],
            [shlex.join(["python3", "-c", REPLACE, path, fix.old, fix.new])],
            *([[END[agent]]] if agent in END else []),
        ]
        turn = sum(bool(message.get("tool_calls")) for message in request["messages"])  # some make up answers before
        if turn >= len(steps):
            return Reply("I fixed it.", usage=(100, 5))
        calls = [call(name, **{argument: command}, **others) for command in steps[turn]]
        return Reply(None, calls, reasoning, usage=(100, 5))

    return answer


ROW = {
    "id": "calc",
    "prompt": "Fix the sum in calc.py.",
    "setup": ["printf 'def add(a, b):\\n    return a - b\\n' >calc.py"],
    "check": "PYTHONPATH=. python3 -c 'import calc; assert calc.add(2, 3) == 5'",
}
CALC = Fix("the sum", "a - b", "calc.py", "a - b", "a + b")


@pytest.mark.long
@pytest.mark.parametrize("agent", AGENTS)
async def test_a_real_agent_solves_the_demo_tasks(
    tmp_path: Path, indexes: None, place: dict[str, Any], owner: str, agent: str, record_property: Any
) -> None:
    found = await rollouts(tmp_path, agent, script(agent), "swe-smith", ENVIRONMENT, owner=owner, **place)
    records = checked(agent, found)
    assert len(records) == len(FIXES)
    assert all("Network is unreachable" in str(record["messages"]) for record in records)
    told = [record["program"]["output"] for record in records if agent == "codex"]  # others' own parts warn, too
    assert not any("deprecated" in output for output in told)
    seconds = sum(record["timings"]["agent_s"] for record in records) / len(records)
    where = f"{place['backend']} {place['level']}"
    record_property("figure", f"{agent}, {where}: {seconds:.1f} s for a task, in two slots at a time")


@pytest.mark.stress
async def test_aider_works_without_tools(tmp_path: Path, isolates: None, indexes: None) -> None:
    def answer(request: dict[str, Any]) -> Reply:
        return Reply("Hello" if request.get("max_tokens") in FEWEST else WHOLE, usage=(100, 5))

    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROW) + "\n")
    [record] = await rollouts(
        tmp_path, "aider", answer, "tasks", {"dataset_name": str(tmp_path / "tasks.jsonl")}, "user"
    )
    assert (record["reward"], record["failure"], record["stop_reason"]) == (1.0, None, "finished"), record
    assert (record["calls"], len(record["turns"])) == ([], 1)


@pytest.mark.stress
async def test_hermes_installs_no_package_in_the_slot(tmp_path: Path, isolates: None, indexes: None) -> None:
    """Its driver fetches what it runs. Without a network, each start would wait until pip gives up on the index."""

    def answer(request: dict[str, Any]) -> Reply:
        if request.get("max_tokens") in FEWEST:
            return Reply("Hello")
        done = any(message["role"] == "tool" for message in request["messages"])
        return Reply("I looked.") if done else Reply(None, [call("terminal", command="cat pip.log; ls -A")])

    (tmp_path / "tasks.jsonl").write_text(json.dumps({**ROW, "check": "true"}) + "\n")
    where, settings = {"dataset_name": str(tmp_path / "tasks.jsonl")}, {"variables": {"PIP_LOG": "pip.log"}}
    [record] = await rollouts(tmp_path, "hermes", answer, "tasks", where, "user", settings=settings)
    [result] = [message["content"] for message in record["messages"] if message["role"] == "tool"]
    assert "calc.py" in result and "pip.log: No such file" in result, result


UPSTREAM = {"claude-code": "anthropic", "codex": "responses"}


@pytest.mark.long
@pytest.mark.parametrize("agent", UPSTREAM)
async def test_a_real_agent_is_evaluated_with_the_api_that_it_speaks(
    tmp_path: Path, isolates: None, indexes: None, agent: str
) -> None:
    """What it says to its provider arrives: marks for the cache, signed thinking, its own settings."""
    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROW) + "\n")
    where, asked = {"dataset_name": str(tmp_path / "tasks.jsonl")}, list[dict[str, Any]]()
    answers, settings = script(agent, reasoning="I think."), {"upstream": UPSTREAM[agent]}
    records = await rollouts(tmp_path, agent, answers, "tasks", where, "user", asked=asked, settings=settings)
    [record] = checked(agent, records)
    assert record["program"]["requests"]["continues"] == 2 and record["usage"]["prompt_tokens"] == 300
    assert {each for turn in record["turns"] for each in turn["sampling"]} >= OWN[agent]
    _, *calls = map(json.dumps, asked)
    assert len(calls) == 3 and "hermes_" in calls[1]
    assert all(mark in body for body in calls for mark in MARKS[agent])


OWN = {"claude-code": {"max_tokens", "thinking"}, "codex": {"reasoning"}}
MARKS = {
    "claude-code": ('"cache_control"', '"stream": true'),
    "codex": ('"prompt_cache_key"', "reasoning.encrypted_content"),
}


@pytest.mark.long
@pytest.mark.parametrize("upstream", [None, "responses"])
async def test_codex_works_in_the_way_that_it_chooses_for_a_model_it_knows(
    tmp_path: Path, isolates: None, indexes: None, upstream: str | None
) -> None:
    """It then offers one tool, which takes JavaScript that calls the others."""
    model = "gpt-5.6-luna"

    def answer(request: dict[str, Any]) -> Reply:
        if request.get("max_tokens") in FEWEST:
            return Reply("Hello")
        if any(message["role"] == "tool" for message in request["messages"]):
            return Reply("I fixed it.")
        line = shlex.join(["python3", "-c", REPLACE, CALC.path, CALC.old, CALC.new])
        return Reply(None, [call("functions__exec", input=f"await tools.exec_command({{cmd: {json.dumps(line)}}})")])

    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROW) + "\n")
    where, settings = {"dataset_name": str(tmp_path / "tasks.jsonl")}, {"model": model, "upstream": upstream}
    [record] = await rollouts(tmp_path, "codex", answer, "tasks", where, "user", settings=settings)
    requests = record["program"]["requests"]
    assert (record["reward"], record["stop_reason"], requests["continues"], requests["fork"]) == (1.0, "finished", 1, 0)


def checked(agent: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records, of which each is that of an agent that solved its task."""
    for record in records:
        assert (record["reward"], record["failure"]) == (1.0, None), record
        assert record["stop_reason"] == "finished" and record["program"]["exit_code"] == 0
        assert record["program"]["requests"]["fork"] == 0 and record["program"]["requests"]["root"] == 1
        assert {each["name"] for each in record["calls"]} == {TOOLS[agent][0]}
        assert "not-for-the-slot" not in str(record)
    return records


async def rollouts(
    tmp_path: Path,
    agent: str,
    answers: Callable[[dict[str, Any]], Answer],
    environment: Any,
    env: dict[str, Any] | None,
    level: str,
    *,
    asked: list[dict[str, Any]] | None = None,
    settings: dict[str, Any] | None = None,
    owner: str | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """The records of a run. What the model's server is asked goes to `asked`."""
    records: list[dict[str, Any]] = []
    plugins = [hermes_agents, hermes_docker, hermes_swe_smith]
    async with (
        ScriptedServer(answers, models=["scripted", "gpt-5.6-luna"], api_key="not-for-the-slot") as server,
        Runtime(
            Settings(state_dir=tmp_path / "state", owner=owner), load_entry_points=False, plugins=plugins
        ) as runtime,
    ):
        await run_rollouts(
            runtime,
            environment,
            agent,
            env=env,
            settings={
                **{"model": "scripted", "base_url": server.base_url, "api_key": "not-for-the-slot"},
                **(settings or {}),
            },
            isolation=level,
            concurrency=2,
            on_record=lambda record: records.append(dict(record)),
            **options,
        )
        (asked if asked is not None else []).extend(server.requests)
        kind = runtime.agents.entry(agent).load()
    if hasattr(kind, "program"):
        assert all(record["versions"][agent] == kind.program.version for record in records)
    return records
