"""`hermes-rl atropos evaluate` as it is typed: what it writes, what it says, and what it does when it can't."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hermes_testing.scripted_server import Fault, Reply, ScriptedServer, ToolScript

from hermes_core.cli.main import main

pytestmark = pytest.mark.usefixtures("atropos_extra")

Evaluate = Callable[..., Any]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def evaluate(tokenizer_folder: str, without_torch: dict[str, str], tmp_path: Path) -> Evaluate:
    """`await evaluate(name, base_url, "--env.…=…", …)`: the real command, in a folder of its own."""

    async def run(name: str, base_url: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hermes_core", "atropos", "evaluate", name, *options]
        command += [
            f"--env.tokenizer_name={tokenizer_folder}",
            f"--openai.base_url={base_url}",
            "--openai.model_name=scripted",
        ]
        level = [] if os.geteuid() == 0 else ["--env.isolation=namespace"]
        environment = {**os.environ, **without_torch, "XDG_STATE_HOME": str(tmp_path / "state")}
        del environment["HERMES_PLUGINS"]  # those that are installed: it is what a user would have
        return await asyncio.to_thread(
            subprocess.run,
            [*command, *level],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run


async def test_items_are_rolled_out_and_what_came_of_them_is_written(
    evaluate: Evaluate, obedient_play: Any, tasks: str, tmp_path: Path
) -> None:
    def play(prompt: str) -> Any:
        return obedient_play(prompt.replace("Write 1 ", "Write 2 "))  # and so one of the tasks is not solved

    async with ScriptedServer(ToolScript(play)) as server:
        done = await evaluate(
            "tasks", server.base_url, f"--env.dataset_name={tasks}", "--env.eval_items=4", "--env.group_size=1"
        )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["mode"], told["groups"], told["rollouts"]) == ("evaluate", 4, 4)
    assert told["written"] == "data/tasks-eval"
    written = json.loads((tmp_path / "data/tasks-eval/metrics.json").read_text())
    assert written["config_general"]["model_name"] == "scripted"
    assert list(written["results"]) == ["atropos|tasks_eval|0", "all"]
    assert written["results"]["all"] == {
        "eval/mean_reward": 0.75,
        "eval/solved": 0.75,
        "eval/items": 4,
        "eval/rollouts": 4,
        "eval/failed": 0,
    }
    samples = lines(tmp_path / "data/tasks-eval/samples.jsonl")
    assert sorted(sample["score"] for sample in samples) == [0.0, 1.0, 1.0, 1.0]
    for sample in samples:
        roles = [message["role"] for message in sample["messages"]]
        assert roles == ["user", "assistant", "tool", "assistant"]
        assert "echo" in sample["messages"][1]["tool_calls"][0]["function"]["arguments"]
    records = lines(Path(tmp_path / told["trajectories"]))
    assert sorted(record["item_id"] for record in records) == [f"task-{n}" for n in range(4)]
    (metrics,) = lines(Path(tmp_path / told["trajectories"]).with_suffix(".metrics.jsonl"))
    assert metrics["eval/solved"] == 0.75
    assert metrics["eval/turns"] == 2.0
    assert metrics["eval/groups"] == 4
    assert metrics["eval/tool_errors_count"] == 0
    assert "train/reward" not in metrics, "it is not what the trainer's rollouts got"


@pytest.mark.root
@pytest.mark.stress  # evaluation is tested with tasks that take less, and these tasks in training
@pytest.mark.skipif(os.geteuid() != 0, reason="the tasks ask for isolation by user; root has it")
async def test_the_demo_tasks_of_swe_smith(evaluate: Evaluate, tmp_path: Path) -> None:
    from hermes_swe_smith.demo import play

    async with ScriptedServer(ToolScript(play)) as server:
        done = await evaluate("swe-smith", server.base_url, "--env.dataset_name=demo", "--env.group_size=1")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "data/swe-smith-eval/metrics.json").read_text())["results"]["all"]
    assert results["eval/items"] == results["eval/rollouts"] == json.loads(done.stdout)["rollouts"] > 1
    assert (results["eval/solved"], results["eval/failed"]) == (1.0, 0)
    assert len(lines(tmp_path / "data/swe-smith-eval/samples.jsonl")) == results["eval/items"]


async def test_what_failed_is_no_score_and_an_evaluation_that_stayed_short_says_so(
    evaluate: Evaluate, obedient_play: Any, tasks: str, tmp_path: Path
) -> None:
    scripted = ToolScript(obedient_play)

    async def some(request: dict[str, Any]) -> Any:
        failing = "Write 0 " in json.dumps(request["messages"])
        return Fault(400, "no") if failing else scripted(request)

    options = [f"--env.dataset_name={tasks}", "--env.eval_items=2", "--env.group_refills=1", "--env.group_size=1"]
    async with ScriptedServer(some) as server:
        done = await evaluate("tasks", server.base_url, *options)
    assert done.returncode == 3, "one item has no score"
    told = json.loads(done.stdout)
    assert (told["groups"], told["groups_short"], told["failures_model"]) == (1, 1, 2)
    results = json.loads((tmp_path / "data/tasks-eval/metrics.json").read_text())["results"]["all"]
    assert (results["eval/mean_reward"], results["eval/rollouts"], results["eval/failed"]) == (1.0, 1, 2)


ONE = ("--env.group_size=1", "--env.group_refills=0")


async def test_what_can_not_be_evaluated_is_said(evaluate: Evaluate, tasks: str, tmp_path: Path) -> None:
    dataset = f"--env.dataset_name={tasks}"
    async with ScriptedServer(lambda request: Fault(400, "no")) as server:
        done = await evaluate("tasks", server.base_url, dataset, "--env.eval_items=1", *ONE)
        assert done.returncode == 3
        assert "no rollout of the evaluation has a score" in done.stderr
    assert not (tmp_path / "data/tasks-eval").exists()


@pytest.mark.parametrize(
    ("name", "option", "said"),
    [
        ("task", "--env.eval_items=1", "did you mean 'tasks'"),
        ("tasks", "--env.eval_items=-1", "eval_items"),
        ("tasks", "--env.eval_item=1", "did you mean 'eval_items'"),
        ("tasks", "--env.dataset_name=nothing.jsonl", "nothing.jsonl"),
    ],
)
def test_a_mistake_is_said_before_the_server_is_asked(
    name: str,
    option: str,
    said: str,
    tasks: str,
    tokenizer_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [f"--env.dataset_name={tasks}", option, f"--env.tokenizer_name={tokenizer_folder}"]
    options += ["--openai.base_url=http://127.0.0.1:9/v1", "--openai.model_name=scripted"]
    done = CliRunner().invoke(main, ["atropos", "evaluate", name, *options])
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data/tasks-eval").exists()


async def test_what_is_evaluated_is_not_counted_as_trained_on(make_env: Any, obedient_server: ScriptedServer) -> None:
    env = make_env(obedient_server.base_url, eval_items=2)
    await env.evaluate_manager()
    assert env.evaluation.totals["rollouts"] == 4
    assert env.metrics.totals == {}


async def test_a_reward_that_no_rollout_has_is_not_reported(make_env: Any, tmp_path: Path) -> None:
    from hermes_core.errors import InfraError

    async with ScriptedServer([Reply("hi")]) as server:
        env = make_env(server.base_url, eval_items=1, group_refills=0, data_dir_to_save_evals=str(tmp_path / "eval"))
        env.make_environment, plain = None, env.make_environment

        def failing(runtime: Any) -> Any:
            environment = plain(runtime)

            async def gone(item: Any, rollout: Any) -> Any:
                raise InfraError("the sandbox is gone")

            environment.setup_trajectory_workspace = gone
            return environment

        env.make_environment = failing
        with pytest.raises(InfraError, match="no rollout of the evaluation has a score"):
            await env.evaluate_manager()
    assert not (tmp_path / "eval").exists()
    assert env.evaluation.totals["failures_infra"] == 2
