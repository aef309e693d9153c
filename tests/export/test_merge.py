"""Runs that are joined: every rollout once, under a key that no other has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hermes_core.errors import UsageError
from hermes_core.export.exporting import export_run
from hermes_core.export.merge import merge_runs
from hermes_core.records.record import Record
from hermes_core.records.store import read_run, records
from tests.export.conftest import MakeRun, failed, rollout


def keys(run: Path) -> list[tuple[str, str, int]]:
    return [(record.item_id, record.group, record.rollout_index) for record in records(run)]


def other(record: Record, name: str) -> Record:
    return replace(record, trajectory_id=name)


def test_rollouts_of_the_same_item_are_numbered_on(make_run: MakeRun) -> None:
    first = make_run([rollout(index=0), rollout(index=1), rollout("wave")], "first")
    again = [other(rollout(index=0, said="Again."), "x"), other(rollout(index=5), "y"), other(failed("greet", 1), "z")]
    second = make_run([rollout("wave"), *again], "second")
    out = first.parent / "joined"
    done = merge_runs([first, second], out)
    assert (done.rollouts, done.repeated, done.renumbered, done.renamed) == (6, 1, 2, 0)
    numbers = [("greet", 0), ("greet", 1), ("wave", 0), ("greet", 2), ("greet", 5), ("greet", 6)]
    assert keys(out) == [(item, item, index) for item, index in numbers]
    assert [record.trajectory_id for record in records(out)][3:] == ["x", "y", "z"]


def test_another_item_with_the_same_id_stays_another(make_run: MakeRun) -> None:
    prompt = rollout(index=0)
    prompt.messages[1]["content"] = "Something else."
    elsewhere = replace(rollout(index=1), environment="prompts", group="greet#1")
    first = make_run([rollout()], "first")
    second = make_run([other(prompt, "x"), other(elsewhere, "y")], "second")
    out = first.parent / "joined"
    done = merge_runs([first, second], out)
    assert done.renamed == 2
    assert keys(out) == [
        ("greet", "greet", 0),
        ("greet@second", "greet@second", 0),
        ("greet@second-2", "greet#1@second", 1),
    ]


def test_a_joined_run_says_what_it_is_made_of(make_run: MakeRun) -> None:
    configuration = {"environment": "tasks", "agent": "model", "group_size": 2}
    first = make_run([rollout()], "first", configuration=configuration)
    second = make_run([rollout("wave", reward=0.0)], "second", seed=8, configuration={**configuration, "group_size": 4})
    out = first.parent / "joined"
    merge_runs([first, second], out)
    run = read_run(out)
    assert run["configuration"] == {"environment": "tasks", "agent": "model", "group_size": None}
    assert run["seed"] is None
    assert [(part["name"], part["seed"], part["rollouts"]) for part in run["merged"]] == [
        ("first", 7, 1),
        ("second", 8, 1),
    ]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["total"], summary["scored"], summary["solved"], summary["mean_reward"]) == (2, 2, 1, 0.5)
    done = export_run(out, "openai", first.parent / "exported")
    assert done.rollouts == 2
    assert "| second | tasks | model | 8 |" in (first.parent / "exported" / "README.md").read_text()


def test_wrong_merges_leave_nothing(make_run: MakeRun) -> None:
    run = make_run([rollout()])
    with pytest.raises(UsageError, match="exists already"):
        merge_runs([run], run)
    with pytest.raises(UsageError, match="can't be read"):
        merge_runs([run, run.parent / "none"], run.parent / "joined")
    with pytest.raises(UsageError, match="no records"):
        merge_runs([make_run([], "empty")], run.parent / "joined")
    assert sorted(path.name for path in run.parent.iterdir()) == ["empty", "run"]
