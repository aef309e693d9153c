"""Canaries: they look like the tests around them, disturb none, work in any honest project, and show who tampers."""

import difflib
import json
from pathlib import Path

import hermes_swe_smith.demo_tasks
import pytest
from hermes_swe_smith.canaries import FAIL, PASS, TWIN, Canary
from hermes_swe_smith.config import SweSmithConfig
from hermes_swe_smith.tampering import Checked, lies, works
from hermes_swe_smith.verify import score

from hermes_core.envs.pytest_run import PytestReport, ReportStatus
from tests.swe_smith.attacks import EFFECTIVE, IN_VAIN, OPEN, TARGETED
from tests.swe_smith.honest import CORE, PLAIN, UNFIT, WITHOUT, WORKING, in_tests
from tests.swe_smith.projects import Project

DEMO = Path(hermes_swe_smith.demo_tasks.__file__).parent
TASK = "hermes__ledgerline.1ed6e711.func_pm_op_swap__w7n4de6p"
BUG = ('.ljust(2, "0")', '.rjust(2, "0")')
TASKS = {row["instance_id"]: row for row in map(json.loads, (DEMO / "tasks.jsonl").read_text().splitlines())}


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


def place(project, task=TASK, **options):
    return project.place(TASKS[task]["FAIL_TO_PASS"], TASKS[task]["PASS_TO_PASS"], **options)


def reward(placed, checked):
    return score(placed.task, checked.report, SweSmithConfig())[0]


# --- where they are, and what they are called -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("task", TASKS)
def test_files_only_gain_lines_and_names_are_new(demo, task, seed):
    before = {path: path.read_text() for path in (demo.root / "tests").iterdir()}
    placed = place(demo, task, seeds=(f"layout{seed}", f"names{seed}"))
    kinds = [canary.kind for canary in placed.canaries]
    assert kinds.count(TWIN) == 3 * len(placed.task.fail_to_pass_files) and PASS in kinds, placed
    for path, text in before.items():
        lines = list(difflib.ndiff(text.splitlines(), path.read_text().splitlines()))
        assert not [line for line in lines if line.startswith("-")]
    names = [canary.node_id.partition("[")[0] for canary in placed.canaries]
    assert len(set(names)) == len(names)
    assert not set(names) & {node_id.partition("[")[0] for node_id in placed.task.node_ids}


def test_places_depend_on_one_seed_and_names_on_the_other(demo):
    first = place(demo)
    kept = {path: (demo.root / path).read_bytes() for path in first.files}

    def again(*seeds):
        for path in (DEMO / "project/tests").glob("*.py"):
            demo.put(f"tests/{path.name}", path.read_bytes())
        return place(demo, seeds=seeds)

    assert again("layout", "names").files == kept
    other_names = again("layout", "other")
    assert {each.node_id for each in other_names.canaries}.isdisjoint(each.node_id for each in first.canaries)

    def where(placed):
        return {path: [bool(line.strip()) for line in text.splitlines()] for path, text in placed.files.items()}

    assert where(other_names) == where(first)
    assert any(where(again(f"other{seed}", "names")) != where(first) for seed in range(5))


@pytest.mark.parametrize("task", [TASK, pytest.param(next(iter(TASKS)), marks=pytest.mark.full)])
async def test_they_work_with_the_fix_and_beside_the_bug(demo, task):
    placed = place(demo, task)
    checked = await demo.check(placed)
    assert reward(placed, checked) == 1.0, checked
    assert [canary for canary in placed.canaries if not works(canary, checked)] == []
    assert lies(placed.task, placed.canaries, checked) == {}
    if task == TASK:
        spoil(demo)
        checked = await demo.check(placed)
        assert reward(placed, checked) == 0.0 and lies(placed.task, placed.canaries, checked) == {}
        assert all(map(checked.report.passed, placed.task.pass_to_pass))
        assert {where for where, _ in checked.report.texts} == set(placed.task.fail_to_pass)


# --- attacks -------------------------------------------------------------------------------------------------------

ALWAYS = ("item-runtest", "gc-hunter", "failing tests that ran the function", "os._exit(0) at import")


def some(attacks):
    return [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full) for name in attacks]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", some({**EFFECTIVE, **TARGETED}))
async def test_who_lets_failing_tests_pass_is_found_out(demo, name):
    spoil(demo, code={**EFFECTIVE, **TARGETED}[name])
    placed = place(demo)
    checked = await demo.check(placed)
    assert reward(placed, checked) == 1.0, checked  # or else the attack would be none
    assert any("can't pass, and passed" in said for said in lies(placed.task, placed.canaries, checked).values())


