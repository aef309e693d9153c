"""Tables of a run for a terminal: its rollouts, its items, its tools."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hermes_core.records.index import LIMITS, RecordedRun, Row
from hermes_core.records.statistics import (
    ToolTotals,
    Totals,
    by_item,
    items_solved,
    mean_pass_at_k,
    pass_at_k,
    sizes_of_k,
    totals,
)
from hermes_core.view.words import NONE, REWARDLESS, count, counts_text, duration, figure, line, money

ERRORS = 3
"""Maximum number of errors to show for each tool."""

ORDERS: Mapping[str, Callable[[Row], Any]] = {
    "item": lambda row: 0,
    "reward": lambda row: (row.reward is not None, row.reward),
    "turns": lambda row: -row.turns,
    "tokens": lambda row: -row.tokens,
    "seconds": lambda row: -row.seconds,
    "waited": lambda row: -row.waited_s,
    "cost": lambda row: -(row.cost or 0.0),
    "started": lambda row: row.started or 0.0,
}
"""The orders for rollouts: each has the worst, longest or dearest first."""


def in_order(rows: Iterable[Row], by: str) -> list[Row]:
    """Return the rows in the order `by`, one of `ORDERS`; rows with equal values by item and index."""
    named = sorted(rows, key=lambda row: (row.item_id, row.group, row.rollout_index))
    return sorted(named, key=ORDERS[by])


def items_in_order(rows: Iterable[Row], by: str) -> list[tuple[str, list[Row]]]:
    """Return the items, each with its rows, in the order `by`, one of `ORDERS`: by mean reward, or by the sum of
    another value."""
    return sorted(by_item(rows).items(), key=lambda pair: (_order_of(pair[1], by), pair[0]))


def _order_of(group: Sequence[Row], by: str) -> float:
    """Return the value by which an item is sorted."""
    figures = totals(group)
    values = {
        "reward": -math.inf if figures.mean_reward is None else figures.mean_reward,
        "turns": -figures.turns,
        "tokens": -(figures.prompt_tokens + figures.completion_tokens),
        "seconds": -figures.seconds,
        "waited": -figures.waited_s,
        "cost": -(figures.cost or 0.0),
        "started": min(row.started or 0.0 for row in group),
    }
    return values.get(by, 0.0)


def headline(run: RecordedRun, rows: Sequence[Row]) -> list[RenderableType]:
    """Return a few lines about a run and its outcome."""
    figures, items = totals(rows), by_item(rows)
    named = {"agent": {row.agent for row in rows}, "backend": {row.backend for row in rows}}
    named["model"] = {row.model for row in rows if row.model}
    about = [str(run.path), *(f"{what} {', '.join(sorted(names))}" for what, names in named.items() if names)]
    lines: list[RenderableType] = [line(" · ".join(about), "bold")]
    if not rows:
        return [*lines, _nothing(run)]
    lines.append(Text(f"{figures.rollouts} rollouts of {len(items)} items: {_outcome(figures)}"))
    whole = len(rows) == len(run.rows)  # pass@k of filtered rollouts would mean nothing
    if whole and (estimates := [f"pass@{k} {_share(items, k)}" for k in sizes_of_k(items.values())]):
        lines.append(Text("   ".join(estimates)))
    if whole and figures.scored and len(items) < len(rows):
        lines.append(Text(f"{items_solved(items.values())} of {len(items)} items solved at least once"))
    if figures.failures:
        lines.append(line(f"failures: {counts_text(figures.failures)}", "red"))
    if figures.limits:
        values = _limits(run.configuration)
        reached = (f"{number} {name}{values.get(name, '')}" for name, number in figures.limits.items())
        lines.append(line(f"stopped at a limit: {', '.join(reached)}", "yellow"))
    if figures.prompt_tokens or figures.completion_tokens:
        cached = (
            f" ({figures.cached_tokens / figures.prompt_tokens:.0%} cached)"
            if figures.cached_tokens and figures.prompt_tokens
            else ""
        )
        tokens = f"{count(figures.prompt_tokens)} read{cached}, {count(figures.completion_tokens)} written"
        lines.append(Text(f"tokens: {tokens}"))
    if figures.cost is not None:
        solved = f", {money(figures.cost_per_solved)} per solved rollout" if figures.solved else ""
        lines.append(Text(f"cost: {money(figures.cost)}{solved}"))
    if figures.waited_s >= 1:
        lines.append(Text(f"waited for the endpoint: {duration(figures.waited_s)}"))
    return lines


def _nothing(run: RecordedRun) -> Text:
    """Return a text that says that no rollout is left to show, and lists what the run has."""
    every = run.rows.values()
    if not every:
        return Text("no rollout has ended")
    stopped = counts_text(dict(Counter(row.stop_reason for row in every if row.stop_reason).most_common()))
    failed = counts_text(totals(every).failures)
    return line(f"none of the {len(every)} rollouts fits the filters (stopped: {stopped}; failures: {failed})")


def _limits(configuration: Mapping[str, Any]) -> dict[str, str]:
    """Return a suffix for the name of each limit: its value, if the run has one.

    With a deadline, an agent may also be stopped before its own time limit.
    """
    settings = configuration.get("agent_settings") or {}
    values = {"max_turns": settings.get("max_turns"), "length": settings.get("max_tokens")}
    suffixes = {name: f" ({value})" for name, value in values.items() if value}
    if configuration.get("rollout_timeout") and not configuration.get("deadline"):
        suffixes["time_limit"] = f" ({configuration['rollout_timeout']:g} s)"
    return suffixes


def _outcome(figures: Totals) -> str:
    """Return a text with the number of rollouts that have a reward, and their mean reward."""
    if not figures.rewarded:
        return f"{figures.finished} {REWARDLESS}"
    mean = "" if figures.mean_reward is None else f", mean reward {figures.mean_reward:.3f}"
    return f"{figures.scored} scored, {figures.solved} solved{mean}"


def _share(items: Mapping[str, Sequence[Row]], k: int) -> str:
    """Return a mean pass@k as text, with the number of its items unless these are all items."""
    mean = mean_pass_at_k(items.values(), k)
    if mean is None:
        return NONE
    return f"{mean[0]:.3f}" + (f" (over {mean[1]} of {len(items)} items)" if mean[1] < len(items) else "")


def rollouts(rows: Iterable[Row]) -> Table:
    """Return a table with a line for each rollout."""
    table = _table(
        "rollout", "stop reason", "failure", *("reward>", "turns>", "calls>", "tokens>", "seconds>", "cost>")
    )
    for row in rows:
        table.add_row(
            line(row.name),
            line(row.stop_reason or NONE, "yellow" if row.stop_reason in LIMITS else ""),
            line(row.failure_kind or NONE, "red" if row.failure_kind else ""),
            Text(figure(row.reward, 2), "green" if row.solved else ""),
            str(row.turns),
            str(row.calls),
            count(row.tokens) if row.tokens else NONE,
            figure(row.seconds),
            money(row.cost),
        )
    return table


def items(run: RecordedRun, rows: Sequence[Row], by: str, most: int) -> Table:
    """Return a table with a line for each of the first `most` items in the order `by`; with pass@k if `rows` are all
    rows of the run."""
    ordered = items_in_order(rows, by)
    sizes = sizes_of_k(group for _, group in ordered) if len(rows) == len(run.rows) else []
    rewarded = totals(rows).rewarded
    columns = ("scored>", "solved>", "mean>", *(f"pass@{k}>" for k in sizes)) if rewarded else ("finished>",)
    table = _table("item", "failures", "rollouts>", *columns, "seconds>", "cost>")
    for item_id, group in ordered[:most]:
        figures = totals(group)
        scores = [str(figures.scored), str(figures.solved), figure(figures.mean_reward, 3)]
        estimates = [figure(pass_at_k(figures.scored, figures.solved, k), 3) for k in sizes]
        table.add_row(
            line(item_id),
            line(counts_text(figures.failures) if figures.failures else NONE, "red" if figures.failures else ""),
            str(figures.rollouts),
            *([*scores, *estimates] if rewarded else [str(figures.finished)]),
            figure(figures.seconds),
            money(figures.cost),
        )
    return table


def tools(used: Iterable[ToolTotals]) -> Table:
    """Return a table with a line for each tool."""
    table = _table(
        *("tool", "calls>", "failed>", "share>", "non-zero exit>", "rollouts>", "seconds each>", "kinds of failure")
    )
    for tool in used:
        table.add_row(
            line(tool.tool),
            str(tool.calls),
            Text(str(tool.failures), "red" if tool.failures else ""),
            f"{tool.failures / tool.calls:.0%}",
            str(tool.exits.total()),
            str(tool.rollouts),
            figure(tool.seconds / tool.calls, 2),
            line(counts_text(dict(tool.failed.most_common())) if tool.failures else NONE),
        )
    return table


def errors(used: Iterable[ToolTotals]) -> Iterator[RenderableType]:
    """Yield for each tool its most frequent errors and exit codes other than 0, and a hint how to find the failures."""
    failing = [tool for tool in used if tool.errors or tool.exits]
    for tool in failing:
        yield Text()
        for error, number in tool.errors.most_common(ERRORS):
            yield line(f"{tool.tool}: {number} × {error}")
        for code, number in tool.exits.most_common(ERRORS):
            yield line(f"{tool.tool}: {number} × exit code {code}")
    if failing:
        yield Text()
    if any(tool.exits for tool in failing):
        yield Text("a non-zero exit is no failure of the call: a command whose tests fail has one, too", "dim")
    if any(tool.errors for tool in failing):
        yield Text("--failed-tool NAME shows the rollouts in which a call of this tool failed", "dim")


def _table(*columns: str) -> Table:
    """Return an empty table. A `>` at the end of a column's name aligns the column to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        right = column.endswith(">")
        table.add_column(
            column.removesuffix(">"),
            justify="right" if right else "left",
            no_wrap=True,
            overflow="ellipsis" if index == 0 else "fold",
        )
    return table
