"""Whole rollouts in containers of Apptainer, by the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hermes_swe_smith import demo_tasks


def rollout(profile: dict[str, Any], folder: Path, level: str, *words: str) -> list[dict[str, Any]]:
    """The records of a run."""
    (folder / "run.yaml").write_text(json.dumps({"backend": profile}))
    command = [
        *(sys.executable, "-m", "hermes_core", "rollout", *words, "--out", str(folder / "out")),
        *("--backend", "apptainer", "--isolation", level, "--concurrency", "2", "--config", str(folder / "run.yaml")),
    ]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "HERMES_ENV_FILE": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "out" / "trajectories.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("image", "level", "agent", "reward"),
    [
        ("python", "user", "oracle", 1.0),
        ("python", "namespace", "nop", 0.0),
        ("busybox", "dedicated", "oracle", 1.0),
    ],
)
def test_tasks(
    apptainer: Path, profile: dict[str, Any], tmp_path: Path, image: str, level: str, agent: str, reward: float
) -> None:
    """Also in an image without Python, where each command is a program of its own."""
    rows = [
        {
            "id": f"t{n}",
            "prompt": "p",
            "setup": ["touch there"],
            "check": "test -f a -a -f there",
            "solution": "touch a",
        }
        for n in range(4)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    profile["image"] = f"docker-archive:{apptainer}/{image}.tar"
    dataset = f"--env.dataset_name={tmp_path}/tasks.jsonl"
    found = rollout(profile, tmp_path, level, "tasks", "--agent", agent, dataset)
    assert [record["reward"] for record in found] == [reward] * 4
    assert {record["backend"] for record in found} == {"singularity"}


def test_swe_smith(apptainer: Path, profile: dict[str, Any], tmp_path: Path) -> None:
    demo_tasks.write(tmp_path)
    tmp_path.chmod(0o755)
    profile |= {"image": f"docker-archive:{apptainer}/python.tar"}
    dataset = (f"--env.dataset_name={tmp_path}/tasks.jsonl", f"--env.repo_base_url={tmp_path}")
    found = rollout(profile, tmp_path, "namespace", "swe-smith", "--agent", "oracle", *dataset)
    assert [record["reward"] for record in found] == [1.0] * 4
