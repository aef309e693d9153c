"""Servers in a slot: a real one, and those that lie, hang, die and flood. What they do is never our failure."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from hermes_core.errors import ErrorKind, InfraError
from hermes_core.mcp.opening import OpenServers, open_servers
from hermes_core.mcp.servers import McpServer
from hermes_core.mcp.tools import tool_name
from hermes_core.sandbox.commands import ExecutionResult, SlotCommands
from hermes_core.tools.base import CallContext
from hermes_core.tools.registry import ToolRegistry
from hermes_core.tools.schema import function_schema
from tests.mcp.mcp_servers import odd, real

MARK = uuid.uuid4().hex
"""In the environment of every server of this process's tests."""


class Opened:
    """The tools of open servers, as a rollout calls them."""

    def __init__(self, servers: OpenServers, slot: SlotCommands) -> None:
        self.tools = {tool.name: tool for tool in servers.tools}
        self.reopen = servers.reopen
        self.slot = slot

    async def __call__(self, name: str, timeout_s: float = 30, **arguments: Any) -> ExecutionResult:
        tool = self.tools[name]
        limit = tool.time_limit(timeout_s, timeout_s)
        return await ToolRegistry().call(tool, CallContext(commands=self.slot, timeout_s=limit), arguments)


@asynccontextmanager
async def opened(slot: SlotCommands, **servers: McpServer) -> AsyncIterator[Opened]:
    marked = {name: each.model_copy(update={"env": {**each.env, "MARK": MARK}}) for name, each in servers.items()}
    async with open_servers(marked, slot) as servers:
        yield Opened(servers, slot)


async def left() -> list[str]:
    """What is left of this test's servers ten seconds later; a kill takes a moment."""
    for _ in range(100):
        if not await asyncio.to_thread(running):  # what /proc says of a dying process may take a while
            break
        await asyncio.sleep(0.1)
    return running()


