"""Runs a task's original tests on the agent's work in a fresh slot, and scores their outcomes."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hermes_core import Item, PytestReport, ReportStatus, SlotHandle, run_pytest
from hermes_swe_smith.canary import CheckedReport, separate_canary
from hermes_swe_smith.config import SweSmithConfig
from hermes_swe_smith.repos import RepositorySource, TestEnvironment
from hermes_swe_smith.rows import SweTask
from hermes_swe_smith.workspace import TreeUnderTest

Score = tuple[float, dict[str, Any]]

NAMED = 50
"""Maximum number of node ids, or of files, of one kind in the details."""

_COLLECTED = (0, 1, 5)
"""Exit statuses of a pytest that could collect everything: all tests passed, some failed, or there were none."""

NOT_PASSED = ("skipped", "xfailed", "xpassed")
"""Outcomes that count as passed if a PASS_TO_PASS test has the same outcome on the clean tree. Some datasets list tests
that are always skipped or expected to fail."""

_REASONS = {
    ReportStatus.CUT: "the tests ended before pytest could say so",
    ReportStatus.NO_REPORT: "no report arrived from the tests",
}


def undone_changes(tested: TreeUnderTest) -> dict[str, list[str]]:
    """Return the agent's changes that were undone before the tests, for the details."""
    changes = {"restored": tested.restored, "removed": tested.removed}
    return {key: _names(paths) for key, paths in changes.items() if paths}


async def run_tests(
    fresh: SlotHandle,
    task: SweTask,
    tested: TreeUnderTest,
    source: RepositorySource,
    environment: TestEnvironment,
    *,
    timeout_s: float,
) -> CheckedReport:
    """Run the tests of the task and of the canary in the fresh slot, with the arguments and the variables of the
    repository's test command."""
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
    return separate_canary(report, tested.canary)


def find_disturbance(checked: CheckedReport) -> str | None:
    """Return the reason to run the tests again: a process was killed, perhaps not by their fault. None if there is no
    reason."""
    report = checked.report
    return report.disturbance if not all(map(report.passed, report.outcomes)) else None


def as_clean(report: PytestReport, clean: Mapping[str, str]) -> PytestReport:
    """Return the report, with "passed" for each test whose outcome is the one in `clean`.

    Args:
        clean: the outcomes on the clean tree of the tests that do not pass there.
    """
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


def tampering_score(violations: Sequence[str], details: Mapping[str, Any]) -> Score:
    """Return the score of work that changed the outcomes of tests."""
    reason = f"the code under test tampered with its tests: {'; '.join(violations)}"
    return 0.0, {**details, "reason": reason, "tampered": list(violations)}


def doubt(item: Item, agent: str, details: Mapping[str, Any]) -> str | None:
    """Return a sentence on the listed tests that do not behave as listed, by the details of a baseline's score.

    With the bug, FAIL_TO_PASS tests must fail and PASS_TO_PASS tests pass; with the fix, all must pass. Return None if
    all behave so, or if the tests did not come to their end.
    """
    if details.get("tests") != ReportStatus.FINISHED:
        return None
    doubts = []
    for listed in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        passes = agent != "nop" or listed == "PASS_TO_PASS"
        passed, total = details[listed.lower()]["passed"], details[listed.lower()]["total"]
        if wrong := total - passed if passes else passed:
            candidates = details.get("failing" if passes else "passing", ())
            names = [node_id for node_id in item[listed] if node_id in candidates][:5]
            tree = "with the bug" if agent == "nop" else "with the fix"
            what = f"{wrong} of {total} {listed} tests {'do not pass' if passes else 'pass'} {tree}"
            doubts.append(f"{what}: {', '.join(names)}" if names else what)
    return "; ".join(doubts) or None


def _fraction(task: SweTask, report: PytestReport, config: SweSmithConfig) -> float:
    kept = sum(map(report.passed, task.pass_to_pass))
    if not config.score_include_fail_to_pass:
        return kept / len(task.pass_to_pass) if task.pass_to_pass else 1.0
    if kept < len(task.pass_to_pass):
        return 0.0
    return sum(map(report.passed, task.fail_to_pass)) / len(task.fail_to_pass)


def _not_found(failing: Sequence[str], report: PytestReport) -> list[str]:
    """Return the tests that do not exist; none if pytest could not collect everything, because this is unknown then."""
    if report.pytest_status not in _COLLECTED:
        return []
    return [node_id for node_id in failing if report.outcomes.get(node_id) == "missing"]


def _count(node_ids: Sequence[str], report: PytestReport) -> dict[str, int]:
    return {"passed": sum(map(report.passed, node_ids)), "total": len(node_ids)}


def _names(paths: Sequence[str]) -> list[str]:
    """Return file names as a record can hold them: bytes that are not UTF-8 are replaced."""
    return [path.encode("utf-8", "replace").decode() for path in paths[:NAMED]]
