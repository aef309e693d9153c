"""Serve mode against the real `run-api` and a trainer over HTTP: batches, failures, deaths, and a clean end."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hermes_atropos.trainer import TrainerGone

from hermes_core.agents.endpoint.errors import EndpointDown
from hermes_core.errors import ConfigError, InfraError, PluginError


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def checked(trainer: Any, group_size: int = 2) -> None:
    """Every batch is whole, and every sequence is there once, with its logprobs."""
    assert all(sum(len(group["tokens"]) for group in batch) == trainer.batch_size for batch in trainer.batches)
    taken = trainer.sequences()
    assert len(taken) == len(set(taken))
    for group in (group for batch in trainer.batches for group in batch):
        assert len(group["tokens"]) == group_size
        for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            assert len(tokens) == len(masks) == len(logprobs)
            assert all(-1 <= lp < 0 for lp, mask in zip(logprobs, masks, strict=True) if mask != -100)
            assert {lp for lp, mask in zip(logprobs, masks, strict=True) if mask == -100} == {1.0}


async def test_items_that_can_not_be_had_end_it_when_what_runs_is_sent(
    make_env: Any, token_server: Any, run_api: Any, make_trainer: Any
) -> None:
    env = make_env(token_server.base_url, "vllm", rollout_server_url=run_api.url, total_steps=50, max_num_workers=2)
    ask, count = env.get_next_item, 0

    async def breaking() -> Any:
        nonlocal count
        count += 1
        if count > 4:
            raise KeyError("the next row")
        return await ask()

    env.get_next_item = breaking
    trainer = make_trainer(run_api.url)
    training = asyncio.create_task(trainer.run(50))
    try:
        with pytest.raises(PluginError, match=r"get_next_item of environment 'tasks' failed: KeyError"):
            async with asyncio.timeout(200):
                await env.env_manager()
    finally:
        training.cancel()
    assert env.metrics.totals["failures_cancelled"] == 0
    assert (env.metrics.totals["groups"], env.api.counts["sent"]) == (4, 4)


@pytest.mark.usefixtures("leak_check")
@pytest.mark.parametrize("batches", [10, pytest.param(50, marks=pytest.mark.stress)])
async def test_many_batches_with_failures_and_a_dead_api(
    make_env: Any, token_server: Any, run_api: Any, make_trainer: Any, tmp_path: Path, batches: int
) -> None:
    env = make_env(
        token_server.base_url,
        "vllm",
        rollout_server_url=run_api.url,
        total_steps=batches,
        infra_retries=0,
        max_num_workers=4,
    )
    plain_setup, count = env.make_environment, 0

    def with_failures(runtime: Any) -> Any:
        environment = plain_setup(runtime)

        async def failing(item: Any, rollout: Any) -> dict[str, Any]:
            nonlocal count
            count += 1
            if count % 7 == 0:
                raise InfraError("the sandbox is gone")
            return {}

        environment.setup_trajectory_workspace = failing
        return environment

    env.make_environment = with_failures
    trainer = make_trainer(run_api.url)
    async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
        serving_task = tasks.create_task(env.env_manager())
        training = tasks.create_task(trainer.run(batches))
        while len(trainer.batches) < batches // 2:
            await asyncio.sleep(0.1)
        run_api.kill()
        await asyncio.sleep(1)
        await run_api.start()
        await training
        await serving_task
    checked(trainer)
    records = {record["trajectory_id"]: record for record in lines(tmp_path / "data/groups.trajectories.jsonl")}
    for trajectory_id, _ in trainer.sequences():
        assert records[trajectory_id]["mask_sample"] is False
    assert env.metrics.totals["failures_infra"] > batches // 5
    assert all(record["reward"] is None for record in records.values() if record["failure"])
    assert env.api.counts["registered"] == 2
    assert env.group_workers.tasks == set()


@pytest.mark.usefixtures("leak_check")
@pytest.mark.parametrize("trouble", ["hang", *(pytest.param(n, marks=pytest.mark.stress) for n in (401, 404, 503))])
async def test_trouble_of_the_model_server_that_passes_costs_no_rollout(
    make_env: Any, token_server: Any, run_api: Any, make_trainer: Any, tmp_path: Path, trouble: Any
) -> None:
    env = make_env(token_server.base_url, "vllm", rollout_server_url=run_api.url, total_steps=5, max_num_workers=4)
    env.server_configs = [server.model_copy(update={"timeout": 1}) for server in env.server_configs]
    trainer = make_trainer(run_api.url)
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        serving_task = tasks.create_task(env.env_manager())
        training = tasks.create_task(trainer.run(5))
        while len(trainer.batches) < 2:
            await asyncio.sleep(0.05)
        token_server.trouble, before = trouble, token_server.requests
        await asyncio.sleep(3)
        asked, token_server.trouble = token_server.requests - before, None
        await training
        await serving_task
    checked(trainer)
    assert asked < 30, "it was spared"
    ended = [record for record in lines(tmp_path / "data/groups.trajectories.jsonl") if record["failure"]]
    assert {record["failure"]["kind"] for record in ended} <= {"cancelled"}, "those that the end of the run cut off"
    assert env.metrics.totals["items_put_back"] == 0


@pytest.mark.usefixtures("leak_check")
async def test_trouble_of_the_model_server_that_lasts_ends_it(
    make_env: Any, token_server: Any, run_api: Any, make_trainer: Any, tmp_path: Path
) -> None:
    env = make_env(
        *(token_server.base_url, "vllm"), rollout_server_url=run_api.url, total_steps=50, endpoint_patience=1.5
    )
    trainer = make_trainer(run_api.url)
    async with asyncio.timeout(120):
        training = asyncio.create_task(trainer.run(50))
        serving_task = asyncio.create_task(env.env_manager())
        while len(trainer.batches) < 2:
            await asyncio.sleep(0.05)
        token_server.trouble = 503
        with pytest.raises(EndpointDown, match="in trouble"):
            await serving_task
        training.cancel()
    failed = [record for record in lines(tmp_path / "data/groups.trajectories.jsonl") if record["failure"]]
    assert {(record["reward"], record["failure"]["kind"]) for record in failed} == {(None, "model")}
    assert len(failed) <= 3 * 2, "those that were under way"


@pytest.mark.usefixtures("leak_check")
async def test_the_environment_is_killed_and_restarted_and_ends_with_a_signal(
    token_server: Any,
    run_api: Any,
    make_trainer: Any,
    tasks: str,
    tokenizer_folder: str,
    without_torch: dict[str, str],
    tmp_path: Path,
) -> None:
    trainer = make_trainer(run_api.url)
    command = [
        *(sys.executable, "-m", "hermes_core", "-v", "atropos", "serve", "tasks"),
        *("--env.dataset_name", tasks, "--env.tokenizer_name", tokenizer_folder, "--env.group_size=2"),
        *(
            "--env.rollout_server_url",
            run_api.url,
            "--env.max_num_workers",
            "2",
            "--env.ensure_scores_are_not_same=false",
        ),
        *("--openai.base_url", token_server.base_url, "--openai.server_type", "vllm"),
        *([] if os.geteuid() == 0 else ["--env.isolation", "shared", "--env.allow_unisolated", "true"]),
    ]
    places = {"HERMES_OWNER": "serve-test", "XDG_STATE_HOME": str(tmp_path / "state")}
    environment = {**os.environ, **without_torch, **places}

    async def start() -> asyncio.subprocess.Process:
        with (tmp_path / "env.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(*command, cwd=tmp_path, env=environment, stdout=log, stderr=log)

    process = await start()
    try:
        async with asyncio.timeout(240):
            await trainer.run(5)
            process.kill()
            await process.wait()
            process = await start()
            await trainer.run(15)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 130
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    checked(trainer)


@pytest.mark.usefixtures("leak_check")
async def test_a_trainer_that_goes_away_ends_it_and_nothing_is_left(
    make_env: Any, token_server: Any, run_api: Any, make_trainer: Any
) -> None:
    env = make_env(token_server.base_url, "vllm", rollout_server_url=run_api.url, trainer_timeout=3, total_steps=50)
    trainer = make_trainer(run_api.url)
    async with asyncio.timeout(90), asyncio.TaskGroup() as tasks:
        serving_task = tasks.create_task(_raised(env.env_manager()))
        await trainer.run(1)
        error = await serving_task
    assert isinstance(error, TrainerGone)
    assert env.group_workers.tasks == set()


async def _raised(work: Any) -> BaseException | None:
    try:
        await work
    except Exception as error:
        return error
    return None


async def test_sizes_that_never_make_a_batch_are_refused(
    make_env: Any, token_server: Any, run_api: Any, make_trainer: Any
) -> None:
    trainer = make_trainer(run_api.url, batch_size=4)
    env = make_env(token_server.base_url, "vllm", rollout_server_url=run_api.url, group_size=3)
    training = asyncio.ensure_future(trainer.run(1))
    try:
        async with asyncio.timeout(60):
            with pytest.raises(ConfigError, match="a batch of 4 can't be made of groups of 3"):
                await env.env_manager()
    finally:
        training.cancel()
        await asyncio.wait([training])


@pytest.mark.usefixtures("atropos_extra")
async def test_an_evaluation_stops_rollouts_and_no_group_that_is_being_sent(make_env: Any, token_server: Any) -> None:
    env = make_env(token_server.base_url, "vllm", steps_per_eval=2)
    rolling, sending = (asyncio.create_task(asyncio.sleep(600)) for _ in range(2))
    env.workers, env.running_items = {rolling, sending}, {"key": {"item": "task", "worker": rolling, "start_time": 0}}
    env.curr_step = 1
    evaluated = asyncio.Event()

    async def evaluate() -> None:
        evaluated.set()

    env.evaluate = evaluate
    await env.group_workers.step({"current_step": 2})
    await evaluated.wait()
    assert rolling.cancelled()
    assert env.backlog == ["task"]
    assert not sending.cancelling()
    assert env.workers == {sending}, "or more workers than were asked for would be started beside it"
    sending.cancel()
    await asyncio.wait([sending])
    await env.group_workers.step({"current_step": 2})
    assert env.workers == set(), "one that has ended takes no other's place"


async def test_all_of_a_group_is_sent_while_evaluations_fail(
    make_env: Any,
    token_server: Any,
    run_api: Any,
    make_trainer: Any,
    runtime: Any,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    from hermes_atropos import load_environment

    more = {
        "generation_params": {"temperature": 1.0},
        "distill_token_ids": [[[1, 2]]] * 2,
        "distill_logprobs": [[[-0.5, -1.5]]] * 2,
    }
    broken_off, delays = [], itertools.cycle((0.3, 0.7, 1.1, 1.5))

    class Own(load_environment("tasks", runtime)):  # type: ignore[misc]
        async def postprocess_histories(self, trajectories: Any) -> Any:
            return [{**group, **more} for group in trajectories]

        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            raise InfraError("nothing could be scored")

        async def _send_scored_data_to_api(self, scored_data: Any) -> None:
            try:
                await asyncio.sleep(next(delays))  # so that evaluations begin meanwhile
            except asyncio.CancelledError:
                broken_off.append(scored_data)
                raise
            await super()._send_scored_data_to_api(scored_data)

    # Of several steps at once Atropos sees the last, and evaluates where they are fewer than `steps_per_eval`.
    settings = {"total_steps": 50, "steps_per_eval": 5, "max_num_workers": 4}
    env = make_env(token_server.base_url, "vllm", Own, rollout_server_url=run_api.url, **settings)
    trainer = make_trainer(run_api.url)
    serving_task, training = asyncio.ensure_future(env.env_manager()), asyncio.ensure_future(trainer.run(50))
    async with asyncio.timeout(120):
        while env.metrics.totals["evaluations_failed"] < 2:
            await asyncio.sleep(0.1)
        assert broken_off == []
        assert not serving_task.done(), "a failed evaluation does not end the training"
        for task in (training, serving_task):
            task.cancel()
            await asyncio.wait([task])
    checked(trainer)
    assert trainer.batches
    for group in (group for batch in trainer.batches for group in batch):
        assert {key: group[key] for key in more} == more
    (told, *_) = (record for record in caplog.records if "the evaluation at step" in record.getMessage())
    assert "nothing could be scored" in told.getMessage()
    assert told.exc_info
    metrics = lines(tmp_path / "data/groups.trajectories.metrics.jsonl")
    assert sum(each.get("train/evaluations_failed", 0) for each in metrics) == 2


@pytest.mark.usefixtures("atropos_extra")
def test_what_is_done_counts_what_waits() -> None:
    from hermes_atropos.modes import is_done

    class Config:
        group_size, batch_size, total_steps = 2, 4, 10

    assert not is_done(Config, {"current_step": 8, "queue_size": 4})  # type: ignore[arg-type]
    assert is_done(Config, {"current_step": 8, "queue_size": 6})  # type: ignore[arg-type]


@pytest.mark.usefixtures("leak_check")
async def test_rollouts_at_work_and_their_sandboxes_end_with_the_run(
    make_env: Any, token_server: Any, run_api: Any, make_trainer: Any, runtime: Any, tmp_path: Path
) -> None:
    env = make_env(token_server.base_url, "vllm", rollout_server_url=run_api.url, total_steps=50)
    plain, begun, ended = env.make_environment, asyncio.Event(), []

    def hanging(runtime: Any) -> Any:
        environment = plain(runtime)

        async def setup(item: Any, rollout: Any) -> None:
            begun.set()
            try:
                await asyncio.sleep(600)
            finally:
                ended.append(rollout.trajectory_id)

        environment.setup_trajectory_workspace = setup
        return environment

    env.make_environment = hanging
    training = asyncio.ensure_future(make_trainer(run_api.url).run(1))
    serving_task = asyncio.ensure_future(env.env_manager())
    async with asyncio.timeout(90):
        await begun.wait()
        assert await runtime.backend("local").list(runtime.owner)
        serving_task.cancel()
        await asyncio.wait([serving_task])
    training.cancel()
    await asyncio.wait([training])
    assert serving_task.cancelled()
    assert env.group_workers.tasks == set()
    assert await runtime.backend("local").list(runtime.owner) == [], "they do not wait for the runtime's end"
    records = lines(tmp_path / "data/groups.trajectories.jsonl")
    assert {record["trajectory_id"] for record in records} >= set(ended) != set()
    assert {(record["failure"]["kind"], record["reward"]) for record in records} == {("cancelled", None)}
