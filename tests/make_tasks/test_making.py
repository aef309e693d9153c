"""Tasks are made of small repositories of awkward shapes, and each is sound."""

# ruff: noqa: E501
# (the repositories' files, which are easier to read unbroken)

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import hermes_swe_smith
import pytest
from click.testing import CliRunner, Result
from hermes_make_tasks.kinds import kinds
from hermes_make_tasks.making import _find_broken, _unfit, make_tasks
from hermes_make_tasks.progress import MakingStanding
from hermes_make_tasks.wanted import Wanted
from hermes_testing.scripted_server import Reply, ScriptedServer

from hermes_core import DatasetError, PytestReport, ReportStatus, UnknownNameError, UsageError, progress_for
from hermes_core.cli.main import main
from hermes_core.runs.options import RunOptions
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Isolation
from hermes_core.soundness.validate import validate
from tests.swe_smith.shapes import PYTEST, git, write_files

ALL = (*kinds(), "combine-functions", "combine-files")


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    async with Runtime(load_entry_points=False, plugins=[hermes_swe_smith]) as made:
        if Isolation.USER not in made.backend("local").capabilities.isolation:
            pytest.skip("this host grants no isolation between slots")
        yield made


def repository(root: Path, files: dict[str, str | bytes]) -> Path:
    write_files(root, files)
    git(root, "init", "-q", "-b", "main")
    (root / ".git/info").mkdir(exist_ok=True)
    (root / ".git/info/attributes").write_text("* -text\n")
    git(root, "add", "-A", "-f")
    git(root, "commit", "-q", "-m", "clean")
    return root


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]


async def check(runtime: Runtime, folder: Path, **options: Any) -> None:
    """Have the environment look at every task: solved by its patch, and by nothing else."""
    env = {"dataset_name": str(folder / "tasks.jsonl"), "repo_base_url": str(folder)}
    outcome = await validate(runtime, "swe-smith", env=env, concurrency=2, **options)
    assert [(each.item_id, each.agent, each.failures, each.details, each.doubts) for each in outcome.unsound] == []


SMALL = {
    "core.py": "def double(x):\n    if x is None or x == 0:\n        return 0\n    return 2 * x  # twice\n\n\ndef sign(x):\n    if x < 0:\n        return -1\n    return 1\n",
    "test_core.py": "from core import double, sign\n\n\ndef test_double():\n    assert double(4) == 8\n\n\n"
    "def test_sign():\n    assert [sign(-2), sign(0), sign(3)] == [-1, 1, 1]\n",
}


async def test_tasks_of_a_small_repository(runtime: Runtime, tmp_path: Path) -> None:
    repo = repository(tmp_path / "small", SMALL)
    wanted = Wanted(repo=str(repo), count=1, runs=1, kinds=("op-change", "remove-return"), requirements=PYTEST, seed=3)
    outcome = await make_tasks(runtime, RunOptions(concurrency=2), wanted, tmp_path / "out")
    rows = rows_in(tmp_path / "out")
    assert outcome.complete
    assert len(rows) == outcome.tasks == 1
    for row in rows:
        assert set(row["FAIL_TO_PASS"]) | set(row["PASS_TO_PASS"]) == {
            f"test_core.py::test_{n}" for n in ("double", "sign")
        }
        assert row["FAIL_TO_PASS"]
        assert row["difficulty"]["level"] in ("easy", "medium", "hard")
        said = row["problem_statement"]
        assert said.startswith(("small: `double(4)` ", "small: `sign(-2)` ", "small: `sign(3)` ")), said
        assert "from core import" in said
        assert not [word for word in ("test_", str(tmp_path), "FAIL") if word in said]
        assert "  # twice" in row["patch"] or "sign" in row["patch"]


