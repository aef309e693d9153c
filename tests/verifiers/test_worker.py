"""The run that a process of verifiers shares, on the real local backend and without verifiers."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.scripted_server import Reply, ScriptedServer, call
from hermes_verifiers.worker import Worker, WorkerOptions

from hermes_core import FailureKind, UnknownNameError, UsageError

LEVEL = {} if os.geteuid() == 0 else {"isolation": "shared", "allow_unisolated": True}


def worker_for(tasks: dict[str, Any], **options: Any) -> Worker:
    return Worker("tasks", tasks, WorkerOptions(**LEVEL, **options))


WRITE_1 = [Reply(tool_calls=[call("terminal", command="echo 1 > out.txt; echo $HERMES")]), Reply("Done.")]


async def test_prompts_are_read_while_a_loop_runs(tasks: dict[str, Any]) -> None:
    prompts = worker_for(tasks).prompts()
    assert [*prompts] == ["task-0", "task-1", "task-2"]
    assert [message["role"] for message in prompts["task-1"]] == ["system", "user"]
    assert prompts["task-1"][1]["content"] == "Write 1 into out.txt"


@pytest.mark.usefixtures("leak_check")
async def test_rollouts_at_the_same_time_share_a_run_that_ends_with_the_last(tasks: dict[str, Any]) -> None:
    worker = worker_for(tasks, concurrency=4)
    async with worker.open() as run:
        rolled = await asyncio.gather(*(worker.roll(f"task-{n % 3}", "oracle") for n in range(6)))
        async with worker.open() as again:
            assert again is run
    async with worker.open() as another:
        assert another is not run
    assert [each.reward for each in rolled] == [1.0] * 6
    assert {each.record.group for each in rolled} == {"task-0", "task-1", "task-2"}


@pytest.mark.usefixtures("leak_check")
async def test_the_model_is_asked_at_the_endpoint_of_the_rollout(tasks: dict[str, Any]) -> None:
    async with ScriptedServer(WRITE_1, api_key="one") as one, ScriptedServer(WRITE_1, api_key="two") as two:
        worker = worker_for(tasks)
        first, second = await asyncio.gather(
            worker.roll("task-1", "model", {"model": "scripted", "base_url": one.base_url, "api_key": "one"}),
            worker.roll("task-2", "model", {"model": "scripted", "base_url": two.base_url, "api_key": "two"}),
        )
    assert (first.reward, second.reward) == (1.0, 0.0)
    assert (one.request_count, two.request_count) == (2, 2)


async def test_a_dead_endpoint_is_a_failure_of_the_model(tasks: dict[str, Any]) -> None:
    gone = {"model": "m", "base_url": "http://127.0.0.1:9/v1", "max_retries": 0}
    rolled = await worker_for(tasks).roll("task-0", "model", gone)
    assert (rolled.failure_kind, rolled.reward) == (FailureKind.MODEL, None)


@pytest.mark.usefixtures("leak_check")
async def test_a_cancelled_rollout_closes_the_run(tasks: dict[str, Any]) -> None:
    async with ScriptedServer([Reply("slow", delay_s=60)]) as server:
        worker = worker_for(tasks)
        rollout = asyncio.create_task(
            worker.roll("task-0", "model", {"model": "scripted", "base_url": server.base_url})
        )
        while not server.request_count and not rollout.done():
            await asyncio.sleep(0.05)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout


async def test_what_can_not_be_opened_is_tried_again_for_the_next(tasks: dict[str, Any]) -> None:
    worker = Worker("tasks", {**tasks, "dataset_name": tasks["dataset_name"] + ".gz.not"}, WorkerOptions(**LEVEL))
    for _ in range(2):
        with pytest.raises(Exception, match="not"):
            await worker.roll("task-0", "oracle")
    with pytest.raises(UnknownNameError, match="tusks"):
        Worker("tusks", tasks, WorkerOptions()).prompts()


async def test_an_environment_without_rewards_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt": "Tell a joke."}\n')
    with pytest.raises(UsageError, match="gives no rewards"):
        Worker("prompts", {"dataset_name": str(tmp_path / "prompts.jsonl")}, WorkerOptions(**LEVEL)).prompts()


@pytest.mark.parametrize("option", [{"infra_retries": 1}, {"group_size": 2}, {"stop_on_infra": 0.5}])
def test_what_is_the_trainers_business_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        WorkerOptions(**option)
