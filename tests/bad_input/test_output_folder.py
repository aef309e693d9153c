"""Output folders that can't be used, hold something else, are full, or hold nothing to resume."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_core.datasets import tasks

PROGRAM = [sys.executable, "-m", "hermes_core"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, level, isolates):
    """A directory with a dataset `tasks.jsonl`, and its run in `out`; to be copied."""
    folder = tmp_path_factory.mktemp("finished")
    rows = [{"id": name, "prompt": "p", "check": "true", "solution": "true"} for name in ("a", "b")]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--env.dataset_name=tasks.jsonl", "--agent", "oracle", "--out", "out", *level]
    environment = {**os.environ, "HERMES_PLUGINS": "", "HERMES_ENV_FILE": ""}
    subprocess.run([*PROGRAM, "rollout", "tasks", *arguments], cwd=folder, env=environment, check=True)
    return folder


@pytest.fixture
def ran(finished, tmp_path):
    """The option of a dataset whose run is in `out`."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return "--env.dataset_name=tasks.jsonl"


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("/proc/nowhere", ["can't use /proc/nowhere as the output folder", "choose another"]),
        ("tasks.jsonl", ["can't use tasks.jsonl as the output folder: File exists"]),
        ("tasks.jsonl/x", ["can't use tasks.jsonl/x as the output folder: Not a directory"]),
        ("", ["--out", "the name is empty"]),
        ("a" * 300, ["as the output folder: File name too long"]),
    ],
)
def test_a_folder_that_can_not_be_made_is_refused(hermes, tasks, folder, words):
    hermes("rollout", "tasks", tasks(), "--agent", "oracle", "--out", folder).is_refused(*words)


@pytest.mark.parametrize("name", ["trajectories.jsonl", ".lock"])
def test_a_folder_whose_files_can_not_be_written_is_refused(hermes, tasks, tmp_path, name):
    (tmp_path / "out" / name).mkdir(parents=True)
    done = hermes("rollout", "tasks", tasks(), "--agent", "oracle", "--out", "out", "--resume")
    done.is_refused("can't use out as the output folder: Is a directory" if name == ".lock" else "out")
    assert sorted(os.listdir(tmp_path / "out")) == [name]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_without_the_right_to_write_is_refused(hermes, tasks, tmp_path):
    (tmp_path / "out").mkdir(mode=0o555)
    done = hermes("rollout", "tasks", tasks(), "--agent", "oracle", "--out", "out")
    done.is_refused("can't use out as the output folder: Permission denied")


def test_a_run_that_is_there_is_not_overwritten(hermes, ran, tmp_path):
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    hermes("rollout", "tasks", ran, "--agent", "oracle", "--out", "out").is_refused("already holds a run", "--resume")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--agent", "nop"], ["agent ('oracle' there, 'nop' now)", "give the same options"]),
        (["--agent", "oracle", "--group-size", "2"], ["group_size (1 there, 2 now)"]),
        (["--agent", "oracle", "--items", "1"], ["env.max_items (0 there, 1 now)"]),
        (["--agent", "oracle", "--seed", "7"], ["seed (None there, 7 now)"]),
    ],
)
def test_another_configuration_does_not_resume_it(hermes, ran, tmp_path, level, change, words):
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    hermes("rollout", "tasks", ran, "--out", "out", "--resume", *change, *level).is_refused(
        "another configuration", *words
    )
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_run_without_its_run_json_is_refused(hermes, ran, tmp_path):
    (tmp_path / "out" / "run.json").unlink()
    hermes("rollout", "tasks", ran, "--agent", "oracle", "--out", "out", "--resume").is_refused("no usable run.json")


class ScoresPatches(tasks.TasksEnvironment):
    """A class of its own: `isinstance` keeps what it has found out about a class."""

    score_patch = print


def test_a_line_that_is_no_record_is_named(hermes, ran, tmp_path, level, monkeypatch):
    file = tmp_path / "out" / "trajectories.jsonl"
    file.write_bytes(b"what\n" + file.read_bytes())
    done = hermes("rollout", "tasks", ran, "--agent", "oracle", "--out", "out", "--resume", *level)
    done.is_refused("out/trajectories.jsonl, line 1: no record of a rollout", "remove that line")
    monkeypatch.setattr(tasks, "TasksEnvironment", ScoresPatches)
    hermes("rescore", "out", "--trust-run", *level).is_refused("out/trajectories.jsonl, line 1: no record of a rollout")


def test_rescoring_without_records_is_refused(hermes, ran, tmp_path, level, monkeypatch):
    (tmp_path / "out" / "trajectories.jsonl").unlink()
    monkeypatch.setattr(tasks, "TasksEnvironment", ScoresPatches)
    hermes("rescore", "out", "--trust-run", *level).is_refused("out/trajectories.jsonl can't be read: No such file")


def test_resuming_without_a_folder_is_refused(hermes, tasks):
    hermes("rollout", "tasks", tasks(), "--agent", "oracle", "--resume").is_refused(
        "no run to resume was named", "--out DIR"
    )


