"""Reads rows of a dataset from JSONL files and checks them against pydantic models. Errors name file and line."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

from pydantic import BaseModel, ValidationError

from hermes_core.datasets.intake import Intake
from hermes_core.errors import DatasetError
from hermes_core.validation import requirement

_ONE_OBJECT = "each line is one JSON object in UTF-8"

Row = TypeVar("Row", bound=BaseModel)


def load_rows(model: type[Row], path: str | Path) -> list[Row]:
    """Return the rows of a JSONL file as instances of `model`. Blocking.

    Raises:
        DatasetError: the file can't be read or has no rows, or some of its lines are not valid rows; names the first
            invalid lines with the field.
    """
    return [row for _, row in _validate_rows(model, Path(path).expanduser(), skip=False)]


class RowFile(Sequence[Row]):
    """The rows of a JSONL file of any size. Each access to a row reads its line again. Close the object at the end.

    The constructor reads and checks the whole file, and blocks meanwhile. Reading a row takes some microseconds.

    Args:
        skip: leave out, with a warning, lines that are not valid rows or repeat the `id` of an earlier row.

    Raises:
        DatasetError: as `load_rows`; reading a row also raises it, if the line has been changed meanwhile.
    """

    def __init__(self, model: type[Row], path: str | Path, *, skip: bool = False) -> None:
        self._model = model
        self._path = Path(path).expanduser()
        self._places = array("Q")
        """Offset and length of each line, alternating."""
        self._file = -1
        for line, _ in _validate_rows(model, self._path, skip=skip):
            self._places.extend((line.offset, len(line.text)))
        self._file = _open(self._path)

    def __len__(self) -> int:
        return len(self._places) // 2

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        where = f"{self._path}, row {index + 1}"
        try:
            return validate_row(self._model, _parse(self.line(index), where), where)
        except DatasetError as error:
            raise DatasetError(error.message, hint="don't change the file while a run reads it") from error

    def line(self, index: int) -> bytes:
        """Return the bytes of a row's line as they are in the file.

        Raises:
            DatasetError: the line can't be read any more.
        """
        offset, length = self._places[2 * range(len(self))[index] :][:2]
        try:
            return os.pread(self._file, length, offset)
        except OSError as error:
            raise _unreadable(self._path, error) from error

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _validate_rows(model: type[Row], path: Path, *, skip: bool) -> Iterator[tuple[_RowLine, Row]]:
    """Yield each line that is a valid row, with the row. Report invalid lines at the end, as `Intake.end` does."""
    intake, taken = Intake(str(path), skip=skip), 0
    for line in _lines(path):
        where = f"line {line.number}"
        try:
            row = validate_row(model, _parse(line.text, where), where)
            if (name := getattr(row, "id", None)) is not None:
                intake.once(str(name))
        except DatasetError as error:
            intake.leave_out(error, where)
        else:
            taken += 1
            yield line, row
    intake.end(taken, _ONE_OBJECT)


def read_jsonl(path: Path, intake: Intake | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row of a JSONL file, unchecked, after its place, such as `tasks.jsonl, line 3`. Blocking.

    Args:
        intake: collects the errors of lines that are not JSON objects; None raises the first.

    Raises:
        DatasetError: the file can't be read, or a line is not a JSON object.
    """
    for line in _lines(path):
        where = f"{path}, line {line.number}"
        try:
            row = _parse(line.text, where)
        except DatasetError as error:
            if intake is None:
                raise
            intake.leave_out(error, where)
        else:
            yield where, row


def validate_row(model: type[Row], row: Mapping[str, Any], where: str, hint: Callable[[str], str] | None = None) -> Row:
    """Return a row as an instance of `model`.

    Args:
        where: the row's place, for messages: `tasks.jsonl, line 3`.
        hint: returns advice about a field with this path (`files.a.py`); None lists the fields of `model`.

    Raises:
        DatasetError: a field is missing, unknown or wrong; names the place and the field.
    """
    try:
        return model.model_validate(row)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        unknown = (each for each in errors if each["type"] == "extra_forbidden")
        first = next(unknown, errors[0])  # an unknown field may be the missing one, misspelt
        field = ".".join(str(part) for part in first["loc"]) or "?"
        advice = f"the fields are {', '.join(model.model_fields)}" if hint is None else hint(field)
        raise DatasetError(f"{where}, field {field!r} {requirement(first)}", hint=advice) from error


class _RowLine(NamedTuple):
    """A non-empty line of a file."""

    number: int
    offset: int
    text: bytes


def _lines(path: Path) -> Iterator[_RowLine]:
    try:
        with path.open("rb") as lines:
            offset = 0
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _RowLine(number, offset, line)
                offset += len(line)
    except OSError as error:
        raise _unreadable(path, error) from error


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DatasetError:
    return DatasetError(f"can't read {path}: {error.strerror or error}", hint="name a JSONL file")


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        why = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
        raise DatasetError(f"{where}: not JSON: {why}", hint=_ONE_OBJECT) from error
    if not isinstance(row, dict):
        raise DatasetError(f"{where}: {type(row).__name__} instead of an object", hint=_ONE_OBJECT)
    return row
