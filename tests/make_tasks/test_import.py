"""A repository comes out as a bundle of one commit, and every change of it as a patch that can be undone."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hermes_swe_smith import trees

from tests.swe_smith.shapes import git, write_files

FILES = {
    "a.py": "A = 1\n",
    "crlf.py": "def f():\r\n    return 1\r\n",
    "latin.py": b"# coding: latin-1\nNAME = '\xfc'\n",
    "run.py": "#!/usr/bin/env python\nprint(1)",
    "dir with space/\u00fc.py": "B = 2\n",
    "pyproject.toml": "[project]\nname = 'x'\n",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    write_files(root, FILES)
    (root / "run.py").chmod(0o755)
    git(root, "init", "-q", "-b", "trunk")
    (root / ".git/info").mkdir(exist_ok=True)
    (root / ".git/info/attributes").write_text("* -text\n")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "one")
    git(root, "tag", "v1")
    (root / "a.py").write_text("A = 2\n")
    git(root, "commit", "-q", "-a", "-m", "two")
    git(root, "branch", "topic/x")
    return root


def imported(folder: Path, source: Path, ref: str) -> dict[str, Any]:
    folder.mkdir()
    arguments = {"repo": str(folder / "repo.git"), "source": str(source), "ref": ref, "message": "x"}
    arguments |= {"bundle": str(folder / "bundle"), "read": ["pyproject.toml", "setup.py"]}  # type: ignore[dict-item]
    return trees.import_project(arguments, io.BytesIO())


def test_any_name_of_a_commit_gives_its_tree_as_one_commit(repository: Path, tmp_path: Path) -> None:
    first, second = (git(repository, "rev-parse", each).decode().strip() for each in ("v1", "HEAD"))
    git(repository, "bundle", "create", "-q", str(tmp_path / "all.bundle"), "--all")
    git(repository, "bundle", "create", "-q", str(tmp_path / "no head.bundle"), "trunk")
    cases = [
        (repository / ".git", "HEAD", second),
        (repository / ".git", "v1", first),
        (repository / ".git", first, first),
        (repository / ".git", first[:9], first),
        (repository, "topic/x", second),
        (tmp_path / "all.bundle", "v1", first),
        (tmp_path / "all.bundle", "HEAD", second),
        (tmp_path / "no head.bundle", "trunk", second),
        (tmp_path / "no head.bundle", second[:10], second),
    ]
    commits: dict[str, set[str]] = {}
    for number, (source, ref, expected) in enumerate(cases):
        answer = imported(tmp_path / str(number), source, ref)
        assert answer["upstream"] == expected, (source, ref)
        assert list(answer["files"]) == ["pyproject.toml"]
        commits.setdefault(expected, set()).add(answer["commit"])
    assert [len(each) for each in commits.values()] == [1, 1], "the same tree is the same commit"
    git(tmp_path, "clone", "-q", str(tmp_path / "1/bundle"), "clone")
    assert (tmp_path / "clone/a.py").read_text() == "A = 1\n"
    assert git(tmp_path / "clone", "log", "--format=%H").decode().split() == list(commits[first])


@pytest.mark.parametrize("ref", ["nothing", "0" * 40])
def test_a_commit_that_is_not_there_is_refused(repository: Path, tmp_path: Path, ref: str) -> None:
    with pytest.raises(trees.TreeError, match="there is no commit"):
        imported(tmp_path / "out", repository, ref)


def test_nothing_of_a_repository_is_run(repository: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for key in ("core.fsmonitor", "uploadpack.packObjectsHook", "core.sshCommand", "core.pager", "gpg.program"):
        git(repository, "config", key, f"touch {mark}; false")
    for hook in ("post-checkout", "pre-commit", "post-update", "reference-transaction"):
        path = repository / ".git/hooks" / hook
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\ntouch {mark}\n")
        path.chmod(0o755)
    imported(tmp_path / "out", repository, "HEAD")
    assert not mark.exists()


CHANGES = {
    "crlf.py": b"def f():\r\n    return 2\r\n",
    "latin.py": b"# coding: latin-1\nNAME = '\xe4'\n",
    "run.py": b"#!/usr/bin/env python\nprint(2)",
    "dir with space/\u00fc.py": b"B = 3\n",
}


def test_a_patch_makes_the_change_and_undoes_it(repository: Path, tmp_path: Path) -> None:
    imported(tmp_path / "out", repository, "HEAD")
    arguments = {"repo": str(tmp_path / "out/repo.git"), "files": [(path, len(data)) for path, data in CHANGES.items()]}
    answer = trees.make_patch(arguments, io.BytesIO(b"".join(CHANGES.values())))
    patch = json.loads(json.dumps(answer))["patch"]
    git(tmp_path, "clone", "-q", str(tmp_path / "out/bundle"), "clone")
    (tmp_path / "patch").write_bytes(patch.encode())
    git(tmp_path / "clone", "apply", "--whitespace=nowarn", str(tmp_path / "patch"))
    for path, data in CHANGES.items():
        assert (tmp_path / "clone" / path).read_bytes() == data
    assert (tmp_path / "clone/run.py").stat().st_mode & 0o100
    git(tmp_path / "clone", "apply", "-R", "--whitespace=nowarn", str(tmp_path / "patch"))
    assert git(tmp_path / "clone", "status", "--porcelain") == b""
