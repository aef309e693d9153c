"""The command `conformance`: parse, call, print."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click

from hermes_core import alongside
from hermes_core.cli.exits import EXIT_BROKEN
from hermes_core.cli.support import new_runtime, tell_problems
from hermes_core.printing import printable
from hermes_core.settings import read_mapping
from hermes_testing.conformance.checks import Check, chosen
from hermes_testing.conformance.kit import FIRST_S, Rig
from hermes_testing.conformance.report import as_end, as_list, as_row
from hermes_testing.conformance.runner import CheckOutcome, Report, Result, run

TELL_S = 15.0
"""How often in seconds a program without a terminal is told what takes long."""


@click.command()
@click.argument("backend")
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="YAML file with settings of the backend to test it with.",
)
@click.option("--isolation", metavar="LEVEL", help="Isolation level of the checks that are not about levels [user].")
@click.option("--group", "groups", multiple=True, metavar="G", help="Run only the checks of this group.")
@click.option("--check", "names", multiple=True, metavar="NAME", help="Run only this check.")
@click.option("--list", "only_list", is_flag=True, help="Only print what each check expects; run none.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def conformance(ctx: click.Context, /, backend: str, as_json: bool, only_list: bool, **given: Any) -> None:
    """Test BACKEND against the backend contract, and measure its speed.

    Prints each check when it ends; with --json these lines go to standard error. Exits with 0 if no check failed, 1 if
    one did, 2 for wrong use, and 3 if the backend makes no sandbox here or does not close.
    """
    if only_list:
        click.echo(as_list(chosen(given["groups"], given["names"])))
        return
    checks = chosen(given.pop("groups"), given.pop("names"))
    rows = _Rows(checks, to_stderr=as_json, tracebacks=bool(ctx.find_root().params.get("traceback")))
    try:
        report = asyncio.run(_report(ctx.obj or 0, backend, checks, rows, as_json=as_json, **given))
    except KeyboardInterrupt:
        click.echo(f"broken off at: {rows.doing}", err=True)
        raise
    ctx.exit(0 if report.sound else EXIT_BROKEN)


async def _report(
    verbose: int,
    backend: str,
    checks: Sequence[Check],
    rows: _Rows,
    *,
    as_json: bool,
    config: Path | None,
    isolation: str | None,
) -> Report:
    profile = {} if config is None else read_mapping(config)
    async with new_runtime(verbose) as runtime:
        tell_problems(runtime)
        with _quiet() if not verbose else nullcontext():
            async with alongside(rows.tell()), Rig(runtime, backend, profile, isolation=isolation) as rig:
                rows.begin_next()
                report = await run(rig, checks, on_result=rows)
        # Before the runtime is closed, at which a backend may fail.
        click.echo(json.dumps(report.to_dict(), indent=2) if as_json else as_end(report))
        return report


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide our own warnings, because the checks provoke them."""
    logger = logging.getLogger("hermes_core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Rows:
    """Prints each check when it ends. On a terminal, the last line says what is being done; elsewhere, a line says so
    if it takes long."""

    def __init__(self, checks: Sequence[Check], *, to_stderr: bool, tracebacks: bool) -> None:
        self._checks, self._to_stderr, self._tracebacks = checks, to_stderr, tracebacks
        self._ended = 0
        self._began = time.monotonic()
        self.doing = f"the `create` of a first sandbox, which may take {FIRST_S:g} s"
        """What is being done, and how long it may take."""

    def begin_next(self) -> None:
        """Note that the next check begins, or the end."""
        self._began, self.doing = time.monotonic(), "the end"
        for check in self._checks[self._ended : self._ended + 1]:
            name = f"{self._ended + 1}/{len(self._checks)} {check.group} {check.name}"
            self.doing = f"{name}, which may take {check.limit_s:g} s"
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{self.doing}", err=True, nl=False)

    async def tell(self) -> None:
        """Say now and then what takes long."""
        while True:
            await asyncio.sleep(TELL_S)
            lasts = time.monotonic() - self._began
            if lasts >= TELL_S and not sys.stderr.isatty():
                click.echo(f"for {lasts:.0f} s at: {self.doing}", err=True)

    def __call__(self, result: Result) -> None:
        if sys.stderr.isatty():
            click.echo("\r\x1b[K", err=True, nl=False)
        if result.outcome is not CheckOutcome.NOT_APPLICABLE:  # those are told together at the end
            click.echo(as_row(result, self._checks), err=self._to_stderr)
        if result.traceback and self._tracebacks:
            click.echo(printable(result.traceback), err=True)
        self._ended += 1
        self.begin_next()
