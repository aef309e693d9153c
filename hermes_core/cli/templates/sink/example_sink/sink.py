"""The sink: writes a line of CSV for each rollout."""

import asyncio
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hermes_core import ConfigError

COLUMNS = ("trajectory_id", "item_id", "reward")


class ExampleSink:
    """Appends to the file that `--sink example-sink=FILE.csv` names.

    Raises:
        ConfigError: no file was named, or it can't be written.
    """

    def __init__(self, target: str) -> None:
        if not target:
            raise ConfigError("example-sink was not told where to write", hint="use --sink example-sink=FILE.csv")
        self._path = Path(target)
        self._writing = asyncio.Lock()
        try:
            if not self._path.exists():
                self._append(COLUMNS)
        except OSError as error:
            raise ConfigError(f"example-sink can't write {target}: {error}", hint="choose another file") from error

    async def write(self, record: Mapping[str, Any]) -> None:
        """Take one record, whose fields docs/reference/records.md of hermes-rl has. Calls may overlap."""
        async with self._writing:
            await asyncio.to_thread(self._append, [record[column] for column in COLUMNS])

    async def aclose(self) -> None:
        """Close what the sink holds open. Called once, after the last record."""

    def _append(self, row: Sequence[Any]) -> None:
        with self._path.open("a", newline="") as file:
            csv.writer(file).writerow(row)
