"""Tool parameters for models: makes function schemas, and explains wrong arguments."""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from hermes_core.errors import ToolArgumentError
from hermes_core.tools.base import Tool
from hermes_core.tools.json_schema import problems_of

Schema = dict[str, Any]

_NAMED_SCHEMAS = ("properties", "patternProperties", "dependentSchemas")
_LISTED_SCHEMAS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SINGLE_SCHEMAS = ("items", "additionalProperties", "not", "contains", "propertyNames")
_MAX_ENCODINGS = 3
"""Maximum number of times that arguments may be JSON-encoded."""


def function_schema(tool: Tool) -> Schema:
    """Return the tool as an entry of a chat completion request's `tools`."""
    function = {"name": tool.name, "description": tool.description, "parameters": parameters_schema(tool.params)}
    return {"type": "function", "function": function}


def parameters_schema(params: type[BaseModel] | Mapping[str, Any]) -> Schema:
    """Return the JSON schema of a tool's parameters: a given schema unchanged, the schema of a pydantic model
    simplified.

    References are resolved (a model that contains itself keeps its `$defs`), and generated titles are left out. An
    optional parameter has its plain type instead of a union with null. Unknown arguments are refused unless the model
    allows them.
    """
    schema = {"properties": {}, **params} if isinstance(params, Mapping) else _schema_of_model(params)
    return copy.deepcopy(schema)


@functools.lru_cache(maxsize=256)  # pydantic takes a millisecond for each; every runtime needs core's
def _schema_of_model(params: type[BaseModel]) -> Schema:
    raw = params.model_json_schema()
    definitions: Mapping[str, Schema] = raw.pop("$defs", {})
    recursive: set[str] = set()
    inside: tuple[str, ...] = ()
    if "$ref" in raw:  # the schema of a model that contains itself is a reference
        inside = (_reference(raw),)
        raw = definitions[inside[0]]
    schema: Schema = _plain(raw, definitions, inside, recursive)
    schema.pop("description", None)  # the class's docstring; the tool has its own description
    schema.setdefault("properties", {})
    if params.model_config.get("extra") != "allow":
        schema["additionalProperties"] = False
    kept: dict[str, Schema] = {}
    while missing := recursive - kept.keys():
        name = min(missing)
        kept[name] = _plain(definitions[name], definitions, (name,), recursive)
    if kept:
        schema["$defs"] = kept
    return schema


def _reference(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).removeprefix("#/$defs/")


def _plain(schema: Any, definitions: Mapping[str, Schema], inside: tuple[str, ...], recursive: set[str]) -> Any:
    """Return `schema` with references resolved and noise removed. `inside` names the definitions that are being
    resolved."""
    if not isinstance(schema, dict):
        return schema  # `additionalProperties: false` and similar
    if "$ref" in schema:
        name = _reference(schema)
        if name in inside or name in recursive:
            recursive.add(name)
            return {key: value for key, value in schema.items() if key != "title"}
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        return _plain({**definitions[name], **beside}, definitions, (*inside, name), recursive)
    schema = _without_null(schema)
    if "$ref" in schema:
        return _plain(schema, definitions, inside, recursive)
    result: Schema = {}
    for key, value in schema.items():
        if key in ("title", "discriminator"):
            continue
        if key in _NAMED_SCHEMAS:
            result[key] = {name: _plain(each, definitions, inside, recursive) for name, each in value.items()}
        elif key in _LISTED_SCHEMAS:
            result[key] = [_plain(each, definitions, inside, recursive) for each in value]
        elif key in _SINGLE_SCHEMAS:
            result[key] = _plain(value, definitions, inside, recursive)
        else:
            result[key] = value
    return result


def _without_null(schema: Schema) -> Schema:
    """Return the plain type of an optional parameter whose default is null, because a model can leave it out instead of
    writing null."""
    branches = schema.get("anyOf")
    if branches is None or "default" not in schema or schema["default"] is not None:
        return schema
    others = [branch for branch in branches if branch != {"type": "null"}]
    rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    if len(others) == len(branches):
        return schema
    return {**others[0], **rest} if len(others) == 1 else {**rest, "anyOf": others}


