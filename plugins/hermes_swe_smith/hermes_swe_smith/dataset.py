"""Checks the rows of SWE-smith datasets, and makes tasks of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from hermes_core import DatasetError
from hermes_swe_smith.config import SweSmithConfig
from hermes_swe_smith.names import Refused
from hermes_swe_smith.rows import Task, parse_row, test_file

log = logging.getLogger("hermes_core.swe_smith")

Placed = tuple[str, Mapping[str, Any]]
"""A row's place, such as `tasks.jsonl, line 3`, and the row."""


def load_tasks(rows: Iterable[Placed], config: SweSmithConfig) -> dict[str, Task]:
    """Return the rows as tasks by instance id, in the dataset's order. Blocking.

    Raises:
        DatasetError: a row is wrong, or two have the same id; names file, line, instance and field.
    """
    tasks: dict[str, Task] = {}
    left_out = 0
    refused: list[Refused] = []
    for where, row in rows:
        try:
            task = parse_row(row, where, config)
        except Refused as error:
            if not config.skip_refused:
                raise
            refused.append(error)
            continue
        if config.python_only and not all(test_file(node_id).endswith(".py") for node_id in task.pass_to_pass):
            left_out += 1
            continue
        if tasks.setdefault(task.instance_id, task) is not task:
            raise DatasetError(f"{where}: instance {task.instance_id!r} is there twice", hint="keep one of them")
    if left_out:
        log.info("%s: %d rows left out, with tests outside of .py files (python_only)", config.dataset_name, left_out)
    if refused:
        reason = refused[0].message
        log.warning("%s: %d rows left out (skip_refused); the first: %s", config.dataset_name, len(refused), reason)
    if not tasks:
        by = [name for name, count in (("python_only", left_out), ("skip_refused", len(refused))) if count]
        reason = f"all of its rows were left out by {' and '.join(by)}" if by else "it has no rows"
        raise DatasetError(f"nothing to do in dataset {config.dataset_name!r}: {reason}", hint="look into it")
    return tasks
