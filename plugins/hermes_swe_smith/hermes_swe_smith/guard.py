"""Which files of the tested tree are the tests' own, and which of an agent's files would take the place of others.

Sent into the sandbox with `trees.py`; standard library only, Python >= 3.8.
"""

# ruff: noqa: PTH119, PTH120
# (pathlib would be one import more)

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # annotations are not evaluated, so the newer spellings do no harm on 3.8
    from collections.abc import Iterable

    Entry = tuple[str, str]
    Tree = dict[str, Entry]

CONFIGURATION = ("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml")
"""What pytest reads at the top of a checkout."""

STARTUP = ("conftest", "sitecustomize", "usercustomize")
METADATA = re.compile(r"\.(dist-info|egg-info|egg|egg-link|pth)$")
TEST_DIRECTORY = re.compile(r"^tests?$|^tests?[_-]|[_-]tests?$")
TEST_MODULE = re.compile(r"^(test_.*|.*_test|tests?)\.py$")


class Guard:
    """Which files of the tested tree are the clean tree's, whatever the agent did.

    The files of the tests, everything in the test directories that they lie in, test modules beside them, `conftest.py`
    anywhere, and what configures pytest. Never a file that the bug is in, unless the tests themselves are in it.
    """

    def __init__(self, test_files: Iterable[str], bug: set[str]) -> None:
        self._files = set(test_files)
        self._bug = bug - self._files
        self._beside = {os.path.dirname(path) for path in self._files}
        self._below = tuple({top + "/" for top in map(_test_directory, self._files) if top})

    def protects(self, path: str) -> bool:
        if path in self._bug:
            return False
        name = os.path.basename(path)
        return (
            path in self._files
            or path.startswith(self._below)
            or path in CONFIGURATION
            or name == "conftest.py"
            or (os.path.dirname(path) in self._beside and bool(TEST_MODULE.match(name)))
        )


def _test_directory(path: str) -> str:
    """The topmost directory above a test file that is one of tests by its name, or nothing."""
    parts = path.split("/")[:-1]
    for depth, part in enumerate(parts, 1):
        if TEST_DIRECTORY.search(part):
            return "/".join(parts[:depth])
    return ""


def shadows(tested: Tree, clean: Tree, import_path: list[str], modules: set[str]) -> set[str]:
    """Files that the clean tree has not and that Python would take for a module of its own or of the environment."""
    roots = ["" if entry in (".", "") else entry.strip("/") + "/" for entry in import_path]
    found = set()
    for path in tested:
        if path in clean:
            continue
        parts = path.split("/")
        if any(part.split(".")[0] in STARTUP[1:] or METADATA.search(part) for part in parts):
            found.add(path)
        for root in roots:
            if not path.startswith(root):
                continue
            first = path[len(root) :].split("/")[0]
            if first.split(".")[0] in modules and not any(
                p == root + first or p.startswith(root + first + "/") for p in clean
            ):
                found.add(path)
    return found


def in_the_way(tested: Tree, kept: Tree) -> set[str]:
    """Files where a kept file needs a directory, and files in a directory where a kept file lies."""
    directories = {parent for path in kept for parent in _parents(path)}
    return {path for path in tested if path in directories or any(parent in kept for parent in _parents(path))}


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def undone(path: str, work: Tree, start: Tree, kept: Tree) -> bool:
    """Whether the agent's change of a protected file is undone; a hidden file that it left alone is none."""
    return work.get(path) != start.get(path) and work.get(path) != kept.get(path)
