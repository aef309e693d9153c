"""JSON schemas as tool parameters: checks a schema when the tool is defined, and arguments against it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hermes_core.errors import ConfigError

MOST_PROBLEMS = 10
"""Maximum number of problems of one call that are reported to the model."""

_MESSAGE_CHARS = 300
"""Maximum number of characters of one problem's message, which quotes a value of any size."""


def check_schema(tool: str, schema: Mapping[str, Any]) -> None:
    """Check that a JSON schema can be the parameters of a tool.

    Raises:
        ConfigError: the schema is not valid, does not describe an object, or refers to something outside itself.
    """
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    what = f"the parameters of tool {tool!r}"
    try:
        json.dumps(schema)
        validator_for(schema, default=_latest()).check_schema(schema)
    except SchemaError as error:
        message = f"{what} are not a valid JSON schema, at {error.json_path}: {_short(error.message)}"
        raise ConfigError(message, hint="see https://json-schema.org/understanding-json-schema") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} are not JSON: {error}", hint="use JSON's types") from error
    except (RecursionError, OverflowError) as error:  # limits of Python, also for patterns
        raise ConfigError(f"{what} are nested too deeply, or a pattern in them is", hint="make them simpler") from error
    if schema.get("type") != "object":
        raise ConfigError(f"{what} are not an object", hint='begin with `"type": "object"`')
    _check_references(what, schema)


def problems_of(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    """Check arguments against a schema that passed `check_schema`. Return the problems; an empty list if there are
    none."""
    from jsonschema.validators import validator_for

    try:
        json.dumps(arguments, ensure_ascii=False).encode()
        validator = validator_for(schema, default=_latest())(schema, registry=_registry(schema))
        found = [_problem(error) for error in validator.iter_errors(arguments)]
    except UnicodeEncodeError:
        return ["a text contains half of a surrogate pair, which UTF-8 can't carry"]
    except RecursionError:
        return ["the arguments are nested too deep"]
    return sorted(found)[:MOST_PROBLEMS]


def _problem(error: Any) -> str:
    place = ".".join(str(part) for part in error.absolute_path)
    return f"{place}: {_short(error.message)}" if place else _short(error.message)


def _short(message: str) -> str:
    return message if len(message) <= _MESSAGE_CHARS else f"{message[:_MESSAGE_CHARS]}…"


def _latest() -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator


def _registry(schema: Mapping[str, Any]) -> Any:
    """Return a registry that looks references up in the schema itself, never on the network."""
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012

    return Registry().with_resource("", DRAFT202012.create_resource(schema))


def _check_references(what: str, schema: Mapping[str, Any]) -> None:
    from referencing.exceptions import Unresolvable

    resolver = _registry(schema).resolver()
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except Unresolvable as error:
            hint = "put it below `$defs`, and refer to it as `#/$defs/NAME`; nothing is fetched"
            raise ConfigError(f"{what} refer to {reference!r}, which they do not hold", hint=hint) from error


def _references(schema: Any) -> Iterator[str]:
    """Yield every reference in a schema."""
    if isinstance(schema, Mapping):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from _references(value)
