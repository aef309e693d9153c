"""The commands `export` and `merge`: parse arguments, call the library, print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hermes_core.cli.filters import filter_options
from hermes_core.cli.options import collect_settings
from hermes_core.export.selection import ExportFilters
from hermes_core.printing import say

if TYPE_CHECKING:
    from hermes_core.export.card import Export
    from hermes_core.export.merge import Merge

EXPORTS = "exports"
"""The parent folder of an export's folder, if no folder is given."""

_RUN = click.Path(exists=True, path_type=Path)

_json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@click.command()
@click.argument("run", metavar="RUN", type=_RUN)
@click.option(
    *("--to", "form"),
    required=True,
    metavar="FORMAT",
    help="openai, trl, sharegpt, tokens, preference, atif, harbor or eval.",
)
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Folder to make [exports/RUN-FORMAT].")
@click.option("--parquet", is_flag=True, help="Write Parquet instead of JSONL (needs hermes-rl[parquet]).")
@filter_options(ExportFilters)
@click.option("--licence", "--license", metavar="NAME", help="Licence that the dataset card names.")
@_json_option
@click.pass_context
def export(ctx: click.Context, /, run: Path, form: str, **given: Any) -> None:
    """Write the rollouts of RUN in another format: a dataset for training, or a folder for other tools.

    The folder has a dataset card, README.md, with counts, statistics by tool, versions, seeds and hashes. Secrets of
    the environment's settings are removed. Exits with 2 if no rollout can be exported.
    """
    from hermes_core.export.exporting import export_run
    from hermes_core.settings import Settings

    done = export_run(
        run,
        form,
        given["out"] or Path(EXPORTS) / f"{run.resolve().name.removesuffix('.jsonl')}-{form}",
        filters=ExportFilters(**collect_settings(ctx, ExportFilters)),
        parquet=given["parquet"],
        licence=given["licence"],
        redact=Settings.load().redactor(),
    )
    say(json.dumps(done.to_dict(), indent=2) if given["as_json"] else _describe_export(done))


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=_RUN)
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Folder to make.")
@_json_option
def merge(runs: Sequence[Path], out: Path, as_json: bool) -> None:
    """Join RUNs into a new one, which can be exported and viewed like any other.

    Each rollout is kept once. Rollouts of the same item are numbered on.
    """
    from hermes_core.export.merge import merge_runs
    from hermes_core.settings import Settings

    done = merge_runs(runs, out, redact=Settings.load().redactor())
    say(json.dumps(done.to_dict(), indent=2) if as_json else _describe_merge(done))


def _describe_export(done: Export) -> str:
    from hermes_core.export.card import rewards_text

    rows = "" if done.rows == done.rollouts else f", {done.rows} rows"
    lines = [f"{done.rollouts} rollouts of {done.items} items exported as {done.format}{rows}"]
    for reason, count in done.left_out.items():
        rewards = rewards_text(done, reason)
        lines.append(f"left out: {count} {reason}" + (f" ({rewards})" if rewards else ""))
    lines += [
        f"tool {name}: {tool.calls} calls, {sum(tool.errors.values())} failed" for name, tool in done.tools.items()
    ]
    return "\n".join([*lines, f"written to {done.out_dir}"])


def _describe_merge(done: Merge) -> str:
    lines = [f"{done.rollouts} rollouts of {done.runs} runs joined"]
    notes = {
        "left out, because an earlier run has them": done.repeated,
        "got another rollout index": done.renumbered,
        "items got another id, because they are not those of an earlier run": done.renamed,
    }
    lines += [f"{count} {note}" for note, count in notes.items() if count]
    return "\n".join([*lines, f"written to {done.out_dir}"])
