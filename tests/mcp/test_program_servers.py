"""MCP servers of rollouts whose agent is a program in the slot: it reaches them at its port, wherever they run."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import httpx2
import pytest

pytest.importorskip("mcp")

import hermes_agents
from hermes_agents.program import AgentProgram, ProgramAgent, ProgramSettings
from hermes_agents.serving import mcp as serving
from hermes_agents.serving.gateway import Gateway
from hermes_testing.scripted_server import Reply, ScriptedServer
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from hermes_core import Environment, Runtime, Settings
from hermes_core.agents.base import AgentSettings, ToolAnswer
from hermes_core.errors import ConfigError
from hermes_core.mcp.servers import McpServer
from hermes_core.runs.runner import run_rollouts
from tests.coding_agents.serving.slot import Model, port_of, reply, task_of
from tests.mcp.mcp_servers import HERE, odd
from tests.mcp.test_driver_servers import served

TOKEN = "s3cr3t-0123456789"
ARGUMENTS = {"add": {"a": 2, "b": 3}, "fail": {"why": "of no luck"}, "t": {"text": "from the slot"}}
PROGRAM = shlex.join(["python3", "-c", (HERE / "slot_client.py").read_text("utf-8"), json.dumps(ARGUMENTS)])


class Asking(Environment):
    """Keeps what the program wrote down."""

    name = "asking"
    own: Mapping[str, McpServer] = {}

    def __init__(self) -> None:
        super().__init__()
        self.wrote: dict[str, Any] = {}

    def items(self) -> list[dict[str, str]]:
        return [{"id": "one"}]

    def format_prompt(self, item: Any) -> str:
        return "Ask."

    def mcp_servers(self, item: Any) -> Mapping[str, McpServer]:
        return self.own

    async def verify_and_score_trajectory(self, item: Any, result: Any, *, exec_tool: Any, rollout: Any) -> float:
        self.wrote = json.loads((await rollout.commands.run("cat out.json || echo {}")).text)
        return 1.0


async def rollout(
    environment: Asking, agent: Any = "program", *, runtime: Runtime | None = None, **options: Any
) -> dict[str, Any]:
    """The record of the only item."""
    records: list[dict[str, Any]] = []
    given = {"isolation": "namespace", "backend_config": {"network": "none"}, **options}
    settings = {"command": PROGRAM} if agent == "program" else {}
    async with (
        ScriptedServer(lambda request: Reply("Done.")) as server,
        Runtime(Settings(), load_entry_points=False, plugins=[hermes_agents]) as runtime,
    ):
        await run_rollouts(
            runtime,
            environment,
            agent,
            settings={"model": "scripted", "base_url": server.base_url, **settings},
            concurrency=1,
            on_record=lambda record: records.append(dict(record)),
            **given,
        )
    [record] = records
    return record


@pytest.mark.parametrize("level", ["namespace", pytest.param("user", marks=pytest.mark.full)])
async def test_a_program_reaches_servers_of_the_driver_and_of_the_slot(isolates: None, level: str) -> None:
    environment = Asking()
    environment.own = {"mine": McpServer(command="python3", args=("-S", str(HERE / "odd_server.py"), "fine"))}
    record = await rollout(
        environment,
        isolation=level,
        backend_config={"network": "none", "visible_paths": [str(HERE)]},
        mcp={"far": odd("fine", where="driver", env={"API_TOKEN": TOKEN})},
    )
    assert (record["failure"], record["stop_reason"]) == (None, "finished"), record
    wrote = environment.wrote
    assert {name: json.loads(text) for name, (text, _) in wrote["told"].items()} == {
        "far t": ARGUMENTS["t"],
        "mine t": ARGUMENTS["t"],
    }
    header = {"Authorization": f"Bearer {wrote['key']}"}
    assert {name: each["headers"] for name, each in wrote["servers"].items()} == {"far": header, "mine": header}
    assert all(each["url"].startswith("http://127.0.0.1:") for each in wrote["servers"].values())
    assert TOKEN not in str(wrote)


@pytest.mark.full
async def test_a_program_reaches_a_server_at_a_url(isolates: None) -> None:
    environment = Asking()
    async with served("streamable-http") as url:
        web = McpServer(url=url, headers={"Authorization": f"Bearer {TOKEN}"}, tools=("add", "fail"))
        record = await rollout(environment, mcp={"web": web})
    assert environment.wrote["told"] == {
        "web add": ["5", False],
        "web fail": ["Error executing tool fail: of no luck", True],
    }, record
    assert TOKEN not in str(environment.wrote)


class Deaf(ProgramAgent):
    """A program that can't be given MCP servers."""

    program = AgentProgram("deaf", ("true",))


async def test_a_program_that_takes_none_is_refused_before_anything_is_made() -> None:
    agent = Deaf(ProgramSettings(model="m", base_url="http://127.0.0.1:1/v1"))
    with pytest.raises(ConfigError, match="'deaf' is a program with tools of its own, and can't be given MCP servers"):
        await rollout(Asking(), agent, mcp={"far": odd("fine", where="driver")})
    await agent.aclose()


async def test_a_program_that_takes_none_fails_with_an_item_that_has_some(isolates: None) -> None:
    async with ScriptedServer(lambda request: Reply("Done.")) as server:
        agent = Deaf(ProgramSettings(model="scripted", base_url=server.base_url))
        environment = Asking()
        environment.own = {"mine": odd("fine")}
        record = await rollout(environment, agent)
        await agent.aclose()
    assert record["failure"]["kind"] == "setup" and "can't be given any" in record["failure"]["message"], record


