"""Exports a run: chooses rollouts, writes them in a format, and describes the result."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from hermes_core.errors import OutputError, UnknownNameError, UsageError
from hermes_core.export.card import CARD, Export, card, describe_export, files_of
from hermes_core.export.formats import FORMATS
from hermes_core.export.rows import pair_up
from hermes_core.export.selection import ExportFilters, Selection, open_run, select
from hermes_core.records.jsonable import Redact

_OF_PAIRS = {"solved": False, "unsolved": False, "min_reward": None, "max_reward": None, "per_item": None}
"""Conditions on pairs, and on the better rollout of a pair. `pair_up` checks them."""


def export_run(
    run: str | Path,
    to: str,
    out_dir: str | Path,
    *,
    filters: ExportFilters | None = None,
    parquet: bool = False,
    licence: str | None = None,
    redact: Redact | None = None,
) -> Export:
    """Write the rollouts of a run in another format, with a dataset card. Blocking.

    Records are read one at a time, so memory use does not grow with their size. The folder appears when it is complete,
    or not at all.

    Args:
        run: the run's folder, or a file of records. Of a run that is not over, the rollouts so far are exported.
        to: the name of a format: `openai`, `trl`, `sharegpt`, `tokens`, `preference`, `atif`, `harbor` or `eval`.
        out_dir: the folder to make.
        parquet: write Parquet instead of JSONL.
        licence: the licence that the card names.
        redact: removes secrets from every text, in addition to those removed when the run was recorded; use
            `Settings.redactor()`.

    Raises:
        UnknownNameError: there is no such format.
        UsageError: there is no run, `out_dir` exists, no rollout can be exported, or pyarrow is missing.
        OutputError: the files can't be written.
    """
    if to not in FORMATS:
        raise UnknownNameError("format", to, FORMATS)
    form, out = FORMATS[to], Path(out_dir)
    form.check(parquet=parquet)
    filters = filters or ExportFilters()
    asked = filters.model_copy(
        update={"failures": filters.failures or form.failures, **(_OF_PAIRS if form.pairs else {})}
    )
    with closing(open_run(Path(run), redact)) as opened, new_folder(out) as folder:
        selection = select(opened, asked, form.refuses)
        if form.pairs:
            pair_up(selection, filters)
        rows = form.write_to(folder, selection, parquet=parquet) if selection.chosen else 0
        if not rows:
            raise _nothing_to_export(selection, to)
        done = describe_export(selection, filters, to, out, rows=rows, files=files_of(folder))
        (folder / CARD).write_text(card(done, licence, form.columns), encoding="utf-8")
    return done


def _nothing_to_export(selection: Selection, to: str) -> UsageError:
    reasons = ", ".join(f"{count} {reason}" for reason, count in selection.left_out.most_common())
    hint = "give fewer conditions; `hermes-rl show` says how the rollouts ended"
    if to == "preference":
        hint = "a pair needs two rollouts of a group with the same prompt, different answers and different rewards"
    if to == "tokens":
        hint = "record exact tokens: `hermes-rl rollout` with a token-exact server"
    return UsageError(f"{selection.run.path} has nothing to export as {to}: {reasons or 'no records'}", hint=hint)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill. It is renamed to `path` if the block succeeds, and removed otherwise.

    Raises:
        UsageError: the path exists, or no folder can be made there.
        OutputError: a file in the folder could not be written.
    """
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path} exists already", hint="choose another folder with --out, or remove it first")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise UsageError(f"can't make {path}: {error.strerror}", hint="choose another folder with --out") from error
    try:
        yield made
        made.chmod(0o755)
        made.rename(path)
    except OSError as error:
        raise OutputError(
            f"can't write {error.filename or path}: {error.strerror}", hint="free some space, or choose another folder"
        ) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
