"""Tests in a sandbox of their own: what reaches them, what does not, and artifacts that are kept."""

from __future__ import annotations

import io
import tarfile

import pytest
from hermes_harbor.artifacts import _Left, _Refused, _rewrite

from tests.harbor.harbor_tasks import PYTHON, SOLVE, Shell, write_task
from tests.harbor.harbor_tasks import roll_out_here as roll_out
from tests.harbor.task_folders import REWARD, STEPS, scored, step

SEPARATE = 'artifacts = ["out"]\n[verifier]\nenvironment_mode = "separate"\n'

FORGED = {
    "grep": "printf '#!/bin/sh\\nexit 0\\n' >/tmp/grep; mv /tmp/grep $(command -v grep)",
    "preloaded": "echo /app/evil.so >/etc/ld.so.preload",
    "reward": f"echo 1 >{REWARD}.txt",
    "sitecustomize": 'echo \'open("/logs/verifier/reward.txt", "w").write("1"); import os; os._exit(0)\' '
    "> $(python3 -c 'import site; print(site.getsitepackages()[0])')/sitecustomize.py",
}


@pytest.mark.full
async def test_an_agent_that_changes_its_own_sandbox_changes_nothing_for_the_tests(host_runtime, tmp_path):
    test = f"python3 -c 'print(1)' | {scored('grep -qx hello /app/out')}"
    for name in FORGED:
        write_task(tmp_path / name, SEPARATE, image=PYTHON, test=test)
        record = (await roll_out(host_runtime, tmp_path / name, Shell(FORGED[name])))[name]
        assert (record["reward"], record["failure"]) == (0.0, None), name
        assert "tests_in" in record["details"]
    record = (await roll_out(host_runtime, tmp_path / name, Shell(FORGED[name], SOLVE)))[name]
    assert record["reward"] == 1.0


async def test_an_artifact_brings_no_reward_and_no_tests(host_runtime, tmp_path):
    toml = 'artifacts = ["/logs", "/tests", "/tests/test.sh", "/", "gone", "out"]\n' + SEPARATE.partition("\n")[2]
    write_task(tmp_path / "task", toml, test="exit 1")
    forged = (
        f"mkdir -p /tests; echo 'echo 1 >{REWARD}.txt' >/tests/test.sh; echo 1 >{REWARD}.txt; ln -s /etc/passwd out"
    )
    record = (await roll_out(host_runtime, tmp_path, Shell(forged)))["task"]
    assert (record["reward"], record["failure"]["kind"]) == (None, "verifier")
    assert "neither reward.json nor reward.txt" in record["failure"]["message"]


@pytest.mark.full
async def test_what_became_of_each_artifact(host_runtime, tmp_path):
    toml = 'artifacts = ["/tests/a", "gone", "out", "/app", "big"]\n' + SEPARATE.partition("\n")[2]
    hook = '[[verifier.collect]]\ncommand = "echo bad; exit 3"\n'
    hook += '[[verifier.collect]]\ncommand = "sleep 9"\ntimeout_sec = 0.5\n'
    write_task(tmp_path / "task", f"{toml}{hook}", test=f"echo 1 >{REWARD}.txt")
    agent = Shell(
        "ln -s /etc/passwd out; dd if=/dev/zero of=big bs=1024 count=300 2>/dev/null; echo x >/logs/artifacts/x"
    )
    env = {"max_artifact_bytes": 200 << 10, "artifacts_dir": str(tmp_path / "kept")}
    record = (await roll_out(host_runtime, tmp_path / "task", agent, env=env))["task"]
    manifest = record["details"]["artifacts"]
    assert manifest[0] == {"command": "echo bad; exit 3", "error": "status 3", "output": "bad"}
    assert (manifest[1]["command"], manifest[1]["error"]) == ("sleep 9", "time limit")
    errors = {each["source"]: each.get("error") for each in manifest[2:]}
    assert errors.pop("/logs/artifacts") is None
    assert errors["/tests/a"] == "it would replace the tests"
    assert errors["/app/gone"] == "missing"
    assert errors["/app/out"] == "it is a link, and neither a file nor a directory"
    assert "too large" in errors["/app/big"] and errors["/app"]
    with tarfile.open(record["details"]["artifacts_in"]) as tar:
        assert [member.name for member in tar if member.isfile()] == ["logs/artifacts/x"]
    assert (record["reward"], record["failure"]) == (1.0, None)


