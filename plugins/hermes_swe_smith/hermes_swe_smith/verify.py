"""Scores an agent's work: on a pristine tree, in a fresh slot, with the original tests."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hermes_core import Item, PytestReport, ReportStatus, SlotHandle, run_pytest
from hermes_swe_smith.canary import Checked, told_apart
from hermes_swe_smith.config import SweSmithConfig
from hermes_swe_smith.repos import RepositorySource, TestEnvironment
from hermes_swe_smith.rows import SweTask
from hermes_swe_smith.workspace import Tested

Score = tuple[float, dict[str, Any]]

NAMED = 50
"""The most node ids, or files, of one kind that the details name."""

_COLLECTED = (0, 1, 5)
"""Exit statuses of a pytest that could collect everything: all passed, some failed, none was left."""

NOT_PASSED = ("skipped", "xfailed", "xpassed")
"""Outcomes that a PASS_TO_PASS test may have, if it has the same on the clean tree: some datasets list such tests."""

_REASONS = {
    ReportStatus.CUT: "the tests ended before pytest could say so",
    ReportStatus.NO_REPORT: "no report arrived from the tests",
}


def unsolved(reason: str) -> Score:
    """Return the score of work that can't be tested because of the agent."""
    return 0.0, {"reason": reason}


def undone(tested: Tested) -> dict[str, list[str]]:
    """Return, for the details, what of the agent's work was undone before the tests."""
    named = {"restored": tested.restored, "removed": tested.removed}
    return {key: _names(paths) for key, paths in named.items() if paths}


async def run_tests(
    fresh: SlotHandle,
    task: SweTask,
    tested: Tested,
    source: RepositorySource,
    environment: TestEnvironment,
    *,
    timeout_s: float,
) -> Checked:
    """Run every test of the task, and the canary's, in the fresh slot, as the repository's command and configuration
    say."""
    root = posixpath.join(fresh.commands.workspace_dir, task.directory)
    import_path = [posixpath.normpath(posixpath.join(root, part)) for part in environment.pythonpath]
    if source.command.checkout_on_path:
        import_path.insert(0, root)
    report = await run_pytest(
        fresh.commands,
        sorted({*task.node_ids, *(tested.canary.node_ids if tested.canary else ())}),
        python=environment.python,
        root=root,
        timeout_s=timeout_s,
        import_path=list(dict.fromkeys(import_path)),
        args=source.command.args,
        env=source.command.env,
        doctests=tested.doctests,
    )
    return told_apart(report, tested.canary)


def disturbed(checked: Checked) -> str | None:
    """Return why the tests have to run again, or None: something was killed, maybe not by their fault."""
    report = checked.report
    return report.disturbance if not all(map(report.passed, report.outcomes)) else None


def as_clean(report: PytestReport, clean: Mapping[str, str]) -> PytestReport:
    """Return the report in which the tests that may not pass, and behave as on the clean tree, have passed."""
    same = [node_id for node_id, outcome in clean.items() if report.outcomes[node_id] == outcome]
    return replace(report, outcomes={**report.outcomes, **dict.fromkeys(same, "passed")})


def score(task: SweTask, report: PytestReport, config: SweSmithConfig) -> Score:
    """Return the reward for a test report, and the details that explain it."""
    scored = task.node_ids if config.score_include_fail_to_pass else task.pass_to_pass
    failing = [node_id for node_id in scored if not report.passed(node_id)]
    if config.score == "all" or not report.complete:
        reward = 0.0 if failing or not report.complete else 1.0
    else:
        reward = _fraction(task, report, config)
    details: dict[str, Any] = {
        "passed": len(scored) - len(failing),
        "total": len(scored),
        "fail_to_pass": _count(task.fail_to_pass, report),
        "pass_to_pass": _count(task.pass_to_pass, report),
        "tests": str(report.status),
        "tests_s": report.duration_s,
    }
    if report.status is ReportStatus.TIMED_OUT:
        details["reason"] = f"the tests did not end within {config.test_timeout_s:g} s"
    elif not report.complete:
        details["reason"] = (
            f"{_REASONS[report.status]}: {report.disturbance}" if report.disturbance else _REASONS[report.status]
        )
    elif gone := _not_found(failing, report):
        details["reason"] = f"pytest found no test named {', '.join(gone[:5])}"
    if failing:
        if fixed := [node_id for node_id in task.fail_to_pass if report.passed(node_id)]:
            details["passing"] = fixed[:NAMED]
        details["failing"] = failing[:NAMED]
        details["outcomes"] = {node_id: report.outcomes[node_id] for node_id in failing[:NAMED]}
        details["texts"] = [list(text) for text in report.texts[:5]]
        details["output"] = report.output[-2000:]
    return reward, details


def tampered(said: Sequence[str], details: Mapping[str, Any]) -> Score:
    """Return the score of work that changed the outcomes of tests."""
    reason = f"the code under test tampered with its tests: {'; '.join(said)}"
    return 0.0, {**details, "reason": reason, "tampered": list(said)}


def doubt(item: Item, agent: str, details: Mapping[str, Any]) -> str | None:
    """Return which listed tests do not behave as listed, by the details of a baseline's score.

    With the bug, all of FAIL_TO_PASS fail and all of PASS_TO_PASS pass; with the fix, all pass. Nothing is known of
    tests that did not come to their end.
    """
    if details.get("tests") != ReportStatus.FINISHED:
        return None
    said = []
    for listed in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        passes = agent != "nop" or listed == "PASS_TO_PASS"
        passed, total = details[listed.lower()]["passed"], details[listed.lower()]["total"]
        if wrong := total - passed if passes else passed:
            known = details.get("failing" if passes else "passing", ())
            names = [node_id for node_id in item[listed] if node_id in known][:5]
            tree = "with the bug" if agent == "nop" else "with the fix"
            what = f"{wrong} of {total} {listed} tests {'do not pass' if passes else 'pass'} {tree}"
            said.append(f"{what}: {', '.join(names)}" if names else what)
    return "; ".join(said) or None


def _fraction(task: SweTask, report: PytestReport, config: SweSmithConfig) -> float:
    kept = sum(map(report.passed, task.pass_to_pass))
    if not config.score_include_fail_to_pass:
        return kept / len(task.pass_to_pass) if task.pass_to_pass else 1.0
    if kept < len(task.pass_to_pass):
        return 0.0
    return sum(map(report.passed, task.fail_to_pass)) / len(task.fail_to_pass)


def _not_found(failing: Sequence[str], report: PytestReport) -> list[str]:
    """Return the tests that do not exist. If pytest could not collect everything, this is unknown."""
    if report.pytest_status not in _COLLECTED:
        return []
    return [node_id for node_id in failing if report.outcomes.get(node_id) == "missing"]


def _count(node_ids: Sequence[str], report: PytestReport) -> dict[str, int]:
    return {"passed": sum(map(report.passed, node_ids)), "total": len(node_ids)}


def _names(paths: Sequence[str]) -> list[str]:
    """Return file names in a form that a record can hold: what is not UTF-8 is replaced."""
    return [path.encode("utf-8", "replace").decode() for path in paths[:NAMED]]
