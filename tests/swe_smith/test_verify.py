"""Rewards and details from test reports."""

from dataclasses import replace

import pytest
from hermes_swe_smith.canary import CheckedReport
from hermes_swe_smith.config import SweSmithConfig
from hermes_swe_smith.repos import TestCommand
from hermes_swe_smith.rows import parse_row
from hermes_swe_smith.verify import doubt, find_disturbance, score

from hermes_core.pytest_runner.run import PytestReport, ReportStatus

BROKEN, KEPT = ["t.py::a", "t.py::b"], ["t.py::c", "t.py::d"]


@pytest.fixture
def task():
    row = {
        "instance_id": "o__n.01234567.x__y",
        "repo": "swesmith/o__n.01234567",
        "patch": "diff",
        "problem_statement": "x",
        "FAIL_TO_PASS": BROKEN,
        "PASS_TO_PASS": KEPT,
    }
    return parse_row(row, "here", SweSmithConfig())


def report(*failing, status=ReportStatus.FINISHED, outcome="failed"):
    outcomes = {node_id: outcome if node_id in failing else "passed" for node_id in BROKEN + KEPT}
    return PytestReport(status, outcomes)


@pytest.mark.parametrize(
    ("failing", "whole", "fraction", "kept_only", "kept_fraction"),
    [
        ([], 1.0, 1.0, 1.0, 1.0),
        (["t.py::a"], 0.0, 0.5, 1.0, 1.0),
        (["t.py::a", "t.py::b"], 0.0, 0.0, 1.0, 1.0),
        (["t.py::c"], 0.0, 0.0, 0.0, 0.5),
        (["t.py::a", "t.py::d"], 0.0, 0.0, 0.0, 0.5),
    ],
)
def test_the_reward_is_that_of_the_setting(task, failing, whole, fraction, kept_only, kept_fraction):
    def reward(**config):
        return score(task, report(*failing), SweSmithConfig(**config))[0]

    assert reward() == whole
    assert reward(score="fraction") == fraction
    assert reward(score_include_fail_to_pass=False) == kept_only
    assert reward(score="fraction", score_include_fail_to_pass=False) == kept_fraction


@pytest.mark.parametrize("outcome", ["skipped", "xfailed", "xpassed", "error", "missing"])
def test_only_passed_is_passed(task, outcome):
    reward, details = score(task, report("t.py::c", outcome=outcome), SweSmithConfig())
    assert reward == 0.0
    assert details["outcomes"] == {"t.py::c": outcome}


@pytest.mark.parametrize(
    ("agent", "failing", "said"),
    [
        ("nop", BROKEN, None),
        ("nop", ["t.py::a"], "1 of 2 FAIL_TO_PASS tests pass with the bug: t.py::b"),
        ("nop", [*BROKEN, "t.py::d"], "1 of 2 PASS_TO_PASS tests do not pass with the bug: t.py::d"),
        (
            "nop",
            ["t.py::c"],
            "2 of 2 FAIL_TO_PASS tests pass with the bug: t.py::a, t.py::b; "
            "1 of 2 PASS_TO_PASS tests do not pass with the bug: t.py::c",
        ),
        ("oracle", [], None),
        ("oracle", ["t.py::a"], "1 of 2 FAIL_TO_PASS tests do not pass with the fix: t.py::a"),
    ],
)
def test_listed_tests_that_do_not_behave_as_listed_are_named(task, agent, failing, said):
    row = {"FAIL_TO_PASS": BROKEN, "PASS_TO_PASS": KEPT}
    _, details = score(task, report(*failing), SweSmithConfig())
    assert doubt(row, agent, details) == said


def test_nothing_is_said_of_tests_that_did_not_end(task):
    _, details = score(task, report(status=ReportStatus.TIMED_OUT), SweSmithConfig())
    assert doubt({}, "nop", details) is None


def test_what_the_score_leaves_out_is_told_of_without_names(task):
    _, details = score(task, report("t.py::a"), SweSmithConfig(score_include_fail_to_pass=False))
    row = {"FAIL_TO_PASS": BROKEN, "PASS_TO_PASS": KEPT}
    assert doubt(row, "oracle", details) == "1 of 2 FAIL_TO_PASS tests do not pass with the fix"


@pytest.mark.parametrize(("pytest_status", "known"), [(0, True), (1, True), (5, True), (2, False), (4, False)])
def test_tests_that_do_not_exist_are_named_where_pytest_could_look_for_them(task, pytest_status, known):
    seen = replace(report("t.py::b", "t.py::c", outcome="missing"), pytest_status=pytest_status)
    _, details = score(task, seen, SweSmithConfig())
    assert details.get("reason") == ("pytest found no test named t.py::b, t.py::c" if known else None)


@pytest.mark.parametrize("status", [ReportStatus.CUT, ReportStatus.TIMED_OUT, ReportStatus.NO_REPORT])
@pytest.mark.parametrize("way", ["all", "fraction"])
def test_nothing_counts_without_an_end(task, status, way):
    reward, details = score(task, report(status=status), SweSmithConfig(score=way))
    assert reward == 0.0
    assert details["reason"]
    assert details["fail_to_pass"] == {"passed": 0, "total": 2}


def test_the_details_count_and_name(task):
    reward, details = score(task, report("t.py::b"), SweSmithConfig())
    assert reward == 0.0
    assert (details["passed"], details["total"]) == (3, 4)
    assert details["failing"] == ["t.py::b"]
    assert details["fail_to_pass"] == {"passed": 1, "total": 2}
    assert details["pass_to_pass"] == {"passed": 2, "total": 2}


@pytest.mark.parametrize(
    ("command", "args", "env", "on_path"),
    [
        ("python -m pytest", (), {}, True),
        ("pytest -q 'a b'", ("-q", "a b"), {}, False),
        ("A=1 B='x y' python3.11 -m pytest -p no:x", ("-p", "no:x"), {"A": "1", "B": "x y"}, True),
    ],
)
def test_test_commands(command, args, env, on_path):
    assert TestCommand.parse(command) == TestCommand(args, env, on_path)


@pytest.mark.parametrize(
    "command", ["", "make test", "python -m unittest", "pytest; rm -rf x", "pytest && x", "sh pytest"]
)
def test_other_commands_are_refused(command):
    with pytest.raises(ValueError, match=r"pytest|command"):
        TestCommand.parse(command)


@pytest.mark.parametrize(
    ("found", "again"),
    [
        (report(), False),
        (report("t.py::a"), False),
        (replace(report(), disturbance="memory"), False),
        (replace(report("t.py::a"), disturbance="memory"), True),
        (replace(report(status=ReportStatus.CUT), disturbance="memory"), True),
        (replace(report(status=ReportStatus.NO_REPORT), disturbance="memory"), True),
    ],
)
def test_tests_that_something_has_killed_are_run_again_unless_all_have_passed(found, again):
    assert find_disturbance(CheckedReport(found, {})) == ("memory" if again else None)


def test_the_reason_names_what_was_killed(task):
    _, details = score(task, replace(report(status=ReportStatus.CUT), disturbance="it was killed"), SweSmithConfig())
    assert details["reason"].endswith("it was killed")