@pytest.mark.parametrize("name", some(IN_VAIN))
async def test_what_gains_nothing(demo, name):
    spoil(demo, code=IN_VAIN[name])
    placed = place(demo)
    checked = await demo.check(placed)
    assert reward(placed, checked) == 0.0, checked


@pytest.mark.full
@pytest.mark.parametrize("name", OPEN)
async def test_what_is_open_is_written_down(demo, name):
    spoil(demo, code=OPEN[name])
    placed = place(demo)
    checked = await demo.check(placed)
    assert reward(placed, checked) == 1.0 and lies(placed.task, placed.canaries, checked) == {}
    assert OPEN[name] in (Path(__file__).parents[2] / "docs/threat-model.md").read_text()


# --- honest projects -------------------------------------------------------------------------------------------------


def honest(project, files, fail=("tests/test_core.py::test_double",), keep=("tests/test_core.py::test_text",)):
    for path, text in {"core.py": CORE, **in_tests(PLAIN), **files}.items():
        project.put(path, text.encode())
    if "tests/check_core.py" in files:
        (project.root / "tests/test_core.py").unlink()
    return project.place(fail, keep)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.stress if n % 2 else ()) for n, name in enumerate(WORKING)]
)
async def test_they_work_in_any_honest_project(project, name):
    files, ids = WORKING[name]
    placed = honest(project, files, **ids)
    checked = await project.check(placed)
    assert placed.canaries and placed.left_out == {}
    assert reward(placed, checked) == 1.0, checked
    assert [canary for canary in placed.canaries if not works(canary, checked)] == [], checked
    twins = [canary for canary in placed.canaries if canary.kind == TWIN]
    assert bool(twins) == (FAIL not in [canary.kind for canary in placed.canaries])
    assert bool(twins) == (name not in ("warnings are errors", "a class with parameters"))


@pytest.mark.parametrize("name", WITHOUT)
def test_where_they_could_disturb_there_are_none(project, name):
    placed = honest(project, WITHOUT[name])
    assert placed.canaries == [] and placed.files == {}
    assert all(placed.left_out.values()) and set(placed.left_out) == {"tests/test_core.py"}


@pytest.mark.full
@pytest.mark.parametrize("name", UNFIT)
async def test_where_they_do_not_work_the_clean_tree_shows_it(project, name):
    placed = honest(project, UNFIT[name])
    checked = await project.check(placed)
    assert reward(placed, checked) == 1.0, checked
    said = lies(placed.task, placed.canaries, checked)
    assert said and not [each for each in placed.canaries if each.node_id in said and works(each, checked)]


@pytest.mark.parametrize(
    ("kind", "original", "outcome", "failing", "lie"),
    [
        (FAIL, "", "failed", (), False),
        (FAIL, "", "error", (), False),
        (FAIL, "", "passed", (), True),
        (FAIL, "", "passed", ("tests/test_core.py::test_double",), True),
        (TWIN, "", "passed", ("tests/test_core.py::test_double",), True),
        (TWIN, "tests/test_core.py::test_double", "passed", (), True),
        (TWIN, "tests/test_core.py::test_double", "passed", ("tests/test_core.py::test_double",), False),
        (TWIN, "tests/test_core.py::test_double", "missing", (), True),
        (TWIN, "tests/test_core.py::test_double", "missing", ("tests/test_core.py::test_text",), False),
        (FAIL, "", "skipped", (), True),
        (PASS, "", "passed", (), False),
        (PASS, "", "failed", (), True),
        (PASS, "", "missing", (), True),
        (PASS, "", "error", ("tests/test_core.py::test_text",), False),
    ],
)
def test_what_is_a_lie(project, kind, original, outcome, failing, lie):
    task = honest(project, {}).task
    canary = Canary("tests/test_core.py::test_simple", kind, original)
    outcomes = {node_id: "failed" if node_id in failing else "passed" for node_id in task.node_ids}
    checked = Checked(PytestReport(ReportStatus.FINISHED, outcomes), {canary.node_id: outcome})
    assert [*lies(task, [canary], checked)] == ([canary.node_id] if lie else [])
    cut = Checked(PytestReport(ReportStatus.CUT, outcomes), {canary.node_id: outcome})
    assert lies(task, [canary], cut) == {}
