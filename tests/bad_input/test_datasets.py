"""Datasets that are wrong, row by row and as a whole; and node ids that look wrong and have to work."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hermes_swe_smith")
from hermes_swe_smith import demo_tasks

SWE = ["rollout", "swe-smith", "--agent", "oracle", "--env.repo_base_url=swe"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["tasks.jsonl'", "line 2: not JSON", "one JSON object"]),
        (b"\xff\xfe\x00", ["tasks.jsonl'", "line 2: not JSON"]),
        ("[1]", ["line 2: list instead of an object"]),
        ("null", ["line 2: NoneType instead of an object"]),
        ({"id": "x", "prompt": "p"}, ["line 2, field 'check' is missing", "the fields are id, prompt"]),
        ({"id": "x", "check": "true"}, ["line 2, field 'prompt' is missing"]),
        ({"prompt": "p", "check": "true"}, ["line 2, field 'id' is missing"]),
        ({"id": 7, "prompt": "p", "check": "true"}, ["line 2, field 'id' must be a text, not 7"]),
        ({"id": "", "prompt": "p", "check": "true"}, ["line 2, field 'id' must not be empty"]),
        ({"id": "x", "prompt": "p", "check": []}, ["line 2, field 'check' must not be empty"]),
        ({"id": "x", "prompt": "p", "check": [1]}, ["line 2, field 'check' must be a shell command or a list"]),
        ({"id": "x", "prompt": "p", "check": " "}, ["line 2, field 'check' must be a shell command or a list"]),
        ({"id": "x", "prompt": "p", "check": "a\0b"}, ["line 2, field 'check' holds a NUL byte"]),
        ({"id": "x", "prompt": "p", "check": "true", "solutoin": "y"}, ["line 2, field 'solutoin' is not known"]),
        ({"id": "x", "prompt": "p", "chekc": "true"}, ["line 2, field 'chekc' is not known"]),
        ({"id": "good", "prompt": "p", "check": "true"}, ["line 2: 'good' is there twice"]),
    ],
    ids=repr,
)
def test_a_wrong_task_is_named_by_line_and_field(hermes, tasks, tmp_path, line, words):
    option = tasks()
    raw = line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
    with (tmp_path / "tasks.jsonl").open("ab") as file:
        file.write(raw + b"\n")
    hermes("rollout", "tasks", option, "--agent", "oracle", "--out", "out").is_refused(*words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["rollout", "validate"])
def test_all_wrong_tasks_are_named_at_once_and_of_many_the_first(hermes, tasks, tmp_path, command):
    option = tasks()
    agent = ["--agent", "nop"] if command == "rollout" else []
    with (tmp_path / "tasks.jsonl").open("a") as file:
        file.write('{\n[1]\n\n{"id": "x", "prompt": "p"}\n')
    done = hermes(command, "tasks", option, *agent)
    done.is_refused(
        "tasks.jsonl'", "line 2: not JSON", "; line 3: list instead of", "; line 5, field 'check' is missing"
    )
    with (tmp_path / "tasks.jsonl").open("a") as file:
        file.write('{"id": "x", "prompt": "p"}\n' * 1000)
    hermes(command, "tasks", option, *agent).is_refused(
        "; line 7, field 'check' is missing", "; and 993 more (each line"
    )


@pytest.mark.parametrize("command", ["rollout", "validate"])
def test_no_tasks_at_all_are_nothing_to_do(hermes, tmp_path, command):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    agent = ["--agent", "nop", "--out", "out"] if command == "rollout" else []
    hermes(command, "tasks", "--env.dataset_name=empty.jsonl", *agent).is_refused("nothing to do in dataset")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "words"), [("no.jsonl", "No such file"), (".", "Is a directory")])
def test_a_file_of_tasks_that_is_none_is_named(hermes, name, words):
    given = ["--agent", "nop", f"--env.dataset_name={name}"]
    hermes("rollout", "tasks", *given).is_refused(f"can't read {name}", words, "JSONL")


@pytest.fixture(scope="module")
def swe(tmp_path_factory) -> Path:
    """The demo's dataset, to be changed in copies."""
    folder: Path = tmp_path_factory.mktemp("swe")
    demo_tasks.write(folder)
    return folder