def test_a_run_without_a_folder_gets_one_and_says_so(hermes, tasks, tmp_path, level):
    option = tasks()
    for number in (1, 2):
        done = hermes("rollout", "tasks", option, "--agent", "oracle", *level)
        assert done.code == 0
        [folder] = re.findall(r"^records go to (runs/tasks-\d{8}-\d{6}(?:-2)?)$", done.err, re.M)
        assert f"records: {folder}/trajectories.jsonl" in done.out
        assert len((tmp_path / folder / "trajectories.jsonl").read_bytes().splitlines()) == 1
        assert len(list((tmp_path / "runs").iterdir())) == number
    resumed = hermes("rollout", "tasks", option, "--agent", "oracle", "--out", folder, "--resume", *level)
    assert (resumed.code, resumed.sandboxes, "records go to" in resumed.err) == (0, 0, False)


def test_a_run_that_is_not_complete_says_how_to_go_on(hermes, tasks, level):
    row = {"id": "a", "prompt": "p", "setup": "false", "check": "true"}
    done = hermes("rollout", "tasks", tasks(row), "--agent", "nop", *level)
    assert done.code == 3
    [folder] = re.findall(r"^records go to (.*)$", done.err, re.M)
    assert f"to go on: the same command with --out {folder} --resume" in done.out


@pytest.mark.parametrize("wrong", ["--isolation=usr", "--env.max_items=x", "--backend.image=python"])
def test_wrong_use_leaves_no_folder_of_its_own(hermes, tasks, tmp_path, wrong):
    done = hermes("rollout", "tasks", tasks(), "--agent", "oracle", wrong)
    assert done.code == 2
    assert "records go to" not in done.err
    assert not (tmp_path / "runs").exists()


def test_resuming_what_has_not_begun_says_so_and_begins(hermes, tasks, records, level):
    done = hermes("rollout", "tasks", tasks(), "--agent", "oracle", "--out", "out", "--resume", *level)
    assert done.code == 0
    assert "out holds no run to resume: a new run begins there" in done.err
    assert len(records()) == 1


def test_resuming_what_is_done_starts_nothing(hermes, ran, level):
    given = ["--agent", "oracle", "--out", "out", "--resume", "--concurrency", "2"]  # which is no other configuration
    done = hermes("rollout", "tasks", ran, *given, *level)
    assert (done.code, done.sandboxes) == (0, 0)
    assert "2 of 2 scored" in done.out


def test_more_at_a_time_than_there_are_makes_no_more_sandboxes(hermes, tasks, level):
    done = hermes("rollout", "tasks", tasks(), "--agent", "oracle", "--concurrency", "500", *level)
    assert (done.code, done.sandboxes) == (0, 1)


def test_a_backend_that_can_not_start_leaves_no_folder(hermes, tasks, tmp_path):
    given = ["--agent", "oracle", "--out", "deep/out", "--backend.state_dir=/proc/none"]
    done = hermes("rollout", "tasks", tasks(), *given)
    assert (done.code, done.out) == (2, "")
    done.says("the directory /proc/none can't be made", "name another one by `state_dir`")
    assert not (tmp_path / "deep").exists()


def test_a_folder_that_was_there_keeps_what_it_had(hermes, tasks, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    assert hermes("rollout", "tasks", tasks(), "--agent", "oracle", "--out", "out", "--backend.image=x").code == 2
    assert os.listdir(tmp_path / "out") == ["notes"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["out has no usable run.json"]),
        ("[]", ["out has no usable run.json"]),
        ('{"configuration": {}, "configuration_hash": ""}', ["out/run.json lacks part of a run's configuration"]),
        ('{"configuration": 3, "configuration_hash": ""}', ["out has no usable run.json: configuration must be"]),
    ],
)
def test_rescoring_what_is_no_run_is_refused(hermes, tmp_path, text, words):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text(text)
    hermes("rescore", "out", "--trust-run").is_refused(*words)
    assert os.listdir(tmp_path / "out") == ["run.json"]


def test_rescoring_a_run_without_patches_is_refused(hermes, ran):
    hermes("rescore", "out", "--trust-run").is_refused("environment 'tasks' can't verify a patch by itself")


def test_rescoring_with_an_environment_that_is_gone_is_refused(hermes, ran, tmp_path):
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    run["configuration"]["environment"] = "tsks"
    (tmp_path / "out" / "run.json").write_text(json.dumps(run))
    hermes("rescore", "out", "--trust-run").is_refused("unknown environment 'tsks'", "did you mean 'tasks'?")


def limited(size: int) -> None:
    """No file of this process can become larger: writing to it then fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_disk_that_is_full_ends_the_run_and_it_can_be_resumed(hermes, tasks, tmp_path, level):
    prompt = "long " * 2000
    rows = [{"id": str(n), "prompt": prompt, "check": "true", "solution": "true"} for n in range(6)]
    arguments = ["rollout", "tasks", tasks(*rows), "--agent", "oracle", "--out", "out", "--concurrency", "1", *level]
    done = subprocess.run(
        [*PROGRAM, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: limited(70_000),
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 3, done.stderr
    assert (
        "error: can't write to out/trajectories.jsonl: File too large"
        " (free some space, then continue with --out out --resume)" in done.stderr
    )
    assert "Traceback" not in done.stderr
    kept = (tmp_path / "out" / "trajectories.jsonl").read_bytes()
    assert (kept.count(b"\n"), kept[-1:]) == (3, b"\n")
    resumed = hermes(*arguments, "--resume")
    assert (resumed.code, "6 of 6 scored" in resumed.out) == (0, True), resumed.err
