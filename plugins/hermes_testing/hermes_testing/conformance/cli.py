"""The command `conformance`: lets pytest run the checks, and prints their outcomes."""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest

from hermes_core.cli.support import new_runtime, tell_problems
from hermes_core.printing import printable
from hermes_core.settings import read_mapping
from hermes_testing.conformance.checks import Check, choose_checks
from hermes_testing.conformance.kit import reason_of
from hermes_testing.conformance.waiting import NotDone

TELL_S = 15.0
"""Seconds between lines about a check that takes long, if standard error is no terminal."""

MOST_HUNG = 3
"""Number of checks that did not end in time after which no further checks are run."""

FIGURES = {
    "true_p50_ms": ("`true` in a slot, p50", "ms"),
    "commands_per_s_at_32": ("commands a second, 32 at a time", "/s"),
    "lease_p50_ms": ("acquire, reset and release, p50", "ms"),
    "sandbox_ready_s": ("a sandbox ready for commands", "s"),
    "output_mb_per_s": ("10 MB of output", "MB/s"),
}
"""The figures that the checks of group `speed` measure, in words and with their units."""

_OUTCOMES = ("passed", "failed", "not_applicable")
_COLOURS = {"passed": "green", "failed": "red"}

_HERE = Path(__file__).parent
_USELESS = ("terminal", "cacheprovider", "faulthandler", "logging", "warnings")
_PYTEST = (
    *("--config-file", os.devnull, "--rootdir", str(_HERE), "--disable-plugin-autoload", "--capture=no"),
    *(word for name in _USELESS for word in ("-p", f"no:{name}")),
    *("-p", "hermes_testing.conformance.plugin", str(_HERE / "every_check.py")),
)
"""The arguments of pytest: it ignores the configuration of the current folder, and prints nothing by itself."""


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
def conformance(
    ctx: click.Context, /, backend: str, config: Path | None, as_json: bool, only_list: bool, **given: Any
) -> None:
    """Test BACKEND against the backend contract, and measure its speed.

    Prints each check when it ends; with --json these lines go to standard error. Exits with 0 if no check failed, 1 if
    one did, 2 for wrong use, and 3 if the backend makes no sandbox here or does not close.
    """
    if only_list:
        _print_list(choose_checks(given["groups"], given["names"]))
        return
    mark = pytest.mark.conformance(backend, config={} if config is None else read_mapping(config), **given)
    tell_problems(new_runtime(ctx.obj or 0))
    session = _KitSession(mark, rows_to_stderr=as_json, tracebacks=bool(ctx.find_root().params.get("traceback")))
    with _hide_warnings(unless=bool(ctx.obj)), session.tell_what_lasts():
        pytest.main([*_PYTEST], plugins=[session])
    if session.interrupted:
        click.echo(f"broken off at: {session.doing}", err=True)
        raise KeyboardInterrupt
    if session.rows:
        click.echo(json.dumps(session.as_dict(backend), indent=2) if as_json else session.as_text(backend))
    if session.error is not None:
        raise session.error
    ctx.exit(int(any(row["outcome"] == "failed" for row in session.rows)))


def _print_list(checks: Iterable[Check]) -> None:
    """Print the promise of each check, by group."""
    for group, members in itertools.groupby(checks, key=lambda each: each.group):
        click.echo(group)
        for check in members:
            click.echo(f"  {check.name}: {check.promise}")


