"""Reads rows of a dataset from JSONL files and checks them against pydantic models. Errors name the place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hermes_core.errors import DatasetError
from hermes_core.validation import requirement

PROBLEMS_SHOWN = 5
"""Maximum number of bad lines that one error names; it gives the number of the others."""

_ONE_OBJECT = "each line is one JSON object in UTF-8"

Row = TypeVar("Row", bound=BaseModel)


def load_rows(model: type[Row], path: str | Path) -> list[Row]:
    """Return the rows of a JSONL file as instances of `model`. Blocking.

    Raises:
        DatasetError: the file can't be read, or lines of it are not valid rows; names the first of them with the field.
    """
    path = Path(path).expanduser()
    rows: list[Row] = []
    problems: list[str] = []
    more = 0
    for number, line in _lines(path):
        try:
            rows.append(_checked(model, _parsed(line)))
        except ValueError as error:
            if len(problems) < PROBLEMS_SHOWN:
                problems.append(f"line {number}{error}")
            else:
                more += 1
    if problems:
        raise DatasetError(
            f"{path}, {'; '.join(problems)}" + (f"; and {more} more" if more else ""),
            hint=f"{_ONE_OBJECT}; {_fields(model)}",
        )
    return rows


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a JSONL file as they are, each with its place: `tasks.jsonl, line 3`. Blocking.

    Raises:
        DatasetError: the file can't be read, or a line is not a JSON object.
    """
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        try:
            row = _parsed(line)
        except ValueError as error:
            raise DatasetError(f"{where}{error}", hint=_ONE_OBJECT) from error
        yield where, row


def checked_row(model: type[Row], row: Mapping[str, Any], where: str, hint: Callable[[str], str] | None = None) -> Row:
    """Return a row as an instance of `model`.

    Args:
        where: the row's place, for messages: `tasks.jsonl, line 3`.
        hint: gives advice about a field, by its path (`files.a.py`); None lists the fields of `model`.

    Raises:
        DatasetError: a field is missing, unknown or wrong; names the place and the field.
    """
    try:
        return _checked(model, row)
    except _WrongField as error:
        advice = _fields(model) if hint is None else hint(error.field)
        raise DatasetError(f"{where}{error}", hint=advice) from error.__cause__


class _WrongField(ValueError):
    """A field is wrong; the message goes after the row's place."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as lines:
            yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    except OSError as error:
        raise DatasetError(f"can't read {path}: {error.strerror or error}", hint="name a JSONL file") from error


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f": not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f": {type(row).__name__} instead of an object")
    return row


def _checked(model: type[Row], row: Mapping[str, Any]) -> Row:
    try:
        return model.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "?"
        raise _WrongField(f", field {field!r} {requirement(first)}", field) from error


def _fields(model: type[BaseModel]) -> str:
    return f"the fields are {', '.join(model.model_fields)}"
