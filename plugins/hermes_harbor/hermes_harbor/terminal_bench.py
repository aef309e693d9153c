"""The environment `terminal-bench-2`: the rows of its dataset, unpacked into Harbor's task folders."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hermes_core import DatasetError, Intake, read_rows, validate_row
from hermes_harbor.archives import unpack
from hermes_harbor.config import TerminalBench2Config
from hermes_harbor.environment import HarborEnvironment
from hermes_harbor.task_toml import TaskToml
from hermes_harbor.tasks import HarborTask, make_task, strip_canary


class TerminalBenchRow(BaseModel):
    """The fields of a dataset's row that are used."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    task_name: str = Field(min_length=1, max_length=200)
    instruction: str
    docker_image: str = Field(min_length=1)
    environment_tar: str | None = None
    """The folder of the image's Dockerfile, as a tar in base64."""
    tests_tar: str | None = None
    """The tests, as a tar in base64."""
    test_sh: str
    """The script that runs the tests."""
    category: str | None = None


class TerminalBench2Environment(HarborEnvironment):
    """Terminal-Bench 2. The rows have no solutions, so the agent `oracle` can't solve them."""

    name = "terminal-bench-2"
    config_class = TerminalBench2Config
    config: TerminalBench2Config

    def __init__(self, config: TerminalBench2Config | None = None) -> None:
        super().__init__(config or TerminalBench2Config())
        self._scratch = ExitStack()

    async def aclose(self) -> None:
        """Remove the unpacked rows."""
        await super().aclose()
        self._scratch.close()

    def load(self, intake: Intake) -> Iterable[tuple[str, Callable[[], HarborTask]]]:
        """Yield the place of each row, with a function that reads it. Blocking."""
        top = Path(self._scratch.enter_context(tempfile.TemporaryDirectory(prefix="hermes-terminal-bench-")))
        rows = read_rows(self.config.dataset_name, self.config.dataset_split, intake)
        for number, (where, fields) in enumerate(rows):
            yield where, partial(self._unpack_row, fields, where, top, number)

    def _unpack_row(self, fields: Mapping[str, Any], where: str, top: Path, number: int) -> HarborTask:
        row = validate_row(TerminalBenchRow, fields, where)
        folder = top / f"{number}-{re.sub(r'[^A-Za-z0-9_-]', '-', row.task_name)}"
        limits = {"max_bytes": self.config.max_archive_bytes, "max_files": self.config.max_archive_files}
        for name, text in (("environment", row.environment_tar), ("tests", row.tests_tar)):
            if text:
                unpack(text, folder / name, f"{where}, field '{name}_tar'", **limits)
        _unnest(folder / "tests")
        try:
            script = folder / "tests" / "test.sh"
            script.unlink(missing_ok=True)  # if it is a link, the text would be written to the link's target
            script.write_text(row.test_sh)
        except OSError as error:
            raise DatasetError(f"{where}, field 'tests_tar': {error}", hint="test.sh must be a file") from error
        metadata = {"category": row.category} if row.category else {}
        toml = TaskToml.model_validate({"environment": {"docker_image": row.docker_image}, "metadata": metadata})
        task = make_task(folder, toml, self.config, strip_canary(row.instruction))
        return task.with_id(row.task_name)


def _unnest(tests: Path) -> None:
    """Move the files of an inner folder `tests` up, if an archive of tests contains nothing else."""
    tests.mkdir(parents=True, exist_ok=True)
    inner = tests / "tests"
    if [*tests.iterdir()] == [inner] and inner.is_dir() and not inner.is_symlink():
        moved = inner.rename(tests.parent / "tests-inner")
        tests.rmdir()
        moved.rename(tests)
