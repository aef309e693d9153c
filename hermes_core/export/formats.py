"""The formats of an export: for each, the records that it can hold, and the function that writes it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from hermes_core.errors import UsageError
from hermes_core.export import atif, harbor, rows, sharegpt
from hermes_core.export.eval_log import RunLog, log_name
from hermes_core.export.selection import Refuses, Selection
from hermes_core.export.tables import Columns, TableRow, check_parquet, table
from hermes_core.records.index import RecordedRun
from hermes_core.records.jsonable import json_text
from hermes_core.records.record import Record
from hermes_core.records.select import FAILURES, NO_FAILURE
from hermes_core.records.store import RUN, SUMMARY, TRAJECTORIES, write_json
from hermes_core.records.summary import Tally


@dataclass(frozen=True)
class Format:
    """One format: either a table, with `columns` and `rows`, or a folder of files, which `write` fills."""

    refuses: Refuses
    """Returns the reason why the format can't hold a record, or None."""
    columns: Columns | None = None
    rows: Callable[..., Iterable[TableRow]] | None = None
    """Called with the selection, and with a record or both records of a pair; returns the rows."""
    write: Callable[[Selection, Path], int] | None = None
    failures: tuple[str, ...] = (NO_FAILURE,)
    """The kinds of failure that are exported unless the filters name some."""
    pairs: bool = False
    """Whether a row is made of several rollouts of a group."""

    def check(self, *, parquet: bool) -> None:
        """Check that the format can be written in this way.

        Raises:
            UsageError: Parquet is asked for, and the format is no table or pyarrow is missing.
        """
        if parquet and self.columns is None:
            raise UsageError("this format is a folder of files, not a table", hint="leave out --parquet")
        if parquet:
            check_parquet()

    def write_to(self, folder: Path, selection: Selection, *, parquet: bool) -> int:
        """Write the selection, and return the number of rows or of rollouts' files. Rollouts that the format can't hold
        are left out of the selection."""
        if self.write is not None:
            return self.write(selection, folder)
        assert self.columns is not None and self.rows is not None
        make = self.rows
        with table(folder, self.columns, parquet=parquet) as add:
            return selection.write_each(lambda *records: add(make(selection, *records)))


def _write_atif(selection: Selection, folder: Path) -> int:
    """Write one file per rollout, named by its trajectory id."""

    def write(record: Record) -> int:
        text = json_text(atif.trajectory(record)) + "\n"
        name = harbor.plain_name(record.trajectory_id)
        if name != record.trajectory_id:  # this id can't be a file's name as it is
            name += f"-{hashlib.sha256(record.trajectory_id.encode()).hexdigest()[:8]}"
        (folder / f"{name}.json").write_text(text)
        return 1

    return selection.write_each(write)


def _write_eval(selection: Selection, folder: Path) -> int:
    """Write a log for Inspect, made from a temporary run with the chosen records."""
    with TemporaryDirectory(prefix=".", dir=folder) as beside:
        chosen = Path(beside) / selection.run.name
        chosen.mkdir()
        with (chosen / TRAJECTORIES).open("wb") as file:
            tally = Tally()

            def write(record: Record) -> int:
                file.write(record.line())
                tally.add(record)
                return 1

            count = selection.write_each(write)
        write_json(chosen / RUN, selection.run.about)
        write_json(chosen / SUMMARY, tally.summary(tally.session).to_dict())
        run = RecordedRun(chosen)
        with closing(RunLog(run, folder / log_name(run))) as log:
            log.update()
    return count


def _without_messages(record: Record) -> str | None:
    return None if record.messages else "no messages"


def _nothing(record: Record) -> str | None:
    return None


FORMATS = {
    "openai": Format(rows.without_answer, rows.OPENAI, rows.openai_rows),
    "trl": Format(rows.without_answer, rows.TRL, rows.trl_rows),
    "sharegpt": Format(rows.without_answer, sharegpt.COLUMNS, sharegpt.sharegpt_rows),
    "tokens": Format(rows.without_tokens, rows.TOKENS, rows.token_rows),
    "preference": Format(rows.without_reward, rows.PREFERENCE, rows.preference_rows, pairs=True),
    "atif": Format(_without_messages, write=_write_atif, failures=FAILURES),
    "harbor": Format(_nothing, write=harbor.write_job, failures=FAILURES),
    "eval": Format(_nothing, write=_write_eval, failures=FAILURES),
}
"""The formats by name; `docs/guides/export.md` says what each is for."""
