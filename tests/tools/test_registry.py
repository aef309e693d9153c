"""The registry: names, schemas, and that a call never fails but for what is ours."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from hermes_core.errors import (
    CommandError,
    ConfigError,
    ErrorKind,
    PluginError,
    PolicyError,
    SandboxLost,
    StaleSlotError,
    UnknownNameError,
    UsageError,
)
from hermes_core.sandbox.commands import ExecutionResult, Slot
from hermes_core.tools.base import CallContext, Tool, ToolParams
from hermes_core.tools.registry import ToolRegistry


class Params(ToolParams):
    value: str = ""


def tool(outcome: Any = "done", *, name: str = "it", where: Any = "driver", **more: Any) -> Tool:
    async def handler(ctx: CallContext, params: Params) -> Any:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome(ctx, params) if callable(outcome) else outcome

    return Tool(name, Params, handler, "Does it.", where=where, **more)


async def call(outcome: Any, args: Any = None, **context: Any) -> ExecutionResult:
    return await ToolRegistry().call(tool(outcome), CallContext(**context), args or {})


def test_names_are_in_order_and_unique() -> None:
    registry = ToolRegistry()
    for name in ("b", "a"):
        registry.add(tool(name=name))
    assert registry.names() == ["b", "a"] and "a" in registry and "c" not in registry
    with pytest.raises(PluginError, match="tool 'a' is registered twice"):
        registry.add(tool(name="a"))
    with pytest.raises(UnknownNameError, match=r"unknown tool 'aa' \(did you mean 'a'"):
        registry.get("aa")


def test_schemas_are_in_the_order_asked_for() -> None:
    registry = ToolRegistry()
    for name in ("a", "b"):
        registry.add(tool(name=name))
    assert [each["function"]["name"] for each in registry.schemas(["b", "a"])] == ["b", "a"]
    assert len(registry.schemas()) == 2
    with pytest.raises(UnknownNameError):
        registry.schemas(["a", "zzz"])


@pytest.mark.parametrize("name", ["", "a b", "a.b", "é", "x" * 65, "a\n"])
def test_names_that_endpoints_refuse_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="can't be a tool's name"):
        tool(name=name)


def plain(ctx: CallContext, params: Any) -> str:
    return ""


async def without_arguments(ctx: CallContext) -> str:
    return ""


WRAPPED = {"name": "it", "description": "Does it.", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"description": " "}, "has no description"),
        ({"where": "moon"}, "where='moon'.*'sandbox'"),
        ({"handler": plain}, "is not async.*function_tool"),
        ({"handler": without_arguments}, "two arguments.*handler.ctx, params"),
        ({"handler": None}, "can't be called"),
        ({"params": None}, "a pydantic class, or a JSON schema"),
        ({"params": dict}, "a pydantic class, or a JSON schema"),
        ({"params": {"type": "function", "function": WRAPPED}}, "pass its `parameters`, here"),
        ({"params": {"type": "function", **WRAPPED}}, "pass its `parameters`"),
        ({"params": {"name": "it", "input_schema": {"type": "object"}}}, "pass its `input_schema`"),
        ({"timeout_s": "10"}, "time limit of '10' seconds"),
        ({"timeout_s": True}, "time limit of True seconds"),
        ({"timeout_s": -1}, "time limit of -1 seconds"),
    ],
)
def test_a_definition_that_can_t_work_is_refused(fields: dict[str, Any], says: str) -> None:
    good = tool()
    with pytest.raises(ConfigError, match=says):
        replace(good, **fields)


async def test_text_is_the_output() -> None:
    result = await call("hello")
    assert result.success and result.to_tool_result() == {"output": "hello", "error": None}


async def test_a_mapping_is_the_answer() -> None:
    result = await call({"found": [1]})
    assert result.success and result.to_tool_result() == {"found": [1]} and '"found"' in result.output
    failed = await call({"error": "no", "output": "so far"})
    assert not failed.success and failed.error == "no" and failed.output == "so far"
    assert failed.error_kind is ErrorKind.COMMAND


async def test_a_result_is_kept_and_gets_its_slot() -> None:
    slot = Slot("s1", "sb", "default", "/data/slot_0", 1, "user")
    given = ExecutionResult(True, "x", metadata={"n": 1})
    result = await ToolRegistry().call(tool(given, where="sandbox"), CallContext(slot=slot, commands=_Commands()), {})
    assert result.slot_id == "s1" and result.metadata == {"n": 1}


class _Commands:
    """Stands for a slot's commands; is only looked at for being there."""


async def test_wrong_arguments_never_reach_the_handler() -> None:
    result = await call(AssertionError("called"), {"other": 1})
    assert not result.success and result.metadata["invalid_arguments"] is True
    assert "no such argument" in result.to_tool_result()["error"]


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (CommandError("gone", code="not_found", hint="look elsewhere"), ErrorKind.COMMAND, "gone (look elsewhere)"),
        (PolicyError("not allowed", sandbox_id="secret"), ErrorKind.POLICY, "not allowed"),
        (TimeoutError("of its own"), ErrorKind.COMMAND, "TimeoutError: of its own"),
        (SystemExit("no key"), ErrorKind.COMMAND, "sys.exit('no key') was called"),
        (None, ErrorKind.COMMAND, "returned None, and not a text or a mapping"),
        ([1, 2], ErrorKind.COMMAND, "returned [1, 2], and not a text or a mapping"),
        (ZeroDivisionError("oops"), ErrorKind.COMMAND, "ZeroDivisionError: oops"),
    ],
)
async def test_what_a_handler_raises_is_an_answer(error: Exception, kind: ErrorKind, says: str) -> None:
    result = await call(error)
    assert not result.success and result.error_kind is kind
    assert says in result.to_tool_result()["error"] and "secret" not in result.error


async def test_a_bug_in_a_handler_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        await call(ZeroDivisionError("oops"), trajectory_id="t-9")
    (record,) = caplog.records
    assert "t-9" in record.getMessage() and record.exc_info


@pytest.mark.parametrize("error", [SandboxLost("lost"), StaleSlotError("stale"), KeyboardInterrupt()])
async def test_what_is_ours_is_raised(error: BaseException) -> None:
    with pytest.raises(type(error)):
        await call(error)


async def test_an_answer_that_is_not_json_is_the_tool_s_failure_here_and_not_later() -> None:
    for answer in ({"x": object()}, ExecutionResult(True, answer={"x": b""})):
        result = await call(answer)
        assert not result.success and "TypeError" in result.error


async def test_driver_tools_never_get_the_slot() -> None:
    seen: list[CallContext] = []
    slot = Slot("s1", "sb", "default", "/data/slot_0", 1, "user")
    context = CallContext(trajectory_id="t", commands=_Commands(), slot=slot)  # type: ignore[arg-type]
    await ToolRegistry().call(tool(lambda ctx, params: seen.append(ctx) or "x"), context, {})
    assert seen[0].commands is None and seen[0].slot is None and seen[0].trajectory_id == "t"


async def test_sandbox_tools_need_a_slot() -> None:
    with pytest.raises(UsageError, match="without one"):
        await ToolRegistry().call(tool(where="sandbox"), CallContext(), {})
