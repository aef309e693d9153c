"""Which of an agent's files would take the place of others: by every way in which Python and pytest find modules."""

import pytest
from hermes_swe_smith.guard import Guard, shadows

ENTRY = ("100644", "0" * 40)
MODULES = {"json", "typing", "pytest", "_pytest"}

CLEAN = [
    "conftest.py",
    "setup.cfg",
    "src/pkg/__init__.py",
    "src/pkg/core.py",
    "checks/test_core.py",
    "checks/helper.py",
    "src/pkg/inner/__init__.py",
    "src/pkg/inner/test_inner.py",
    "tests/unit/__init__.py",
    "tests/unit/test_unit.py",
    "tests/__init__.py",
]
TESTS = ["checks/test_core.py", "src/pkg/inner/test_inner.py", "tests/unit/test_unit.py"]


def removed(*added, without=()):
    clean = dict.fromkeys(CLEAN, ENTRY)
    guard = Guard(TESTS, {"src/pkg/core.py"})
    kept = {path: ENTRY for path in clean if guard.protects(path)}
    work = {path: ENTRY for path in (*CLEAN, *added) if path not in without}
    tested = {path: entry for path, entry in work.items() if not guard.protects(path)}
    gone = {path for path in added if guard.protects(path)}
    return gone | shadows(tested, clean, kept, ["src"], MODULES)


@pytest.mark.parametrize(
    "path",
    [
        "checks/__pycache__/test_core.cpython-311-pytest-8.4.2.pyc",
        "__pycache__/conftest.cpython-311-pytest-8.4.2.pyc",
        "src/pkg/__pycache__/core.cpython-311.pyc",
        "src/pkg/new.pyc",
        "checks/test_core/__init__.py",
        "checks/test_core/data.txt",
        "checks/test_core.cpython-311-x86_64-linux-gnu.so",
        "conftest/__init__.py",
        "conftest.abi3.so",
        "src/pkg/inner/test_inner/__init__.py",
        "tests.py",
        "checks.py",
        "src/pkg.py",
        "json.py",
        "json/__init__.py",
        "checks/typing.py",
        "src/typing.py",
        "_pytest/runner.py",
        "sitecustomize.py",
        "src/usercustomize/__init__.py",
        "Evil-1.DIST-INFO/entry_points.txt",
        "src/evil.Egg-Info/entry_points.txt",
        "evil.pth",
        "tests/unit/test_more.py",
        "tests/data.json",
        "src/pkg/inner/test_more.py",
        "other/conftest.py",
    ],
)
def test_what_takes_the_place_of_another_is_removed(path):
    assert removed(path) == {path}


@pytest.mark.parametrize(
    "path",
    [
        "src/pkg/json.py",
        "src/pkg/typing/__init__.py",
        "src/pkg/inner/json.py",
        "src/pkg/core/__init__.py",
        "src/new/__init__.py",
        "src/pkg/conftest_helper.py",
        "checks/more.py",
        "docs/json.md",
        "json.md",
        "setup.py",
        "setup/data.txt",
        "test_core.py",
        "conftest.txt",
        "src/pkg/pycache.py",
        "src/pkg/data.egg-info.txt",
    ],
)
def test_what_takes_nobodys_place_is_the_agents_work(path):
    assert removed(path) == set()


def test_a_directory_that_is_no_package_any_more_is_a_root():
    inits = ("src/pkg/__init__.py", "src/pkg/inner/__init__.py")
    assert removed("src/pkg/inner/json.py", without=inits) == {"src/pkg/inner/json.py"}
    assert removed("src/pkg/json.py", without=inits[:1]) == {"src/pkg/json.py"}


@pytest.mark.parametrize("directory", ["tests", "test", "Tests", "testing", "unit_tests", "test-suite", "testdata"])
def test_all_of_a_directory_of_tests_is_protected(directory):
    guard = Guard([f"{directory}/deep/test_x.py"], set())
    assert guard.protects(f"{directory}/data/table.csv") and not guard.protects("src/table.csv")


@pytest.mark.parametrize(
    ("test", "bug", "kept", "left"),
    [
        # A source file with doctests is none of the tests' files: they are not named to the guard.
        (
            "tests/test_x.py",
            "pkg/core.py",
            ["tests/a.txt", ".coveragerc"],
            ["pkg/core.py", "pkg/test.py", "pkg/other.py"],
        ),
        ("pkg/tests/test_x.py", "pkg/core.py", ["pkg/tests/__init__.py"], ["pkg/__init__.py", "pkg/testing.py"]),
        ("pkg/core_test.py", "pkg/core.py", ["pkg/more_test.py", "pkg/tests.py"], ["pkg/core.py", "pkg/new.py"]),
        ("README.rst", "pkg/core.py", ["README.rst"], ["README.md", "pkg/README.rst"]),
        ("checks/check_x.py", "pkg/core.py", ["checks/check_x.py"], ["checks/more.py"]),
        # A package that is named like tests, and tests that the bug is in.
        ("test_kit/test_x.py", "test_kit/core.py", ["test_kit/test_y.py"], ["test_kit/core.py", "test_kit/new.py"]),
        ("test_kit/tests/test_x.py", "test_kit/core.py", ["test_kit/tests/a.txt"], ["test_kit/new.py"]),
        ("tests/test_x.py", "tests/helpers.py", ["tests/helpers.py", "tests/a.txt"], ["pkg/core.py"]),
        ("tests/unit/test_x.py", "tests/unit/test_x.py", ["tests/unit/test_x.py", "tests/a.txt"], ["pkg/core.py"]),
        ("tests/test_x.py", "conftest.py", ["conftest.py"], ["pkg/core.py"]),
    ],
)
def test_files_belong_to_the_tests_by_name_or_place(test, bug, kept, left):
    guard = Guard([test], {bug})
    assert {path: guard.protects(path) for path in (*kept, *left)} == {
        **dict.fromkeys(kept, True),
        **dict.fromkeys(left, False),
    }