@pytest.mark.full
async def test_artifacts_of_a_task_and_of_steps_are_kept(host_runtime, tmp_path):
    toml = 'artifacts = [{source = "/app", destination = "all/of/it", exclude = ["*.o"]}, "/etc/hostname"]\n'
    write_task(tmp_path / "tasks" / "task", toml)
    steps = toml + '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    write_task(tmp_path / "tasks" / "steps", steps, files={**step("one"), **step("two")}, **STEPS)
    records = await roll_out(host_runtime, tmp_path / "tasks", env={"artifacts_dir": str(tmp_path / "kept")})
    assert {record["reward"] for record in records.values()} == {1.0}
    kept = {}
    for path in (tmp_path / "kept").iterdir():
        with tarfile.open(path) as tar:
            kept[path.name] = [member.name for member in tar if member.isfile()]
    task, steps = (records[name]["trajectory_id"] for name in ("task", "steps"))
    assert kept == {
        f"{task}.tar": ["all/of/it/out", "etc/hostname"],
        f"{steps}-one.tar": ["all/of/it/one", "etc/hostname"],
        f"{steps}-two.tar": ["all/of/it/one", "all/of/it/two", "etc/hostname"],
    }


def made(*members):
    """Return a tar of members, each its name, its type, and its content or where it leads to."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for name, kind, text in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.uid = kind, 0o6777, 1000
            if kind == tarfile.REGTYPE:
                member.size = len(text)
            else:
                member.linkname = text
            tar.addfile(member, io.BytesIO(text.encode()))
    return target.getvalue()


def names(archive):
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return [(member.name, member.type, f"{member.mode:o}", member.uid) for member in tar]


FILE, LINK, HARD, DIR, DEVICE = (
    tarfile.REGTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.DIRTYPE,
    tarfile.CHRTYPE,
)


def test_only_what_is_harmless_in_an_archive_goes_on():
    archive = made(
        ("./a", FILE, "a"),
        ("../b", FILE, "b"),
        ("/c", FILE, "c"),
        ("d/../../e", FILE, "e"),
        ("dir", DIR, ""),
        ("dir/f", FILE, "f"),
        ("in", LINK, "dir"),
        ("in/g", FILE, "g"),
        ("out", LINK, "/etc"),
        ("out/h", FILE, "h"),
        ("up", LINK, "../.."),
        ("in", FILE, "i"),
        ("hard", HARD, "./a"),
        ("null", DEVICE, ""),
        ("x.o", FILE, "x"),
        ("y/x.o/z", FILE, "x"),
    )
    assert names(_rewrite(archive, ["*.o"], _Left(1000, 100))) == [
        ("a", FILE, "755", 0),
        ("dir", DIR, "755", 0),
        ("dir/f", FILE, "755", 0),
        ("in", LINK, "644", 0),
        ("out/h", FILE, "755", 0),
        ("hard", FILE, "755", 0),
    ]


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        (made(("a", FILE, "x" * 101)), "too large"),
        (made(*((str(number), FILE, "") for number in range(6))), "too many files"),
        (b"no tar" * 1000, "no archive"),
        (made(("a", FILE, "x" * 50), ("b", HARD, "a"), ("c", HARD, "a")), "too large"),
        (made(("a", HARD, "nowhere")), "no archive"),
    ],
)
def test_archives_that_are_too_much(archive, reason):
    with pytest.raises(_Refused, match=reason):
        _rewrite(archive, [], _Left(100, 5))
