"""wandb is off unless asked for; asked for, everything is in its run, read back from the files of offline mode."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.scripted_server import ScriptedServer, ToolScript, call

pytestmark = pytest.mark.usefixtures("atropos_extra")

Command = Callable[..., Any]


@pytest.fixture
def command(tasks: str, tokenizer_folder: str, without_torch: dict[str, str], tmp_path: Path) -> Command:
    """`await command(mode, base_url, "--env.…", WANDB_MODE=…)`: the real command, in a folder and a home of its own."""

    async def run(mode: str, base_url: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
        written = [
            sys.executable,
            "-m",
            "hermes_core",
            "atropos",
            mode,
            "tasks",
            f"--env.dataset_name={tasks}",
        ]
        written += [
            f"--env.tokenizer_name={tokenizer_folder}",
            f"--openai.base_url={base_url}",
            "--openai.model_name=scripted",
            "--env.group_size=2",
        ]
        written += [] if os.geteuid() == 0 else ["--env.isolation=shared", "--env.allow_unisolated"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        places = {
            "HOME": str(tmp_path),
            "XDG_STATE_HOME": str(tmp_path / "state"),
            "WANDB_BASE_URL": "http://127.0.0.1:9",
        }
        return await asyncio.to_thread(
            subprocess.run,
            [*written, *options],
            cwd=tmp_path,
            env={**kept, **without_torch, **places, **variables},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=180,
        )

    return run


def records(path: Path) -> Iterator[Any]:
    """What is in the file of an offline run: the log format of LevelDB, after seven bytes of wandb's own."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def logged(folder: Path) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    """Of the one run in this folder: the run, its settings, and what was logged, step by step."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    everything = list(records(path))
    (run,) = [record.run for record in everything if record.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    steps = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in everything
        if record.WhichOneof("record_type") == "history"
    ]
    return run, config, steps


def clumsy(prompt: str) -> Any:
    """A model that fails at first, and then does what the tasks ask for."""
    yield call("no_such_tool", a=1)
    yield call("terminal", command=f"echo {prompt.split()[1]} > out.txt")
    return "Done."


async def test_it_is_off_unless_asked_for(command: Command, obedient_server: ScriptedServer, tmp_path: Path) -> None:
    done = await command("process", obedient_server.base_url, "--env.total_steps=1", WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "wandb").exists()
    assert "wandb" not in done.stdout + done.stderr


async def test_what_is_logged_is_what_the_original_logs(command: Command, tmp_path: Path) -> None:
    secret = "sk-abcdefghijklmnop"
    async with ScriptedServer(ToolScript(clumsy)) as server:
        done = await command(
            "process",
            server.base_url,
            *("--env.use_wandb", "true", "--env.total_steps=3", "--env.max_num_workers=1"),
            "--env.num_rollouts_per_group_for_logging=-1",
            f"--env.modal_env_vars=KEY={secret}",
            WANDB_MODE="offline",
            WANDB_PROJECT="greetings",
            HERMES_API_KEY=secret,
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["groups"] == 3, "standard output is the answer alone"
    run, config, steps = logged(tmp_path)
    assert run.project == "greetings"
    assert run.display_name.startswith("tasks-2")
    assert (config["group_size"], config["total_steps"]) == (2, 3)
    assert [step["_step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["train/tool_errors_count"] == 2
        assert step["train/tool_error_details"].count("[turn 1] no_such_tool") == 2
        assert (step["train/reward"], step["train/solved"], step["train/turns"]) == (1.0, 1.0, 3.0)
        assert (step["train/groups"], step["train/rollouts_count"], step["train/failures_infra"]) == (1, 2, 0)
        assert step["train/seconds_agent"] > 0
        assert step["train/completion_lengths"] == 0, "an openai server gives no tokens"
        assert step["train/rollouts._type"] == "table-file"
    beside = [
        json.loads(line) for line in (tmp_path / "data/tasks.trajectories.metrics.jsonl").read_text().splitlines()
    ]
    assert [line["train/reward"] for line in beside] == [1.0, 1.0, 1.0]
    tables = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/train/*.json"))
    assert len(tables) == 3
    shown = json.loads(tables[0].read_text())
    assert shown["columns"] == ["text", "score"]
    assert [score for _, score in shown["data"]] == [1, 1]
    for text, _ in shown["data"]:
        assert text.index("[USER]") < text.index("[TOOL CALL] no_such_tool") < text.index("[TOOL RESULT]")
        assert text.endswith("[ASSISTANT]\nDone.")
    everything = b"".join(path.read_bytes() for path in tmp_path.glob("wandb/**/*") if path.is_file())
    assert secret.encode() not in everything


async def test_evaluations_are_logged_too(command: Command, obedient_server: ScriptedServer, tmp_path: Path) -> None:
    options = ("--env.use_wandb=true", "--env.eval_items=2")
    done = await command("evaluate", obedient_server.base_url, *options, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    (step,) = logged(tmp_path)[2]
    assert (step["eval/mean_reward"], step["eval/items"], step["eval/rollouts"]) == (1.0, 2, 4)


async def test_without_a_key_it_ends_before_anything_is_begun(
    command: Command, obedient_server: ScriptedServer, tmp_path: Path
) -> None:
    done = await command("process", obedient_server.base_url, "--env.use_wandb=true")
    assert done.returncode == 2
    assert "wandb is asked for, and has no API key" in done.stderr
    assert "WANDB_MODE=offline" in done.stderr
    assert "Traceback" not in done.stderr
    done = await command("process", obedient_server.base_url, "--env.use_wandb=true", WANDB_MODE="offlin")
    assert done.returncode == 2
    assert "wandb can't be used" in done.stderr
    assert obedient_server.request_count == 0
    assert not (tmp_path / "data/tasks.trajectories.jsonl").exists()


async def test_serve_logs_into_the_trainers_project_and_group(
    command: Command, token_server: Any, run_api: Any, make_trainer: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(run_api.url)
    options = (
        *("--env.use_wandb=true", f"--env.rollout_server_url={run_api.url}", "--openai.server_type=vllm"),
        *("--env.ensure_scores_are_not_same=false", "--env.max_num_workers=2", "--env.total_steps=3"),
    )
    async with asyncio.timeout(170), asyncio.TaskGroup() as both:
        serving = both.create_task(command("serve", token_server.base_url, *options, WANDB_MODE="offline"))
        training = both.create_task(trainer.run(1000))
        done = await serving
        training.cancel()
    assert done.returncode == 0, done.stderr
    run, _, steps = logged(tmp_path)
    assert (run.project, run.run_group) == ("p", "g")
    name = next(key for step in steps for key in step if key.endswith("train/reward"))
    assert name == "tasks_0_train/reward", "as run-api calls this environment"
    assert sum(step.get("tasks_0_train/groups", 0) for step in steps) >= len(trainer.sequences()) / 2
    lengths = [step[key] for step in steps if (key := "tasks_0_train/completion_lengths") in step]
    assert lengths
    assert all(length > 1 for length in lengths)
