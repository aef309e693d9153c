"""What follows from the rewards of the baselines and the cheats, without running anything."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_core.soundness.verdicts import ItemResult, ItemStatus, Verdict


def judged(**backends: Any) -> ItemResult:
    """The result of an item, from the outcomes of each agent by backend: rewards, or kinds of failures."""
    verdicts: dict[str, dict[str, Verdict]] = {}
    for backend, agents in backends.items():
        verdicts[backend] = {}
        for agent, outcomes in {"oracle": [1.0], "nop": [0.0], **agents}.items():
            verdict = verdicts[backend][agent] = Verdict("a", agent, backend, missing=len(outcomes))
            for number, outcome in enumerate(outcomes):
                kind, _, stage = outcome.partition("@") if isinstance(outcome, str) else ("", "", "")
                failure = {"kind": kind, "stage": stage or kind, "message": "it broke"} if kind else None
                reward = None if kind else outcome
                said = {"trajectory_id": f"{agent}-{number}", "reward": reward, "failure": failure, "details": {}}
                verdict.add(said, None)
    return ItemResult.of("a", verdicts)


@pytest.mark.parametrize(
    ("agents", "reasons"),
    [
        ({}, []),
        ({"oracle": [1.0, 1.0, 1.0], "nop": [0.0, 0.0]}, []),
        ({"oracle": [1.0, 0.0, 1.0]}, ["gold-flakes"]),
        ({"oracle": [0.0, 0.0]}, ["gold-fails"]),
        ({"oracle": [0.9, 0.9]}, ["gold-fails"]),
        ({"oracle": [0.9, 0.7]}, ["gold-flakes"]),
        ({"oracle": ["verifier", 1.0]}, ["gold-flakes"]),
        ({"oracle": ["setup", "setup"], "nop": ["setup"]}, ["gold-fails", "nop-fails"]),
        ({"nop": [0.0, 1.0]}, ["nop-scores"]),
        ({"nop": [-1.0]}, ["nop-scores"]),
        ({"nop": ["verifier"]}, ["nop-fails"]),
        ({"cheat:x": [0.0]}, []),
        ({"cheat:x": [0.2], "cheat:y": [1.0]}, ["cheat-solves", "cheat-solves"]),
        ({"cheat:x": [-1.0]}, []),
        ({"nop": [0.3], "cheat:x": [0.3], "cheat:y": [0.4]}, ["nop-scores", "cheat-solves"]),
        ({"nop": [-1.0], "cheat:x": [0.0]}, ["nop-scores"]),
        ({"cheat:x": ["verifier"]}, []),
    ],
)
def test_each_fault_has_its_reason(agents, reasons):
    result = judged(here=agents)
    assert [str(finding.reason) for finding in result.findings] == reasons
    assert result.status is (ItemStatus.UNSOUND if reasons else ItemStatus.SOUND)
    assert {each.agent for each in result.unsound_verdicts()} == {finding.agent for finding in result.findings}


@pytest.mark.parametrize(
    "agents",
    [
        {"oracle": [1.0, "infra"]},
        {"nop": ["cancelled"]},
        {"oracle": ["model"]},
        {"nop": ["image"]},
        {"cheat:x": ["infra"]},
        {"cheat:x": ["setup@agent"]},
    ],
)
def test_what_says_nothing_of_the_item_makes_it_neither_sound_nor_unsound(agents):
    result = judged(here=agents)
    assert (result.findings, result.status) == ((), ItemStatus.NOT_TRIED)
    (why,) = result.untried
    assert "it broke" in why and "here" in why


def test_what_a_cheat_gains_is_not_known_without_what_nothing_gets():
    result = judged(here={"nop": ["infra"], "cheat:x": [0.3]})
    assert (result.findings, result.status) == ((), ItemStatus.NOT_TRIED)


def test_what_is_wrong_is_certain_although_a_part_was_not_tried():
    result = judged(here={"oracle": [0.0, 1.0], "nop": ["infra"]})
    assert result.status is ItemStatus.UNSOUND
    assert result.untried


def test_a_rollout_that_is_missing_was_not_tried():
    verdicts = {"here": {"oracle": Verdict("a", "oracle", "here", missing=2), "nop": Verdict("a", "nop", "here")}}
    assert ItemResult.of("a", verdicts).untried == ["oracle on here: 2 rollouts were not ended"]


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ([1.0, 1.0], [1.0], False),
        ([1.0], [0.0], True),
        ([1.0], [1.0, 0.0], True),
        ([0.0, 1.0], [1.0, 0.0, 0.0], False),
        ([1.0], ["verifier"], True),
        ([1.0], ["infra"], False),
    ],
)
def test_backends_differ_if_they_do_not_give_the_same_rewards(one, other, differ):
    result = judged(here={"oracle": one}, there={"oracle": other})
    drift = [finding for finding in result.findings if finding.reason == "differs"]
    assert [(each.backend, each.agent) for each in drift] == ([(None, "oracle")] if differ else [])
    if differ:
        assert "here " in drift[0].text and "there " in drift[0].text


def test_a_cheat_that_works_on_one_backend_only_is_a_difference_too():
    result = judged(here={"cheat:x": [1.0]}, there={"cheat:x": [0.0]})
    found = [(str(each.reason), each.backend) for each in result.findings]
    assert found == [("cheat-solves", "here"), ("differs", None)]


def test_a_finding_names_its_evidence_and_how_often():
    (finding,) = judged(here={"oracle": [1.0, 0.0, 1.0, 1.0, "verifier"]}).findings
    assert (finding.rewards, finding.records) == (
        (1.0, 0.0, 1.0, 1.0, None),
        tuple(f"oracle-{number}" for number in range(5)),
    )
    assert "1 in 3 of 5 tries: 3 × 1, 0, none" in finding.text


@pytest.mark.parametrize(
    ("rewards", "doubts", "sound", "flaky"),
    [
        ([0.0, 0.0], [], True, False),
        ([0.0, 0.0], ["x"], False, True),
        ([0.0, 0.0], ["x", "x"], False, False),
        ([0.0, 1.0], [], False, True),
        ([1.0, 1.0], [], False, False),
        ([None, 1.0], [], False, True),
    ],
)
def test_what_is_not_always_the_same_is_flaky(rewards, doubts, sound, flaky):
    verdict = Verdict("a", "nop", "here", rewards, doubts=doubts)
    assert (verdict.sound, verdict.flaky) == (sound, flaky)
