"""Makes tasks of a dataset's rows, and reports the rows that can't be used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from hermes_core import Intake
from hermes_swe_smith.config import SweSmithConfig
from hermes_swe_smith.names import test_file
from hermes_swe_smith.rows import SweTask, parse_row

log = logging.getLogger("hermes_core.swe_smith")

Placed = tuple[str, Mapping[str, Any]]
"""A row's place, such as `tasks.jsonl, line 3`, and the row."""


def load_tasks(
    rows: Iterable[Placed],
    config: SweSmithConfig,
    intake: Intake | None = None,
    check: Callable[[SweTask], object] = lambda _: None,
) -> dict[str, SweTask]:
    """Return the rows as tasks by instance id, in the dataset's order. Blocking.

    Args:
        intake: counts the rows that can't be used. It already has the rows that could not be read.
        check: raises `DatasetError` for a task that can't be used.

    Raises:
        DatasetError: rows are wrong or have another row's id, and the message names file, line, instance and field of
            each; or no row is left.
    """
    left_out = 0

    def read(row: Mapping[str, Any], where: str) -> SweTask | None:
        nonlocal left_out
        task = parse_row(row, where, config)
        if config.python_only and not all(test_file(node_id).endswith(".py") for node_id in task.pass_to_pass):
            left_out += 1
            return None
        check(task)
        return task

    intake = intake or Intake(config.dataset_name, skip=config.skip_refused)
    try:
        return intake.read_all(
            ((where, partial(read, row, where)) for where, row in rows), lambda task: task.instance_id
        )
    finally:
        if left_out:
            log.info(
                "%s: %d rows left out, with tests outside of .py files (python_only)", config.dataset_name, left_out
            )