SCHEMAS = {name: {"type": "object", "properties": {"n": {"type": "integer"}}} for name in ("count", "fail")}


@asynccontextmanager
async def serving_tools(
    answers: Mapping[str, ToolAnswer], work: Callable[[str, Mapping[str, Any]], Awaitable[None]] | None = None
) -> AsyncIterator[tuple[str, dict[str, str], list[Any]]]:
    """Serve tools to a program. Yields the address, the headers that it wants, and what was called."""
    called: list[Any] = []

    async def handler(name: str, arguments: Mapping[str, Any], task_id: str) -> ToolAnswer:
        called.append((name, dict(arguments)))
        if work is not None:
            await work(name, arguments)
        return answers[name]

    task = task_of(
        tool_schemas=[
            {"type": "function", "function": {"name": f"s__{name}", "description": name, "parameters": schema}}
            for name, schema in SCHEMAS.items()
        ],
        mcp_tools={"s": {name: f"s__{name}" for name in SCHEMAS}},
        tool_handler=handler,
    )
    async with serving.mcp_routes(task) as routes:
        gateway = Gateway(Model([reply("Hi.")]), task, AgentSettings(model="ours"), routes=routes)
        async with gateway, port_of(gateway) as url:
            yield f"{url}/mcp/s", {"Authorization": f"Bearer {gateway.key}"}, called


@asynccontextmanager
async def client(url: str, headers: Mapping[str, str], mode: Any = "auto") -> AsyncIterator[Client]:
    async with (
        httpx2.AsyncClient(headers=dict(headers), verify=False) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as connected,
    ):
        yield connected


ANSWERS = {
    "s__count": ToolAnswer(json.dumps({"output": "three"})),
    "s__fail": ToolAnswer.read(json.dumps({"error": "no luck"})),
}


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
async def test_the_official_client_finds_and_calls_the_tools(mode: str) -> None:
    async with serving_tools(ANSWERS) as (url, headers, called), client(url, headers, mode) as connected:
        listed = (await connected.list_tools()).tools
        assert {tool.name: tool.input_schema for tool in listed} == SCHEMAS
        told = await connected.call_tool("count", {"n": 3})
        assert not told.is_error and [part.text for part in told.content] == ["three"]
        lost = await connected.call_tool("fail", {})
        assert lost.is_error and [part.text for part in lost.content] == ["no luck"]
        with pytest.raises(MCPError, match="there is no tool 'other'"):
            await connected.call_tool("other", {})
    assert called == [("s__count", {"n": 3}), ("s__fail", {})]


async def test_calls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CALLS", 2)
    async with serving_tools(ANSWERS) as (url, headers, called), client(url, headers) as connected:
        for _ in range(2):
            assert not (await connected.call_tool("count", {})).is_error
        assert (await connected.call_tool("count", {})).is_error
    assert len(called) == 2


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
async def test_what_takes_long_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(serving, "QUIET_S", 0.05)

    async def slow(name: str, arguments: Mapping[str, Any]) -> None:
        await asyncio.sleep(0.2)

    async with serving_tools(ANSWERS, slow) as (url, headers, _), client(url, headers, mode) as connected:
        assert [part.text for part in (await connected.call_tool("count", {})).content] == ["three"]
    ask = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "count", "arguments": {}}}
    async with serving_tools(ANSWERS, slow) as (url, headers, _), httpx.AsyncClient(verify=False) as asking:
        answer = await asking.post(url, headers={**ACCEPT, **headers}, json=ask)
    assert answer.headers["content-type"] == "text/event-stream" and answer.text.count(": not yet\n\n") >= 2


async def test_what_nobody_waits_for_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "QUIET_S", 0.05)
    broken_off = asyncio.Event()

    async def endless(name: str, arguments: Mapping[str, Any]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            broken_off.set()

    ask = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "count", "arguments": {}}}
    async with serving_tools(ANSWERS, endless) as (url, headers, called), httpx.AsyncClient(verify=False) as asking:
        with pytest.raises(httpx.ReadTimeout):
            await asking.post(url, headers={**ACCEPT, **headers}, json=ask, timeout=httpx.Timeout(1, read=0.02))
        async with asyncio.timeout(10):
            await broken_off.wait()
    assert called == [("s__count", {})]


PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
ACCEPT = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
REQUESTS: dict[str, tuple[str, Mapping[str, str], bytes, int]] = {
    "without the key": ("POST", {"authorization": ""}, json.dumps(PING).encode(), 401),
    "a stream": ("GET", {}, b"", 405),
    "the end of a session": ("DELETE", {}, b"", 405),
    "no JSON": ("POST", {}, b"{", 400),
    "no message": ("POST", {}, b"[]", 400),
    "many objects": ("POST", {}, b"[" * 40_000, 413),
    "a long message": ("POST", {}, b'"' + b"x" * (5 << 20) + b'"', 413),
    "a request": ("POST", {}, json.dumps(PING).encode(), 200),
    "a notification": ("POST", {}, b'{"jsonrpc": "2.0", "method": "notifications/initialized"}', 202),
}


@pytest.mark.parametrize("case", REQUESTS)
async def test_requests_of_anyone_in_the_slot(case: str) -> None:
    method, more, body, status = REQUESTS[case]
    async with serving_tools(ANSWERS) as (url, headers, called), httpx.AsyncClient(verify=False) as asking:
        answer = await asking.request(method, url, headers={**ACCEPT, **headers, **more}, content=body)
        assert answer.status_code == status, answer.text
        ok = await asking.post(url, headers={**ACCEPT, **headers}, json=PING)
        assert ok.status_code == 200 and not called
