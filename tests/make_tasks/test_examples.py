"""A statement shows what a user would see: whole examples that were run, without the test, its files or the place."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hermes_make_tasks import example_run
from hermes_make_tasks.examples import (
    MOST_LINES,
    ExampleRun,
    FailedTest,
    describe_doctest_failure,
    describe_failure,
    examples_of,
    gives_away,
    names_a_missing_name,
)
from hermes_make_tasks.sources import read_source
from hermes_make_tasks.statement import from_template

TESTS = '''\
import os, unittest
import pytest
from pkg import clip, lines as split
LIMIT = 9

def helper(x):
    return clip(x, LIMIT)

def test_plain():
    """Text."""
    other = clip(1)
    assert other == 1
    text = """
      a
    """
    found = split(text)  # all of them
    found.append(1)
    assert found == ["a", 1]

@pytest.mark.parametrize("value", [3])
def test_value(value):
    assert helper(value) == 3

class TestClip(unittest.TestCase):
    def test_low(self):
        self.assertIsNone(clip(None))
        self.assertEqual(clip(-1), 0)
        with self.assertRaises(ValueError):
            clip("x")
        with self.assertRaises(TypeError):
            clip("y")

    def test_own(self):
        assert clip(self.value) == 1

def test_fixture(tmp_path):
    assert clip(tmp_path) == 1

def test_unknown():
    assert nothing() == 1

def test_itself():
    assert clip(test_itself) == 1
'''
SOURCE = read_source("test_clip.py", TESTS.encode())


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(TESTS.splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("test", "failing", "values", "expected"),
    [
        (
            "test_plain",
            'found == ["a"',
            {},
            'from pkg import lines as split\n\ntext = """\n      a\n    """\nfound = split(text)  # all of them\n'
            'found.append(1)\nassert found == ["a", 1]',
        ),
        (
            "test_value[3]",
            "helper(value)",
            {"value": "3"},
            "from pkg import clip\n\nLIMIT = 9\n\ndef helper(x):\n    return clip(x, LIMIT)\n\n\nvalue = 3\n"
            "assert helper(value) == 3",
        ),
        ("TestClip::test_low", "clip(-1)", {}, "from pkg import clip\n\nassert clip(-1) == 0"),
        (
            "TestClip::test_low",
            'clip("x")',
            {},
            "import pytest\nfrom pkg import clip\n\nwith pytest.raises(ValueError):\n    clip('x')",
        ),
        (
            "TestClip::test_low",
            'clip("y")',
            {},
            "import pytest\nfrom pkg import clip\n\nwith pytest.raises(TypeError):\n    clip('y')",
        ),
        ("TestClip::test_own", "self.value", {}, None),
        ("test_fixture", "clip(tmp_path)", {}, None),
        ("test_unknown", "nothing()", {}, None),
        ("test_itself", "clip(test_itself)", {}, None),
        ("test_gone", "nothing()", {}, None),
    ],
)
def test_an_example_is_what_a_test_does(test: str, failing: str, values: dict[str, str], expected: str | None) -> None:
    failed = FailedTest(f"test_clip.py::{test}", line_of(failing), values, "AssertionError: ")
    found = next(examples_of(SOURCE, failed), None)
    assert (found and found.replace("\n\n\n", "\n\n")) == (expected and expected.replace("\n\n\n", "\n\n"))


def test_an_example_is_whole_or_none() -> None:
    body = "".join(f"    x{number} = x{number - 1} + 1\n" for number in range(1, MOST_LINES))
    source = read_source("t.py", f"def test_long():\n    x0 = 0\n{body}    assert x{MOST_LINES - 1} == 1\n".encode())
    assert [*examples_of(source, FailedTest("t.py::test_long", MOST_LINES + 2, {}, ""))] == []


def run(code: str, root: Path) -> ExampleRun:
    asked = json.dumps({"import_path": [str(root)], "code": textwrap.dedent(code)})
    command = [sys.executable, "-s", "-B", example_run.__file__]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True, timeout=60)
    told = json.loads(done.stdout.splitlines()[-1])
    return ExampleRun(told["error"], told["line"], tuple(told["values"][each] for each in sorted(told["values"])))


@pytest.mark.parametrize(
    ("code", "title", "happens"),
    [
        (
            "from pkg import clip\nx = clip(5, 3)\nprint('hello')\nassert x == 3",
            "`clip(5, 3)` gives a wrong result",
            "`x` is\n\n    5\n\nand should be\n\n    3",
        ),
        (
            "from pkg import clip\nassert 3 == clip(5, 3)",
            "`clip(5, 3)` gives a wrong result",
            "`clip(5, 3)` is\n\n    5\n\nand should be\n\n    3",
        ),
        (
            "from pkg import clip\nassert str(clip(5, 3)).startswith('3')",
            "`str(clip(5, 3)).startswith('3')` gives a wrong result",
            "`str(clip(5, 3))` is\n\n    '5'\n\nand should be\n\n    '3'",
        ),
        (
            "from pkg import clip\nx = [clip(5, 3)]\nassert x[0] == 3",
            "`clip(5, 3)` gives a wrong result",
            "`x[0]` is\n\n    5\n\nand should be\n\n    3",
        ),
        (
            "import pytest\nfrom pkg import clip\nwith pytest.raises(TypeError):\n    clip(None)",
            "`clip(None)` does not raise TypeError",
            "Nothing is raised. It should raise `TypeError`.",
        ),
        (
            "from pkg import clip\nclip('x')",
            "`clip('x')` raises KeyError",
            "It ends with\n\n    KeyError: 'x'\n\nand should run to its end.",
        ),
    ],
)
def test_what_is_said_is_what_happened(code: str, title: str, happens: str, tmp_path: Path) -> None:
    good = "def clip(x, most=9):\n    return x if x == 'x' else min(x, most)\n"
    bad = "def clip(x, most=9):\n    if x == 'x':\n        raise KeyError(x)\n    return x\n"
    for name, text in (("good", good), ("bad", bad)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pkg.py").write_text(text)
    ran, clean = run(code, tmp_path / "bad"), run(code, tmp_path / "good")
    assert ran.error
    assert not clean.error
    assert describe_failure(code, ran, clean) == (title, happens)


def test_a_doctest_is_shown_as_it_is() -> None:
    failed = FailedTest("m.py::m.f", 0, {}, "DocTestFailure: ", ">>> f(1)\n1\n>>> f(2)\n2\n\x003\n")
    title, session, happens = describe_doctest_failure(failed)
    assert (title, session) == ("`f(2)` gives a wrong result", ">>> f(1)\n1\n>>> f(2)\n2")
    assert happens.endswith("    3\n")
    said = from_template("pkg", [(title, session, happens), ("`g` raises X", "g()", "at 0x7f00aa00bb\x1b[31m")])
    assert said.startswith("pkg: `f(2)` gives a wrong result\n\nTo see it:\n")
    assert "Also, `g` raises X." in said
    assert "at 0x…" in said
    assert "\x1b" not in said


def test_words_beside_the_change_are_not_shown() -> None:
    text = (
        "def f(a):\n    if a < 0:\n        raise ValueError(f'{a} must be at least zero')\n\n\n\n"
        "    return a or 'far from it all'\n"
    )
    [function] = read_source("m.py", text.encode()).functions
    assert gives_away("ValueError: -1 must be at\nleast zero", function, (2, 2))
    assert gives_away(r"match='must be\ at least zero'", function, (2, 2))
    assert not gives_away("far from it all", function, (2, 2))
    assert gives_away("from pkg import _f", function, (2, 2))


@pytest.mark.parametrize(
    ("error", "missing"),
    [
        ("NameError: name 'x' is not defined", True),
        ("UnboundLocalError: local variable 'x'", True),
        ("AttributeError: 'A' object has no attribute 'x'", True),
        ("AttributeError: 'NoneType' object has no attribute 'x'", False),
        ("KeyError: 'x'", False),
    ],
)
def test_a_missing_name_is_known(error: str, missing: bool) -> None:
    assert names_a_missing_name(error) == missing
