"""Tools from functions: what the model sees, what the function gets, and definitions that are refused."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from hermes_core.errors import ConfigError, ErrorKind
from hermes_core.sandbox.commands import ExecutionResult
from hermes_core.tools.base import CallContext, Tool
from hermes_core.tools.functions import function_tool
from hermes_core.tools.registry import ToolRegistry
from hermes_core.tools.schema import function_schema, parse_arguments

if TYPE_CHECKING:
    from pathlib import Path


async def search(
    ctx: CallContext,
    query: str,
    kind: Literal["web", "news"] = "web",
    limit: Annotated[int, Field(ge=1, le=50, description="How many.")] = 10,
    schema: str | None = None,
) -> str:
    """Search the web.

    Gives titles and addresses.

    Args:
        query: What to look for:
            a few words.
        limit: Not this one.
        schema (str): A parameter that is called as a method of pydantic's models.

    Returns:
        The results as text.
    """
    return f"{ctx.trajectory_id} {query} {kind} {limit} {schema}"


async def call(tool: Tool, args: Any = None, **context: Any) -> ExecutionResult:
    return await ToolRegistry().call(tool, CallContext(**context), args or {})


def test_the_model_sees_types_defaults_and_descriptions() -> None:
    assert function_schema(function_tool(search))["function"] == {
        "name": "search",
        "description": "Search the web.\n\nGives titles and addresses.\n\nReturns:\n    The results as text.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to look for: a few words."},
                "kind": {"type": "string", "enum": ["web", "news"], "default": "web"},
                "limit": {"type": "integer", "minimum": 1, "maximum": 50, "default": 10, "description": "How many."},
                "schema": {
                    "type": "string",
                    "description": "A parameter that is called as a method of pydantic's models.",
                },
            },
            "required": ["query"],
            "additionalProperties": False,
        },
    }


async def test_the_function_gets_the_context_and_what_the_model_gave() -> None:
    tool = function_tool(search, where="driver")
    result = await call(tool, {"query": "q", "limit": "3", "schema": "s"}, trajectory_id="t")
    assert result.output == "t q web 3 s"


async def test_wrong_arguments_are_explained_by_the_names_that_the_model_knows() -> None:
    tool = function_tool(search, where="driver")
    result = await call(tool, {"qury": "q", "limit": 0})
    assert result.metadata["invalid_arguments"] and "query: is required" in result.error
    assert (
        "did you mean 'query'" in result.error and "limit: Input should be greater than or equal to 1" in result.error
    )


def test_where_it_runs_follows_from_the_context() -> None:
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    async def look(ctx, path: str) -> str:  # type: ignore[no-untyped-def]
        """Look."""
        return path

    assert [function_tool(each).where for each in (add, look, search)] == ["driver", "sandbox", "sandbox"]
    assert "ctx" not in function_schema(function_tool(look))["function"]["parameters"]["properties"]


class Point(BaseModel):
    x: int


@dataclasses.dataclass
class Pair:
    a: int
    b: str


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("text", {"output": "text", "error": None}),
        (None, {"output": "null", "error": None}),
        (3, {"output": "3", "error": None}),
        (["ü", 1], {"output": '["ü", 1]', "error": None}),
        ({"found": 1}, {"found": 1}),
        (Point(x=1), {"x": 1}),
        (Pair(1, "b"), {"a": 1, "b": "b"}),
        (ExecutionResult(True, "as it is"), {"output": "as it is", "error": None}),
    ],
)
async def test_what_it_returns_is_the_answer(value: Any, told: Any) -> None:
    def give() -> Any:
        """Give."""
        return value

    assert (await call(function_tool(give))).to_tool_result() == told


async def test_a_mapping_with_an_error_is_a_failure_and_so_is_what_is_no_json() -> None:
    async def fail() -> dict[str, str]:
        """Fail."""
        return {"error": "no"}

    def odd() -> object:
        """Be odd."""
        return object()

    for function, says in ((fail, "no"), (odd, "odd failed")):
        result = await call(function_tool(function))
        assert not result.success and says in result.error


async def test_a_plain_function_runs_in_a_thread_and_is_let_go_at_its_time_limit() -> None:
    release = threading.Event()
    where: list[threading.Thread] = []

    def block() -> None:
        """Block."""
        where.append(threading.current_thread())
        release.wait(30)

    try:
        result = await call(function_tool(block, timeout_s=1))
    finally:
        release.set()
    assert result.error_kind is ErrorKind.TIMEOUT and where[0] is not threading.current_thread()


async def test_a_hanging_coroutine_is_cut_off_at_its_time_limit() -> None:
    async def hang(ctx: CallContext) -> None:
        """Hang."""
        assert ctx.timeout_s == 0.05
        await asyncio.sleep(60)

    result = await call(function_tool(hang, where="driver", timeout_s=0.05), timeout_s=30)
    assert result.error_kind is ErrorKind.TIMEOUT


async def test_a_method_and_a_tree_can_be_tools() -> None:
    class Tree(BaseModel):
        children: list[Tree] = []

    class Counter:
        def count(self, tree: dict[str, int]) -> int:
            """Count."""
            return sum(tree.values())

    assert (await call(function_tool(Counter().count), {"tree": {"a": 1, "b": 2}})).output == "3"


def no_description(a: int) -> None: ...
def no_type(a) -> None: ...  # type: ignore[no-untyped-def]
def several(*a: int) -> None: ...
def by_position(a: int, /) -> None: ...
def private(_a: int) -> None: ...
def not_json(a: threading.Thread) -> None: ...
def late_context(a: int, ctx: CallContext) -> None: ...
def hidden(a: Path) -> None: ...
def field_default(a: int = Field(ge=1)) -> None: ...
def plain_in_a_slot(ctx: CallContext) -> None: ...
def wrong_arguments(a: int) -> None:
    """Do it.

    Args:
        b: No parameter.
    """


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (no_description, "has no description .*docstring"),
        (no_type, "has parameter 'a' without a type"),
        (several, "'a', which can't be given by name"),
        (by_position, "'a', which can't be given by name"),
        (private, "'_a', which can't be given by name"),
        (not_json, "takes what JSON can't describe"),
        (late_context, "takes the context as parameter 'ctx'.*first"),
        (hidden, "a type that can't be resolved.*TYPE_CHECKING"),
        (field_default, "a Field as the default of parameter 'a'.*Annotated"),
        (plain_in_a_slot, "runs in a slot, and is not async"),
        (wrong_arguments, "describes 'b', which it does not take"),
        (len.__class__, "is not a function"),
    ],
)
def test_a_function_that_can_be_no_tool_is_refused_when_it_is_made(function: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        function_tool(function)


class Opaque:
    """A type that pydantic does not know."""


def opaque(foo: Opaque) -> str:
    """Take one."""
    return str(foo)


def unfit_default(x: int = "a") -> str:  # type: ignore[assignment]
    """Take one."""
    return str(x)


def no_default(x: int = None) -> str:  # type: ignore[assignment]  # noqa: RUF013
    """Take one."""
    return str(x)


@pytest.mark.parametrize(
    ("function", "more", "says"),
    [
        (opaque, {}, r"parameter 'foo' of type .*Opaque \(use str, int, .* pydantic class\)"),
        (unfit_default, {}, "the default 'a' for parameter 'x', which does not fit.*valid integer"),
        (no_default, {}, r"the default None .*TYPE \| None = None"),
        (lambda: "", {"name": "it", "description": " "}, "has no description"),
        (lambda: "", {"name": "it", "description": "It.", "where": "moon"}, "where='moon'.*'driver'"),
    ],
)
def test_a_definition_that_can_t_work_says_what_to_change(function: Any, more: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        function_tool(function, **more)
    assert "arbitrary_types_allowed" not in str(refused.value)


def test_a_tool_of_the_slot_needs_the_context() -> None:
    with pytest.raises(ConfigError, match="does not take the call's context"):
        function_tool(several_words, where="sandbox")


def several_words(text: str = "") -> str:
    """Give words."""
    return text


@pytest.mark.parametrize("limit", [0, -1, float("inf"), float("nan")])
def test_a_time_limit_is_a_positive_number(limit: float) -> None:
    with pytest.raises(ConfigError, match="time limit"):
        function_tool(several_words, timeout_s=limit)


def test_arguments_are_parsed_into_what_the_handler_takes() -> None:
    assert parse_arguments(function_tool(several_words), "") is not None
