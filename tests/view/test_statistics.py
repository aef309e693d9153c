"""Figures of a run: pass@k is unbiased and counts only what was scored; totals, tools."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from hermes_core.records.index import RecordedRun
from hermes_core.records.statistics import by_item, by_tool, mean_pass_at_k, pass_at_k, sizes_of_k, totals
from hermes_core.view.words import money


@pytest.mark.parametrize(("scored", "solved"), [(5, 0), (5, 1), (5, 3), (5, 5), (1, 1), (8, 2)])
def test_pass_at_k_is_the_share_of_all_choices_with_a_solution(scored: int, solved: int) -> None:
    outcomes = [True] * solved + [False] * (scored - solved)
    for k in range(1, scored + 1):
        choices = list(itertools.combinations(outcomes, k))
        assert math.isclose(pass_at_k(scored, solved, k) or 0.0, sum(map(any, choices)) / len(choices))
    assert pass_at_k(scored, solved, scored + 1) is None


def test_failures_are_not_wrong_answers(make_record: Any, write_run: Any) -> None:
    rewards = [1.0, None, 0.0, None]
    run = RecordedRun(write_run([make_record(index=index, reward=reward) for index, reward in enumerate(rewards)]))
    items = by_item(run.rows.values())
    assert mean_pass_at_k(items.values(), 1) == (0.5, 1)
    assert mean_pass_at_k(items.values(), 3) is None
    assert sizes_of_k(items.values()) == [1, 2]
    figures = totals(run.rows.values())
    assert (figures.rollouts, figures.scored, figures.solved, figures.mean_reward) == (4, 2, 1, 0.5)
    assert figures.failures == {"infra": 2}
    assert figures.cost == pytest.approx(0.08)
    assert figures.cost_per_solved == pytest.approx(0.08)


def test_without_a_rollout_there_are_no_figures() -> None:
    figures = totals([])
    assert (figures.mean_reward, figures.cost, figures.cost_per_solved) == (None, None, None)
    assert sizes_of_k([]) == []


def test_the_tool_that_fails_most_comes_first(make_record: Any, write_run: Any, failed_call: Any) -> None:
    patching = [make_record(index=index, calls=(failed_call,)) for index in (1, 2)]
    run = RecordedRun(write_run([make_record(), *patching]))
    first, second = by_tool(run.rows.values())
    assert (first.tool, first.calls, first.failures, first.rollouts) == ("patch", 2, 2, 2)
    assert (second.tool, second.failures, dict(second.exits)) == ("terminal", 0, {"2": 1})


@pytest.mark.parametrize(
    ("dollars", "said"),
    [
        *[(None, "-"), (0.0, "$0.00"), (0.0105, "$0.0105"), (0.0099, "$0.00990"), (0.01, "$0.0100"), (0.2, "$0.200")],
        *[(1.0, "$1.00"), (12.341, "$12.34"), (0.00001234, "$0.0000123"), (math.nan, "$nan"), (-0.5, "$-0.50")],
    ],
)
def test_small_amounts_have_the_same_number_of_digits(dollars: float | None, said: str) -> None:
    assert money(dollars) == said
