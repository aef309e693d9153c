"""Checks user input against pydantic models, and explains errors in the user's words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from hermes_core.errors import ConfigError, HermesError, UnknownNameError, describe

Model = TypeVar("Model", bound=BaseModel)

SECRET_NAME = re.compile(
    # `FAIL_TO_PASS`, a column of SWE-smith, is no secret.
    r"(API_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|_(KEY|PWD|PAT|AUTH)|(?<!_TO)_PASS|CREDENTIALS?)(_ID)?$"
)
"""Names of variables and keys whose values are secrets."""


def words(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return words as a tuple. A text is a single word, which the user wrote without brackets."""
    return (given,) if isinstance(given, str) else tuple(given)


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict. This is an `object_pairs_hook`.

    Raises:
        ValueError: the object has a key twice.
    """
    value = dict(pairs)
    if len(value) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice!r:.80} stands there twice")
    return value


def validate_data(
    model: type[Model], data: Mapping[str, Any], what: str, *, names: Mapping[str, str] | None = None
) -> Model:
    """Return `data` as an instance of `model`.

    Args:
        what: the source of the data, for messages: `the settings`, `profile 'default'`, `environment 'tasks'`.
        names: maps keys of the model to the names that users know, if they differ.

    Raises:
        UnknownNameError: the data has a key that the model does not have. The error names the nearest key.
        ConfigError: the model refuses values, or defaults can't be made. The error names all their keys.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        for problem in problems:
            if problem["type"] == "extra_forbidden":
                *path, key = problem["loc"]
                place = f" (in {_join_path(path)})" if path else ""
                raise UnknownNameError("key", str(key), _keys_at(model, path), where=f"of {what}{place}") from None
        keys = (_join_path(problem["loc"]) for problem in problems)
        called = [(names or {}).get(key, key) for key in keys]
        lines = "; ".join(f"{key} {requirement(one)}".lstrip() for key, one in zip(called, problems, strict=True))
        hints = (HINTS[problem["type"]] for problem in problems if problem["type"] in HINTS)
        raise ConfigError(f"{what}: {lines}", hint=next(hints, None)) from None
    except HermesError:
        raise
    except Exception as error:  # pydantic does not catch errors of a `default_factory`
        unmade = _key_without_default(model, data)
        if unmade is None:
            raise
        called_so = (names or {}).get(unmade, unmade)
        message = f"{what}: the default of {called_so} can't be made: {describe(error)}"
        raise ConfigError(message, hint=f"set {called_so}, or what its default is made from") from error


def _key_without_default(model: type[BaseModel], data: Mapping[str, Any]) -> str | None:
    """Return the first key that is not given and whose `default_factory` fails."""
    for key, field in model.model_fields.items():
        if key in data or field.default_factory is None:
            continue
        try:
            field.get_default(call_default_factory=True, validated_data=dict(data))
        except Exception:
            return key
    return None


_REQUIREMENTS = {
    "missing": "is missing",
    "extra_forbidden": "is not known",
    "string_pattern_mismatch": "must have the right form",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a text",
    "dict_type": "must be a mapping",
    "mapping_type": "must be a mapping",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
}
"""Requirements on values, by pydantic's kind of error, in the words of people who write YAML, JSON and command
lines."""

HINTS = {
    "missing": "it has no default: set it",
    "dict_type": "in YAML `key: value` lines below it; on a command line JSON, or one entry as --….KEY=VALUE",
}


def problem_text(error: ValidationError) -> str:
    """Return the first fault that pydantic found, in words: `turns.0.cost must be a number, not 'x'`."""
    problem = error.errors(include_url=False)[0]
    return f"{_join_path(problem['loc'])} {requirement(problem)}".lstrip()


_WITHOUT_VALUE = frozenset({"missing", "extra_forbidden", "string_too_short", "too_short", "value_error"})


def requirement(problem: Mapping[str, Any]) -> str:
    """Return the fault that pydantic found in a value, as a text to follow the value's name: `must be at least 1, not
    0`."""
    value, kind = problem["input"], problem["type"]
    if kind in _REQUIREMENTS:
        bounds = {
            key: f"{bound:g}" if isinstance(bound, float) else bound for key, bound in problem.get("ctx", {}).items()
        }
        text = _REQUIREMENTS[kind].format(**bounds)
    else:
        text = re.sub("^Input should be", "must be", str(problem["msg"]).removeprefix("Value error, "))
    secret = "env_vars" in problem["loc"] or SECRET_NAME.search(_join_path(problem["loc"]).upper())
    shown = kind not in _WITHOUT_VALUE and isinstance(value, str | int | float) and len(repr(value)) <= 80
    return f"{text}, not {value!r}" if shown and not secret else text


def _join_path(path: Iterable[Any]) -> str:
    return ".".join(str(part) for part in path)


def _keys_at(model: type[BaseModel], path: Iterable[Any]) -> list[str]:
    """Return the keys of the model at `path` inside `model`. List indexes and mapping keys in `path` are skipped."""
    for part in path:
        field = model.model_fields.get(str(part))
        if field is not None:
            model = next(_models_in(field.annotation), model)
    return list(model.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
