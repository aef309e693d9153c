"""Whole rollouts on a host, by the command line: the `tasks` environment and the demo tasks of SWE-smith."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hermes_swe_smith import demo_tasks


def rollout(server: Any, place: Path, folder: Path, *words: str) -> list[dict[str, Any]]:
    """The records of a run on this server."""
    command = [
        *(sys.executable, "-m", "hermes_core", "rollout", *words, "--out", str(folder / "out")),
        *("--backend", "ssh", "--isolation", "namespace", "--concurrency", "2"),
        *("--backend.host=test", f"--backend.config_file={server.config_file}", f"--backend.directory={place}"),
    ]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "HERMES_ENV_FILE": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "out" / "trajectories.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_tasks(server: Any, place: Path, tmp_path: Path, agent: str, reward: float) -> None:
    rows = [
        {
            "id": f"t{n}",
            "prompt": "p",
            "setup": ["touch there"],
            "check": "test -f a -a -f there",
            "solution": "touch a",
        }
        for n in range(6)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = f"--env.dataset_name={tmp_path}/tasks.jsonl"
    found = rollout(server, place, tmp_path, "tasks", "--agent", agent, dataset)
    assert [record["reward"] for record in found] == [reward] * 6


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), pytest.param("nop", 0.0, marks=pytest.mark.stress)])
def test_swe_smith(server: Any, place: Path, tmp_path: Path, agent: str, reward: float) -> None:
    demo_tasks.write(tmp_path)
    dataset = (f"--env.dataset_name={tmp_path}/tasks.jsonl", f"--env.repo_base_url={tmp_path}")
    found = rollout(server, place, tmp_path, "swe-smith", "--agent", agent, *dataset)
    assert [record["reward"] for record in found] == [reward] * 4
