"""What is remembered of the host's packages: as long as it is right, and no longer."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hermes_core.sandbox.linux import mounts
from hermes_core.sandbox.local import packages, view

Look = Callable[[], tuple[str, ...]]


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system directory with a Python in it, which has settled."""
    top = tmp_path / "usr"
    (top / "lib" / "python3" / "site-packages" / "inside").mkdir(parents=True)
    monkeypatch.setattr(mounts, "SYSTEM_DIRECTORIES", (str(top),))
    monkeypatch.setattr(view, "interpreter_prefixes", lambda: ())
    monkeypatch.setattr(packages, "_SETTLED_NS", 0)
    return top


@pytest.fixture
def look(top: Path, tmp_path: Path) -> Iterator[Look]:
    """What a new process would find."""

    def look() -> tuple[str, ...]:
        time.sleep(0.02)  # longer than the clock of the file system takes to move
        packages._search.cache_clear()
        return packages.package_folders.__wrapped__(tmp_path / "state" / "packages.json")

    yield look
    packages._search.cache_clear()  # of a host that was made up


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The searches so far."""
    made: list[object] = []
    search = view.search_packages
    monkeypatch.setattr(view, "search_packages", lambda *given: (made.append(given), search(*given))[1])
    return made


def test_the_next_process_does_not_search(top: Path, look: Look, searches: list[object]) -> None:
    assert look() == look() == (f"{top}/lib/python3/site-packages",)
    assert len(searches) == 1
    (top / "lib" / "python3" / "site-packages" / "new").mkdir()
    (top / "lib" / "python3" / "site-packages" / "inside" / "site-packages").mkdir()
    look()
    assert len(searches) == 1, "what changes inside the folders is masked as before"


def _link(top: Path) -> None:
    (top / "elsewhere").mkdir()
    (top / "lib" / "dist-packages").symlink_to(top / "elsewhere")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda top: (top / "lib" / "dist-packages").mkdir(), ["lib/dist-packages", "lib/python3/site-packages"]),
        (
            lambda top: (top / "opt" / "py" / "site-packages").mkdir(parents=True),
            ["lib/python3/site-packages", "opt/py/site-packages"],
        ),
        (lambda top: (top / "lib" / "python3").rename(top / "lib" / "python4"), ["lib/python4/site-packages"]),
        (_link, ["elsewhere", "lib/python3/site-packages"]),
    ],
    ids=["beside", "deep", "renamed", "linked"],
)
def test_a_change_is_seen(
    top: Path, look: Look, searches: list[object], change: Callable[[Path], object], found: list[str]
) -> None:
    look()
    time.sleep(0.02)
    before = os.stat(top / "lib")
    change(top)
    os.utime(top / "lib", ns=(before.st_atime_ns, before.st_mtime_ns))  # as an archive's tool sets it
    assert look() == tuple(f"{top}/{each}" for each in found)
    assert look() == tuple(f"{top}/{each}" for each in found)
    assert len(searches) == 2


@pytest.mark.root
def test_a_directory_that_becomes_readable_is_searched(top: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = top / "hidden"
    (hidden / "site-packages").mkdir(parents=True)
    scan = os.scandir

    def refused(directory: str) -> object:
        if str(directory) == str(hidden) and not hidden.stat().st_mode & 0o400:
            raise PermissionError(directory)
        return scan(directory)

    monkeypatch.setattr(os, "scandir", refused)
    hidden.chmod(0)
    assert look() == (f"{top}/lib/python3/site-packages",)
    hidden.chmod(0o700)
    assert look() == (f"{top}/hidden/site-packages", f"{top}/lib/python3/site-packages")


def test_what_changed_a_moment_ago_is_not_remembered(
    top: Path, look: Look, searches: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_SETTLED_NS", 10**12)
    look()
    look()
    assert len(searches) == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"found": []}', "\x00", None])
def test_a_file_that_can_not_be_used_is_replaced(top: Path, look: Look, tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "state" / "packages.json"
    if text is not None:
        file.parent.mkdir()
        file.write_text(text)
    assert look() == (f"{top}/lib/python3/site-packages",)
    assert json.loads(file.read_text())["found"] == [f"{top}/lib/python3/site-packages"]
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_a_process_searches_once_for_all_its_runtimes(
    top: Path, look: Look, searches: list[object], tmp_path: Path
) -> None:
    found = look()
    assert packages.package_folders.__wrapped__(tmp_path / "another" / "packages.json") == found
    assert len(searches) == 1
    assert json.loads((tmp_path / "another" / "packages.json").read_text())["found"] == [*found]


def test_without_a_place_for_the_file_it_searches(top: Path) -> None:
    packages._search.cache_clear()
    assert packages.package_folders.__wrapped__(Path("/proc/none/packages.json")) == (
        f"{top}/lib/python3/site-packages",
    )
