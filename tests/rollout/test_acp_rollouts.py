"""The agent `acp`: programs that speak the Agent Client Protocol, how they end, and what of it is a reward."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from typing import Any

import hermes_agents
import pytest
from hermes_testing.scripted_server import Fault, Reply, ScriptedServer, ToolScript, call

from hermes_core.environment import Environment, FollowUp
from hermes_core.runs.runner import run_rollouts
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from tests.mcp.mcp_servers import odd

AGENT = "python3 -c " + shlex.quote((Path(__file__).parent / "acp_agent.py").read_text("utf-8")) + " {folder} "


class Parts(Environment):
    """A task in parts: the file `out.txt` must have the lines that were asked for."""

    name = "parts"

    def __init__(self, *parts: str, kills: bool = False) -> None:
        super().__init__()
        self.parts, self.kills = parts, kills
        self.said = 1

    def items(self) -> list[dict[str, Any]]:
        return [{"id": "one"}]

    def format_prompt(self, item: Any) -> str:
        return self.parts[0]

    async def continue_trajectory(self, item: Any, rollout: Any) -> FollowUp | None:
        if self.kills:
            await rollout.kill_everything()
        if self.said == len(self.parts):
            return None
        self.said += 1
        return FollowUp(self.parts[self.said - 1])

    async def verify_and_score_trajectory(self, item: Any, result: Any, *, exec_tool: Any, rollout: Any) -> float:
        ran = await rollout.commands.run("cat out.txt cancelled 2>/dev/null")
        return float(ran.text.count("done"))


def solver(prompt: str) -> Any:
    for number in range(9):
        said = yield call("bash", command="echo done >>out.txt; cat out.txt")
        assert said.count("done") == number + 1, said
        yield Reply(f"I wrote it {number}.")


async def rollout(
    tmp_path: Path, modes: str = "", script: Any = None, *, env: Environment | None = None, **settings: Any
) -> dict[str, Any]:
    """The record of the only item."""
    records: list[dict[str, Any]] = []
    given = {"isolation": "user", "rollout_timeout": 60.0, **settings}
    options = {name: given.pop(name) for name in ("isolation", "rollout_timeout", "mcp") if name in given}
    async with (
        ScriptedServer(script or ToolScript(solver)) as server,
        Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False, plugins=[hermes_agents]) as runtime,
    ):
        await run_rollouts(
            runtime,
            env or Parts("Write done."),
            "acp",
            settings={"model": "scripted", "base_url": server.base_url, "command": AGENT + modes, **given},
            concurrency=1,
            on_record=lambda record: records.append(dict(record)),
            **options,
        )
    [record] = records
    return record


@pytest.mark.parametrize("level", ["user", "namespace"])
async def test_what_the_user_says_later_goes_to_the_same_session(tmp_path: Path, level: str) -> None:
    record = await rollout(tmp_path, "asks", env=Parts("Write done.", "Once more.", "Again."), isolation=level)
    assert (record["reward"], record["failure"], record["stop_reason"]) == (3.0, None, "finished"), record
    said = [message["content"] for message in record["messages"] if message["role"] == "user"]
    assert said == ["Write done.", "Once more.", "Again."]
    assert len(record["turns"]) == 6
    program = record["program"]
    assert (program["exit_code"], program["signal"], program["output"]) == (0, None, "")
    assert program["requests"]["answered"] == 6 and program["output_bytes"] > 0
    assert program["acp"]["agent"] == "small 0.1" and program["acp"]["stop_reasons"] == ["end_turn"] * 3
    assert program["acp"]["messages"] == {"agent_message_chunk": 6, "requests": 3, "tool_call_update": 3}


async def test_it_is_given_the_mcp_servers(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    far = odd("fine", where="driver")
    record = await rollout(tmp_path / "takes", "mcp", mcp={"far": far})
    assert (record["reward"], record["failure"], record["stop_reason"]) == (1.0, None, "finished"), record
    refused = await rollout(tmp_path / "refuses", mcp={"far": far})
    assert refused["failure"]["kind"] == "setup"
    assert "takes no MCP servers over HTTP" in refused["failure"]["message"], refused


async def test_a_program_that_the_environment_ends_loads_its_session(tmp_path: Path) -> None:
    record = await rollout(tmp_path, "loads", env=Parts("Write done.", "Once more.", "Again.", kills=True))
    assert (record["reward"], record["failure"], record["stop_reason"]) == (3.0, None, "finished"), record
    assert len(record["turns"]) == 6 and record["program"]["acp"]["stop_reasons"] == ["end_turn"] * 3


async def test_what_follows_is_left_out_if_it_can_not_load_one(tmp_path: Path) -> None:
    record = await rollout(tmp_path, env=Parts("Write done.", "Once more.", kills=True))
    assert (record["reward"], record["failure"], record["stop_reason"]) == (1.0, None, "finished"), record


async def test_a_program_that_dies_of_what_follows_has_failed(tmp_path: Path) -> None:
    """It is started once more, as the environment may have ended it. The end of the part before does not count."""
    record = await rollout(tmp_path, "loads dies-second", env=Parts("Write done.", "Once more."))
    assert (record["reward"], record["failure"], record["stop_reason"]) == (1.0, None, "program_failed"), record
    assert record["program"]["exit_code"] == 5 and len(record["turns"]) == 2


async def test_at_the_end_of_its_time_it_is_told_to_stop(tmp_path: Path) -> None:
    def sleeper(prompt: str) -> Any:
        yield call("bash", command="echo done >out.txt; sleep 1000")
        return "never"

    record = await rollout(tmp_path, script=ToolScript(sleeper), env=Cancelled("Sleep."), rollout_timeout=5.0)
    assert (record["reward"], record["failure"], record["stop_reason"]) == (1.0, None, "time_limit"), record
    assert record["program"]["acp"]["stop_reasons"] == ["cancelled"]
    assert len(record["turns"]) == 1


class Cancelled(Parts):
    """Scored by whether the agent was told to stop."""

    async def verify_and_score_trajectory(self, item: Any, result: Any, *, exec_tool: Any, rollout: Any) -> float:
        return float((await rollout.commands.run("cat cancelled")).text == "yes")


async def test_a_program_that_hangs_is_ended_at_the_end_of_its_time(tmp_path: Path) -> None:
    """It neither reads that it is to stop, nor notices the end of its input."""

    def stopper(prompt: str) -> Any:
        yield call("bash", command="echo done >out.txt; kill -STOP $PPID; sleep 1000")
        return "never"

    record = await rollout(tmp_path, script=ToolScript(stopper), rollout_timeout=5.0)
    assert (record["reward"], record["stop_reason"]) == (1.0, "time_limit"), record
    assert record["program"]["exit_code"] is None and record["program"]["acp"]["stop_reasons"] == []


@pytest.mark.parametrize(
    ("modes", "said"),
    [
        ("dies-first", "acp ended with 1 before the model had answered it: no settings"),
        ("hangs", "was not ready within 4 s"),
        ("asks-first hangs", "was not ready within 4 s, before its task"),
        ("old", "speaks version 7 of ACP, and not 1"),
        ("locked", "refused session/new: Authentication required (auth_method can be key)"),
        ("errs-first", "refused session/new"),
    ],
)
async def test_a_program_that_can_not_be_started_is_no_reward(tmp_path: Path, modes: str, said: str) -> None:
    record = await rollout(tmp_path, modes, start_timeout_s=4.0 if "hangs" in modes else 60.0)
    assert record["reward"] is None and record["failure"]["kind"] == "setup"
    assert said in record["failure"]["message"]


async def test_a_command_that_is_no_agent(tmp_path: Path) -> None:
    for command, said in (("/no/such/agent", "/no/such/agent"), ("cat /etc/hostname", "is not only ACP")):
        record = await rollout(tmp_path, command=command)
        assert record["reward"] is None and record["failure"]["kind"] == "setup"
        assert said in record["failure"]["message"]


async def test_it_can_be_told_how_to_authenticate(tmp_path: Path) -> None:
    assert (await rollout(tmp_path, "locked", auth_method="key"))["reward"] == 1.0


@pytest.mark.parametrize("modes", ["dies-later", "huge"])
async def test_a_program_that_fails_in_the_middle_is_scored(tmp_path: Path, modes: str) -> None:
    record = await rollout(tmp_path, modes, env=Parts("Write done.", "Once more."))
    assert (record["reward"], record["failure"], record["stop_reason"]) == (0.0, None, "program_failed"), record
    assert len(record["turns"]) == 1
    if modes == "dies-later":
        assert (record["program"]["exit_code"], record["program"]["output"]) == (4, "died of it\n")


async def test_lines_that_are_none_and_messages_that_nobody_asked_for(tmp_path: Path) -> None:
    record = await rollout(tmp_path, "noise asks")
    assert (record["reward"], record["stop_reason"]) == (1.0, "finished"), record
    told = record["program"]["acp"]
    assert told["stop_reasons"] == ["end_turn"] and len(told["messages"]) <= 33
    assert told["messages"]["not_read"] == 7 and told["messages"]["not_asked"] == 10
    assert sum(told["messages"].values()) == 7 + 10 + 3 + 302 + 3
    assert record["program"]["output"] == "its standard output is not only ACP: Welcome to the agent!"


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("says-max_tokens", "length"),
        ("says-refusal", "content_filter"),
        ("says-max_turn_requests", "max_turns"),
        ("says-nonsense", "program_failed"),
        ("says-end_turn", "finished"),
        ("errs", "program_failed"),
    ],
)
async def test_its_own_reason_counts_where_the_driver_saw_no_end(tmp_path: Path, says: str, reason: str) -> None:
    """It stops after a call, whose answer it never tells the model."""
    record = await rollout(tmp_path, f"stops {says}", env=Parts("Write done.", "Once more."))
    assert (record["failure"], record["stop_reason"]) == (None, reason), record
    assert (record["reward"], len(record["turns"])) == (1.0, 1 + (reason == "finished"))


async def test_the_drivers_reason_comes_first(tmp_path: Path) -> None:
    record = await rollout(tmp_path, "says-max_tokens")
    assert record["stop_reason"] == "finished" and record["program"]["acp"]["stop_reasons"] == ["max_tokens"]

    def script(request: dict[str, Any]) -> Any:
        return Reply(None, [call("bash", command="true")])

    record = await rollout(tmp_path, "", script, max_turns=3, env=Parts("Write done.", "Once more."))
    assert (record["reward"], record["stop_reason"], len(record["turns"])) == (0.0, "max_turns", 3), record


async def test_what_the_endpoint_refuses_for_good_is_a_model_failure(tmp_path: Path) -> None:
    def script(request: dict[str, Any]) -> Any:
        if any(message["role"] == "tool" for message in request["messages"]):
            return Fault(401, "incorrect API key provided", "invalid_api_key")
        return ToolScript(solver)(request)

    record = await rollout(tmp_path, "", script, endpoint_patience_s=0)
    assert record["reward"] is None and record["failure"]["kind"] == "model", record


async def test_the_wait_for_the_model_does_not_count(tmp_path: Path) -> None:
    async def slow(request: dict[str, Any]) -> Any:
        await asyncio.sleep(4)
        return ToolScript(solver)(request)

    record = await rollout(tmp_path, "", slow, rollout_timeout=5.0)
    assert (record["reward"], record["stop_reason"]) == (1.0, "finished"), record


async def test_the_record_has_what_the_schema_says(tmp_path: Path) -> None:
    from hermes_core.records.record import Record

    record = await rollout(tmp_path)
    assert Record.from_json(json.loads(json.dumps(record))).program == record["program"]
