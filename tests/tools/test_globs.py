"""Globs with braces and `**`."""

from __future__ import annotations

import time

import pytest

from hermes_core.tools.search import MAX_GLOBS, expand_braces
from hermes_core.tools.search_program import path_matches


@pytest.mark.parametrize(
    ("glob", "globs"),
    [
        ("*.py", ["*.py"]),
        ("*.{js,ts}", ["*.js", "*.ts"]),
        ("{a,b}/{c,d}", ["a/c", "a/d", "b/c", "b/d"]),
        ("{a,{b,c}}", ["a", "b", "c"]),
        ("{}{x}", ["{}{x}"]),
        ("a{,.bak}", ["a", "a.bak"]),
    ],
)
def test_braces(glob: str, globs: list[str]) -> None:
    assert sorted(expand_braces(glob)) == sorted(globs)


def test_braces_are_bounded() -> None:
    assert len(expand_braces("{a,b}" * 30)) <= MAX_GLOBS


@pytest.mark.parametrize(
    ("glob", "matching", "other"),
    [
        ("*.py", ["a.py", "x/y/a.py"], ["a.pyc"]),
        ("src/*.py", ["src/a.py"], ["src/x/a.py", "x/src/a.py"]),
        ("./src/?.py", ["src/a.py"], ["src/ab.py"]),
        ("**/a.py", ["a.py", "x/a.py", "x/y/a.py"], ["xa.py"]),
        ("src/**/a.py", ["src/a.py", "src/x/y/a.py"], ["src/xa.py", "a.py"]),
        ("src/**", ["src/a", "src/x/y"], ["srcs/a"]),
        ("/a/[xy]", ["a/x"], ["a/z", "b/x"]),
    ],
)
def test_paths(glob: str, matching: list[str], other: list[str]) -> None:
    assert all(path_matches(path, glob) for path in matching)
    assert not any(path_matches(path, glob) for path in other)


def test_many_stars_take_no_time() -> None:
    begin = time.process_time()
    assert not path_matches("a/" * 500 + "b", "**/a/" * 100 + "c")
    assert time.process_time() - begin < 1
