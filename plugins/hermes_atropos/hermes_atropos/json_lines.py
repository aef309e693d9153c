"""Lines of JSON: a file that loses no line if the process dies, and the text of groups for this file and the API."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hermes_core import OutputError
from hermes_core.records.jsonable import json_line


class JsonLines:
    """A file to which lines are appended, each in one write; a context manager.

    Raises:
        OutputError: the file can't be opened or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise OutputError(f"can't write {path}: {error.strerror}", hint="choose another place") from error

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record as one line."""
        self.write_line(json_line(record))

    def write_line(self, line: bytes) -> None:
        """Append a line, which ends with a line feed."""
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(28, "no space left")
        except OSError as error:
            raise OutputError(f"can't write {self.path}: {error.strerror}", hint="free some space") from error


async def group_json(group: Mapping[str, Any]) -> bytes:
    """Return a group as JSON in ASCII, without a line feed. The event loop can run between its rows.

    A group of eight long rollouts takes a tenth of a second. Encoding it in a thread would block the loop as well,
    because the encoder holds the interpreter's lock.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    parts = []
    for key, value in group.items():
        texts = []
        for row in value if isinstance(value, list) else (value,):
            texts.append(json.dumps(row, allow_nan=False))
            await asyncio.sleep(0)
        parts.append(f"{json.dumps(key)}: {'[' + ', '.join(texts) + ']' if isinstance(value, list) else texts[0]}")
    return f"{{{', '.join(parts)}}}".encode("ascii")