AWKWARD: dict[str, str | bytes] = {
    "pyproject.toml": '[project]\nname = "awkward"\nversion = "1"\n[tool.pytest.ini_options]\n'
    'addopts = "--doctest-modules"\ntestpaths = ["src", "tests"]\n',
    "src/awkward/__init__.py": b"# -*- coding: latin-1 -*-\ndef gr\xf6sse(x):\n    '''L\xe4nge'''\n"
    b"    if x is None:\n        return 0\n    return len(x) + 1\n",
    "src/awkward/crlf.py": "def clip(x, low=0, high=9):\r\n    # keep\r\n    if x < low:\r\n        return low\r\n"
    "    return min(x, high)\r\n",
    "src/awkward/tabs.py": "class Box:\n\tdef __init__(self, x):\n\t\tself.x = x\n\n\t@property\n\tdef twice(self):\n"
    '\t\t"""\n\t\t>>> Box(3).twice\n\t\t6\n\t\t"""\n\t\tif self.x is None or self.x < 0:\n\t\t\treturn 0\n\t\treturn 2 * self.x\n',
    "src/awkward/broken.py": "def f(:\n",
    "src/awkward/more.py": "import asyncio\n\n\ndef outer(values):\n    def inner(value):\n        return value - 1 if 0 < value < 9 else 0\n\n"
    "    return [inner(value) for value in values if value]\n\n\nasync def wait(x):\n    await asyncio.sleep(0)\n"
    "    return x + 1\n\n\ndef kind(x):\n    match x:\n        case int() if 3 < x < 9:\n            return 'big'\n"
    "        case [first, *_]:\n            return first\n        case _:\n            return 'other'\n",
    "tests/conftest.py": "import pytest\n\n\n@pytest.fixture(params=[1, 2])\ndef value(request):\n    return request.param\n",
    "tests/test_all.py": "import asyncio\nimport unittest\n\nimport pytest\nfrom awkward import grösse\nfrom awkward.crlf import clip\n"
    "from awkward.more import kind, outer, wait\nfrom awkward.tabs import Box\n\n\n"
    "@pytest.mark.parametrize('x', ['a b', '', \"it's $x\"])\ndef test_size(x):\n    assert grösse(x) == len(x) + 1\n\n\n"
    "def test_none():\n    assert grösse(None) == 0\n\n\ndef test_box(value):\n    assert Box(value).twice == value + value\n\n\n"
    "class TestClip(unittest.TestCase):\n    def test_low(self):\n        self.assertEqual(clip(-1), 0)\n\n"
    "    def test_high(self):\n        self.assertEqual(clip(11), 9)\n        self.assertEqual(clip(3, 1, 2), 2)\n\n\n"
    "def test_outer():\n    assert outer([3, 0, 2]) == [2, 1]\n\n\ndef test_wait():\n    assert asyncio.run(wait(1)) == 2\n\n\n"
    "def test_kind():\n    assert [kind(4), kind(1), kind([7, 8])] == ['big', 'other', 7]\n",
    "tests/test_lock.py": "import os\n\n\ndef test_lock():\n    lock = os.open('suite.lock', os.O_CREAT | os.O_EXCL)\n    os.close(lock)\n",
    "tests/test_flaky.py": "import os\n\nimport pytest\n\n\n@pytest.mark.parametrize('n', range(256))\ndef test_flaky(n):\n    assert os.urandom(1)[0] < 16\n",
    "tests/test_with name.py": "from awkward.crlf import clip\n\n\ndef test_clip_again():\n    assert clip(5) == 5\n",
    "docs/a text.rst": ">>> 1 + 1\n2\n",
}