def parse_arguments(tool: Tool, arguments: Mapping[str, Any] | str | None) -> BaseModel | dict[str, Any]:
    """Check a model's or hook's arguments and convert them for the tool's handler: to an instance of the pydantic
    model, or to a dict if `params` is a schema.

    Args:
        arguments: a mapping, or its JSON text, possibly encoded more than once. Empty text means no arguments.

    Raises:
        ToolArgumentError: the tool does not accept the arguments; the message has the problem and the expected form.
    """
    model = tool.params
    values = _meant(model if isinstance(model, Mapping) else _schema_of_model(model), _decode(tool, arguments))
    if isinstance(model, Mapping):
        if tool.checks_arguments and (found := problems_of(model, values)):
            raise _argument_error(tool, "; ".join(found))
        return values
    problems = []
    if model.model_config.get("extra") not in ("forbid", "allow"):  # else pydantic would ignore unknown arguments
        known = {name for key, field in model.model_fields.items() for name in (key, field.alias or key)}
        problems = [_unknown(tool, name) for name in values if name not in known]
    try:
        parsed = model.model_validate(values)
    except ValidationError as error:
        problems += [_problem(tool, each) for each in error.errors(include_url=False, include_input=False)]
    else:
        if not problems:
            return parsed
    raise _argument_error(tool, "; ".join(problems))


def _decode(tool: Tool, arguments: Any) -> dict[str, Any]:
    for _ in range(_MAX_ENCODINGS):
        if not isinstance(arguments, str):
            break
        if not arguments.strip():
            return {}
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise _argument_error(tool, f"the arguments are not valid JSON: {error}") from error
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        kind = {str: "a string", list: "an array", bool: "a boolean", int: "a number", float: "a number"}
        raise _argument_error(tool, f"the arguments must be a JSON object, not {kind.get(type(arguments), 'that')}")
    return {str(key): value for key, value in arguments.items()}


_JSON_TYPES: dict[str, list[type]] = {
    "array": [list],
    "object": [dict],
    "integer": [int],
    "number": [int, float],
    "boolean": [bool],
}


def _meant(schema: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a model meant: without null for an optional argument, and with JSON text decoded where
    the schema has no text."""
    properties, required = schema.get("properties"), schema.get("required")
    meant = {}
    for name, argument in values.items():
        value, kinds = argument, _kinds(properties.get(name) if isinstance(properties, Mapping) else None)
        if isinstance(value, str) and kinds and "string" not in kinds:
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value)
            if type(value) not in [each for kind in kinds for each in _JSON_TYPES.get(kind, ())]:
                value = argument
        if value is not None or not kinds or "null" in kinds or name in (required or ()):
            meant[name] = value
    return meant


def _kinds(schema: Any) -> set[str]:
    """Return the names of the types that a schema allows; empty if it does not name types."""
    if not isinstance(schema, Mapping):
        return set()
    if isinstance(branches := schema.get("anyOf"), list):
        kinds = [_kinds(branch) for branch in branches]
        return set().union(*kinds) if all(kinds) else set()
    kind = schema.get("type", [])
    return {kind} if isinstance(kind, str) else {each for each in kind if isinstance(each, str)}


def _problem(tool: Tool, error: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
        return _unknown(tool, place)
    if error["type"] == "missing":
        return f"{place}: is required"
    if error["type"] == "string_unicode":
        return f"{place or 'a name'}: contains half of a surrogate pair, which UTF-8 can't carry"
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


def _unknown(tool: Tool, name: str) -> str:
    close = difflib.get_close_matches(name, parameters_schema(tool.params)["properties"], n=1)
    return f"{name}: no such argument" + (f" (did you mean {close[0]!r}?)" if close else "")


def _argument_error(tool: Tool, problem: str) -> ToolArgumentError:
    return ToolArgumentError(
        f"wrong arguments for {tool.name}: {problem}", hint=f"expected: {describe_arguments(tool)}"
    )


def describe_arguments(tool: Tool) -> str:
    """Return the tool's parameters on one line: `command: string, required; timeout: number`."""
    schema = parameters_schema(tool.params)
    required = schema.get("required", [])
    parts = []
    for name, each in schema["properties"].items():
        words = [type_words(each)]
        if name in required:
            words.append("required")
        elif isinstance(each, Mapping) and "default" in each:
            words.append(f"default {json.dumps(each['default'], ensure_ascii=False, default=str)}")
        parts.append(f"{name}: {', '.join(words)}")
    return "; ".join(parts) or "no arguments"


_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}


def type_words(schema: Mapping[str, Any] | bool) -> str:
    """Describe the values that a schema allows: `integer, at least 1`, `one of "a", "b"`, `array of string`."""
    if isinstance(schema, bool):  # a JSON schema that allows anything, or nothing
        return "any" if schema else "nothing"
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(type_words(each) for each in schema["anyOf"])
    kind = schema.get("type", "any")
    text = " or ".join(kind) if isinstance(kind, list) else str(kind)
    if isinstance(items := schema.get("items"), Mapping) and "type" in items:
        text += f" of {type_words(items)}"
    return ", ".join([text, *(f"{words} {schema[bound]:g}" for bound, words in _BOUNDS.items() if bound in schema)])
