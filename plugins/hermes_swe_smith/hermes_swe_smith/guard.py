"""Decides which files of the tested tree belong to the tests, and which of an agent's files would hide others.

This module is sent into the sandbox with `trees.py`; standard library only, Python >= 3.8.
"""

# ruff: noqa: PTH118, PTH120
# (pathlib would be one import more)

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # annotations are not evaluated, so the newer spellings do no harm on 3.8
    from collections.abc import Iterable

    Entry = tuple[str, str]
    Tree = dict[str, Entry]

CONFIGURATION = (
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
    ".coveragerc",
)
"""Files at the top of a checkout that pytest reads, or coverage in its process."""

STARTUP = ("sitecustomize", "usercustomize")
METADATA = re.compile(r"\.(dist-info|egg-info|egg|egg-link|pth)$", re.IGNORECASE)
COMPILED = re.compile(r"(^|/)__pycache__/|\.py[co]$")
"""Compiled files. Python and pytest run one in place of the source beside it, if it claims the source's age."""

IMPORTABLE = (".py", ".so", ".pyd")
TEST_DIRECTORY = re.compile(r"^tests?$|^tests?[_-]|[_-]tests?$|^testing$|^testdata$", re.IGNORECASE)
TEST_MODULE = re.compile(r"^(test_.*|.*_test|tests?)\.py$")


class Guard:
    """Decides which files of the tested tree come from the clean tree, whatever the agent did.

    These are the files of the tests, and the files that belong to tests by their name or place: `conftest.py` anywhere,
    pytest's configuration, everything in the test directories of the tests' files, and test modules beside the tests'
    files. All other files are the agent's, also a source file whose doctests are among the tests.
    """

    def __init__(self, test_files: Iterable[str], bug: set[str]) -> None:
        """Args:
        test_files: the files of the tests, except sources whose only tests are doctests.
        bug: the files with the bug.
        """
        self._files = set(test_files)
        self._beside = {os.path.dirname(path) for path in self._files}
        sources = bug - self._files
        self._below = tuple({top + "/" for path in self._files for top in [_test_directory(path, sources)] if top})

    def protects(self, path: str) -> bool:
        """Return whether the clean tree's version of a file is tested."""
        return path in self._files or self.belongs(path)

    def belongs(self, path: str) -> bool:
        """Return whether a file belongs to the tests by its name or place."""
        folder, name = os.path.split(path)
        return (
            name == "conftest.py"
            or path in CONFIGURATION
            or path.startswith(self._below)
            or (folder in self._beside and bool(TEST_MODULE.match(name)))
        )


def _test_directory(path: str, bug: set[str]) -> str:
    """Return the topmost directory above a test file whose name is that of a test directory, or an empty string.

    A directory with the bug does not count, because it is a package of the project (`test_tools/core.py`), unless its
    name is exactly `test` or `tests`.
    """
    parts = path.split("/")[:-1]
    named = ["/".join(parts[:depth]) for depth, part in enumerate(parts, 1) if TEST_DIRECTORY.search(part)]
    for folder in named:
        if not any(each.startswith(folder + "/") for each in bug):
            return folder
    plain = [folder for folder in named if folder.split("/")[-1].lower() in ("test", "tests")]
    return plain[-1] if plain else ""


def shadows(tested: Tree, clean: Tree, kept: Tree, import_path: list[str], modules: set[str]) -> set[str]:
    """Return files that the clean tree lacks and that Python would import in place of the environment's modules, or of
    the tests' modules.

    Args:
        tested: the tested files, without the kept ones.
        kept: the files that come from the clean tree, whatever the agent did.
        import_path: the directories from which the project is imported, relative to the checkout.
        modules: the modules that can be imported without the project.
    """
    sources = [path for path in kept if path.endswith(".py")]
    roots = {"" if entry in (".", "") else entry.strip("/") + "/" for entry in import_path}
    roots.update(_import_root(path, tested, kept) for path in sources)
    taken = {_module(path) for path in sources} | {parent for path in sources for parent in _parents(path)}
    directories = {parent for path in clean for parent in _parents(path)}
    return {
        path
        for path in tested
        if path not in clean
        and (_is_startup(path) or _is_namesake(path, taken, directories) or _hides(path, roots, modules, directories))
    }


def _is_startup(path: str) -> bool:
    """Return whether Python reads a file with this path when it starts, or in place of a source."""
    parts = path.split("/")
    return bool(COMPILED.search(path)) or any(
        part.split(".")[0] in STARTUP or METADATA.search(part) is not None for part in parts
    )


def _import_root(path: str, tested: Tree, kept: Tree) -> str:
    """Return the directory from which pytest imports a file: the nearest one above the file that is not a package."""
    folder = os.path.dirname(path)
    while folder and any(f"{folder}/__init__.py" in tree for tree in (tested, kept)):
        folder = os.path.dirname(folder)
    return folder and folder + "/"


def _is_namesake(path: str, taken: set[str], directories: set[str]) -> bool:
    """Return whether a file is another form of a kept module or package: `test_x/__init__.py` of `test_x.py`."""
    new = [parent for parent in _parents(path) if parent not in directories]
    if path.endswith(IMPORTABLE):
        new.append(path)
    return any(_module(each) in taken for each in new)


def _hides(path: str, roots: Iterable[str], modules: set[str], directories: set[str]) -> bool:
    """Return whether a file would be imported from one of the roots in place of a module of the environment."""
    for root in roots:
        first, inside, _ = path[len(root) :].partition("/")
        importable = path.startswith(root) and (inside or first.endswith(IMPORTABLE))
        if importable and first.split(".")[0] in modules and root + first not in directories:
            return True
    return False


def _module(path: str) -> str:
    """Return the path up to the first dot of its last part, which is the module's name."""
    folder, name = os.path.split(path)
    return os.path.join(folder, name.split(".")[0])


def in_the_way(tested: Tree, kept: Tree) -> set[str]:
    """Return tested files that collide with kept files: a file at a path where a kept file needs a directory, or a file
    below the path of a kept file."""
    directories = {parent for path in kept for parent in _parents(path)}
    return {path for path in tested if path in directories or any(parent in kept for parent in _parents(path))}


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def is_undone(path: str, work: Tree, start: Tree, kept: Tree) -> bool:
    """Return whether the agent changed a protected file, and so the change is undone. A file that is hidden from the
    agent and missing in the work is no change."""
    return work.get(path) != start.get(path) and work.get(path) != kept.get(path)
