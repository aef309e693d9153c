"""The settings of a configuration class, for listings and `--help`: option, type, default and meaning of each."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from hermes_core.tools.schema import parameters_schema, type_words

Setting = Mapping[str, str]
"""One setting: `option` (its form on a command line), `key`, `type`, `default` and `summary`."""


def settings_table(model: type[BaseModel], section: str, *, hidden: Collection[str] = ()) -> list[Setting]:
    """Return every setting of the class, its own before those of its base classes.

    Args:
        section: the word before the key on a command line: `env` in `--env.KEY=VALUE`.
        hidden: keys to leave out, because nobody sets them.
    """
    return [row for key, row in _rows(model, f"--{section}.", ()) if key not in hidden]


def help_text(model: type[BaseModel], name: str) -> str:
    """Return the help text of a setting: the first sentence of its text, and its default in brackets.

    If the setting's text explains the default (`None is …`, `Empty is …`), the brackets have this explanation.
    """
    field, text = model.model_fields[name], meaning(model, name)
    default = _default(field)
    first = re.split(r"\.(?= [A-Z0-9`]|$)", text, maxsplit=1)[0]
    named = "Empty" if default in ('""', "[]", "{}") else re.escape(default)
    meaning_of_default = re.search(rf"(?:^|\. ){named} is ([^.;]+)", text, re.IGNORECASE)
    if meaning_of_default is not None:
        default = meaning_of_default[1]
    elif isinstance(field.default, float):
        default = f"{field.default:g}"
    elif field.default in (None, "", (), False):
        return f"{first}."
    return f"{first} [{default}]."


def _rows(model: type[BaseModel], prefix: str, inside: tuple[type[BaseModel], ...]) -> Iterator[tuple[str, Setting]]:
    try:
        schemas = parameters_schema(model)["properties"]
    except PydanticUserError:  # JSON can't describe this type, so use its Python name
        schemas = {}
    for name, field in _own_first(model):
        schema = schemas.get(field.alias or name)
        option = f"{prefix}{name}"
        yield (
            name,
            {
                "option": option,
                "key": option.split(".", 1)[1],
                "type": _type(field, schema),
                "default": _default(field),
                "summary": meaning(model, name),
            },
        )
        inner = _model_in(field.annotation)
        if inner is not None and inner not in inside:
            for _, row in _rows(inner, f"{option}.", (*inside, model)):
                yield name, row


def _own_first(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    """Return the fields ordered by the class that declares them, the most derived class first."""
    declared = [vars(kind).get("__annotations__", {}) for kind in model.__mro__]
    return sorted(
        model.model_fields.items(),
        key=lambda item: next((n for n, names in enumerate(declared) if item[0] in names), len(declared)),
    )


def _type(field: FieldInfo, schema: Mapping[str, Any]) -> str:
    words = type_words(schema).replace(" or null", " or none") if schema else inspect.formatannotation(field.annotation)
    return f"{words}, required" if field.is_required() else words


def _default(field: FieldInfo) -> str:
    """Return the default in command-line form; empty if the setting is required."""
    if field.is_required():
        return ""
    value = to_jsonable_python(field.get_default(call_default_factory=True, validated_data={}), fallback=str)
    if isinstance(value, str):
        return value or '""'
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the class of a field that holds a single pydantic model; None for any other field."""
    kinds = [annotation, *get_args(annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def meaning(model: type[BaseModel], name: str) -> str:
    """Return a setting's documentation: the field's description, or the docstring below the field in the source."""
    return model.model_fields[name].description or _docstrings(model).get(name, "")


@functools.cache
def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of fields by name, read from the source, for fields without `Field(description=…)`.

    Pydantic could store them in the fields (`use_attribute_docstrings`), but would read the source at each start.
    """
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if not issubclass(kind, BaseModel) or kind is BaseModel:
            continue
        try:
            definition = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
        except (OSError, TypeError, SyntaxError):  # a class made at run time has no source
            continue
        for statement, text in pairwise(getattr(definition, "body", ())):
            match statement, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as meaning)):
                    found[name] = " ".join(meaning.split())
    return found
