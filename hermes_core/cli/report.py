"""The texts that commands print at their end: the outcome of a run, a validation or a rescoring in words."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hermes_core.cli.listing import as_text
from hermes_core.records.plain_text import without_what_differs
from hermes_core.records.store import QUARANTINE, TABLE, TRAJECTORIES
from hermes_core.records.summary import RATED_FROM_S, RunSummary
from hermes_core.soundness.verdicts import ItemStatus

if TYPE_CHECKING:
    from hermes_core.soundness.rescore import Rescoring
    from hermes_core.soundness.validate import Validation

MOST_ROWS = 60
"""Maximum number of rows of a table that is shown whole. A longer table is shown without its sound items."""

SHOWN = 10
"""Maximum number of failures, and of items, that are shown."""

LONGEST = 600
"""Maximum number of characters of a failure that are shown."""

_PLACES = re.compile(r" \[(sandbox|slot|trajectory) [^\]]*\]")


class Failures:
    """The failures of a run. Messages that differ only in names of their rollouts form one group."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        """The first text of each group."""
        self._counts: Counter[str] = Counter()
        self._items: dict[str, dict[str, None]] = {}
        self.left_out = 0
        """Number of failures that belong to none of the groups kept."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record, if it has a failure."""
        failure = record["failure"]
        if failure is None:
            return
        item_id = str(record["item_id"])
        message = _shorten(failure["message"]).replace(f"instance {item_id!r}: ", "")
        natural = {"setup": "setup", "agent": "model", "verify": "verifier"}.get(failure["stage"])
        stage = "" if failure["kind"] == natural else f" (at {failure['stage']})"
        text = f"{failure['kind']}{stage}: {message}"
        alike = without_what_differs(text)
        if alike not in self._items and len(self._items) == SHOWN:
            self.left_out += 1
            return
        self._texts.setdefault(alike, text)
        self._counts[alike] += 1
        items = self._items.setdefault(alike, {})
        if len(items) < SHOWN:
            items[item_id] = None

    def tells(self, message: str) -> bool:
        """Return whether a shown failure has the same message."""
        text = without_what_differs(_shorten(message))
        return any(alike.endswith(f": {text}") for alike in self._items)

    def lines(self, width: int | None) -> list[str]:
        """Return lines of text: each failure, followed by its items."""
        lines = []
        for alike, items in self._items.items():
            text, count, named = self._texts[alike], self._counts[alike], ", ".join(items)
            whom = named if count <= len(items) else f"{named}, … ({count} rollouts)"
            lines += _indent(text, 2, width) + _indent(whom, 6, width)
        return lines + ([f"  … and {self.left_out} more"] if self.left_out else [])


def summary_text(summary: RunSummary, failures: Failures, width: int | None = None) -> str:
    """Return the summary of a run.

    Args:
        width: the terminal's width in columns; None if there is no terminal, so that lines may have any length.
    """
    lines = [
        _outcome(summary),
        f"{summary.elapsed_s:.1f} s" + _rate(summary),
    ]
    for stage, seconds in summary.timings.items():
        figures = "  ".join(f"{name} {seconds[name]:8.3f} s" for name in ("p50", "p95", "max"))
        lines.append(f"  {stage.removesuffix('_s'):8} {figures}")
    lines += _of_the_model(summary)
    if summary.trainable is not None:
        share = f" ({summary.trainable / summary.finished:.1%})" if summary.finished else ""
        split = f", {summary.split} of them in several sequences" if summary.split else ""
        lines.append(f"tokens to train on: {summary.trainable} of {summary.finished} finished rollouts{share}{split}")
    lines += [
        f"sandboxes of profile {profile}: {seconds:.0f} s" + _cost(summary.cost.get(profile))
        for profile, seconds in summary.sandbox_s.items()
    ]
    if summary.failures:
        lines.append("failures: " + ", ".join(f"{count} {kind}" for kind, count in summary.failures.items()))
    lines += failures.lines(width)
    if summary.infra_retries:
        lines.append(f"restarted after an infrastructure failure: {summary.infra_retries}")
    if summary.stopped:
        again = failures.tells(summary.stopped)
        lines.append("stopped: no other rollout would do better" if again else f"stopped: {summary.stopped}")
    if summary.out_dir:
        lines.append(f"records: {summary.out_dir}/{TRAJECTORIES}")
        if not summary.complete:
            lines.append(f"to go on: the same command with --out {summary.out_dir} --resume")
    return "\n".join(lines)


def _outcome(summary: RunSummary) -> str:
    if summary.finished and not summary.scored:
        return f"{summary.finished} of {summary.total} finished; the environment gives no rewards"
    mean = "none" if summary.mean_reward is None else f"{summary.mean_reward:.3f}"
    return f"{summary.scored} of {summary.total} scored, {summary.solved} solved, mean reward {mean}"


