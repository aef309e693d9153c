"""Function schemas from parameter models, and wrong arguments explained."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, create_model

from hermes_core.errors import ToolArgumentError
from hermes_core.tools.base import CallContext, Text, Tool, ToolParams
from hermes_core.tools.files import READ_FILE, ReadFileParams
from hermes_core.tools.schema import describe_arguments, function_schema, parameters_schema, parse_arguments


async def nothing(ctx: CallContext, params: Any) -> str:
    return ""


def tool(params: type[BaseModel]) -> Tool:
    return Tool("it", params, nothing, "Does it.")


class Place(BaseModel):
    """Somewhere."""

    x: int
    title: str = Field(default="", description="Its name.")


class Params(ToolParams):
    """Words for programmers."""

    where: Place = Field(description="The place.")
    title: str = Field(description="A parameter that is called title.")
    kind: Literal["a", "b"] = "a"
    others: list[Place] | None = None
    size: int | str | None = Field(default=None, ge=1, description="How much.")
    by_name: dict[str, Place] = Field(default_factory=dict)


class Tree(ToolParams):
    """Contains itself."""

    name: str
    children: list[Tree] = Field(default_factory=list)


def keys(schema: Any) -> set[str]:
    """Every keyword of a schema, names of properties aside."""
    if isinstance(schema, list):
        return set().union(*map(keys, schema))
    if not isinstance(schema, dict):
        return set()
    found = set(schema)
    for key, value in schema.items():
        inner = list(value.values()) if key in ("properties", "$defs") else value
        found |= keys(inner) if key not in ("default", "enum", "required", "description") else set()
    return found


def test_the_whole_function() -> None:
    class Small(ToolParams):
        path: str = Field(description="Where.")
        limit: int = Field(default=5, ge=1, description="How many.")
        note: str | None = Field(default=None, description="Why.")

    assert function_schema(tool(Small)) == {
        "type": "function",
        "function": {
            "name": "it",
            "description": "Does it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "Where."},
                    "limit": {"type": "integer", "default": 5, "minimum": 1, "description": "How many."},
                    "note": {"type": "string", "description": "Why."},
                },
                "required": ["path"],
                "additionalProperties": False,
            },
        },
    }


def test_references_are_resolved_and_noise_is_gone() -> None:
    schema = parameters_schema(Params)
    assert not keys(schema) & {"$ref", "$defs", "title"}
    assert "description" not in schema
    properties = schema["properties"]
    assert properties["title"] == {"type": "string", "description": "A parameter that is called title."}
    assert properties["where"]["description"] == "The place."
    assert properties["where"]["properties"]["title"]["description"] == "Its name."
    assert properties["others"]["items"]["required"] == ["x"]
    assert {each["type"] for each in properties["size"]["anyOf"]} == {"integer", "string"}
    assert properties["by_name"]["additionalProperties"]["type"] == "object"


def test_a_model_that_contains_itself_keeps_its_definition() -> None:
    schema = parameters_schema(Tree)
    assert schema["type"] == "object" and schema["required"] == ["name"]
    assert schema["properties"]["children"]["items"] == {"$ref": "#/$defs/Tree"}
    assert set(schema["$defs"]) == {"Tree"} and "title" not in keys(schema)


def test_no_parameters() -> None:
    class Empty(ToolParams):
        pass

    assert parameters_schema(Empty) == {"type": "object", "properties": {}, "additionalProperties": False}
    assert describe_arguments(tool(Empty)) == "no arguments"
    assert parse_arguments(tool(Empty), "") == Empty()


field_types = st.sampled_from(
    [
        str,
        int,
        float,
        bool,
        str | None,
        list[str],
        dict[str, int],
        Literal["a", 1],
        Place,
        Place | None,
        list[Place] | None,
    ]
)
names = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=8).filter(lambda n: not n.startswith("_"))
names = names.filter(lambda n: not hasattr(BaseModel, n))


@given(st.dictionaries(names, st.tuples(field_types, st.booleans()), max_size=5))
def test_any_model_has_a_plain_schema_that_is_json(fields: dict[str, tuple[Any, bool]]) -> None:
    specs = {n: (kind, ... if needed else Field(default=None, description="d")) for n, (kind, needed) in fields.items()}
    schema = parameters_schema(create_model("Made", __base__=ToolParams, **specs))
    assert json.loads(json.dumps(schema)) == schema
    assert list(schema["properties"]) == list(fields)
    assert set(schema.get("required", [])) == {name for name, (_, needed) in fields.items() if needed}
    assert schema["additionalProperties"] is False
    assert not keys(schema) & {"$ref", "$defs", "title"}


# --- arguments ------------------------------------------------------------------------------------------------------


class Given(ToolParams):
    name: Text
    count: int = 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "x", "count": 3},
        '{"name": "x", "count": 3}',
        json.dumps(json.dumps({"name": "x", "count": 3})),
        json.dumps(json.dumps(json.dumps({"name": "x", "count": "3"}))),
    ],
)
def test_a_mapping_or_its_json(arguments: Any) -> None:
    assert parse_arguments(tool(Given), arguments) == Given(name="x", count=3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "name: is required"),
        (None, "name: is required"),
        ("{not json", "not valid JSON"),
        ("[1]", "not an array"),
        ("3", "not a number"),
        ("true", "not a boolean"),
        ("null", "name: is required"),
        ('"text"', "not valid JSON"),
        ({"name": 3}, "name: Input should be a valid string"),
        ({"name": "x", "cuont": 1}, "cuont: no such argument (did you mean 'count'?)"),
        ({"name": "x", "count": "many"}, "count: Input should be a valid integer"),
        ({"name": "\ud800"}, "surrogate"),
        ('{"name": "x", "\\ud800": 1}', "surrogate"),
        ("[" * 100_000, "not valid JSON"),
        ('{"name": ' + "[" * 100_000, "not valid JSON"),
    ],
)
def test_wrong_arguments_say_what_is_wrong_and_what_is_expected(arguments: Any, says: str) -> None:
    with pytest.raises(ToolArgumentError) as caught:
        parse_arguments(tool(Given), arguments)
    message = str(caught.value)
    assert says in message and "it" in message
    assert "expected: name: string, required; count: integer, default 1" in message
    message.encode()


def test_unknown_arguments_are_errors_even_where_the_model_would_drop_them() -> None:
    class Lax(BaseModel):
        name: str = Field(alias="Name")

    assert parse_arguments(tool(Lax), {"Name": "x"}).name == "x"  # type: ignore[attr-defined]
    with pytest.raises(ToolArgumentError, match="other: no such argument"):
        parse_arguments(tool(Lax), {"Name": "x", "other": 1})


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(ToolArgumentError, match=r"where\.x: .*kind: .*"):
        parse_arguments(tool(Params), {"where": {"x": "a"}, "title": "t", "kind": "c"})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(json_values | st.text())
def test_anything_is_parsed_or_refused_with_the_typed_error(arguments: Any) -> None:
    for kind in (Given, Params, Tree):
        try:
            assert isinstance(parse_arguments(tool(kind), arguments), kind)
        except ToolArgumentError as error:
            str(error).encode()


MEANT = [  # what a model writes for read_file's arguments, and what it means
    ({"offset": None, "limit": None}, {"offset": 1, "limit": 500}),
    ({"offset": 0}, {"offset": 1}),
    ({"limit": 1_000_000}, {"limit": 2000}),
    ({"offset": "3", "limit": "5000"}, {"offset": 3, "limit": 2000}),
]


@pytest.mark.parametrize(("written", "meant"), MEANT)
def test_arguments_that_mean_one_thing_are_taken(written: dict[str, Any], meant: dict[str, Any]) -> None:
    params = parse_arguments(READ_FILE, {"path": "a", **written})
    assert isinstance(params, ReadFileParams) and params.model_dump().items() >= meant.items()


LISTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string"}},
        "depth": {"type": "integer"},
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "any": {},
    },
    "required": ["names"],
}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"names": '["a", "b"]', "depth": None}, {"names": ["a", "b"]}),
        ({"names": [], "depth": "2", "text": "[1]"}, {"names": [], "depth": 2, "text": "[1]"}),
        ({"names": [], "maybe": None, "any": None}, {"names": [], "maybe": None, "any": None}),
    ],
)
def test_a_schema_s_arguments_that_mean_one_thing_are_taken(written: dict[str, Any], meant: dict[str, Any]) -> None:
    assert parse_arguments(Tool("listed", LISTED, nothing, "Does it."), written) == meant


@pytest.mark.parametrize("written", [{"names": None}, {"names": '{"a": 1}'}, {"names": [], "depth": "true"}])
def test_other_arguments_stay_wrong(written: dict[str, Any]) -> None:
    with pytest.raises(ToolArgumentError):
        parse_arguments(Tool("listed", LISTED, nothing, "Does it."), written)