@pytest.mark.full
@pytest.mark.long
async def test_tasks_of_an_awkward_repository(runtime: Runtime, tmp_path: Path) -> None:
    repo = repository(tmp_path / "awkward", AWKWARD)
    # Of 256 flaky tests, each of which passes once in 16, none passes at first once in 10 million runs of this test; one
    # passes in all six runs, and is thought stable, once in 60,000.
    wanted = Wanted(repo=str(repo), count=5, runs=5, kinds=ALL, requirements=PYTEST, seed=1, per_function=3)
    outcome = await make_tasks(runtime, RunOptions(concurrency=2), wanted, tmp_path / "out")
    assert outcome.complete, outcome
    assert [line for line in outcome.unreadable if "broken.py" in line]
    assert outcome.flaky
    assert {name.partition("[")[0] for name in outcome.flaky} == {"tests/test_flaky.py::test_flaky"}
    rows = rows_in(tmp_path / "out")
    assert len({row["patch"] for row in rows}) == len(rows) == 5
    listed = {name for row in rows for name in (*row["FAIL_TO_PASS"], *row["PASS_TO_PASS"])}
    assert listed.isdisjoint(outcome.flaky)
    assert {
        "tests/test_all.py::test_size[a b]",
        "tests/test_with name.py::test_clip_again",
        "tests/test_lock.py::test_lock",
    } <= listed
    assert "src/awkward/tabs.py::awkward.tabs.Box.twice" in listed
    paths = Counter(
        path for row in rows for path in ("__init__", "crlf", "tabs", "more") if f"{path}.py" in row["patch"]
    )
    assert len(paths) >= 2, paths
    assert any(row["difficulty"]["functions"] > 1 for row in rows)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(next((tmp_path / "out/repos").iterdir())), str(clone))
    for row in rows:
        (tmp_path / "patch").write_text(row["patch"])
        git(clone, "apply", "--whitespace=nowarn", str(tmp_path / "patch"))
        assert git(clone, "status", "--porcelain") != b""
        git(clone, "apply", "-R", "--whitespace=nowarn", str(tmp_path / "patch"))
        assert git(clone, "status", "--porcelain") == b""
    await check(runtime, tmp_path / "out")


