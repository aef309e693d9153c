"""What a repository is, and what its packaging files say, is found out without running anything of it."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from hermes_make_tasks import requirements
from hermes_make_tasks.folder import ATTEMPTS, Folder
from hermes_make_tasks.origin import RepositoryOrigin, check_ref

from hermes_core import DatasetError, UsageError
from tests.swe_smith.shapes import git, write_files


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "a project"
    write_files(root, {"a.py": "A = 1\n"})
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "clean")
    return root


def unpacked(origin: RepositoryOrigin, to: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(b"".join(origin.archive()))) as tar:
        # Debian 12's Python has no filters, and newer ones warn where none is named.
        tar.extractall(to, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return to


def test_of_a_path_only_objects_and_names_are_sent(repository: Path, tmp_path: Path) -> None:
    (repository / ".git/config").write_text("[core]\n\tfsmonitor = touch /tmp/never\n")
    (repository / ".git/hooks").mkdir(exist_ok=True)
    (repository / ".git/hooks/post-checkout").write_text("#!/bin/sh\n")
    os.mkfifo(repository / ".git/objects/pipe")
    origin = RepositoryOrigin.parse(str(repository))
    sent = unpacked(origin, tmp_path / "sent")
    assert sorted(path.name for path in sent.iterdir()) == ["HEAD", "objects", "refs"]
    assert git(tmp_path, "clone", "-q", str(sent), "clone") == b""
    assert (tmp_path / "clone/a.py").read_text() == "A = 1\n"


@pytest.mark.parametrize(
    "part", [".git", ".git/HEAD", ".git/packed-refs", ".git/refs", ".git/refs/heads", ".git/objects", ".git/objects/ab"]
)
def test_nothing_of_another_place_is_sent(part: str, repository: Path, tmp_path: Path) -> None:
    """Links, wherever they are: before, those to folders were followed, or their objects left out."""
    elsewhere = tmp_path / "elsewhere"
    if (repository / part).exists():
        (repository / part).rename(elsewhere)
    else:
        elsewhere.mkdir()
    (repository / part).symlink_to(elsewhere)
    with pytest.raises((DatasetError, UsageError), match=r"is a link|part of another repository") as refused:
        list(RepositoryOrigin.parse(str(repository)).archive())
    assert "git clone --no-local" in refused.value.hint


@pytest.mark.parametrize(
    ("file", "text"),
    [(".git", "gitdir: {}/.git"), (".git/commondir", "{}/.git"), (".git/objects/info/alternates", "{}/.git/objects")],
)
def test_a_part_of_another_repository_is_refused(file: str, text: str, repository: Path, tmp_path: Path) -> None:
    given = tmp_path / "given"
    if file != ".git":
        git(tmp_path, "clone", "-q", str(repository), str(given))
    write_files(given, {file: text.format(repository) + "\n"})
    with pytest.raises((DatasetError, UsageError), match=r"another repository") as refused:
        list(RepositoryOrigin.parse(str(given)).archive())
    assert "git clone --no-local" in refused.value.hint


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("https://example.org/Owner/name.git", "Owner__name"),
        ("git@example.org:owner/na_me", "owner__na_me"),
        ("ssh://host/deep/owner/x__y/", "owner__x-y"),
        ("https://host", "local__host"),
    ],
)
def test_a_url_has_a_name(given: str, name: str) -> None:
    assert (RepositoryOrigin.parse(given).url, RepositoryOrigin.parse(given).name) == (given, name)


def test_what_is_no_repository_is_refused(repository: Path, tmp_path: Path) -> None:
    assert RepositoryOrigin.parse(str(repository)).name == "local__a-project"
    with pytest.raises(UsageError, match="there is no repository"):
        RepositoryOrigin.parse(str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="git init"):
        RepositoryOrigin.parse(str(tmp_path))
    for ref in ("--upload-pack=x", "", "a..b", "a b", "HEAD@{1}", "x\n"):
        with pytest.raises(UsageError):
            check_ref(ref)
    assert check_ref("v1.2+x/y-z") == "v1.2+x/y-z"


PYPROJECT = """
[project]
name = "My.Project"
version = "1"
dependencies = ["attrs>=20"]
[project.optional-dependencies]
docs = ["sphinx"]
Test = ["my-project[more]", "hypothesis"]
more = ["simplejson; python_version > '3.8'"]
[dependency-groups]
dev = ["ruff"]
"""


def test_requirements_are_those_of_the_project_and_its_tests() -> None:
    found = requirements.find_requirements({"pyproject.toml": PYPROJECT})
    assert found == ["attrs>=20", "hypothesis", "simplejson; python_version > '3.8'"]
    assert requirements.with_pytest(found or [])[-1] == "pytest>=7"
    assert requirements.with_pytest(["pytest-asyncio"])[-1] == "pytest>=7"
    assert requirements.with_pytest(["PyYAML", "pytest~=8.0"]) == ["PyYAML", "pytest~=8.0"]


def test_dependency_groups_may_include_each_other() -> None:
    groups = '[dependency-groups]\ntest = ["a", {include-group = "more"}]\nmore = ["b", {include-group = "test"}]\n'
    assert requirements.find_requirements({"pyproject.toml": f'[project]\nname = "x"\nversion = "1"\n{groups}'}) == [
        "a",
        "b",
    ]


def test_requirements_of_setup_cfg() -> None:
    cfg = "[metadata]\nname = x\n[options]\ninstall_requires =\n    a>=1  # why\n    b\n"
    cfg += "[options.extras_require]\ntesting = c\n"
    assert requirements.find_requirements({"setup.cfg": cfg}) == ["a>=1", "b", "c"]


@pytest.mark.parametrize(
    "files",
    [
        {"setup.py": "setup(name='x', install_requires=read())"},
        {"pyproject.toml": '[project]\nname = "x"\ndynamic = ["dependencies"]\n'},
        {"pyproject.toml": '[tool.poetry]\nname = "x"\n'},
    ],
)
def test_what_only_an_installation_can_tell_is_not_guessed(files: dict[str, str]) -> None:
    assert requirements.find_requirements(files) is None


def test_broken_packaging_files_are_no_error() -> None:
    assert requirements.find_requirements({"pyproject.toml": "[[[", "setup.cfg": "x"}) == []
    odd = '[project]\nname = 3\noptional-dependencies = "x"\ndependencies = [1, "a"]\n'
    assert requirements.find_requirements({"pyproject.toml": odd}) == ["a"]


def test_the_import_path_is_that_of_the_packages() -> None:
    assert requirements.import_path({}, ["pkg/a.py"]) == "."
    assert requirements.import_path({}, ["src/pkg/a.py"]) == "src"
    lib = {"pyproject.toml": '[tool.setuptools]\npackage-dir = {"" = "lib"}\n'}
    assert requirements.import_path(lib, ["lib/a.py", "src/x.py"]) == "lib"
    outside = {"pyproject.toml": '[tool.setuptools.packages.find]\nwhere = ["../x"]\n'}
    assert requirements.import_path(outside, ["../x/a.py"]) == "."


def test_a_torn_line_is_cut_off_and_another_process_is_refused(tmp_path: Path) -> None:
    with Folder(tmp_path / "out") as folder:
        lines = folder.attempts()
        lines.append({"key": "a"})
        lines.close()
        with (tmp_path / "out/making" / ATTEMPTS).open("ab") as file:
            file.write(b'{"key": "b')
        again = folder.attempts()
        assert again.values == [{"key": "a"}]
        again.append({"key": "c"})
        again.close()
        assert [each["key"] for each in folder.attempts().values] == ["a", "c"]
        with pytest.raises(UsageError, match="another process makes tasks"):
            Folder(tmp_path / "out")


def test_a_folder_with_other_tasks_is_refused(tmp_path: Path) -> None:
    with Folder(tmp_path / "out") as folder:
        assert not folder.check_same({"seed": 1, "ref": "HEAD"})
        assert folder.check_same({"seed": 1, "ref": "HEAD"})
        assert not folder.check_same({"seed": 2, "ref": "HEAD"}), "nothing was tried yet"
        lines = folder.attempts()
        lines.append({"key": "a"})
        lines.close()
        with pytest.raises(UsageError, match=r"other options: seed \(2 there, 1 now\)"):
            folder.check_same({"seed": 1, "ref": "HEAD"})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/tasks.jsonl").write_text("{}\n")
    with Folder(tmp_path / "mine") as folder, pytest.raises(UsageError, match="not made here"):
        folder.check_same({})
