"""24 rollouts by the reference solution over SSH, the connection cut every three seconds: each solved, none retried."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.stress

EVERY_S = 3.0
LIMIT_S = 900.0


@pytest.fixture
def server(require: Callable[[str, str | None], None], tmp_path: Path) -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("ssh_server", Path(__file__).parents[1] / "ssh" / "server.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    require("ssh", module.missing())
    server = module.Server(tmp_path)
    yield server
    server.stop()


def test_rollouts_survive_cuts(server: Any, swe_tasks: Path, tmp_path: Path) -> None:
    place = f"/var/tmp/hermes-cuts-{os.getpid()}"
    command = [
        *(sys.executable, "-m", "hermes_core", "-v", "rollout", "swe-smith", "--agent", "oracle"),
        *(f"--env.dataset_name={swe_tasks}/tasks.jsonl", f"--env.repo_base_url={swe_tasks}"),
        *("--backend", "ssh", "--isolation", "namespace", "--concurrency", "4", "--out", str(tmp_path / "out")),
        *("--backend.host=test", f"--backend.config_file={server.config_file}", f"--backend.directory={place}"),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "HERMES_PLUGINS"}
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
        cuts, deadline = 0, time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(EVERY_S)
            cuts += bool(server.cut())
        process.kill()
    text = (tmp_path / "said").read_text()
    assert process.wait() == 0, text[-4000:]
    records = [json.loads(line) for line in (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()]
    assert [record["reward"] for record in records] == [1.0] * 24, text[-4000:]
    assert len({record["trajectory_id"] for record in records}) == 24
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["infra_retries"] == 0, text[-4000:]
    assert cuts >= 10
    print(f"{cuts} cuts")
    assert not Path(place).exists()
