"""The commands `show` and `view`: look at a run in a terminal, or in Inspect's viewer."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hermes_core.cli.filters import filter_options
from hermes_core.cli.options import collect_settings
from hermes_core.errors import OutputError, UsageError
from hermes_core.printing import say
from hermes_core.records.index import RecordedRun, Row
from hermes_core.records.select import Filters, select_named

if TYPE_CHECKING:
    from rich.console import RenderableType

_RUN = click.Path(exists=True, path_type=Path)

ROWS = 40
"""Default number of lines of a table."""

_PIPE_WIDTH = 100_000
"""The width in columns of output that does not go to a terminal."""

FIRST_PORT = 7575
"""The first port to try for the viewer."""

LOOK_S = 1.0
"""Seconds between two checks for new records."""

SAID_FROM = 1000
"""For a run of more rollouts than this, a line counts the rollouts read so far."""


@click.command()
@click.argument("run", type=_RUN)
@click.argument("item", nargs=-1)
@click.option("--items", is_flag=True, help="One line per item, with its pass@k.")
@click.option("--tools", is_flag=True, help="One line per tool: calls, failures, non-zero exits, seconds; errors.")
@click.option("--report", is_flag=True, help="Only failures and verifier's reports, of each rollout.")
@filter_options(Filters)
@click.option(
    *("--sort",),
    type=click.Choice(["item", "reward", "turns", "tokens", "seconds", "waited", "cost", "started"]),
    help="Order: the lowest reward, the most of anything else first [item].",
)
@click.option(
    "--rows", type=click.IntRange(min=0), default=ROWS, metavar="N", help=f"At most N lines; 0: all [{ROWS}]."
)
@click.option("--full", is_flag=True, help="Show long texts in full length.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def show(
    ctx: click.Context,
    /,
    run: Path,
    item: tuple[str, ...],
    *,
    items: bool,
    tools: bool,
    report: bool,
    sort: str | None,
    rows: int,
    full: bool,
    as_json: bool,
    **_: Any,
) -> None:
    """Show a run in the terminal: a table of its rollouts, or what happened in the rollouts of each ITEM.

    RUN is the folder of a run, or a file of records. ITEM is an item, one rollout of it (`ITEM/INDEX`), the beginning
    of a rollout's id, or a pattern ('leap-*'). One rollout is shown as a whole; of several, the reports are shown.
    """
    from hermes_core.view.tables import in_order

    what = _one_of(items=items, tools=tools, report=report)
    if what == "tools" and sort:
        raise UsageError("--tools can't be sorted: the most failed calls come first", hint="leave out --sort")
    filters = Filters(**collect_settings(ctx, Filters))
    recorded = RecordedRun(run)
    chosen = filters.choose(recorded)
    if item:
        chosen = select_named(item, chosen, recorded)
    by = sort or "item"
    ordered = in_order(chosen, by)
    if as_json:
        say(json.dumps(_values(recorded, ordered, what, whole=bool(item), by=by)))
    else:
        most = rows or sys.maxsize
        _print(_render(recorded, ordered, what, by_name=bool(item), by=by, most=most, full=full))


def _one_of(**flags: bool) -> str | None:
    """Return the name of the flag that is given, or None.

    Raises:
        UsageError: several flags are given.
    """
    names = [name for name, is_given in flags.items() if is_given]
    if len(names) > 1:
        options = " and ".join(f"--{name}" for name in names)
        raise UsageError(f"{options} can't be given together", hint="leave out all but one of them")
    return names[0] if names else None


def _render(
    run: RecordedRun, rows: list[Row], what: str | None, *, by_name: bool, by: str, most: int, full: bool
) -> Iterable[RenderableType]:
    from rich.text import Text

    from hermes_core.records.statistics import by_item, by_tool
    from hermes_core.view import tables, transcript, words

    if not by_name:
        yield from tables.headline(run, rows)
        if not rows:
            return
        yield Text()
    if what == "tools":
        used = by_tool(rows)
        yield tables.tools(used[:most]) if used else Text("no tool was called")
        yield from tables.errors(used[:most])
        yield from _more(len(used) - most)
    elif what == "items":
        yield tables.items(run, rows, by, most)
        yield from _more(len(by_item(rows)) - most)
    elif what == "report" or (by_name and len(rows) > 1):
        for _, group in groupby(rows[:most], lambda row: row.item_id):
            yield from transcript.reports(((row, run.record(row).to_json()) for row in group), full=full)
        yield from _more(len(rows) - most)
        if rows:
            yield words.line(f"`hermes-rl show RUN {rows[0].name}` shows all turns and calls of a rollout", "dim")
    elif by_name:
        yield from transcript.rollout(rows[0], run.record(rows[0]).to_json(), full=full)
    else:
        yield tables.rollouts(rows[:most])
        yield from _more(len(rows) - most)


def _more(left_out: int) -> Iterable[RenderableType]:
    from rich.text import Text

    if left_out > 0:
        yield Text(f"… and {left_out} more: --rows 0 shows all", "dim")


def _values(run: RecordedRun, rows: list[Row], what: str | None, *, whole: bool, by: str) -> Any:
    """Return the output for programs: the records of the rollouts that the user named, or tables of the run."""
    from hermes_core.records.statistics import by_item, by_tool, totals
    from hermes_core.view.tables import items_in_order

    whole_run = len(rows) == len(run.rows)
    if what == "tools":
        return [{**vars(tool), "failures": tool.failures} for tool in by_tool(rows)]
    if whole or what == "report":
        return [run.record(row).to_json() for row in rows]
    if what == "items":
        return [
            {"item_id": item_id, **asdict(totals(group)), **_pass({item_id: group}, whole_run)}
            for item_id, group in items_in_order(rows, by)
        ]
    plain = [_plain(row) for row in rows]
    return {"run": str(run.path), **asdict(totals(rows)), **_pass(by_item(rows), whole_run), "rows": plain}


def _pass(items: dict[str, list[Row]], whole_run: bool) -> dict[str, Any]:
    """Return the mean pass@k over the items, by k; empty unless these are all rollouts of the run."""
    from hermes_core.records.statistics import mean_pass_at_k, sizes_of_k

    if not whole_run:
        return {"pass_at_k": {}}
    means = {k: mean_pass_at_k(items.values(), k) for k in sizes_of_k(items.values())}
    return {"pass_at_k": {str(k): mean[0] for k, mean in means.items() if mean is not None}}


def _plain(row: Row) -> dict[str, Any]:
    """Return a row as JSON values, without the position of its record in the file."""
    values = row._asdict()
    del values["line"], values["offset"], values["size"]
    return {**values, "tools": {name: use._asdict() for name, use in row.tools.items()}}


def _print(parts: Iterable[RenderableType]) -> None:
    """Print for people. In a pipe, long lines are not wrapped."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    console = Console(markup=False, emoji=False, highlight=False, width=None if terminal else _PIPE_WIDTH)
    for part in parts:
        console.print(part)


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=_RUN)
@click.option("--static", type=click.Path(path_type=Path), metavar="DIR", help="Write DIR, which any web server shows.")
@click.option("--host", default="127.0.0.1", metavar="H", help="Address to listen at [127.0.0.1].")
@click.option("--port", type=int, metavar="P", help=f"Port to listen at [the first free one from {FIRST_PORT} on].")
def view(runs: tuple[Path, ...], static: Path | None, host: str, port: int | None) -> None:
    """Open runs in Inspect's viewer, also while they run. Ctrl-C ends it.

    RUN is the folder of a run, or a file of records. The viewer comes with Inspect (`pip install inspect-ai`); without
    it, `hermes-rl show` shows a run in the terminal. What models wrote is shown as plain text.
    """
    from hermes_core.view import inspect_viewer
    from hermes_core.view.logs import make_shown_folder, open_logs

    inspect = inspect_viewer.command()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # handled like Ctrl-C, so that the viewer is ended, too
    with make_shown_folder(runs[0]) as folder:
        if static is not None:
            with open_logs(runs, folder) as logs:
                for log in logs:
                    log.update(_progress)
                inspect_viewer.bundle(inspect, folder, static)
            say(f"wrote {static}: `python -m http.server -d {static}` shows it")
            return
        # The runs are read during the seconds that the viewer takes to start.
        chosen = port or _free_port(host)
        with inspect_viewer.running(inspect, folder, host, chosen) as viewer, open_logs(runs, folder) as logs:
            while viewer.poll() is None:
                for log in logs:
                    log.update(_progress)
                time.sleep(LOOK_S)
        if viewer.returncode:
            raise OutputError(f"the viewer ended with exit code {viewer.returncode}", hint="see its messages above")


def _progress(done: int, of: int) -> None:
    """Print on a terminal, for a long run, that the viewer has `done` of the run's `of` rollouts."""
    if of > SAID_FROM and sys.stderr.isatty():
        click.echo(f"\r{min(done, of)} of {of} rollouts", nl=done >= of, err=True)


def _free_port(host: str) -> int:
    """Return the first free port from `FIRST_PORT` on."""
    for port in range(FIRST_PORT, FIRST_PORT + 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return port
    raise UsageError(f"no port from {FIRST_PORT} on is free", hint="choose one with --port")
