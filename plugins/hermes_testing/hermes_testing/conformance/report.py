"""What a run of the kit prints for people: a table with a row for each check, and what they come to."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import click

from hermes_testing.conformance.checks import Check
from hermes_testing.conformance.runner import CheckOutcome, Report, Result

FIGURES = {
    "true_p50_ms": ("`true` in a slot, p50", "ms"),
    "commands_per_s_at_32": ("commands a second, 32 at a time", "/s"),
    "lease_p50_ms": ("acquire, reset and release, p50", "ms"),
    "sandbox_ready_s": ("a sandbox ready for commands", "s"),
    "output_mb_per_s": ("10 MB of output", "MB/s"),
}
"""The figures that the checks of group `speed` measure, in words."""

_MARKS = {CheckOutcome.PASSED: "passed", CheckOutcome.FAILED: "FAILED", CheckOutcome.NOT_APPLICABLE: "not applicable"}
_COLOURS = {CheckOutcome.PASSED: "green", CheckOutcome.FAILED: "red", CheckOutcome.NOT_APPLICABLE: "yellow"}


def as_row(result: Result, checks: Sequence[Check]) -> str:
    """Return the line of one check in the table of all, in colours. A failure's line also has what was promised."""
    width = max(len(each.name) for each in checks)
    mark = click.style(
        f"{_MARKS[result.outcome]:14}", _COLOURS[result.outcome], bold=result.outcome is CheckOutcome.FAILED
    )
    row = f"{result.group:9} {result.name:{width}} {mark} {result.seconds:7.2f} s  {_harmless(result.reason)}"
    if result.outcome is CheckOutcome.FAILED:
        row += "".join(f" (promised: {each.promise})" for each in checks if each.name == result.name)
    return row.rstrip()


def as_end(report: Report) -> str:
    """Return what follows the rows: the checks that are not applicable by reason, the figures, and the sums."""
    lines = [""]
    inapplicable: dict[str, list[str]] = {}
    for each in report.checks:
        if each.outcome is CheckOutcome.NOT_APPLICABLE:
            inapplicable.setdefault(each.reason, []).append(each.name)
    for reason, names in inapplicable.items():  # many checks share a reason
        lines.append(f"not applicable: {_harmless(reason)}: {', '.join(names)}")
    if inapplicable:
        lines.append("")
    for name, value in report.figures.items():
        words, unit = FIGURES.get(name, (name, ""))
        lines.append(f"{words}: {value:g} {unit}".rstrip())
    if report.not_run:
        lines.append(
            f"{len(report.not_run)} checks were not run, because the last ones that failed did not end in time"
        )
    count = Counter(each.outcome for each in report.checks)
    sums = ", ".join(f"{count[outcome]} {_MARKS[outcome].lower()}" for outcome in CheckOutcome)
    lines.append(f"{report.backend}: {len(report.checks)} checks, {sums}")
    return "\n".join(lines)


def as_list(checks: Sequence[Check]) -> str:
    """Return the promise of each check, by group."""
    lines = []
    for group, members in itertools.groupby(checks, key=lambda each: each.group):
        lines += [group, *(f"  {each.name}: {each.promise}" for each in members)]
    return "\n".join(lines)


def _harmless(text: str) -> str:
    """Return a sandbox's text without control characters."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
