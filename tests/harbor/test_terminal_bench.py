"""Rows of Terminal-Bench 2, and archives that a stranger has made."""

from __future__ import annotations

import base64
import io
import itertools
import json
import tarfile
from pathlib import Path

import pytest
from hermes_harbor.archives import unpack
from hermes_harbor.config import TerminalBench2Config
from hermes_harbor.terminal_bench import TerminalBench2Environment

from hermes_core.errors import DatasetError
from hermes_core.sandbox.commands import Cwd
from tests.harbor.harbor_tasks import BUSYBOX, TEST, Shell, roll_out


def archive(files, mode="w:gz", links=(), kind=tarfile.SYMTYPE):
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode=mode) as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
        for name, to in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, to
            tar.addfile(member)
    return base64.b64encode(target.getvalue()).decode()


def row(**changes):
    return {
        "task_name": "hello",
        "instruction": "<!-- terminal-bench-canary -->\nWrite hello to /app/out.",
        "docker_image": BUSYBOX,
        "environment_tar": archive({"Dockerfile": "FROM x\nWORKDIR /srv\n"}),
        "tests_tar": archive({"test_outputs.py": "", "data/expected": "hello\n"}),
        "test_sh": "#!/bin/sh\n" + TEST.replace("-qx hello", "-qxf /tests/data/expected"),
        "category": "files",
        "difficulty": "unused",
        **changes,
    }


def written(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


async def test_rows_become_task_folders(tmp_path):
    nested = row(task_name="../../etc", tests_tar=archive({"tests/a": "1"}, "w"), environment_tar=None, category=None)
    path = written(tmp_path, row(), nested)
    made = TerminalBench2Environment(TerminalBench2Config(dataset_name=str(path)))
    await made.setup()
    first, second = made.items()
    assert (first["id"], first["image"], first["metadata"]) == ("hello", BUSYBOX, {"category": "files"})
    assert (made.format_prompt(first), made.cwd(first)) == ("Write hello to /app/out.", Cwd.IMAGE)
    assert second["id"] == "../../etc"
    folders = [made._tasks[item["id"]].folder for item in (first, second)]
    assert (folders[0] / "tests" / "data" / "expected").read_text() == "hello\n"
    assert sorted(path.name for path in (folders[1] / "tests").iterdir()) == ["a", "test.sh"]
    assert folders[0].parent == folders[1].parent
    await made.aclose()
    assert not folders[0].parent.exists()


async def test_a_row_is_solved_on_docker(runtime, tmp_path):
    records = await roll_out(
        runtime, written(tmp_path, row()), Shell("mkdir -p /app; echo hello >/app/out"), environment="terminal-bench-2"
    )
    assert (records["hello"]["reward"], records["hello"]["failure"]) == (1.0, None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"task_name": None}, "line 1, field 'task_name'"),
        ({"docker_image": ""}, "line 1, field 'docker_image'"),
        ({"tests_tar": "no base64!"}, "line 1, field 'tests_tar': no archive"),
        ({"environment_tar": base64.b64encode(b"no tar").decode()}, "field 'environment_tar': no archive"),
        ({"tests_tar": archive({"test.sh/x": ""})}, "test.sh must be a file"),
    ],
)
async def test_a_row_that_is_wrong_is_named(tmp_path, change, reason):
    made = TerminalBench2Environment(TerminalBench2Config(dataset_name=str(written(tmp_path, row(**change)))))
    with pytest.raises(DatasetError, match=reason):
        await made.setup()
    await made.aclose()


LIMITS = {"max_bytes": 10_000, "max_files": 5}


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_archives_of_every_compression(tmp_path, mode):
    unpack(archive({"a/b": "c"}, mode), tmp_path / "x", "here", **LIMITS)
    assert (tmp_path / "x" / "a" / "b").read_text() == "c"


def test_modes_and_links_that_stay_inside(tmp_path):
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for name, mode in (("a/run.sh", 0o4777), ("a/data", 0o600)):
            member = tarfile.TarInfo(name)
            member.mode = mode
            tar.addfile(member)
        for name, kind, link in (("a/link", tarfile.SYMTYPE, "data"), ("again", tarfile.LNKTYPE, "a/run.sh")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            tar.addfile(member)
    unpack(base64.b64encode(target.getvalue()).decode(), tmp_path / "x", "here", **LIMITS)
    assert [(tmp_path / "x" / name).stat().st_mode & 0o7777 for name in ("a/run.sh", "a/data", "again")] == [
        0o755,
        0o644,
        0o755,
    ]
    assert (tmp_path / "x" / "a" / "link").readlink() == Path("data")


def test_a_link_to_elsewhere_is_not_followed(tmp_path):
    """A link that was inside when it was made, and leads out once another one is there."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for name, link in (("a/b", "../c/d"), ("c", ".."), ("a/b/out", None)):
            member = tarfile.TarInfo(name)
            if link is not None:
                member.type, member.linkname = tarfile.SYMTYPE, link
            tar.addfile(member)
    with pytest.raises(DatasetError, match="leads out"):
        unpack(base64.b64encode(target.getvalue()).decode(), tmp_path / "x", "here", **LIMITS)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (archive({"../out": "x"}), "here: .*leads out"),
        (archive({"a/../../out": "x"}), "here: .*leads out"),
        (archive({}, links=[("a", "/etc/passwd")]), "here: .*leads out"),
        (archive({}, links=[("a", "../out")]), "here: .*leads out"),
        (archive({}, links=[("a", "../out")], kind=tarfile.LNKTYPE), "here: .*leads out"),
        (archive({}, links=[("a", "")], kind=tarfile.CHRTYPE), "here: .*neither a file"),
        (archive({"a": "x" * 10_001}), "here: it has more than 10000 bytes"),
        (archive({str(number): "" for number in range(6)}), "here: it has more than 10000 bytes or 5 files"),
        (archive({"x" * 200_000: ""}), "here: it has more than"),
        (archive({"a": "x" * 5000}, "w")[:4000], "here: no archive"),
        (archive({"a": "x" * 5000})[:40], "here: no archive"),
    ],
    ids=itertools.count(),  # the archives have the time in them
)
def test_archives_of_a_stranger(tmp_path, text, reason):
    with pytest.raises(DatasetError, match=reason):
        unpack(text, tmp_path / "x", "here", **LIMITS)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
