"""Whole rollouts in pods, by the command line: the `tasks` environment and the demo tasks of SWE-smith."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hermes_swe_smith import demo_tasks

from tests.kubernetes.conftest import ClusterProcess


@pytest.fixture
def network(cloud_extra: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster whose pods have this host's network, for tasks that install packages."""
    cluster = ClusterProcess(tmp_path / "cluster", host_network=True)
    monkeypatch.setenv("KUBECONFIG", cluster.kubeconfig)
    yield
    cluster.close()


def rollout(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Return the records of a run."""
    command = [*(sys.executable, "-m", "hermes_core", "rollout", *words, "--out", "out"), "--concurrency", "2"]
    environment = os.environ | {"HERMES_PLUGINS": "kubernetes,swe-smith", "XDG_STATE_HOME": str(folder / "state")}
    done = subprocess.run(
        [*command, "--backend", "k8s"], capture_output=True, text=True, timeout=300, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "out" / "trajectories.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_tasks(cluster: ClusterProcess, tmp_path: Path, agent: str, reward: float) -> None:
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
    found = rollout(tmp_path, "tasks", "--agent", agent, "--env.dataset_name=tasks.jsonl")
    assert [record["reward"] for record in found] == [reward] * 6
    assert found[0]["image"]["name"] == "python:3.11"


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), pytest.param("nop", 0.0, marks=pytest.mark.stress)])
def test_swe_smith(network: None, tmp_path: Path, agent: str, reward: float) -> None:
    demo_tasks.write(tmp_path)
    dataset = f"--env.dataset_name={tmp_path}/tasks.jsonl", f"--env.repo_base_url={tmp_path}"
    found = rollout(tmp_path, "swe-smith", "--agent", agent, *dataset)
    assert [record["reward"] for record in found] == [reward] * 4
