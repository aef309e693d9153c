"""The canary: it disturbs no tests, works in any honest project, and shows who lets failing tests pass."""

import json
from pathlib import Path

import hermes_swe_smith.demo_tasks
import pytest
from hermes_swe_smith import workspace
from hermes_swe_smith.canary import CheckedReport
from hermes_swe_smith.config import SweSmithConfig
from hermes_swe_smith.environment import SweSmithEnvironment
from hermes_swe_smith.verify import score

from hermes_core.pytest_runner.run import PytestReport, ReportStatus
from tests.swe_smith.attacks import EFFECTIVE, IN_VAIN, OPEN
from tests.swe_smith.projects import Project

DEMO = Path(hermes_swe_smith.demo_tasks.__file__).parent
TASK = "hermes__ledgerline.1ed6e711.func_pm_op_swap__w7n4de6p"
BUG = ('.ljust(2, "0")', '.rjust(2, "0")')
ROWS = map(json.loads, (DEMO / "tasks.jsonl").read_text().splitlines())
ROW = next(row for row in ROWS if row["instance_id"] == TASK)


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path / "project")


@pytest.fixture
def demo(project):
    """The demo's project, as it should be."""
    for path in (DEMO / "project").rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            project.put(str(path.relative_to(DEMO / "project")), path.read_bytes())
    return project


def spoil(project, *, code=""):
    """Put the bug of `TASK` into the project, and code at the end of its package."""
    amounts = project.root / "ledgerline/amounts.py"
    assert BUG[0] in amounts.read_text()
    amounts.write_text(amounts.read_text().replace(*BUG))
    package = project.root / "ledgerline/__init__.py"
    package.write_text(package.read_text() + code)


async def checked(project, fail=ROW["FAIL_TO_PASS"], keep=ROW["PASS_TO_PASS"]):
    """The reward of the task's tests alone, and what the canary says."""
    placed = project.place(fail, keep)
    found = await project.check(placed)
    return score(placed.task, found.report, SweSmithConfig())[0], placed.canary.violations(found.canary), found


async def test_it_works_with_the_fix_and_beside_the_bug(demo):
    assert (await checked(demo))[:2] == (1.0, [])
    spoil(demo)
    reward, violations, found = await checked(demo)
    assert (reward, violations) == (0.0, [])
    assert {where for where, _ in found.report.texts} == set(ROW["FAIL_TO_PASS"])


