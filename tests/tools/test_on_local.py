"""The model's tools through a tool backend on this host, as a rollout calls them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hermes_core.errors import ErrorKind, StaleSlotError
from hermes_core.runtime import Runtime
from hermes_core.sandbox.commands import Slot
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import resolve_tools


class Rollouts:
    """A backend, and tool calls as `Rollout.tool_handler` makes them."""

    def __init__(self, runtime: Runtime, backend: ToolBackend) -> None:
        self.runtime, self.backend = runtime, backend

    async def call(self, slot: Slot, name: str, **args: Any) -> dict[str, Any]:
        result = await self.backend.execute(slot, self.runtime.tools.get(name), args, timeout_s=60)
        return result.to_tool_result()


@pytest.fixture(params=["shared", "user"])
async def rollouts(request: pytest.FixtureRequest) -> AsyncIterator[Rollouts]:
    async with Runtime(load_entry_points=False) as runtime:
        usable = (await runtime.backend("local").check()).usable
        if request.param == "user" and not usable:
            pytest.skip("this host gives no slot of level user")
        async with runtime.tool_backend("local", isolation=request.param) as backend:
            yield Rollouts(runtime, backend)


async def test_a_session_of_work(rollouts: Rollouts) -> None:
    async with rollouts.backend.lease("t") as slot:

        async def call(name: str, **args: Any) -> dict[str, Any]:
            return await rollouts.call(slot, name, **args)

        written = await call("write_file", path="pkg/calc.py", content="def add(a, b):\n    return a - b\n")
        assert written == {"bytes_written": 32, "dirs_created": True}
        found = await call("search_files", pattern=r"return\s", file_glob="*.py")
        assert found["matches"] == [{"path": "pkg/calc.py", "line": 2, "content": "    return a - b"}]
        assert (await call("read_file", path="pkg/calc.py", offset=2))["content"] == "2|    return a - b"
        changed = await call("patch", path="pkg/calc.py", old_string="return a - b", new_string="return a + b")
        assert changed["success"] and "syntax_errors" not in changed
        ran = await call("terminal", command="python3 -c 'from pkg.calc import add; print(add(1, 2))'")
        assert ran == {"output": "3\n", "exit_code": 0, "error": None}
        started = await call("terminal", command="read line; echo got $line", background=True)
        session = started["session_id"]
        assert (await call("process", action="submit", session_id=session, data="this"))["status"] == "ok"
        ended = await call("process", action="wait", session_id=session, timeout=20)
        assert ended["status"] == "exited" and ended["output"] == "got this\n" and ended["exit_code"] == 0


async def test_a_slot_tool_and_a_model_s_tool_of_one_name(rollouts: Rollouts) -> None:
    async with rollouts.backend.lease() as slot:
        await rollouts.call(slot, "write_file", path="a", content="x\n")
        assert (await rollouts.backend.execute(slot, "read_file", {"path": "a"})).output == "x\n"
        assert (await rollouts.call(slot, "read_file", path="a"))["content"] == "1|x"


async def test_neighbours_do_not_know_each_other_s_processes(rollouts: Rollouts) -> None:
    async with rollouts.backend.lease() as one, rollouts.backend.lease() as other:
        session = (await rollouts.call(one, "terminal", command="sleep 60", background=True))["session_id"]
        assert (await rollouts.call(other, "process", action="list"))["processes"] == []
        answer = await rollouts.call(other, "process", action="kill", session_id=session)
        assert answer["status"] == "not_found"
        assert (await rollouts.call(one, "process", action="poll", session_id=session))["status"] == "running"


async def test_the_next_trajectory_of_a_slot_starts_with_none(rollouts: Rollouts) -> None:
    async with rollouts.backend.lease() as slot:
        session = (await rollouts.call(slot, "terminal", command="sleep 60", background=True))["session_id"]
    with pytest.raises(StaleSlotError):
        await rollouts.call(slot, "process", action="poll", session_id=session)
    for _ in range(12):
        async with rollouts.backend.lease() as again:
            assert (await rollouts.call(again, "process", action="list"))["processes"] == []
            assert (await rollouts.call(again, "process", action="poll", session_id=session))["status"] == "not_found"


async def test_a_release_without_a_reset_forgets_them_too(rollouts: Rollouts) -> None:
    slot = await rollouts.backend.acquire()
    session = (await rollouts.call(slot, "terminal", command="sleep 60", background=True))["session_id"]
    await rollouts.backend.release(slot)
    for _ in range(12):
        again = await rollouts.backend.acquire()
        assert (await rollouts.call(again, "process", action="list"))["processes"] == []
        assert (await rollouts.call(again, "process", action="poll", session_id=session))["status"] == "not_found"
        await rollouts.backend.release(again)


async def test_calls_of_many_slots_run_at_the_same_time(rollouts: Rollouts) -> None:
    async with rollouts.backend.lease() as one, rollouts.backend.lease() as other:
        calls = [(slot, "terminal", {"command": "sleep 1; echo done"}) for slot in (one, other) for _ in range(4)]
        begin = asyncio.get_running_loop().time()
        results = await rollouts.backend.execute_batch(calls)
        assert [result.output for result in results] == ["done\n"] * 8
        assert asyncio.get_running_loop().time() - begin < 6


async def test_what_the_slot_may_not_do_is_an_answer(rollouts: Rollouts) -> None:
    async with rollouts.backend.lease() as slot:
        if slot.isolation == "shared":
            return  # there the slot is the driver's own user
        result = await rollouts.backend.execute(
            slot, rollouts.runtime.tools.get("write_file"), {"path": "/etc/x", "content": ""}
        )
        assert not result.success and result.error_kind is ErrorKind.COMMAND
        assert "/etc/x was not written" in result.to_tool_result()["error"]


def test_core_s_tools_come_by_the_same_hook_as_anyone_s() -> None:
    runtime = Runtime(load_entry_points=False)
    assert resolve_tools(runtime.tools, ["debugging"]) == resolve_tools(runtime.tools, ["all"])
    assert len(runtime.tools.schemas()) == 6
