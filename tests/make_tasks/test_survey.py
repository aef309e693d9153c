# ruff: noqa: E501
"""The survey finds all tests, and the lines that each of them runs, on every Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hermes_make_tasks import survey
from hermes_make_tasks.bench import SurveyedTest, _read_survey

from tests.support.pythons import interpreter
from tests.swe_smith.shapes import write_files

TRACED = """\
import sys, json, threading
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import survey
lines = survey.LineTracer(sys.argv[2], ["m.py"])
lines.start()
import m
first = lines.take()
m.f(1)
second = lines.take()
m.f(-1)
thread = threading.Thread(target=m.f, args=(1,))
thread.start()
thread.join()
third = lines.take()
print(json.dumps([first, second, third, lines.take()]))
"""
MODULE = "def f(x):\n    if x > 0:\n        return 1\n    return (\n        2\n    )\n"


def numbers(bits: str) -> set[int]:
    return {line for line in range(64) if int(bits, 16) >> line & 1}


@pytest.mark.parametrize("version", ["3.8", "3.11", "3.12", "3.13"])
def test_lines_are_those_since_the_last_time(version: str, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version}")
    (tmp_path / "m.py").write_text(MODULE)
    arguments = [python, "-c", TRACED, str(Path(survey.__file__).parent), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60)
    first, second, third, fourth = json.loads(done.stdout)
    assert numbers(first["0"]) & {1, 2, 3} == {1}
    assert numbers(second["0"]) - {1} == {2, 3}
    assert numbers(third["0"]) - {1, 4} == {2, 3, 5} or numbers(third["0"]) - {1} == {2, 3, 4}
    assert fourth == {}


PROJECT = {
    "pytest.ini": "[pytest]\naddopts = -x --doctest-modules -p plug\n",
    "plug.py": "import pytest\n\n\n@pytest.fixture\ndef one(): return 1\n",
    "src/m.py": MODULE + '\n\ndef g():\n    """\n    >>> g()\n    3\n    """\n    return 3\n',
    "src/bad.py": "import no_such_module\n",
    "test_m.py": "import pytest\nfrom m import f\n\n\n@pytest.mark.parametrize('x', ['a b', '$'])\ndef test_a(x): assert f(1)\n\n\n"
    "def test_b(one): assert f(-one) == 3\n\n\ndef test_c(): pytest.skip()\n",
}


def survey_of(root: Path, **more: Any) -> list[dict[str, Any]]:
    asked = {"root": str(root), "import_path": [str(root), str(root / "src")], "args": [], "env": {}, "tests": []}
    asked |= {"files": ["src/m.py"], **more}
    command = [sys.executable, "-s", "-B", survey.__file__]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_test_is_found_with_its_lines(tmp_path: Path) -> None:
    write_files(tmp_path, PROJECT)
    events = survey_of(tmp_path)
    lines = "".join(json.dumps(event) + "\n" for event in events).encode()
    surveyed = _read_survey(lines + b'not JSON\n{"test": 99, "lines": {}}\n{"tests": 5}\n', ["src/m.py"])
    found = {test.node_id: test for test in surveyed.tests}
    assert list(found) == [
        "src/m.py::m.g",
        "test_m.py::test_a[a b]",
        "test_m.py::test_a[$]",
        "test_m.py::test_b",
        "test_m.py::test_c",
    ]
    outcomes = [test.outcome for test in found.values()]
    assert outcomes == ["passed", "passed", "passed", "failed", "skipped"]
    assert found["test_m.py::test_a[$]"].ran("src/m.py", (3, 3))
    assert not found["test_m.py::test_a[$]"].ran("src/m.py", (4, 6))
    assert found["test_m.py::test_b"].ran("src/m.py", (4, 6))
    assert surveyed.importing.ran("src/m.py", (1, 1))
    assert [name for name, _ in surveyed.broken] == ["src/bad.py"]
    assert "no_such_module" in surveyed.broken[0][1]


def test_what_a_project_prints_is_no_event(tmp_path: Path) -> None:
    write_files(tmp_path, {"test_m.py": "def test(): print('{\"tests\": []}')\nprint('{\"status\": 9}')\n"})
    events = survey_of(tmp_path)
    assert [event for event in events if "status" in event] == [{"status": 0}]


def test_a_test_ran_the_ranges_with_one_of_its_lines() -> None:
    test = SurveyedTest("a", "passed", 0.0, {"m.py": 1 << 7})
    assert test.ran("m.py", (7, 7)) and test.ran("m.py", (1, 9))
    assert not test.ran("m.py", (8, 9)) and not test.ran("m.py", (1, 6)) and not test.ran("n.py", (7, 7))


def test_what_tests_replace_for_good_does_not_matter(tmp_path: Path) -> None:
    source = "import json, os\n\ndef no(*_, **__): raise RuntimeError\n\n"
    source += "def test_a(): json.dumps = os.write = os._exit = no\n\ndef test_b(): os.fork()\n"
    write_files(tmp_path, {"test_m.py": source})
    events = survey_of(tmp_path, files=[], args=["-p", "no:cacheprovider"])
    assert [each["outcome"] for each in events if "test" in each] == ["", "passed", "passed"]
    assert events[-1] == {"status": 0}
