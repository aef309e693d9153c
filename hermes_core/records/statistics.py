"""Figures over the rows of a run: totals, pass@k, and figures by item and by tool. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hermes_core.records.index import LIMITS, Row
from hermes_core.records.summary import SOLVED


def pass_at_k(scored: int, solved: int, k: int) -> float | None:
    """Return the probability that at least one of `k` rollouts solves the item. The unbiased estimate is made from
    `scored` rollouts with a reward, `solved` of them successful; None if `scored` is less than `k`."""
    return None if scored < k else 1.0 - math.comb(scored - solved, k) / math.comb(scored, k)


@dataclass(frozen=True)
class Totals:
    """Figures over several rollouts. Means and pass@k leave out rollouts without a reward."""

    rollouts: int
    finished: int
    """Number of rollouts that ended without a failure. They have a reward, unless the environment gives none."""
    scored: int
    solved: int
    mean_reward: float | None
    failures: Mapping[str, int]
    """Number of rollouts without a reward, by kind of failure."""
    limits: Mapping[str, int]
    """Number of rollouts that ended at a limit, by stop reason."""
    turns: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost: float | None
    """US dollars; None if no rollout has a cost."""
    seconds: float
    waited_s: float

    @property
    def rewarded(self) -> bool:
        """Return whether the environment seems to give rewards: False if rollouts finished and all of them are without
        one."""
        return bool(self.scored or not self.finished)

    @property
    def cost_per_solved(self) -> float | None:
        """Return the cost of all rollouts divided by the number of solved ones; None without a cost or a solved one."""
        return self.cost / self.solved if self.cost is not None and self.solved else None


def totals(rows: Iterable[Row]) -> Totals:
    """Add up the rows."""
    rows = list(rows)
    rewards = [row.reward for row in rows if row.reward is not None]
    costs = [row.cost for row in rows if row.cost is not None]
    return Totals(
        rollouts=len(rows),
        finished=sum(row.failure_kind is None for row in rows),
        scored=len(rewards),
        solved=sum(row.solved for row in rows),
        mean_reward=math.fsum(rewards) / len(rewards) if rewards else None,
        failures=_count(row.failure_kind for row in rows),
        limits=_count(row.stop_reason for row in rows if row.stop_reason in LIMITS),
        turns=sum(row.turns for row in rows),
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        completion_tokens=sum(row.completion_tokens for row in rows),
        cached_tokens=sum(row.cached_tokens for row in rows),
        cost=math.fsum(costs) if costs else None,
        seconds=round(math.fsum(row.seconds for row in rows), 3),
        waited_s=round(math.fsum(row.waited_s for row in rows), 3),
    )


def _count(names: Iterable[str | None]) -> dict[str, int]:
    return dict(Counter(name for name in names if name is not None).most_common())


def by_item(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each item, items in the order in which they first occur."""
    items: dict[str, list[Row]] = {}
    for row in rows:
        items.setdefault(row.item_id, []).append(row)
    return items


def _counts(rows: Iterable[Row]) -> tuple[int, int]:
    """Return the number of rows with a reward, and the number of solved rows."""
    rewards = [row.reward for row in rows if row.reward is not None]
    return len(rewards), sum(reward >= SOLVED for reward in rewards)


def items_solved(items: Iterable[Sequence[Row]]) -> int:
    """Return the number of items with at least one solved rollout."""
    return sum(any(row.solved for row in rows) for rows in items)


def sizes_of_k(items: Iterable[Sequence[Row]]) -> list[int]:
    """Return the values of `k` to show: the largest number of scored rollouts of an item, and smaller powers of two."""
    most = max((sum(row.reward is not None for row in rows) for rows in items), default=0)
    return sorted({*(2**power for power in range(most.bit_length())), most} - {0})


def mean_pass_at_k(items: Iterable[Sequence[Row]], k: int) -> tuple[float, int] | None:
    """Return the mean pass@k over the items with at least `k` scored rollouts, and the number of these items; None if
    there are none."""
    estimates = [
        estimate for scored, solved in map(_counts, items) if (estimate := pass_at_k(scored, solved, k)) is not None
    ]
    return (math.fsum(estimates) / len(estimates), len(estimates)) if estimates else None


@dataclass
class ToolTotals:
    """Counts of one tool's calls by how they ended, over several rollouts."""

    tool: str
    calls: int = 0
    rollouts: int = 0
    """Number of rollouts that called it."""
    seconds: float = 0.0
    failed: Counter[str] = field(default_factory=Counter)
    """Number of failed calls by kind of error."""
    errors: Counter[str] = field(default_factory=Counter)
    """Number of failed calls by message; messages that differ only in quoted values, paths and numbers are one."""
    exits: Counter[str] = field(default_factory=Counter)
    """Number of commands with a non-zero exit by exit code. Their calls did not fail."""

    @property
    def failures(self) -> int:
        """Return the number of failed calls of any kind."""
        return self.failed.total()


def by_tool(rows: Iterable[Row]) -> list[ToolTotals]:
    """Return the tools, those with the most failed calls first."""
    tools: dict[str, ToolTotals] = {}
    for row in rows:
        for name, use in row.tools.items():
            tool = tools.setdefault(name, ToolTotals(name))
            tool.calls += use.calls
            tool.rollouts += 1
            tool.seconds += use.seconds
            tool.failed.update(use.failed)
            tool.errors.update(use.errors)
            tool.exits.update(use.exits)
    return sorted(tools.values(), key=lambda tool: (-tool.failures, -tool.calls, tool.tool))
