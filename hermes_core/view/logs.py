"""The logs of runs for the viewer: kept beside the records, and shown together in one folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hermes_core.errors import OutputError
from hermes_core.export.eval_log import RunLog, log_name
from hermes_core.records.index import RecordedRun, records_of
from hermes_core.records.run_files import make_folder

KEPT = ".view"
"""The name of the folder beside the records in which a run's log is kept for the next view."""


@contextmanager
def make_shown_folder(run: Path) -> Iterator[Path]:
    """Make a temporary folder for logs that are shown together, on the disk of this run if possible."""
    kept = records_of(run).parent / KEPT
    try:
        make_folder(kept)
        folder = TemporaryDirectory(prefix="shown-", dir=kept)
    except OSError:
        folder = TemporaryDirectory(prefix="hermes-rl-view-")
    with folder as name:
        yield Path(name)


@contextmanager
def open_logs(runs: Iterable[Path], folder: Path) -> Iterator[list[RunLog]]:
    """Open the log of each run, and put all logs into the folder.

    Raises:
        UsageError: there is no run, or it can't be read.
        OutputError: a log can't be written.
    """
    with ExitStack() as stack:
        yield [stack.enter_context(closing(_log(RecordedRun(run), folder))) for run in runs]


def _log(run: RecordedRun, folder: Path) -> RunLog:
    """Open the log of a run, beside its records, and link it into the folder.

    The log is only in the folder if nothing can be written beside the records, if the records are on another disk, or
    if another viewer has their log open.
    """
    name = log_name(run)
    try:
        log = RunLog(run, run.records.parent / KEPT / name)
    except OutputError:
        return RunLog(run, folder / name)
    try:
        os.link(log.path, folder / name)  # Inspect does not list symbolic links
    except OSError:
        log.close()
        return RunLog(run, folder / name)
    return log