@contextmanager
def _hide_warnings(*, unless: bool) -> Iterator[None]:
    """Hide our own warnings, because the checks provoke them."""
    logger = logging.getLogger("hermes_core")
    level = logger.level
    logger.setLevel(level if unless else logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class _KitSession:
    """A plugin of pytest for one session: prints each check when it ends, and keeps its outcome.

    On a terminal, the last line names the current work. Elsewhere, a line is printed if the current work takes long.
    """

    def __init__(self, mark: pytest.MarkDecorator, *, rows_to_stderr: bool, tracebacks: bool) -> None:
        self._mark, self._to_stderr, self._tracebacks = mark, rows_to_stderr, tracebacks
        self._items: list[pytest.Item] = []
        self._hung = 0
        self._began = time.monotonic()
        self.doing = "the `create` of a first sandbox, which may take minutes"
        """The current work, and its time limit, in words."""
        self.rows: list[dict[str, Any]] = []
        """The checks that have ended, as in the JSON output."""
        self.figures: dict[str, Any] = {}
        self.interrupted = False
        self.error: BaseException | None = None
        """An error outside of the checks: there is no such check, or the backend makes no sandbox."""

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Add the mark `conformance` to the session, so that each test has it."""
        session.add_marker(self._mark)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Keep the list of the checks that will be run."""
        self._items = session.items

    def pytest_exception_interact(self, call: pytest.CallInfo[object], report: object) -> None:
        """Keep the error because of which the checks can't be listed."""
        if isinstance(report, pytest.CollectReport) and call.excinfo is not None:
            self.error = call.excinfo.value

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Record Ctrl-C, but not an error of a subclass: with such an error, pytest itself ends a session."""
        self.interrupted = excinfo.type is KeyboardInterrupt

    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Show the check that begins as the current work."""
        check = _check_of(item)
        number = f"{len(self.rows) + 1}/{len(self._items)}"
        self._begin(f"{number} {check.group} {check.name}, which may take {check.limit_s:g} s")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record the outcome of a check. An error outside of the checks ends the session."""
        report = yield
        error = None if call.excinfo is None else call.excinfo.value
        if call.when == "call" or isinstance(error, pytest.skip.Exception):
            self._end(item, call.duration, error, report)
            if self._hung == MOST_HUNG:
                item.session.shouldstop = "checks did not end in time"
        elif error is not None and self.error is None:
            self.error = error
            item.session.shouldstop = "no sandbox can be had, or the backend does not close"
        return report

    def _begin(self, what: str) -> None:
        self._began, self.doing = time.monotonic(), what
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{what}", err=True, nl=False)

    def _end(self, item: pytest.Item, seconds: float, error: BaseException | None, report: pytest.TestReport) -> None:
        check, outcome = _check_of(item), "not_applicable" if report.skipped else report.outcome
        reason = "" if error is None else reason_of(error)
        self._hung += isinstance(error, NotDone)
        self.figures |= dict(report.user_properties)
        row = {"name": check.name, "group": check.group, "outcome": outcome, "reason": reason}
        self.rows.append({**row, "seconds": round(seconds, 3)})
        if sys.stderr.isatty():
            click.echo("\r\x1b[K", err=True, nl=False)
        if outcome != "not_applicable":  # these checks are listed together at the end
            mark = click.style(
                f"{outcome.upper() if report.failed else outcome:6}", _COLOURS[outcome], bold=outcome == "failed"
            )
            why = f"{_in_one_line(reason)} (promised: {check.promise})" if reason else ""
            line = f"{check.group:9} {check.name:{self._width()}} {mark} {seconds:7.2f} s  {why}"
            click.echo(line.rstrip(), err=self._to_stderr)
        if self._tracebacks and report.failed:
            click.echo(printable(report.longreprtext), err=True)
        self._begin("the end")

    def _width(self) -> int:
        return max(len(_check_of(item).name) for item in self._items)

    @contextmanager
    def tell_what_lasts(self) -> Iterator[None]:
        """While the block runs, print a line every `TELL_S` seconds if the current work takes long."""
        ended = threading.Event()

        def tell() -> None:
            while not ended.wait(TELL_S):
                lasts = time.monotonic() - self._began
                if lasts >= TELL_S and not sys.stderr.isatty():
                    click.echo(f"for {lasts:.0f} s at: {self.doing}", err=True)

        thread = threading.Thread(target=tell, name="hermes-conformance", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _not_run(self) -> list[str]:
        return [_check_of(item).name for item in self._items[len(self.rows) :]]

    def as_dict(self, backend: str) -> dict[str, Any]:
        """Return the outcomes of the checks, for programs."""
        return {"backend": backend, "checks": self.rows, "figures": self.figures, "not_run": self._not_run()}

    def as_text(self, backend: str) -> str:
        """Return the text after the rows: the checks that are not applicable, by reason, the figures, and the sums."""
        lines = [""]
        inapplicable: dict[str, list[str]] = {}
        for row in self.rows:
            if row["outcome"] == "not_applicable":
                inapplicable.setdefault(row["reason"], []).append(row["name"])
        for reason, names in inapplicable.items():  # many checks share a reason
            lines.append(f"not applicable: {_in_one_line(reason)}: {', '.join(names)}")
        if inapplicable:
            lines.append("")
        for name, value in self.figures.items():
            words, unit = FIGURES.get(name, (name, ""))
            lines.append(f"{words}: {value:g} {unit}".rstrip())
        if not_run := self._not_run():
            lines.append(f"{len(not_run)} checks were not run, because the last ones that failed did not end in time")
        count = Counter(row["outcome"] for row in self.rows)
        sums = ", ".join(f"{count[outcome]} {outcome.replace('_', ' ')}" for outcome in _OUTCOMES)
        return "\n".join([*lines, f"{backend}: {len(self.rows)} checks, {sums}"])


def _check_of(item: pytest.Item) -> Check:
    check: Check = item.callspec.params["conformance_check"]  # type: ignore[attr-defined]
    return check


def _in_one_line(text: str) -> str:
    return printable(" ".join(text.split()))
