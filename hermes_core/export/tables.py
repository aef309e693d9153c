"""Tables of rows with fixed columns, as JSONL or Parquet. Columns are described without importing pyarrow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hermes_core.errors import UsageError
from hermes_core.records.jsonable import json_text

TableRow = Mapping[str, Any]

Kind = Any
"""The type of a column: the name of a type in `_TYPES`, a list that holds the type of the elements, or a mapping from
keys to types."""

Columns = Mapping[str, Kind]

Add = Callable[[Iterable[TableRow]], int]
"""Adds rows and returns their number, or raises ValueError and adds none of them."""

JSON = "json"
"""The type of any JSON value. Parquet stores it as JSON text, in a column that readers can distinguish from text."""

_ROWS_AT_A_TIME = 32
_ROW_GROUP_BYTES = 16 << 20
"""Bytes of rows in memory from which on they are written as one group of a Parquet file."""


@contextmanager
def table(folder: Path, columns: Columns, *, parquet: bool) -> Iterator[Add]:
    """Open `train.jsonl` or `train.parquet` in a folder, and yield a function that adds rows.

    Raises:
        UsageError: pyarrow is not installed.
    """
    opened = _parquet(folder / "train.parquet", columns) if parquet else _jsonl(folder / "train.jsonl")
    with opened as write:

        def add(rows: Iterable[TableRow]) -> int:
            lines = [(row, json_text(row)) for row in rows]  # also for Parquet, to refuse invalid values
            for row, line in lines:
                assert row.keys() == columns.keys(), row.keys() ^ columns.keys()
                write(row, line)
            return len(lines)

        yield add


@contextmanager
def _jsonl(path: Path) -> Iterator[Callable[[TableRow, str], object]]:
    with path.open("w", encoding="ascii") as file:
        yield lambda row, line: file.write(f"{line}\n")


@contextmanager
def _parquet(path: Path, columns: Columns) -> Iterator[Callable[[TableRow, str], object]]:
    check_parquet()
    import pyarrow as pa
    import pyarrow.parquet

    types: dict[str, Any] = {
        "string": pa.string(),
        "int": pa.int64(),
        "float": pa.float64(),
        "bool": pa.bool_(),
        "token": pa.int32(),
    }

    def arrow(kind: Kind, json_type: Any) -> Any:
        if isinstance(kind, list):
            return pa.list_(arrow(kind[0], json_type))
        if isinstance(kind, Mapping):
            return pa.struct([(name, arrow(part, json_type)) for name, part in kind.items()])
        return json_type if kind == JSON else types[kind]

    def schema(json_type: Any) -> Any:
        return pa.schema([(name, arrow(kind, json_type)) for name, kind in columns.items()])

    texts, typed = schema(pa.string()), schema(pa.json_())
    rows: list[dict[str, Any]] = []
    tables: list[Any] = []

    def collect() -> None:
        # Arrow makes no JSON columns from Python values, but casts text to them.
        tables.append(pa.Table.from_pylist(rows, schema=texts).cast(typed))
        rows.clear()

    def write(file: Any) -> None:
        if tables:
            file.write_table(pa.concat_tables(tables))
        tables.clear()

    with pyarrow.parquet.ParquetWriter(path, typed, compression="zstd") as file:

        def add(row: TableRow, line: str) -> None:
            rows.append({name: _to_arrow(row[name], kind) for name, kind in columns.items()})
            if len(rows) == _ROWS_AT_A_TIME:
                collect()
                if sum(each.nbytes for each in tables) >= _ROW_GROUP_BYTES:
                    write(file)

        yield add
        collect()
        write(file)


def features(columns: Columns) -> list[dict[str, Any]]:
    """Return the columns as the features on a dataset card."""
    return [{"name": name, **_feature(kind)} for name, kind in columns.items()]


def _feature(kind: Kind) -> dict[str, Any]:
    if isinstance(kind, list):
        return {"list": features(kind[0]) if isinstance(kind[0], Mapping) else _feature(kind[0])["dtype"]}
    if isinstance(kind, Mapping):
        return {"struct": features(kind)}
    return {"dtype": {"int": "int64", "float": "float64", "token": "int32"}.get(kind, kind)}


def check_parquet() -> None:
    """Check that Parquet can be written.

    Raises:
        UsageError: pyarrow is missing or too old.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise UsageError("Parquet needs pyarrow", hint="pip install 'hermes-rl[parquet]'") from error
    if not hasattr(pa, "json_"):
        raise UsageError(f"pyarrow {pa.__version__} has no JSON columns", hint="pip install 'pyarrow>=19'")


def _to_arrow(value: Any, kind: Kind) -> Any:
    """Return a value in the form that Arrow takes: only the keys of its type, and JSON as text."""
    if value is None:
        return None
    if isinstance(kind, list):
        return value if kind[0] in ("token", "float", "int") else [_to_arrow(part, kind[0]) for part in value]
    if isinstance(kind, Mapping):
        return {name: _to_arrow(value.get(name), part) for name, part in kind.items()}
    if kind == JSON or (kind == "string" and not isinstance(value, str)):
        return json.dumps(value, ensure_ascii=False)
    return value
