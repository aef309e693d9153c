"""The command `conformance`: parse, call, print."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click

from hermes_core.cli.exits import EXIT_BROKEN
from hermes_core.cli.support import new_runtime, tell_problems, terminal_width
from hermes_core.testing.conformance.runner import Report, Result


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

    Exits with 0 if no check failed, 1 if one did, and 2 for wrong use.
    """
    if only_list:
        from hermes_core.testing.conformance.checks import chosen
        from hermes_core.testing.conformance.report import as_list

        click.echo(as_list(chosen(given["groups"], given["names"])))
        return
    report = asyncio.run(_report(ctx.obj or 0, backend, **given))
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        from hermes_core.testing.conformance.report import as_text

        click.echo(as_text(report, terminal_width()))
    ctx.exit(0 if report.sound else EXIT_BROKEN)


async def _report(
    verbose: int,
    backend: str,
    *,
    config: Path | None,
    isolation: str | None,
    groups: tuple[str, ...],
    names: tuple[str, ...],
) -> Report:
    from hermes_core.settings import read_yaml
    from hermes_core.testing.conformance.checks import chosen
    from hermes_core.testing.conformance.kit import Rig
    from hermes_core.testing.conformance.runner import run

    checks = chosen(groups, names)
    profile = {} if config is None else read_yaml(config)
    async with new_runtime(verbose) as runtime:
        tell_problems(runtime)
        with _quiet() if not verbose else nullcontext():
            async with Rig(runtime, backend, profile, isolation=isolation) as rig:
                return await run(rig, checks, on_result=_Progress(len(checks)))


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


class _Progress:
    """Shows progress on one line of a terminal, which is overwritten each time; failures stay visible."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0

    def __call__(self, result: Result) -> None:
        self._done += 1
        if sys.stderr.isatty():
            line = f"{self._done}/{self._total} {result.group} {result.name}: {result.outcome}"
            click.echo(f"\r\x1b[K{line}" + ("\n" if result.outcome == "failed" else ""), err=True, nl=False)
            if self._done == self._total:
                click.echo("\r\x1b[K", err=True, nl=False)
