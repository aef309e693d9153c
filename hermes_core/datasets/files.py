"""Reads the rows of a dataset: JSONL and Parquet files, folders of them, and datasets of the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hermes_core.datasets.intake import Intake
from hermes_core.datasets.rows import read_jsonl
from hermes_core.errors import DatasetError

Placed = tuple[str, Mapping[str, Any]]
"""A row with its place, such as `tasks.jsonl, line 3`, before it."""

JSONL = (".jsonl", ".ndjson")
PARQUET = (".parquet",)


def read_rows(name: str, split: str, intake: Intake | None = None) -> Iterator[Placed]:
    """Yield the rows of a file, a folder or a hub dataset. A name that exists as a path, or looks like one, is a path.

    Blocking.

    Args:
        intake: collects the errors of JSONL lines that are no rows; None raises the first.

    Raises:
        DatasetError: the dataset does not exist or can't be read, or the library that reads it is not installed.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        for file in _files_in(path, split):
            yield from _read_file(file, intake)
    elif path.exists():
        yield from _read_file(path, intake)
    elif path.suffix in JSONL + PARQUET or name.startswith(("/", "./", "../", "~")):
        raise DatasetError(f"there is no dataset at {path}", hint="dataset_name is a path, or a name on the hub")
    elif re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        yield from _read_hub(name, split)
    else:
        raise DatasetError(f"{name!r} is neither a path nor the name of a dataset", hint="give a file, or owner/name")


def _files_in(folder: Path, split: str) -> list[Path]:
    """Return the split's files in a folder, or in its `data` (the layout of a hub dataset's snapshot)."""
    for place in (folder, folder / "data"):
        for suffixes in (JSONL, PARQUET):
            files = [file for file in sorted(place.glob(f"{split}*")) if file.suffix in suffixes]
            if files:
                return files
    raise DatasetError(f"no {split}*.jsonl or {split}*.parquet in {folder}", hint="set dataset_split, or name one file")


def _read_file(path: Path, intake: Intake | None) -> Iterator[Placed]:
    if path.suffix in PARQUET:
        yield from _read_parquet(path)
    elif path.suffix in JSONL:
        yield from read_jsonl(path, intake)
    else:
        raise DatasetError(f"{path}: not a kind of file that can be read", hint="use .jsonl or .parquet")


def _read_parquet(path: Path) -> Iterator[Placed]:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError as error:
        raise DatasetError(f"{path}: reading Parquet needs pyarrow", hint="pip install 'hermes-rl[parquet]'") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pyarrow.lib.ArrowException, OSError) as error:
        raise DatasetError(f"{path} can't be read after row {number}: {error}", hint="is it whole?") from error


def _read_hub(name: str, split: str) -> Iterator[Placed]:
    try:
        import datasets
    except ImportError as error:
        raise DatasetError(
            f"dataset {name!r} is not a path, and names on the hub need the package datasets",
            hint="pip install 'hermes-rl[hub]', or give a .jsonl or .parquet file",
        ) from error
    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # of many types: the library's own, and those of its HTTP client
        raise DatasetError(
            f"dataset {name!r}, split {split!r}, can't be loaded: {type(error).__name__}: {str(error)[:500]}",
            hint="check name, split and network, or give a file",
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{name}[{split}], row {number}", row
