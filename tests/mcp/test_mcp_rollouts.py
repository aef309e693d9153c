"""Rollouts with MCP servers: what the model is offered and called, what is recorded, and whose failure it is."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from hermes_testing.scripted_server import ScriptedServer, ToolScript, call

from hermes_core import (
    DrivenRollout,
    Environment,
    FailureKind,
    RolloutContext,
    RunOptions,
    Runtime,
    Settings,
    hookimpl,
    open_session,
)
from hermes_core.errors import ConfigError
from hermes_core.mcp.servers import McpServer
from hermes_core.runs.runner import run_rollouts
from hermes_core.runs.session import Tools
from hermes_core.sandbox.programs import SlotProgram
from hermes_core.soundness.validate import validate
from tests.mcp.mcp_servers import odd, real

SHARED = {"isolation": "shared", "allow_unisolated": True}
"""At this level the slots see the packages of this host."""

ITEM = {"id": "one"}

RUNNING = """
for each in $(grep -lsa "HOME=$HOME" /proc/[0-9]*/environ); do cat "${each%environ}cmdline" 2> /dev/null; done |
tr '\\0' ' ' |
grep -E '[o]dd_server|[r]eal_server' >&2
"""
"""Prints the servers of this slot to standard error."""


class Adding(Environment):
    """The reward is 1 if the file `sum` has the right number."""

    name = "adding"
    default_toolsets = ("terminal",)
    own: Mapping[str, McpServer] = {}
    slots = True

    def items(self) -> list[dict[str, str]]:
        return [ITEM]

    def format_prompt(self, item: Any) -> str:
        return "Add."

    def uses_slot(self, item: Any) -> bool:
        return self.slots

    def mcp_servers(self, item: Any) -> Mapping[str, McpServer]:
        return self.own

    @hookimpl
    async def verify_and_score_trajectory(self, item: Any, rollout: Any) -> float:
        if not self.slots:
            return 1.0
        found = await rollout.commands.run(f"cat sum 2> /dev/null; {RUNNING}")
        assert not found.stderr, "a server still runs"
        return float(found.text.strip() == "5")


@asynccontextmanager
async def driving(
    path: Path, environment: Environment | None = None, **servers: McpServer
) -> AsyncIterator[RolloutContext]:
    options = RunOptions.model_validate({**SHARED, "concurrency": 1, "infra_retries": 1, "mcp": servers})
    async with (
        Runtime(Settings(state_dir=path / "state"), load_entry_points=False) as runtime,
        open_session(runtime, environment or Adding(), "nop", options, work_of="model") as session,
        session.sandboxes() as context,
    ):
        yield session.tools.offer_tools(context, ITEM, "one")


async def test_a_run_with_servers_in_the_slot_and_on_the_driver(tmp_path: Path) -> None:
    def solver(prompt: Any) -> Any:
        added = yield call("calc__add", a=2, b=3)
        yield call("terminal", command=f"echo {added['output']} > sum")
        lost = yield call("notes__fail", why="of no luck")
        return f"Done, {lost['error']}"

    file = tmp_path / "mcp.json"
    command = {"command": sys.executable, "args": list(real().args)}
    token = "s3cr3t-0123456789"
    servers = {"calc": {**command, "env": {"API_TOKEN": token}}, "notes": {**command, "where": "driver"}}
    file.write_text(json.dumps({"mcpServers": servers}))
    async with ScriptedServer(ToolScript(solver)) as server, Runtime(load_entry_points=False) as runtime:
        summary = await run_rollouts(
            runtime,
            Adding(),
            "model",
            settings={"model": "scripted", "base_url": server.base_url},
            out_dir=tmp_path / "run",
            group_size=1,
            mcp=str(file),
            **SHARED,
        )
        offered = {tool["function"]["name"] for tool in server.requests[-1]["tools"]}
    assert summary.complete and {"terminal", "calc__add", "notes__add"} <= offered
    records = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    assert [record["reward"] for record in records] == [1.0]
    assert {schema["function"]["name"] for schema in records[0]["tool_schemas"]} == offered
    assert "of no luck" in records[0]["messages"][-1]["content"]
    configuration = (tmp_path / "run" / "run.json").read_text()
    assert '"API_TOKEN"' in configuration and '"where": "driver"' in configuration
    assert token not in configuration + json.dumps(records)


@pytest.mark.full
async def test_a_server_that_an_item_brings_can_be_called(tmp_path: Path) -> None:
    environment = Adding()
    environment.own = {"calc": real()}
    async with driving(tmp_path, environment) as context:
        rollout = DrivenRollout(context, ITEM)
        assert await rollout.begin()
        added = json.loads(await rollout.call("calc__add", {"a": 2, "b": 3}))
        await rollout.call("terminal", {"command": f"echo {added['output']} > sum"})
        record = await rollout.end()
    assert record.reward == 1.0 and "calc__add" in json.dumps([*record.tool_schemas])


@pytest.mark.parametrize("own", [McpServer(url="http://127.0.0.1:9/mcp"), odd("normal", where="driver")])
async def test_the_driver_reaches_and_runs_nothing_that_an_item_names(tmp_path: Path, own: McpServer) -> None:
    environment = Adding()
    environment.own = {"web": own}
    async with driving(tmp_path, environment) as context:
        rollout = DrivenRollout(context, ITEM)
        assert not await rollout.begin()
        failure = (await rollout.end()).failure
    assert failure is not None and failure.kind is FailureKind.SETUP and "--mcp FILE" in failure.message
    async with driving(tmp_path, environment, web=odd("normal", where="driver")) as context:
        rollout = DrivenRollout(context, ITEM)
        assert await rollout.begin()
        assert "text" in await rollout.call("web__t", {"text": "x"})
        await rollout.aclose()


@pytest.mark.parametrize("news_s", [0.0, 0.3])
async def test_a_server_that_was_killed_between_two_parts_is_started_again(
    monkeypatch: pytest.MonkeyPatch, news_s: float
) -> None:
    """Also where the news of its end takes a while."""
    read = SlotProgram.read

    async def late(self: Any) -> bytes:
        data = await read(self)
        await asyncio.sleep(0 if data else news_s)
        return data

    monkeypatch.setattr(SlotProgram, "read", late)

    class Stepping(Adding):
        @hookimpl
        async def continue_trajectory(self, item: Any, rollout: Any, result: Any) -> str | None:
            await rollout.kill_everything()
            return "And again." if len(answers) == 1 else None

    class Stepper:
        name = "stepper"

        async def run(self, task: Any) -> Any:
            while True:
                answers.append(json.loads(await task.tool_handler("odd__t", {"text": "x"}, "t")))
                if await task.follow_up() is None:
                    return task.result

        async def aclose(self) -> None:
            pass

    answers: list[dict[str, str]] = []
    async with Runtime(load_entry_points=False) as runtime:
        summary = await run_rollouts(runtime, Stepping(), Stepper(), mcp={"odd": odd("normal")}, **SHARED)
    assert summary.complete and [answer.get("output") for answer in answers] == ['{"text": "x"}'] * 2, answers


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("of_item", "of_run", "kind"),
    [
        ({"odd": odd("exits")}, {}, FailureKind.SETUP),
        ({}, {"odd": odd("exits")}, FailureKind.INFRA),
        ({"odd": odd("normal")}, {"odd": odd("exits")}, FailureKind.INFRA),
    ],
    ids=["the item's", "the run's", "the run's instead of the item's"],
)
async def test_a_server_that_fails_in_the_slot_is_the_fault_of_the_item_if_that_brings_it(
    tmp_path: Path, of_item: dict[str, McpServer], of_run: dict[str, McpServer], kind: FailureKind
) -> None:
    environment = Adding()
    environment.own = of_item
    async with driving(tmp_path, environment, **of_run) as context:
        rollout = DrivenRollout(context, ITEM)
        assert not await rollout.begin()
        failure = (await rollout.end()).failure
    assert failure is not None and failure.kind is kind and "no licence" in failure.message


class Solved(Adding):
    """The same, with a reference solution."""

    @hookimpl
    async def solve_trajectory(self, item: Any, rollout: Any) -> None:
        await rollout.commands.run("echo 5 > sum")


async def test_a_server_of_the_run_that_no_slot_can_start_says_nothing_about_the_items(tmp_path: Path) -> None:
    async with Runtime(load_entry_points=False) as runtime:
        outcome = await validate(
            runtime, Solved(), mcp={"odd": odd("exits")}, infra_retries=0, out_dir=tmp_path / "out", **SHARED
        )
    assert not outcome.complete and outcome.findings == []
    assert json.loads((tmp_path / "out/quarantine.json").read_text())["items"] == []


async def test_a_server_of_the_driver_that_fails_ends_the_run_at_its_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no licence"):
        async with driving(tmp_path, odd=odd("exits", where="driver")):
            pytest.fail("it began")


async def test_a_server_of_the_driver_that_fails_later_is_an_infrastructure_failure(tmp_path: Path) -> None:
    once = "import os, sys; os.mkdir(sys.argv[1]); exec(open(sys.argv[2]).read())"
    script = str(Path(__file__).parent / "once_server.py")
    server = McpServer(command=sys.executable, args=("-c", once, str(tmp_path / "used"), script), where="driver")
    async with driving(tmp_path, once=server) as context:
        rollout = DrivenRollout(context, ITEM)
        assert not await rollout.begin()
        failure = (await rollout.end()).failure
    assert failure is not None and failure.kind is FailureKind.INFRA and "'once'" in failure.message


@pytest.mark.full
async def test_a_rollout_without_a_slot_can_use_servers_of_the_driver(tmp_path: Path) -> None:
    class Talking(Adding):
        default_toolsets = ()
        slots = False

    async with driving(tmp_path, Talking(), calc=real(where="driver")) as context:
        assert not context.needs_slot
        rollout = DrivenRollout(context, ITEM)
        assert await rollout.begin()
        assert json.loads(await rollout.call("calc__add", {"a": 2})) == {"output": "3"}
        assert (await rollout.end("5")).reward == 1.0
    async with driving(tmp_path, Talking(), calc=real()) as context:
        assert context.needs_slot


CHOICES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "all by default": ({}, {"a", "b"}),
    "named": ({"enabled_toolsets": ("terminal", "a")}, {"a"}),
    "none named": ({"enabled_toolsets": ("terminal",)}, set()),
    "disabled": ({"disabled_toolsets": ("b",)}, {"a"}),
    "everything": ({"enabled_toolsets": ("all",)}, {"a", "b"}),
    "included": ({"enabled_toolsets": ("both",)}, {"a", "b"}),
    "drawn": ({"distribution": "often"}, {"a"}),
}


@pytest.mark.parametrize("case", CHOICES)
async def test_toolsets_choose_servers(case: str, caplog: pytest.LogCaptureFixture) -> None:
    config, expected = CHOICES[case]
    async with Runtime(load_entry_points=False) as runtime:
        runtime.tools.add_toolset("both", includes=("a", "b"))
        runtime.tools.add_distribution("often", {"a": 100, "terminal": 100})
        environment = Adding(Adding.config_class(**config))
        tools = Tools(runtime, environment, 1, {"a": odd("normal"), "b": odd("normal")})
        assert {*tools.servers_for(ITEM, "g")} == expected
        assert ("terminal" in tools.names(ITEM, "g")) or case == "included"
    assert ("in no enabled toolset" in caplog.text) == (len(expected) < 2 and case != "drawn")