def running() -> list[str]:
    """What runs of this test's servers."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if MARK.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


async def test_a_real_server(slot: SlotCommands) -> None:
    server = real("one two", env={"WORD": "w"}, cwd="sub")
    await slot.run("mkdir sub")
    async with opened(slot, real=server) as call:
        assert (await call("real__add", a=2, b=3)).output == "5"
        schema = function_schema(call.tools["real__add"])["function"]
        assert schema["description"] == "Add two numbers." and schema["parameters"]["required"] == ["a"]
        await call("real__remember", note="x")
        assert (await call("real__remember", note="y")).output == "2: x, y"
        failed = await call("real__fail", why="for a reason")
        assert not failed.success and failed.error_kind is ErrorKind.COMMAND and "for a reason" in failed.error
        picture = (await call("real__picture")).output
        assert picture == "a pixel:\n[image, image/png, 102 bytes: left out, as only text is shown]"
        about = json.loads((await call("real__about")).output)
        assert about["word"] == "w" and about["cwd"].endswith("/sub") and about["args"] == ["one two"]
        bulky = await call("real__bulky", timeout_s=120, size=1_500_000)
        assert len(bulky.output) <= 50_000 and bulky.metadata["bytes_dropped"] > 1_400_000
        assert (await call("real__structured")).to_tool_result() == {"output": '{"answer": 42}'}
        assert "did not say why" in (await call("real__silent_failure")).error
        assert not (await call("real__add", a="no number")).success
    assert await left() == []


@pytest.mark.full
async def test_a_call_has_a_time_limit_and_the_server_lives_on(slot: SlotCommands) -> None:
    async with opened(slot, real=real(timeout_s=1.0)) as call:
        late = await call("real__wait", seconds=30)
        assert late.error_kind is ErrorKind.TIMEOUT
        assert (await call("real__add", a=1)).output == "2"


@pytest.mark.full
async def test_calls_at_the_same_time(slot: SlotCommands) -> None:
    async with opened(slot, a=real(), b=real()) as call:
        began = time.monotonic()
        waits = [call(f"{name}__wait", seconds=2) for name in "ab" for _ in range(5)]
        assert {done.output for done in await asyncio.gather(*waits)} == {"waited"}
        assert time.monotonic() - began < 15


LIES = {
    "many": "more than 30000 objects",
    "hundreds": "3000 tools at once",
    "several": "200 tools, more than 128",
    "no-object": "inputSchema",
    "no-schema": "inputSchema",
    "elsewhere": "which they do not hold",
    "deep": "nested more than 32",
    "too-deep": "can't be read",
    "big": "more than 65536",
    "twice": "'t' twice",
    "endless-list": "without an end",
    "no-tools": "has no tools",
    "old": "1999-01-01",
    "exits": "status 2, and wrote: no licence",
    "never-starts": "not ready within 5 s",
}


async def test_a_server_that_can_not_be_used_says_why(slot: SlotCommands) -> None:
    async def attempt(how: str) -> str:
        with pytest.raises(InfraError) as caught:
            async with opened(slot, odd=odd(how, startup_timeout_s=5 if how == "never-starts" else 60)):
                pytest.fail("it was opened")
        assert "'odd'" in caught.value.message and caught.value.hint
        return caught.value.message

    said = await asyncio.gather(*map(attempt, LIES))
    assert [message for message, part in zip(said, LIES.values(), strict=True) if part not in message] == []
    assert await left() == []


async def test_a_program_that_the_slot_lacks_is_named(slot: SlotCommands) -> None:
    with pytest.raises(InfraError, match=r"'web'.*no-such-program") as caught:
        async with opened(slot, web=McpServer(command="no-such-program"), odd=odd("normal")):
            pytest.fail("it was opened")
    assert "image" in str(caught.value.hint)
    assert await left() == []


BROKEN = {
    "die": ("status 3, and wrote: out of ideas", ErrorKind.COMMAND),
    "junk-answer": ("not a tool's result", ErrorKind.COMMAND),
    "no-answer": ("broken inside", ErrorKind.COMMAND),
    "flood-junk": ("nobody asked for", ErrorKind.COMMAND),
    "flood-notes": ("nobody asked for", ErrorKind.COMMAND),
    "flood-pings": ("nobody asked for", ErrorKind.COMMAND),
    "flood-answers": ("nobody asked for", ErrorKind.COMMAND),
    "too-many-parts": ("more than 30000 objects", ErrorKind.COMMAND),
    "endless-line": ("more than 4194304 bytes", ErrorKind.COMMAND),
    "hang": ("time limit", ErrorKind.TIMEOUT),
}


ONE_OF_A_SORT = ("die", "junk-answer", "flood-notes", "endless-line", "hang")
OTHERS = [how for how in BROKEN if how not in ONE_OF_A_SORT]


@pytest.mark.parametrize("hows", [ONE_OF_A_SORT, pytest.param(OTHERS, marks=pytest.mark.full)], ids=["some", "others"])
@pytest.mark.loop_stall(0.8)  # an answer of 4 MB is read in one go
async def test_a_server_that_breaks_is_an_error_for_the_model(
    slot: SlotCommands, loop_lag: None, hows: Sequence[str]
) -> None:
    for how in hows:
        said, kind = BROKEN[how]
        async with opened(slot, odd=odd(how)) as call:
            first = await call("odd__t", timeout_s=2 if how == "hang" else 60, text="x")
            assert said in first.error and first.error_kind is kind, how
            again = await call("odd__t", timeout_s=2, text="x")
            assert not again.success and again.error_kind in (ErrorKind.COMMAND, ErrorKind.TIMEOUT), how
    assert await left() == []


async def test_what_servers_say_otherwise(slot: SlotCommands) -> None:
    servers = {each: odd(each) for each in ("invalid", "banner", "slow-schema", "odd-names")}
    async with opened(slot, **servers, some=odd("several", tools=("t7", "t3"))) as call:
        refused = await call("invalid__t")
        assert refused.metadata["invalid_arguments"] and "text: is required" in refused.error
        assert (await call("banner__t", text="x")).success
        # A checker of arguments would be busy with this schema's pattern for longer than the test may take.
        assert (await call("slow-schema__t", text="a" * 60 + "!")).success
        names = [name for name in call.tools if name.startswith("odd-names__")]
        assert len({*names}) == 4 and all(len(name) <= 64 for name in names)
        assert (await call(names[0], text="x")).success
        assert [name for name in call.tools if name.startswith("some__")] == ["some__t7", "some__t3"]
    with pytest.raises(InfraError, match="no tool 't777'") as caught:
        async with opened(slot, odd=odd("several", tools=("t777",))):
            pytest.fail("it was opened")
    assert "did you mean" in str(caught.value.hint)


async def test_a_server_that_the_agent_kills(slot: SlotCommands) -> None:
    async with opened(slot, odd=odd("normal")) as call:
        assert (await call("odd__t", text="x")).output == '{"text": "x"}'
        await slot.run(f"kill -KILL $(grep -lsa MARK={MARK} /proc/[0-9]*/environ | cut -d/ -f3)")
        gone = await call("odd__t", text="x")
        assert gone.error_kind is ErrorKind.COMMAND and "signal 9 ended it" in gone.error
        await call.reopen()
        assert (await call("odd__t", text="y")).output == '{"text": "y"}'


@pytest.mark.full
@pytest.mark.loop_stall(0.3)
async def test_an_answer_of_many_parts(slot: SlotCommands, loop_lag: None) -> None:
    async with opened(slot, odd=odd("many-parts")) as call:
        assert "19000 more parts" in (await call("odd__t")).output


@pytest.mark.parametrize(("server", "tool"), [("a", "b"), ("a", "b__c"), ("a-b", "c"), ("a", "_b")])
def test_a_plain_name_stays(server: str, tool: str) -> None:
    assert tool_name(server, tool) == f"{server}__{tool}"


@pytest.mark.full
async def test_a_server_that_ignores_the_end_of_its_input(slot: SlotCommands) -> None:
    async with opened(slot, odd=odd("ignores-the-end")) as call:
        assert (await call("odd__t")).success
    assert await left() == []


@pytest.mark.full
async def test_a_cancellation_leaves_nothing(slot: SlotCommands) -> None:
    async def work(servers: Mapping[str, McpServer]) -> None:
        async with opened(slot, **servers) as call:
            await call("hang__t")

    for after_s in (0.0, 0.05, 1.0):
        task = asyncio.create_task(work({"hang": odd("hang"), "odd": odd("never-starts")}))
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await left() == []
