"""Folders that images are built from: what their digest depends on, what is left out, and what a stranger can't do."""

from __future__ import annotations

import io
import os
import socket
import tarfile
import time
from pathlib import Path

import pytest

from hermes_core.errors import ImageError
from hermes_core.sandbox.images import ImageBuild, context_digest, write_context


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "context/src").mkdir(parents=True)
    (tmp_path / "context/Dockerfile").write_text("FROM x\n")
    (tmp_path / "context/src/a").write_text("one")
    return tmp_path / "context"


def packed(folder: Path, **settings: object) -> dict[str, tarfile.TarInfo]:
    """Return the entries of the archive, whose digest is that of the folder."""
    build, target = ImageBuild(folder, **settings), io.BytesIO()  # type: ignore[arg-type]
    assert write_context(build, target) == context_digest(build)
    target.seek(0)
    with tarfile.open(fileobj=target, encoding="utf-8", errors="surrogateescape") as archive:
        for member in archive:
            if member.isfile():
                content = archive.extractfile(member)
                assert content is not None and content.read() == (folder / member.name).read_bytes()
        return {member.name: member for member in archive.getmembers()}


def test_the_digest_is_of_names_modes_and_contents(folder: Path, tmp_path: Path) -> None:
    seen = [context_digest(ImageBuild(folder))]
    os.utime(folder / "src/a", (1, 1))
    moved = folder.rename(tmp_path / "elsewhere")
    assert context_digest(ImageBuild(moved)) == seen[0]

    def change(what: str) -> None:
        seen.append(context_digest(ImageBuild(moved)))
        assert len({*seen}) == len(seen), what

    (moved / "src/a").write_text("two")
    change("content")
    (moved / "src/a").chmod(0o755)
    change("mode")
    (moved / "src/a").rename(moved / "src/b")
    change("name")
    (moved / "src/link").symlink_to("b")
    change("link")
    (moved / "src/link").unlink()
    (moved / "src/link").symlink_to("a")
    change("target")
    (moved / "empty").mkdir()
    change("folder")
    (moved / "Other").write_text("FROM x\n")
    change("file")
    seen.append(context_digest(ImageBuild(moved, "Other")))
    assert len({*seen}) == len(seen), "Dockerfile"


def test_fields_do_not_run_into_each_other(folder: Path) -> None:
    (folder / "ab").write_text("c")
    first = context_digest(ImageBuild(folder))
    (folder / "ab").unlink()
    (folder / "a").write_text("bc")
    assert context_digest(ImageBuild(folder)) != first


def test_what_the_archive_holds(folder: Path) -> None:
    (folder / "out").symlink_to("/etc/passwd")
    (folder / "src/dir").symlink_to("/etc")
    long, odd = "long" * 40, os.fsdecode(b"not-\xff-utf8")
    (folder / long).write_text("1")
    (folder / odd).write_text("2")
    entries = packed(folder)
    assert {*entries} == {"Dockerfile", "src", "src/a", "src/dir", "out", long, odd}
    assert (entries["out"].type, entries["out"].linkname) == (tarfile.SYMTYPE, "/etc/passwd")
    assert entries["src/dir"].issym()
    assert {(entry.uid, entry.gid, entry.uname) for entry in entries.values()} == {(0, 0, "")}
    assert entries["src/a"].mtime == int((folder / "src/a").stat().st_mtime)


