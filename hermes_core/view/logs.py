"""The logs of runs that are being looked at: kept beside the records, brought up to date, shown as one folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hermes_core.errors import OutputError
from hermes_core.view.eval_log import RunLog, log_name
from hermes_core.view.index import Run

KEPT = ".view"
"""The folder beside the records in which their log is kept."""


@contextmanager
def opened(runs: Sequence[Run]) -> Iterator[tuple[Path, list[RunLog]]]:
    """Open the log of each run; yields a folder that shows them all, and the logs.

    Raises:
        OutputError: a log can't be written.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="hermes-rl-view-")))
        yield folder, [stack.enter_context(_log(run, folder)) for run in runs]


@contextmanager
def _log(run: Run, folder: Path) -> Iterator[RunLog]:
    """Open the log of a run: beside its records, with a link in the folder; or in the folder, if they are read-only."""
    name = log_name(run)
    kept = run.records.parent / KEPT / name
    try:
        log = RunLog(run, kept)
        (folder / name).symlink_to(kept.resolve())
    except OutputError:
        log = RunLog(run, folder / name)
    try:
        yield log
    finally:
        log.close()
