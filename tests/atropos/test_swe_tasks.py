"""The real tasks by `process`: half of them solved by a scripted model, each scored right, on local and docker."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.scripted_server import ScriptedCall, ScriptedServer, ToolScript, call

from hermes_core.records.index import RecordedRun
from hermes_core.records.statistics import totals
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings

LEVEL = {} if os.geteuid() == 0 else {"isolation": "namespace"}


class Solver:
    """Knows the reference fix of each task by its issue, and makes it for every other one."""

    def __init__(self, tasks: Path) -> None:
        self.tasks = [json.loads(line) for line in tasks.read_text().splitlines()]
        self.expected = {task["instance_id"]: float(n % 2 == 0) for n, task in enumerate(self.tasks)}

    def play(self, prompt: str) -> Generator[ScriptedCall, Any, str]:
        task = max(
            (task for task in self.tasks if task["problem_statement"].strip() in prompt),
            key=lambda task: len(task["problem_statement"]),
        )
        directory = re.search(r"The directory `([^`]+)`", prompt)
        assert directory is not None
        yield call("terminal", command=f"cd {directory[1]} && git status --short | head")
        if self.expected[task["instance_id"]]:
            yield call("write_file", path="fix.diff", content=task["patch"])
            done = yield call("terminal", command=f"cd {directory[1]} && git apply -R ../fix.diff")
            assert done["exit_code"] == 0, done
        return "I looked at it."


@pytest.mark.long
@pytest.mark.usefixtures("atropos_extra")
@pytest.mark.parametrize(
    ("backend", "every"),
    [
        ("local", 8),  # all of them are scored by tests/verifiers/test_swe_tasks.py as well
        pytest.param("local", 1, marks=pytest.mark.stress),
        pytest.param("docker", 1, marks=pytest.mark.stress),
    ],
)
async def test_each_of_the_tasks_is_scored_right(
    backend: str, every: int, swe_tasks: Path, tokenizer_folder: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    import hermes_swe_smith
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig
    from hermes_atropos import load_environment

    plugins, sandbox = [hermes_swe_smith], dict(LEVEL)
    if backend == "docker":
        import hermes_docker

        sandbox = {"docker_image": request.getfixturevalue("docker_images")[0], "docker_max_sandboxes": 1}
        plugins.append(hermes_docker)
    rows = (swe_tasks / "tasks.jsonl").read_text().splitlines(keepends=True)[::every]
    chosen = tmp_path / "tasks.jsonl"
    chosen.write_text("".join(rows))
    solver = Solver(chosen)
    runtime = Runtime(Settings(state_dir=tmp_path / "state"), plugins=plugins, load_entry_points=False)
    async with runtime, ScriptedServer(ToolScript(solver.play)) as server:
        kind = load_environment("swe-smith", runtime)
        config = kind.env_config_cls(
            tokenizer_name=tokenizer_folder,
            dataset_name=str(chosen),
            repo_base_url=str(swe_tasks),
            group_size=1,
            total_steps=100,
            max_num_workers=2,
            ensure_scores_are_not_same=False,
            data_path_to_save_groups=str(tmp_path / "swe.jsonl"),
            terminal_backend=backend,
            **sandbox,
        )
        servers = [APIServerConfig(base_url=server.base_url, model_name="scripted", api_key="none")]
        await kind(config, servers, runtime=runtime).process_manager()
    groups = [json.loads(line) for line in (tmp_path / "swe.jsonl").read_text().splitlines()]
    scores = {group["group_overrides"]["item_id"]: group["scores"][0] for group in groups}
    assert scores == solver.expected
    assert len(scores) == len(rows)
    assert totals(RecordedRun(tmp_path / "swe.trajectories.jsonl").rows.values()).rollouts == len(rows)