FILES = ("a.py", "a.pyc", "docs/a.pyc", "docs/deep/b.pyc", "docs/keep.pyc", "src/a.py", "src/sub/a.py", "x[1]")


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        ("", {*FILES}),
        ("# docs\n\n", {*FILES}),
        ("docs", {*FILES} - {"docs/a.pyc", "docs/deep/b.pyc", "docs/keep.pyc"}),
        ("/docs/", {*FILES} - {"docs/a.pyc", "docs/deep/b.pyc", "docs/keep.pyc"}),
        ("*.pyc", {*FILES} - {"a.pyc"}),
        ("*/*.pyc", {*FILES} - {"docs/a.pyc", "docs/keep.pyc"}),
        ("**/*.pyc", {each for each in FILES if not each.endswith("c")}),
        ("**/*.pyc\n!docs/keep.pyc", {each for each in FILES if not each.endswith("c")} | {"docs/keep.pyc"}),
        ("docs\n!docs/deep", {*FILES} - {"docs/a.pyc", "docs/keep.pyc"}),
        ("!docs/deep\ndocs", {*FILES} - {"docs/a.pyc", "docs/deep/b.pyc", "docs/keep.pyc"}),
        ("src/**", {*FILES} - {"src/a.py", "src/sub/a.py"}),
        ("src/**/a.py", {*FILES} - {"src/a.py", "src/sub/a.py"}),
        ("**", set()),
        ("*", set()),
        ("?.py", {*FILES} - {"a.py"}),
        ("[^b].py", {*FILES} - {"a.py"}),
        ("x\\[1\\]", {*FILES} - {"x[1]"}),
        ("../context/docs\n.\n!", {*FILES}),
        ("sub", {*FILES}),
    ],
)
def test_a_dockerignore_leaves_files_out(folder: Path, patterns: str, left: set[str]) -> None:
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    (folder / "src/a").unlink()
    (folder / ".dockerignore").write_text(patterns)
    entries = packed(folder)
    assert {name for name, entry in entries.items() if entry.isfile()} - {"Dockerfile", ".dockerignore"} == left
    assert {"Dockerfile", ".dockerignore"} <= {*entries}, "the builder needs them"


def test_a_dockerfile_in_a_folder_that_is_left_out(folder: Path) -> None:
    (folder / "docker").mkdir()
    (folder / "docker/Dockerfile").write_text("FROM x\n")
    (folder / ".dockerignore").write_text("docker\n")
    assert "docker/Dockerfile" in packed(folder, dockerfile="docker/Dockerfile")


def refused(folder: Path, reason: str, **settings: object) -> None:
    began = time.monotonic()
    with pytest.raises(ImageError, match=reason) as failed:
        context_digest(ImageBuild(folder, **settings))  # type: ignore[arg-type]
    assert str(folder) in failed.value.message and failed.value.hint
    assert time.monotonic() - began < 20


def test_a_folder_that_can_not_be_built_is_refused(folder: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "it has no Dockerfile")
    refused(folder, "it has no Other", dockerfile="Other")
    for outside in ("../Dockerfile", "/etc/passwd", "./Dockerfile"):
        refused(folder, "not a path in the folder", dockerfile=outside)
    (folder / "Linked").symlink_to("Dockerfile")
    refused(folder, "Linked is a link", dockerfile="Linked")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/Dockerfile").write_text("FROM x\n")
    (folder / "elsewhere").symlink_to(tmp_path / "other")
    refused(folder, "elsewhere is a link", dockerfile="elsewhere/Dockerfile")


def test_special_files_are_refused_without_being_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(folder / "src/pipe")
    refused(folder, r"'src/pipe' is neither a file, a folder nor a link")
    (folder / "src/pipe").unlink()
    monkeypatch.chdir(folder)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        refused(folder, r"'socket' is neither")
    (folder / "socket").unlink()
    os.mkfifo(folder / ".dockerignore")
    refused(folder, "can't be read")


def test_size_number_and_depth_are_limited(folder: Path) -> None:
    refused(folder, "more than 9 bytes", max_bytes=9)
    packed(folder, max_bytes=10)
    refused(folder, "more than 2 files", max_files=2)
    packed(folder, max_files=3)
    deep = folder.joinpath(*["d"] * 70)
    deep.mkdir(parents=True)
    refused(folder, "more than 64 folders in each other")


def test_a_dockerignore_can_not_take_forever(folder: Path) -> None:
    (folder / ("a" * 200)).write_text("")
    (folder / ".dockerignore").write_text("*a" * 60 + "b\n" + "**/" * 60 + "b\n")
    began = time.monotonic()
    packed(folder)
    assert time.monotonic() - began < 10, "it takes milliseconds; a search that backs up would never end"
    (folder / ".dockerignore").write_text("a\n" * 501)
    refused(folder, "more than 500 patterns")
    (folder / ".dockerignore").write_text("a" * (64 << 10) + "b")
    refused(folder, "more than 500 patterns")
    (folder / ".dockerignore").unlink()
    refused(folder, "can't be read within 0 s", timeout_s=0)


def test_a_file_that_changes_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.lstat

    def longer(path: Path) -> os.stat_result:
        found = real(path)
        if path.name == "a":
            path.write_text("")
        return found

    monkeypatch.setattr(os, "lstat", longer)
    refused(folder, "became shorter")
