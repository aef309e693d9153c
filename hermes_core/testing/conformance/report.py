"""The report of a run of the kit as a table for people."""

from __future__ import annotations

import io
import itertools
from collections import Counter
from collections.abc import Sequence

from hermes_core.testing.conformance.checks import Check, all_checks
from hermes_core.testing.conformance.runner import Outcome, Report

FIGURES = {
    "true_p50_ms": ("`true` in a slot, p50", "ms"),
    "commands_per_s_at_32": ("commands a second, 32 at a time", "/s"),
    "lease_p50_ms": ("acquire, reset and release, p50", "ms"),
    "sandbox_ready_s": ("a sandbox ready for commands", "s"),
    "output_mb_per_s": ("10 MB of output", "MB/s"),
}
"""The figures that the checks of group `speed` measure, in words."""

_MARKS = {Outcome.PASSED: "passed", Outcome.FAILED: "FAILED", Outcome.NOT_APPLICABLE: "not applicable"}
_STYLES = {Outcome.PASSED: "green", Outcome.FAILED: "bold red", Outcome.NOT_APPLICABLE: "yellow"}


def as_text(report: Report, terminal_width: int | None = None) -> str:
    """Return the table, the figures and the totals; in colours if it is for a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading, justify in (("group", "left"), ("check", "left"), ("outcome", "left"), ("s", "right")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("reason", overflow="fold")
    promises = {each.name: each.promise for each in all_checks()}
    inapplicable: dict[str, list[str]] = {}
    for each in report.checks:
        if each.outcome is Outcome.NOT_APPLICABLE:
            inapplicable.setdefault(each.reason, []).append(each.name)
            continue
        outcome, reason = Text(_MARKS[each.outcome], _STYLES[each.outcome]), _harmless(each.reason)
        if each.outcome is Outcome.FAILED and (promise := promises.get(each.name)):
            reason += f" (promised: {promise})"
        table.add_row(each.group, Text(each.name), outcome, f"{each.seconds:.2f}", Text(reason))
    stream = io.StringIO()
    console = Console(file=stream, width=terminal_width or 240, force_terminal=terminal_width is not None)
    console.print(table)
    console.print()
    for reason, names in inapplicable.items():  # many checks share a reason
        console.print(Text(f"not applicable: {_harmless(reason)}: {', '.join(names)}"))
    if inapplicable:
        console.print()
    for name, value in report.figures.items():
        words, unit = FIGURES.get(name, (name, ""))
        console.print(f"{words}: {value:g} {unit}", highlight=False)
    count = Counter(each.outcome for each in report.checks)
    sums = ", ".join(f"{count[outcome]} {_MARKS[outcome].lower()}" for outcome in Outcome)
    console.print(f"{report.backend}: {len(report.checks)} checks, {sums}", highlight=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def as_list(checks: Sequence[Check]) -> str:
    """Return the promise of each check, by group."""
    lines = []
    for group, members in itertools.groupby(checks, key=lambda each: each.group):
        lines += [group, *(f"  {each.name}: {each.promise}" for each in members)]
    return "\n".join(lines)


def _harmless(text: str) -> str:
    """Return a sandbox's text without control characters; as `Text` it is not markup either."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
