"""What a group looks like when it is sent: every sequence once, each with its rollout's score, all of one size."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

import pytest
from hermes_atropos.groups import make_scored_groups, make_scored_item
from hermes_atropos.json_lines import group_json

from hermes_core.agents.base import TurnRecord
from hermes_core.errors import FailureKind, UsageError
from hermes_core.records.record import Failure, Record
from hermes_core.records.tokens import MASKED, TokenSequence
from hermes_core.runs.group import Group, Rolled


def record(name: str, reward: float | None = 1.0, sequences: int = 1, **changes: Any) -> Record:
    made = tuple(
        TokenSequence.of([n, 1, 2, 3], [MASKED, MASKED, 2, 3], [1.0, 1.0, -0.5, -0.1]) for n in range(sequences)
    )
    about = {"reward": reward, "messages": [{"role": "user"}], "sequences": made}
    return Record(name, "tasks", "item", "g#0", 0, "model", "local", **{**about, **changes})


def group(*records: Record, exact: bool = True) -> Group:
    rolled = [Rolled.of(each, exact=exact) for each in records]
    assert not any(each.mask_sample for each in rolled)
    return Group("g#0", "g", len(rolled), kept=rolled)


def test_rollouts_of_one_sequence_make_one_group() -> None:
    (scored,) = make_scored_groups(group(record("a", 1.0), record("b", 0.0)))
    assert scored["scores"] == [1.0, 0.0]
    assert scored["inference_logprobs"] == [[1.0, 1.0, -0.5, -0.1]] * 2
    assert scored["group_overrides"]["parts"] == 1


def test_every_sequence_of_a_split_conversation_is_sent_with_all_scores() -> None:
    first, second, third = make_scored_groups(group(record("a", 1.0, 3), record("b", 0.0), record("c", 0.5, 2)))
    for part in (first, second, third):
        assert part["scores"] == [1.0, 0.0, 0.5]
        assert {len(part[key]) for key in ("tokens", "masks", "messages", "overrides", "inference_logprobs")} == {3}
    real = [
        (about["trajectory_id"], tuple(tokens))
        for part in (first, second, third)
        for tokens, about in zip(part["tokens"], part["overrides"], strict=True)
        if about.get("trainable", True)
    ]
    assert len(real) == len(set(real)) == 6
    filler = third["overrides"].index(third["overrides"][1])
    assert third["masks"][filler] == [MASKED, MASKED]
    assert third["overrides"][1]["set_advantage_to_zero"] is True


def test_the_versions_of_the_policy_are_sent() -> None:
    turns = (TurnRecord(1, weight_version="w1"), TurnRecord(3, weight_version="w2"))
    (scored,) = make_scored_groups(group(record("a", turns=turns), record("b")))
    assert [about["weight_versions"] for about in scored["overrides"]] == [["w1", "w2"], []]


def test_an_item_is_a_rollout_of_one_sequence_and_no_part_of_one_of_several() -> None:
    item = make_scored_item(group(record("a", 0.5)))
    assert (item["tokens"], item["scores"]) == ([0, 1, 2, 3], 0.5)
    assert item["inference_logprobs"] == [1.0, 1.0, -0.5, -0.1]
    with pytest.raises(UsageError, match=r"has 2 sequences.*use collect_trajectories"):
        make_scored_item(group(record("a", 0.5, 2)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"failure": Failure(FailureKind.INFRA, "setup", "gone"), "reward": None}, "infra: gone"),
        ({"tokens_refused": "mask 2 is 3", "sequences": 0}, "tokens: mask 2 is 3"),
        ({"sequences": 0}, "the server kept none"),
    ],
)
def test_what_can_not_be_trained_on_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    rolled = Rolled.of(record("a", **changes), exact=True)
    assert (rolled.mask_sample, rolled.reward, rolled.sequences) == (True, None, ())
    assert reason in str(rolled.refused)
    assert rolled.refused == "{failure_kind}: {failure_reason}".format(**rolled.labels)
    assert rolled.notes == {**rolled.labels, "trajectory_id": rolled.record.trajectory_id, "weight_versions": []}


def test_a_rollout_that_waits_for_its_group_keeps_no_lists() -> None:
    (sequence,) = Rolled.of(record("a"), exact=True).sequences
    assert all(isinstance(part, array) for part in vars(sequence).values())


async def test_a_group_is_written_with_turns_for_others_in_between() -> None:
    (scored,) = make_scored_groups(group(*(record(f"é\n{n}") for n in range(8))))
    turns, done = 0, False

    async def another() -> None:
        nonlocal turns
        while not done:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(another())
        line = await group_json(scored)
        done = True
    assert json.loads(line) == scored
    assert b"\n" not in line
    assert turns > 8 * len(("tokens", "masks", "messages", "inference_logprobs"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        await group_json({**scored, "scores": [float("nan")]})