@pytest.fixture
def swe_row(swe, tmp_path, monkeypatch):
    """`swe_row(field=…)`: writes `swe/tasks.jsonl` with one row of the demo, changed; None leaves the field out."""
    monkeypatch.setenv("HERMES_PLUGINS", "swe-smith")
    (tmp_path / "swe").mkdir()
    for name in ("repos.json", "ledgerline.bundle"):
        (tmp_path / "swe" / name).symlink_to(swe / name)

    def write(**changes: Any) -> str:
        row = {**json.loads((swe / "tasks.jsonl").read_text().splitlines()[0]), **changes}
        row = {key: value for key, value in row.items() if value is not None}
        (tmp_path / "swe" / "tasks.jsonl").write_text(json.dumps(row) + "\n")
        return "--env.dataset_name=swe/tasks.jsonl"

    return write


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"FAIL_TO_PASS": 3}, ["field 'FAIL_TO_PASS' must be a list, not 3"]),
        ({"test_patch": "diff"}, ["field 'base_commit' is missing", "one of SWE-bench"]),
    ],
    ids=str,
)
def test_a_wrong_swe_smith_row_is_named_by_line_instance_and_field(hermes, swe_row, tmp_path, changes, words):
    hermes(*SWE, swe_row(**changes), "--out", "out").is_refused(*words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("x.csv", b"a,b", ["swe/x.csv: not a kind of file", ".jsonl or .parquet"]),
        ("x.jsonl", b"\n", ["swe/x.jsonl", "it has no rows"]),
    ],
)
def test_a_file_that_is_no_swe_smith_dataset_is_named(hermes, swe_row, tmp_path, file, content, words):
    swe_row()
    if content is not None:
        (tmp_path / "swe" / file).write_bytes(content)
    hermes(*SWE, f"--env.dataset_name=swe/{file}").is_refused(*words)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--env.score=al", ["score must be 'all' or 'fraction', not 'al'"]),
        ("--env.test_timeout_s=0", ["test_timeout_s must be more than 0"]),
    ],
)
def test_wrong_settings_of_swe_smith_are_refused(hermes, swe_row, option, words):
    hermes(*SWE, swe_row(), option).is_refused(*words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", ["repos.json can't be read"]),
        (b"{}", ["repos.json: the whole must be a list"]),
        (b'[{"repo": 3}]', ["repos.json, entry 1, field 'repo' must be a text, not 3"]),
    ],
    ids=str,
)
def test_a_wrong_list_of_repositories_is_named(hermes, swe_row, tmp_path, content, words):
    option = swe_row()
    listing = tmp_path / "swe" / "repos.json"
    listing.unlink()
    listing.write_bytes(content)
    hermes(*SWE, option, "--out", "out").is_refused(*words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        ("swe/x.parquet", "pyarrow", ["needs pyarrow", "pip install 'hermes-rl[parquet]'"]),
        ("some/dataset", "datasets", ["need the package datasets", "pip install 'hermes-rl[hub]'"]),
    ],
)
def test_an_extra_that_is_not_installed_is_named(hermes, swe_row, tmp_path, monkeypatch, name, module, words):
    swe_row()
    (tmp_path / "swe" / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, module, None)
    hermes(*SWE, f"--env.dataset_name={name}").is_refused(*words)


def test_without_git_the_demo_says_so(hermes, monkeypatch, tmp_path):
    monkeypatch.setenv("HERMES_PLUGINS", "swe-smith")
    monkeypatch.setenv("PATH", str(tmp_path))
    hermes("rollout", "swe-smith", "--env.dataset_name=demo", "--agent", "nop").is_refused("not here", "install git")


def test_a_bundle_that_is_broken_is_the_datasets_fault(hermes, swe, swe_row, tmp_path, level):
    option = swe_row()
    bundle = tmp_path / "swe" / "ledgerline.bundle"
    bundle.unlink()
    bundle.write_bytes((swe / "ledgerline.bundle").read_bytes()[:200])
    done = hermes(*SWE, option, *level)
    assert done.code == 3
    assert "is the bundle whole, and is this commit in it?" in done.out
    done.has_no_noise()


def test_an_agent_without_a_solution_to_apply_is_refused_before_anything_starts(hermes, tasks, monkeypatch):
    from hermes_core.datasets.tasks import TasksEnvironment

    monkeypatch.setattr(TasksEnvironment, "solve_trajectory", None)
    hermes("rollout", "tasks", tasks(), "--agent", "oracle").is_refused("no reference solution", "another agent")
    hermes("validate", "tasks", tasks()).is_refused("no reference solution")


def test_a_task_without_a_solution_is_named(hermes, tasks, level):
    done = hermes("rollout", "tasks", tasks({"id": "bare", "check": "true"}), "--agent", "oracle", *level)
    assert done.code == 3
    assert "task 'bare' has no solution (give its row the field `solution`)" in done.out
    done.has_no_noise()


def test_ids_of_any_characters_work(hermes, tasks, records, level):
    names = ["a b", "it's", '"$(touch pwned)"', "x|y;z", "back\\slash", "line\nbreak", "..", "ü\u2028🙂", "a" * 300]
    rows = [{"id": name, "check": "test -f a", "solution": "touch a"} for name in names]
    done = hermes("rollout", "tasks", tasks(*rows), "--agent", "oracle", "--out", "out", *level)
    assert done.code == 0, done.err
    assert sorted(record["item_id"] for record in records()) == sorted(names)
    assert os.listdir(".").count("pwned") == 0
