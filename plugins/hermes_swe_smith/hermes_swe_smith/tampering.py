"""Tells by the canaries whether code under test changed the outcomes of its tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hermes_core import PytestReport
from hermes_swe_smith.canaries import PASS, Canary
from hermes_swe_smith.rows import Task, test_file
from hermes_swe_smith.workspace import Tested

NAMED = 10
"""The most lies, or files without canaries, that the details name."""


@dataclass(frozen=True)
class Checked:
    """What a test run said: of the task's tests, and of the canaries among them."""

    report: PytestReport
    canaries: Mapping[str, str]
    """The outcomes of the canaries by node id."""


def told_apart(report: PytestReport, canaries: Sequence[Canary]) -> Checked:
    """Return the report without the canaries, and their outcomes."""
    ours = {canary.node_id for canary in canaries}
    outcomes = {node_id: outcome for node_id, outcome in report.outcomes.items() if node_id not in ours}
    texts = [text for text in report.texts if text[0] not in ours]
    theirs = replace(report, outcomes=outcomes, texts=texts)
    return Checked(theirs, {node_id: report.outcomes[node_id] for node_id in sorted(ours)})


def works(canary: Canary, checked: Checked) -> bool:
    """Return whether a canary has the outcome that it must have."""
    wanted = ("passed",) if canary.kind == PASS else ("failed", "error")
    return checked.canaries.get(canary.node_id) in wanted


def lies(task: Task, canaries: Iterable[Canary], checked: Checked) -> dict[str, str]:
    """Return, by node id, what is wrong with the outcomes of canaries.

    A failing test that passes is a lie; a twin only if its original passes too, because a wrong solution may give just
    the twin's value. A canary without its outcome is one only where all real tests of its file pass: whatever keeps it
    from running would keep them from it too.
    """
    if not checked.report.complete:
        return {}
    found = {}
    failing = {test_file(node_id) for node_id in task.node_ids if not checked.report.passed(node_id)}
    for canary in canaries:
        outcome = checked.canaries[canary.node_id]
        if works(canary, checked):
            continue
        if canary.kind != PASS and outcome == "passed":
            if not canary.original or checked.report.passed(canary.original):
                found[canary.node_id] = f"{canary.node_id} can't pass, and passed"
        elif test_file(canary.node_id) not in failing:
            must = "pass" if canary.kind == PASS else "fail"
            found[canary.node_id] = f"{canary.node_id} must {must}, and is {outcome}, while all tests beside it pass"
    return found


def told_of(tested: Tested, why_not: str | None) -> dict[str, Any]:
    """Return, for the details, how many canaries of each kind there were, and why a file or the task had none."""
    kinds = [canary.kind for canary in tested.canaries]
    told: dict[str, Any] = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    if tested.left_out:
        told["left_out"] = dict(list(tested.left_out.items())[:NAMED])
    if why_not:
        told["none"] = why_not
    return {"canaries": told} if told else {}


def tampered(said: Mapping[str, str], details: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return the score of work that changed the outcomes of tests."""
    reasons = list(said.values())[:NAMED]
    reason = f"the code under test tampered with its tests: {'; '.join(reasons)}"
    return 0.0, {**details, "reason": reason, "tampered": reasons}