ALWAYS = ("item-runtest", "gc-hunter")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full) for name in EFFECTIVE]
)
async def test_who_lets_failing_tests_pass_is_found_out(demo, name):
    spoil(demo, code=EFFECTIVE[name])
    reward, violations, found = await checked(demo)
    assert reward == 1.0, found  # or else the attack would be none
    assert violations and "must fail, and is passed" in violations[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", IN_VAIN)
async def test_what_gains_nothing(demo, name):
    spoil(demo, code=IN_VAIN[name])
    reward, _, found = await checked(demo)
    assert reward == 0.0, found


@pytest.mark.full
async def test_what_is_open_is_written_down(demo):
    spoil(demo, code=OPEN)
    assert (await checked(demo))[:2] == (1.0, [])
    assert OPEN in (Path(__file__).parents[2] / "docs/how-it-works/threat-model.md").read_text()


UNITTEST = """\
import unittest
from core import double
class TestCore(unittest.TestCase):
    def test_double(self): self.assertEqual(double(2), 4)
    def test_text(self): self.assertEqual(double("a"), "aa")
"""
QUIET = "import unittest\nunittest.TestCase.assertEqual = lambda *_: None\n"
STOPS = "def pytest_exception_interact(node): node.session.shouldstop = 'enough'\n"
NAMED = "def check_double():\n    from core import double\n    assert double(2) == 4\n"
INI = "[pytest]\naddopts = -x --strict-markers --strict-config\nfilterwarnings = error\n"
HONEST = {
    "all is strict": ({"pytest.ini": INI + "xfail_strict = true\n"}, False),
    "other names": ({"pytest.ini": "[pytest]\npython_functions = check_*\n", "tests/test_core.py": NAMED}, False),
    "ends with the first failure": ({"conftest.py": STOPS}, False),
    "unittest": ({}, False),
    "unittest, replaced": ({"core.py": "def double(x): return 3 * x\n" + QUIET}, True),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", HONEST)
async def test_it_works_in_odd_projects(project, name):
    files, tampers = HONEST[name]
    files = {"core.py": "def double(x): return 2 * x\n", "tests/test_core.py": UNITTEST, **files}
    for path, text in files.items():
        project.put(path, text.encode())
    ids = [f"tests/test_core.py::TestCore::{each}" for each in ("test_double", "test_text")]
    if name == "other names":
        ids = ["tests/test_core.py::check_double"]
    reward, violations, found = await checked(project, ids, [])
    assert (reward, bool(violations)) == (1.0, tampers), found


P2P = ("tests/test_core.py::test_one", "tests/test_core.py::test_two")
RUNS = {
    # name: (the work's outcomes and the canary's, the same on the clean tree or None if that is cut, the reward)
    "solved": ("p pp f", "", 1.0),
    "all passes": ("p pp p", "p pp f", 0.0),
    "all passes, the clean run is cut": ("p pp p", None, 0.0),
    "a canary that passes in this project": ("p pp p", "p pp p", 1.0),
    "a canary that disturbs": ("p fp f", "p fp f", 1.0),
    "broken": ("p fp f", "p pp f", 0.0),
    "broken, the clean run is cut": ("p fp f", None, 0.0),
    "skipped, as on the clean tree": ("p sp f", "p sp f", 1.0),
    "expected to fail, as on the clean tree": ("p xX f", "p xX f", 1.0),
    "skipped, but not on the clean tree": ("p sp f", "p pp f", 0.0),
    "skipped otherwise": ("p xp f", "p sp f", 0.0),
    "skipped and tampered": ("p sp p", "p sp f", 0.0),
}
OUTCOMES = {"p": "passed", "f": "failed", "s": "skipped", "x": "xfailed", "X": "xpassed"}


@pytest.mark.parametrize("name", RUNS)
async def test_what_the_clean_tree_decides(project, monkeypatch, name):
    work, clean, reward = RUNS[name]
    task = project.place(["tests/test_core.py::test_zero"], P2P).task
    env = SweSmithEnvironment(SweSmithConfig())
    asked = []

    async def run(_, tested, __):
        text = work if tested.patch == "work" else clean
        asked.append((tested.patch, tested.canary is not None))
        codes = [OUTCOMES[each] for each in (text or "p pp f").replace(" ", "")]
        if tested.canary is None and name == "a canary that disturbs":
            codes = ["passed"] * 4
        status = ReportStatus.TIMED_OUT if text is None else ReportStatus.FINISHED
        report = PytestReport(status, dict(zip(task.node_ids, codes, strict=False)))
        return CheckedReport(report, dict.fromkeys(tested.canary.node_ids, codes[-1]) if tested.canary else {})

    async def tested(*args, canary):
        return workspace.TreeUnderTest("", "", "", (), (), {}, args[-1], canary)

    async def nothing(*_):
        return "fix", None

    monkeypatch.setattr(env, "_check", run)
    monkeypatch.setattr(env, "_prepare", nothing)
    monkeypatch.setattr("hermes_swe_smith.environment.take_patch", tested)
    monkeypatch.setattr("hermes_swe_smith.environment.reference_fix", nothing)
    for _ in range(2):
        done = await env._score(task, await tested("work", canary=env._canary(task)), None)
        assert done[0] == reward, (done, asked)
        assert ("tampered" in done[1]) == ("all passes" in name or name == "skipped and tampered")
        assert ("no_canary" in done[1]) == name.startswith("a canary that")
    known = clean is not None
    assert sum(patch != "work" for patch, _ in asked) <= (2 if not known or "disturbs" in name else 1)
