"""The demo as a user runs it, and its dataset."""

import json
import os
import subprocess
import sys

import pytest
from hermes_swe_smith import demo, demo_tasks


@pytest.mark.full  # `make demo`; its tasks are those of test_environment.py
def test_the_demo(tmp_path):
    environment = {**os.environ, "HERMES_ENV_FILE": ""}
    command = [sys.executable, "-m", "hermes_swe_smith.demo"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    rewards = {}
    for path in tmp_path.glob("demo-out/*/*/trajectories.jsonl"):
        rewards[path.parent.name] = [json.loads(line)["reward"] for line in path.read_text().splitlines()]
    assert rewards == {"oracle": [1.0] * 4, "nop": [0.0] * 4, "model": [1.0] * 4}
    for said in ("trajectories.jsonl", "--model MODEL --base-url URL", "patch {", "terminal {", "says: Fixed"):
        assert said in done.stdout


def test_the_scripted_model_knows_every_task():
    rows = [json.loads(line) for line in (demo_tasks._PACKAGE / "tasks.jsonl").read_text().splitlines()]
    for row in rows:
        (fix,) = [fix for fix in demo.FIXES if fix.issue in row["problem_statement"]]
        removed = "".join(line[1:] + "\n" for line in row["patch"].splitlines() if line.startswith("-    "))
        added = "".join(line[1:] + "\n" for line in row["patch"].splitlines() if line.startswith("+    "))
        assert fix.old in added and fix.new in removed


def test_the_repository_is_the_same_wherever_it_is_made(tmp_path):
    commits = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        path = demo_tasks.write(tmp_path / name)
        commits.add(json.loads((path.parent / "repos.json").read_text())[0]["base_commit"])
    assert len(commits) == 1
