"""Whole rollouts on a cluster, by the command line: the `tasks` environment and the demo tasks of SWE-smith."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hermes_swe_smith import demo_tasks


def rollout(cluster: Any, folder: Path, *words: str) -> list[dict[str, Any]]:
    """The records of a run with two sandboxes."""
    command = [
        *(sys.executable, "-m", "hermes_core", "rollout", *words, "--out", str(folder / "out")),
        *("--backend", "slurm", "--isolation", "namespace", "--concurrency", "4"),
        *(f"--backend.directory={cluster.place}", "--backend.slots_per_sandbox=3", "--backend.max_sandboxes=2"),
    ]
    environment = {name: os.environ[name] for name in ("PATH", "SLURM_CONF")} | {"HOME": str(folder)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=folder, env=environment | {"HERMES_ENV_FILE": ""}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "out" / "trajectories.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_tasks(cluster: Any, tmp_path: Path, agent: str, reward: float) -> None:
    row = {"prompt": "p", "setup": ["touch there"], "check": "test -f a -a -f there", "solution": "touch a"}
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"id": f"t{n}", **row}) + "\n" for n in range(6)))
    found = rollout(cluster, tmp_path, "tasks", "--agent", agent, f"--env.dataset_name={tmp_path}/tasks.jsonl")
    assert [record["reward"] for record in found] == [reward] * 6


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), pytest.param("nop", 0.0, marks=pytest.mark.stress)])
def test_swe_smith(cluster: Any, tmp_path: Path, agent: str, reward: float) -> None:
    demo_tasks.write(tmp_path)
    dataset = (f"--env.dataset_name={tmp_path}/tasks.jsonl", f"--env.repo_base_url={tmp_path}")
    found = rollout(cluster, tmp_path, "swe-smith", "--agent", agent, *dataset)
    assert [record["reward"] for record in found] == [reward] * 4