def _of_the_model(summary: RunSummary) -> list[str]:
    """Return lines on the model's tokens and cost, and on the time spent waiting for its endpoint."""
    usage, lines = summary.usage, []
    if usage.requests:
        cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
        lines.append(
            f"model: {usage.requests} requests, {usage.prompt_tokens} prompt tokens{cached}, "
            f"{usage.completion_tokens} completion tokens"
        )
    if usage.cost is not None:
        solved = "" if summary.cost_per_solved is None else f", ${summary.cost_per_solved:.4g} per solved rollout"
        lines.append(f"cost of the model: ${usage.cost:.4g}{solved}")
    if summary.waited_s >= 1:
        lines.append(f"waited for the endpoint: {summary.waited_s:.0f} s, of all rollouts together")
    return lines


def _rate(summary: RunSummary) -> str:
    """Return the rollouts per hour as text; empty for a run too short for a meaningful rate."""
    if summary.elapsed_s < RATED_FROM_S or not summary.rollouts_per_hour:
        return ""
    return f", {summary.rollouts_per_hour:.0f} rollouts an hour"


def _cost(cost: float | None) -> str:
    return "" if cost is None else f", cost {cost:.4g}"


def validation_text(outcome: Validation, width: int | None = None) -> str:
    """Return a validation's table, the reasons why items are not sound or were not tried, and the number of sound
    items."""
    rows = outcome.rows()
    if len(rows) > MOST_ROWS:
        rows = [row for row in rows if row["result"] != ItemStatus.SOUND]
    lines = [as_text({"items": rows[:MOST_ROWS]}, terminal_width=width), ""] if rows else []
    if len(rows) > MOST_ROWS:
        lines.append(f"… and {len(rows) - MOST_ROWS} more rows")
    reasons_by_text: dict[str, list[str]] = {}
    for finding in outcome.findings:
        where = f" on {finding.backend}" if finding.backend else ""
        reasons_by_text.setdefault(f"{finding.reason}: {finding.item_id}{where}", []).append(finding.text)
    for what, texts in [*reasons_by_text.items()][:SHOWN]:
        lines += [what, *_indent(_shorten("; ".join(texts)), 2, width)]
    if len(reasons_by_text) > SHOWN:
        lines.append(f"… and {len(reasons_by_text) - SHOWN} more: {TABLE} has all")
    untried = Counter(why for result in outcome.results for why in result.untried)
    for why, count in untried.most_common(SHOWN):
        lines += _indent(f"not tried ({count} items): {_shorten(why)}", 0, width)
    if outcome.stopped:
        lines.append(f"stopped: {outcome.stopped}")
    counts = {status: len(outcome.with_status(status)) for status in ItemStatus}
    times = "once" if outcome.repeat == 1 else f"{outcome.repeat} times"
    cheats = f", with {len(outcome.cheats)} cheats" if outcome.cheats else ""
    others = "".join(f", {counts[each]} {each}" for each in (ItemStatus.UNSOUND, ItemStatus.NOT_TRIED) if counts[each])
    lines.append(
        f"{counts[ItemStatus.SOUND]} of {outcome.items} items are sound{others}; "
        f"each tried {times} with either baseline{cheats}, on {', '.join(outcome.backends)}"
    )
    if outcome.out_dir:
        where = f"quarantine: {outcome.out_dir}/{QUARANTINE}"
        if failing := outcome.fails_everywhere:
            where = f"no quarantine, as no rollout on {', '.join(failing)} got a reward: the cause is one of all"
        lines.append(f"results: {outcome.out_dir}/{TABLE}; {where}")
        if not outcome.complete:
            lines.append(f"to go on: the same command with --out {outcome.out_dir} --resume")
    return "\n".join(lines)


def rescoring_text(outcome: Rescoring) -> str:
    """Return a text that lists the patches with another reward, and counts those with the same reward."""
    lines = [
        f"differs: {line['item_id']} {line['rollout_index']}: {line['recorded_reward']} recorded, {line['reward']} now"
        for line in outcome.differing[:SHOWN]
    ]
    if len(outcome.differing) > SHOWN:
        lines.append(f"… and {len(outcome.differing) - SHOWN} more: --json lists all")
    lines.append(f"{outcome.agreed} of {outcome.patches} patches got the same reward again")
    if outcome.without_patch:
        lines.append(f"{outcome.without_patch} rollouts recorded no patch")
    return "\n".join(lines)


def _shorten(message: str) -> str:
    """Return the message as one line without sandbox ids. Of a long message, the beginning and the end are kept: the
    advice is at the end."""
    line = " ".join(_PLACES.sub("", message).split())
    if len(line) <= LONGEST:
        return line
    return f"{line[: LONGEST - 200]} … {line[-200:]}"


def _indent(text: str, margin: int, width: int | None) -> list[str]:
    """Return the text wrapped for the terminal, with lines after the first indented further."""
    begin = " " * margin
    if width is None:
        return [begin + text]
    further = begin + "  "
    fitted = max(width, margin + 20)
    return textwrap.wrap(text, fitted, initial_indent=begin, subsequent_indent=further, break_on_hyphens=False)
