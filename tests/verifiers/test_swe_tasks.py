"""The 24 real tasks by the programs of verifiers: all reference solutions valid, each rollout scored right."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.scripted_server import ScriptedCall, ScriptedServer, ToolScript, call

pytestmark = [pytest.mark.usefixtures("verifiers_extra"), pytest.mark.filterwarnings("ignore")]

LEVEL = [] if os.geteuid() == 0 else ["--taskset.run.isolation", "namespace"]


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
        if self.expected[task["instance_id"]]:
            yield call("write_file", path="fix.diff", content=task["patch"])
            yield call("terminal", command=f"cd {directory[1]} && git apply -R ../fix.diff")
        return "I looked at it."


async def program(name: str, *arguments: str, cwd: Path) -> None:
    """Run a program of verifiers to its end."""
    environment = {**os.environ, "HERMES_STATE_DIR": str(cwd / "state"), "HERMES_PLUGINS": "swe-smith"}
    command = [str(Path(sys.executable).with_name(name)), "hermes_rl", *arguments, "--no-rich"]
    ran = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await ran.communicate()
    assert ran.returncode == 0, said.decode()[-4000:]


@pytest.mark.long
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.stress)])
async def test_the_reference_solutions_are_valid_and_each_task_is_scored_right(
    swe_tasks: Path, tmp_path: Path, leak_check: None, every: int
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    rows = (swe_tasks / "tasks.jsonl").read_text().splitlines(keepends=True)[::every]
    tasks.write_text("".join(rows))
    env = json.dumps({"dataset_name": str(tasks), "repo_base_url": str(swe_tasks)})
    taskset = ["--taskset.environment", "swe-smith", "--taskset.env", env, "--taskset.run.concurrency", "4", *LEVEL]
    await program("vf-validate", *taskset, "--only-gold", "--runtime.type", "subprocess", cwd=tmp_path)
    (summary,) = tmp_path.glob("outputs/*validate*/summary.json")
    assert json.loads(summary.read_text())["outcomes"]["valid"] == len(rows)

    solver = Solver(tasks)
    async with ScriptedServer(ToolScript(solver.play)) as server:
        model = ["-m", "scripted", "--client.base-url", server.base_url, "--client.api-key-var", "NONE", "--no-push"]
        options = [option.replace("--taskset", "--env.taskset") for option in taskset]
        await program("vf-eval", *options, *model, "-r", "1", cwd=tmp_path)
    (lines,) = [path for path in tmp_path.glob("outputs/**/*.jsonl") if "validate" not in str(path)]
    traces = [trace for line in lines.read_text().splitlines() for trace in json.loads(line)["traces"]]
    assert {trace["task"]["key"]: trace["rewards"]["reward"]["score"] for trace in traces} == solver.expected
    assert len(traces) == len(rows)
