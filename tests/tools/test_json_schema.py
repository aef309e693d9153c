"""Tools with a JSON schema: a bad one is refused when the tool is defined, wrong arguments when it is called."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hermes_core.agents.parsers.typed import convert, parameters_of, property_schema
from hermes_core.errors import ConfigError
from hermes_core.sandbox.commands import ExecutionResult
from hermes_core.tools.base import CallContext, Tool
from hermes_core.tools.registry import ToolRegistry
from hermes_core.tools.schema import describe_arguments, function_schema

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1},
        "days": {"$ref": "#/$defs/days"},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 7}},
}


async def echo(ctx: CallContext, arguments: dict[str, Any]) -> str:
    return json.dumps(arguments)


def tool(schema: Any = SCHEMA) -> Tool:
    return Tool("forecast", schema, echo, "Tell the weather.", where="driver")


async def call(args: Any) -> ExecutionResult:
    return await ToolRegistry().call(tool(), CallContext(), args)


async def test_the_handler_gets_the_arguments_as_a_dict() -> None:
    assert (await call('{"city": "Rome", "days": 3}')).output == '{"city": "Rome", "days": 3}'


def test_the_model_sees_the_schema_as_it_is() -> None:
    shown = function_schema(tool())["function"]["parameters"]
    assert shown == SCHEMA and shown is not SCHEMA
    assert "city: string, required" in describe_arguments(tool())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "'city' is a required property"),
        ({"city": ""}, "city: "),
        ({"city": "Rome", "days": 8}, "days: 8 is greater than the maximum of 7"),
        ({"city": "Rome", "days": "3"}, "days: '3' is not of type 'integer'"),
        ({"city": "Rome", "unit": "K"}, "unit: 'K' is not one of ['C', 'F']"),
        ({"city": "Rome", "town": 1}, "'town' was unexpected"),
        ({"city": "\ud800"}, "surrogate"),
        ("[]", "must be a JSON object"),
    ],
)
async def test_wrong_arguments_never_reach_the_handler(arguments: Any, says: str) -> None:
    result = await call(arguments)
    assert result.metadata.get("invalid_arguments") and says in result.error, result.error
    assert "expected: city: string, required" in result.error


async def test_what_is_said_of_a_long_value_is_short() -> None:
    assert len((await call({"city": "Rome", "days": "x" * 100_000})).error) < 1000


async def test_arguments_that_are_nested_too_deep_are_refused() -> None:
    deep: Any = []
    for _ in range(3000):
        deep = [deep]
    result = await call({"city": "Rome", "days": deep})
    assert not result.success and result.metadata.get("invalid_arguments")


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({}, "are not an object"),
        ({"type": "array"}, "are not an object"),
        ({"type": "objekt"}, "not a valid JSON schema, at \\$.type: 'objekt' is not valid"),
        ({"type": "object", "properties": {"a": {"type": 1}}}, "at \\$.properties.a.type"),
        ({"type": "object", "required": "a"}, "at \\$.required"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}}, "refer to '#/\\$defs/a'"),
        ({"type": "object", "properties": {"a": {"$ref": "https://example.org/a.json"}}}, "nothing is fetched"),
        ({"type": "object", "default": object()}, "are not JSON"),
    ],
)
def test_a_bad_schema_is_refused_when_the_tool_is_defined(schema: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"tool 'forecast' .*{says}"):
        tool(schema)


def test_a_schema_of_references_to_itself_is_read_quickly() -> None:
    many = {"anyOf": [{"$ref": "#/$defs/many"}] * 10 + [{"type": "integer"}]}
    schema = {"type": "object", "properties": {"n": {"$ref": "#/$defs/many"}}, "$defs": {"many": many}}
    assert convert("5", property_schema(schema, "n"), schema) == 5


def test_a_schema_that_is_true_or_false_can_be_told() -> None:
    shown = describe_arguments(tool({"type": "object", "properties": {"a": True, "b": False}}))
    assert shown == "a: any; b: nothing"


def test_parsers_type_bare_values_by_it() -> None:
    parameters = parameters_of([function_schema(tool())])["forecast"]
    values = {"city": "7", "days": "7", "unit": "C"}
    typed_values = {key: convert(text, property_schema(parameters, key), parameters) for key, text in values.items()}
    assert typed_values == {"city": "7", "days": 7, "unit": "C"}
