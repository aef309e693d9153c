"""Which rollouts are exported, and what is said about the others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hermes_core.errors import FailureKind, UnknownNameError, UsageError
from hermes_core.export.exporting import export_run
from hermes_core.export.selection import ExportFilters, Selection, open_run, select
from hermes_core.records.record import Record
from hermes_core.records.tokens import TokenSequence
from tests.export.conftest import SEQUENCE, MakeRun, failed, rollout


def chosen(run: Path, **conditions: Any) -> Selection:
    selection = select(open_run(run), ExportFilters(**conditions), lambda record: None)
    assert [record.trajectory_id for record in selection.records()] == [
        candidate.row.trajectory_id for candidate in selection.chosen
    ]
    return selection


def names(selection: Selection) -> list[str]:
    return [candidate.row.trajectory_id for candidate in selection.chosen]


def silent(record: Record) -> Record:
    messages = [{key: part for key, part in each.items() if key != "reasoning_content"} for each in record.messages]
    return replace(record, messages=messages)


@pytest.fixture
def run(make_run: MakeRun) -> Path:
    long = TokenSequence.of([1, *[5] * 20], [-100, *[5] * 20], [-0.5] * 21)
    return make_run(
        [
            rollout("a", 0, said="one"),
            rollout("a", 1, said="two", reward=0.5),
            silent(rollout("b", 0, said="one", reward=0.0)),
            rollout("b", 1, said="one", reward=None, sequences=(SEQUENCE, long)),
            rollout("b", 2, said="one", sequences=(), turns=()),
            failed("c"),
            failed("c", 1, FailureKind.MODEL),
        ]
    )


@pytest.mark.parametrize(
    ("conditions", "expected", "left_out"),
    [
        ({}, "a-0 a-1 b-0 b-1 b-2 c-0-failed c-1-failed", {}),
        ({"failures": ("none",)}, "a-0 a-1 b-0 b-1 b-2", {"failure: infra": 1, "failure: model": 1}),
        ({"failures": ("model", "infra")}, "c-0-failed c-1-failed", {"without a failure": 5}),
        ({"failures": ("any",)}, "c-0-failed c-1-failed", {"without a failure": 5}),
        ({"solved": True}, "a-0 b-2", {"reward too low, or none": 5}),
        ({"unsolved": True}, "a-1 b-0 b-1 c-0-failed c-1-failed", {"reward too high, or none": 2}),
        ({"max_reward": 0.5}, "a-1 b-0", {"reward too high, or none": 5}),
        ({"stop": "finished"}, "a-0 a-1 b-0 b-1 b-2", {"another stop reason": 2}),
        ({"tool": "bash"}, "a-0 a-1 b-0 b-1 b-2", {"without a call of the tool": 2}),
        ({"failed_tool": "bash"}, "", {"without a failed call of the tool": 7}),
        ({"min_reward": 0.5}, "a-0 a-1 b-2", {"reward too low, or none": 4}),
        ({"has_reasoning": True}, "a-0 a-1 b-1 b-2", {"no reasoning": 3}),
        ({"max_tokens": 9}, "a-0 a-1 b-0", {"number of tokens not known": 3, "too many tokens": 1}),
        ({"per_item": 1, "failures": ("none",)}, "a-0 b-2", {"over the limit per item": 3, "failure: infra": 1}),
        ({"deduplicate": True, "failures": ("none",)}, "a-0 a-1 b-0 b-1", {"duplicate": 1, "failure: model": 1}),
    ],
)
def test_conditions_choose_rollouts_and_count_the_others(
    run: Path, conditions: dict[str, Any], expected: str, left_out: dict[str, int]
) -> None:
    selection = chosen(run, **conditions)
    assert names(selection) == expected.split()
    assert left_out.items() <= selection.left_out.items()
    assert len(selection.chosen) + selection.left_out.total() == 7


def test_the_endpoint_s_count_is_used_without_exact_tokens(make_run: MakeRun) -> None:
    run = make_run([rollout(sequences=())])  # its last answer: 7 tokens before, 2 of its own
    assert names(chosen(run, max_tokens=9)) == ["greet-0"]
    assert chosen(run, max_tokens=8).left_out == {"too many tokens": 1}


def test_the_last_record_of_a_rollout_counts(make_run: MakeRun) -> None:
    again = replace(rollout("a", 0, reward=0.25), trajectory_id="again")
    run = make_run([failed("a"), rollout("b"), rollout("a"), again, b'{"torn'])
    selection = chosen(run, solved=True)
    assert (names(selection), selection.run.superseded) == (["b-0"], 2)
    assert selection.left_out == {"reward too low, or none": 1}, "what a later record replaces is in no other count"
    assert names(chosen(run)) == ["b-0", "again"]


def test_groups_of_an_item_replace_each_other_in_no_format(make_run: MakeRun) -> None:
    records = [rollout("a", index, group=group) for group in ("a#0", "a#1", "a#2") for index in (0, 1)]
    run = make_run(replace(record, trajectory_id=f"{record.group}-{record.rollout_index}") for record in records)
    for to in ("openai", "atif", "harbor", "eval"):
        assert export_run(run, to, run.parent / to).rollouts == 6
    trials = [json.loads(path.read_text()) for path in (run.parent / "harbor").glob("*/result.json")]
    assert len({trial["trial_name"] for trial in trials}) == 6


def test_a_rollout_is_the_same_whatever_its_calls_ids(make_run: MakeRun) -> None:
    run = make_run([rollout("a", 0), rollout("a", 1), rollout("a", 2, said="Other.")])
    assert names(chosen(run, deduplicate=True)) == ["a-0", "a-2"]


def test_tools_are_counted_from_messages_where_a_record_has_no_calls(make_run: MakeRun) -> None:
    new, old = rollout(), rollout("b", calls=())
    for record in (new, old):
        (candidate,) = chosen(make_run([record], record.item_id)).chosen
        uses = [(name, use.calls, dict(use.failed)) for name, use in candidate.row.tools.items()]
        assert uses == [("bash", 1, {}), ("read", 1, {"failed": 1})]


def test_a_run_that_is_replaced_meanwhile_is_read_as_it_was(make_run: MakeRun) -> None:
    run = make_run([rollout("a"), rollout("b")])
    selection = select(open_run(run), ExportFilters(), lambda record: None)
    beside = run / "new"
    beside.write_bytes(rollout("c").line())
    beside.replace(run / "trajectories.jsonl")
    assert [record.item_id for record in selection.records()] == ["a", "b"]


def test_a_file_of_records_is_a_run_too(make_run: MakeRun) -> None:
    run = make_run([rollout("a"), failed("b")])
    assert export_run(run / "trajectories.jsonl", "openai", run / "out").run["configuration_hash"] == "abc"
    file = (run / "trajectories.jsonl").rename(run / "data.jsonl")
    assert names(chosen(file)) == ["a-0", "b-0-failed"]
    done = export_run(file, "openai", file.parent / "alone")
    assert (done.rollouts, done.run["name"], done.run["configuration_hash"]) == (1, "data", None)


def test_wrong_conditions_are_refused(make_run: MakeRun) -> None:
    with pytest.raises(UnknownNameError, match="infra"):
        ExportFilters(failures=("infre",))
    with pytest.raises(UsageError, match="together"):
        ExportFilters(solved=True, unsolved=True)
    with pytest.raises(UsageError, match=r"called 'bahs'.*\(did you mean 'bash'\?\)"):
        chosen(make_run([rollout()], "named"), tool="bahs")
    for wrong in ({"per_item": 0}, {"max_tokens": -1}):
        with pytest.raises(UsageError, match="from 1 on"):
            ExportFilters(**wrong)
    run = make_run([rollout("a"), b"{}\n"])
    with pytest.raises(UsageError, match="line 2: no record"):
        chosen(run)