@pytest.mark.full
@pytest.mark.long
async def test_a_killed_run_goes_on_and_gives_the_same_tasks(tmp_path: Path) -> None:
    repo = repository(tmp_path / "small", SMALL)
    (tmp_path / "needs.txt").write_text("\n".join(PYTEST))
    command = [sys.executable, "-m", "hermes_core", "make-tasks", str(repo)]
    command += ["--requirements", str(tmp_path / "needs.txt"), "--count", "2", "--runs", "1", "--seed", "5"]
    command += ["--concurrency", "1", "--progress", "none"]  # of two at a time, both may be done when it is killed
    env = {**os.environ, "HERMES_PLUGINS": "make-tasks"}

    def run(out: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, "--out", str(tmp_path / out)], env=env, capture_output=True, text=True, timeout=400
        )

    whole = await asyncio.to_thread(run, "whole")
    assert whole.returncode == 0, whole.stderr
    assert "2 of 2 tasks" in whole.stdout
    process = subprocess.Popen([*command, "--out", str(tmp_path / "cut")], env=env, stderr=subprocess.DEVNULL)
    attempts, deadline = tmp_path / "cut/making/attempts.jsonl", time.monotonic() + 300
    while not (attempts.exists() and attempts.read_bytes().count(b"\n") >= 1) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    tried = attempts.read_bytes().count(b"\n")
    assert tried >= 1
    assert not (tmp_path / "cut/tasks.jsonl").exists() or len(rows_in(tmp_path / "cut")) < 2
    again = await asyncio.to_thread(run, "cut")
    assert again.returncode == 0, again.stderr
    assert rows_in(tmp_path / "cut") == rows_in(tmp_path / "whole")
    other = subprocess.run(
        [*command, "--out", str(tmp_path / "cut"), "--max-broken", "3"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert other.returncode == 2
    assert "max_broken (40 there, 3 now)" in other.stderr


@pytest.mark.full
async def test_a_model_writes_the_statements(runtime: Runtime, tmp_path: Path) -> None:
    repo = repository(tmp_path / "small", SMALL)
    wanted = Wanted(repo=str(repo), count=1, runs=1, kinds=("op-change",), requirements=PYTEST, statement="model")
    async with ScriptedServer([Reply(content="Doubling is wrong\n\ndouble(4) gives 6.")] * 4) as server:
        settings = {"model": "scripted", "base_url": server.base_url}
        agent = runtime.agent("model", settings)
        await make_tasks(runtime, RunOptions(concurrency=1), wanted, tmp_path / "out", writer=agent)
    (row,) = rows_in(tmp_path / "out")
    assert row["problem_statement"] == "Doubling is wrong\n\ndouble(4) gives 6."


@pytest.mark.full
async def test_a_repository_without_passing_tests_says_why(runtime: Runtime, tmp_path: Path) -> None:
    files = {**SMALL, "test_core.py": "import no_such_module\n\n\ndef test(): pass\n"}
    repo = repository(tmp_path / "small", files)
    wanted = Wanted(repo=str(repo), count=1, runs=1, kinds=("op-change",), requirements=PYTEST)
    with pytest.raises(DatasetError, match="no_such_module"):
        await make_tasks(runtime, RunOptions(concurrency=1), wanted, tmp_path / "out")


async def test_tests_are_not_run_unisolated_unless_asked(runtime: Runtime, tmp_path: Path) -> None:
    repo = repository(tmp_path / "small", SMALL)
    with pytest.raises(UsageError, match="--allow-unisolated"):
        await make_tasks(runtime, RunOptions(isolation="shared"), Wanted(repo=str(repo)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_lists_the_kinds_and_refuses_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_PLUGINS", "make-tasks")

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["make-tasks", *arguments])

    listed = json.loads(run("--list-kinds", "--json").stdout)
    assert [each["kind"] for each in listed] == list(ALL)
    assert run("--list-kinds").stdout.startswith("op-change ")
    wrong = run("nowhere", "--out", "x", "--kinds", "op-chang")
    assert (wrong.exit_code, "did you mean 'op-change'" in wrong.stderr) == (2, True)
    assert run("nowhere").exit_code == 2
    assert "count must be at least 1, not 0" in run("nowhere", "--out", "x", "--count", "0").stderr
    refused = run("nowhere", "--out", "x", "--test-command", "tox")
    assert refused.exit_code == 2
    assert "does not run pytest" in refused.stderr


NAMES = ["a", "b", "c"]


def report(status: ReportStatus = ReportStatus.FINISHED, **outcomes: str) -> PytestReport:
    return PytestReport(status, {**dict.fromkeys(NAMES, "passed"), **outcomes})


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (report(a="failed"), None),
        (report(a="failed", b="error"), None),
        (report(), "unnoticed"),
        (report(a="failed", b="failed", c="failed"), "too many"),
        (report(a="failed", b="missing"), "not collected"),
        (report(a="skipped"), "not collected"),
        (report(ReportStatus.TIMED_OUT, a="failed"), "no end"),
        (report(ReportStatus.CUT, a="failed"), "no end"),
        (report(ReportStatus.NO_REPORT), "no end"),
    ],
)
def test_what_makes_no_task(made: PytestReport, reason: str | None) -> None:
    assert _unfit(made, _find_broken(NAMES, made), 2) == reason


def test_progress_has_the_forms_of_a_rollout(capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("json", "plain"):
        standing, display = MakingStanding(), progress_for(form, sys.stdout)
        display.begin(3, standing)
        standing.stage, standing.kept, standing.tried = "trying changes", 1, 2
        display.update(standing)  # at once, as the stage is another one
        display.update(standing)
        display.end(standing)
    begin, progress, end, first, line = capsys.readouterr().out.splitlines()
    assert [json.loads(each)["event"] for each in (begin, progress, end)] == ["begin", "progress", "end"]
    assert [json.loads(each)["kept"] for each in (begin, progress, end)] == [0, 1, 1]
    assert json.loads(progress).items() >= {"total": 3, "tried": 2, "stage": "trying changes"}.items()
    assert first == "3 tasks"
    assert line == "1/3 done, 2 changes tried in 0:00:00: trying changes"
    with pytest.raises(UnknownNameError):
        progress_for("jsn", sys.stdout)
    with pytest.raises(UsageError):
        progress_for("json:77", sys.stdout)
