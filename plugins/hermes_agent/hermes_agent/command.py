"""The command `hermes-rl batch-runs`, which turns conversations of hermes-agent's batch runner into a run of
hermes-rl."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from hermes_agent.trajectories import read_batch_run
from hermes_core import Settings, merge_runs, say


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN…", type=click.Path(path_type=Path, exists=True))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The folder to make.")
def batch_runs(runs: tuple[Path, ...], out: Path) -> None:
    """Make a run of the conversations of hermes-agent's batch runner, to merge, export and view like any other.

    RUN is its folder `data/RUN_NAME`, or one file of its rows. The rollouts have no rewards.
    """
    with tempfile.TemporaryDirectory(prefix="hermes-rl-") as folder:
        files = []
        for number, run in enumerate(runs):
            files.append(Path(folder, f"{number}-{run.stem}.jsonl"))
            with files[-1].open("wb") as file:
                file.writelines(record.line() for record in read_batch_run(run))
        merged = merge_runs(files, out, redact=Settings.load().redactor())
    say(f"{out}: {merged.rollouts} rollouts of {merged.runs} runs")
