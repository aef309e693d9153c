"""Values that a format writes as bare text. The tool's schema decides their types."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from hermes_core.agents.parsers.base import ToolSchemas
from hermes_core.agents.replies import get

Schema = Mapping[str, Any]
Parameters = Mapping[str, Schema]
"""The parameters schema of each tool, by the tool's name."""

_UNIONS = ("anyOf", "oneOf", "allOf")
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
"""The constants of JSON, and those of Python, which some templates write because they print a value unconverted."""
_MAX_DEPTH = 20
"""The greatest depth to which references and unions are followed."""


def parameters_of(tools: ToolSchemas) -> Parameters:
    """Return the parameter schemas of all function tools, by name."""
    found: dict[str, Schema] = {}
    for tool in tools:
        function = get(tool, "function")
        name, parameters = get(function, "name"), get(function, "parameters")
        if isinstance(name, str):
            found[name] = parameters if isinstance(parameters, Mapping) else {}
    return found


def property_schema(tool: Schema, key: str) -> Schema | None:
    """Return the schema of one of the tool's parameters; None if the parameter has no schema."""
    schema = _mapping(tool.get("properties")).get(key)
    return schema if isinstance(schema, Mapping) else None


def member_schema(schema: Schema, key: str, root: Schema) -> Schema | None:
    """Return the schema of a member of an object, or of `item`, the member of a list; None if there is none."""
    for part in _parts(schema, root, 0, set()):
        found = property_schema(part, key) or part.get("additionalProperties")
        found = part.get("items", found) if key == "item" else found
        if isinstance(found, Mapping):
            return found
    return None


def convert(text: str, schema: Schema | None, root: Schema) -> Any:
    """Return the value of `text` by its schema. `root` is the parameters schema, into which references point.

    If the schema allows a string, the value is the text itself, except for null, members of an enumeration, and objects
    and arrays, if the schema allows these as well. Without a schema or a type, the value is the text, too. A text that
    matches no allowed type is left unchanged, so that the tool's own check reports the fault.
    """
    if schema is None:
        return text
    kinds, members = _find_types(schema, root)
    bare = text.strip()
    if members:
        return next((member for member in members if _writes(member, text, bare)), text)
    if "null" in kinds and bare in ("null", "None"):
        return None
    if "string" in kinds and not (bare[:1] in ("{", "[") and kinds & {"object", "array"}):
        return text
    value = decode(bare)
    return value if _kinds_of(value) & kinds else text


def _writes(member: Any, text: str, bare: str) -> bool:
    """Return whether the text stands for this member of an enumeration."""
    if isinstance(member, str):
        return member in (text, bare)
    return bare in (str(member), json.dumps(member, default=str))


def decode(bare: str) -> Any:
    """Return the value of a text that is JSON or one of the constants in `_WORDS`; else the text itself."""
    if bare in _WORDS:
        return _WORDS[bare]
    try:
        return json.loads(bare, strict=False, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return bare


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not JSON")
    return value


def _kinds_of(value: Any) -> set[str]:
    """Return the JSON schema types of this value."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"object"} if isinstance(value, Mapping) else {"array"}


def _find_types(schema: Schema, root: Schema) -> tuple[set[str], list[Any]]:
    """Return the types that a schema allows, and the members of its enumeration. No types mean that the schema names
    none."""
    kinds: set[str] = set()
    members: list[Any] = []
    open_ended = False
    for part in _parts(schema, root, 0, set()):
        declared = part.get("type")
        named = {declared} if isinstance(declared, str) else {k for k in _list(declared) if isinstance(k, str)}
        if "enum" in part or "const" in part:
            members += _list(part.get("enum")) if "enum" in part else [part["const"]]
        else:
            open_ended = True
        kinds |= named
        if not named:
            kinds |= {word for word, key in (("object", "properties"), ("array", "items")) if key in part}
    return kinds, [] if open_ended else members


def _parts(schema: Schema, root: Schema, depth: int, seen: set[str]) -> Iterator[Schema]:
    """Yield the schema itself, or the schemas of its union or reference.

    Each reference is followed only once; `seen` has the references that were followed. Otherwise, a few definitions
    that refer to each other several times would take for ever.
    """
    reference = schema.get("$ref")
    if depth >= _MAX_DEPTH:
        return
    if isinstance(reference, str):
        if reference in seen:
            return
        seen.add(reference)
        name = reference.rpartition("/")[2]
        target = _mapping(root.get("$defs")).get(name) or _mapping(root.get("definitions")).get(name)
        if isinstance(target, Mapping):
            yield from _parts(target, root, depth + 1, seen)
        return
    inside = [part for key in _UNIONS for part in _list(schema.get(key)) if isinstance(part, Mapping)]
    if not inside:
        yield schema
    for part in inside:
        yield from _parts(part, root, depth + 1, seen)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []
