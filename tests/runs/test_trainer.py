"""Runs for trainers on the real local backend: in their own event loop, in a thread, and one for all copies."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.scripted_server import Reply, ScriptedServer, call

from hermes_core import (
    ConfigError,
    DatasetError,
    Environment,
    RunOptions,
    SharedRun,
    TrainerRun,
    UnknownNameError,
    UsageError,
    check_temperature,
    hookimpl,
    open_trainer_session,
)
from hermes_core.aio import LoopEnded

ROOT = Path(__file__).resolve().parents[2]
ISOLATION = {"isolation": "user"} if os.geteuid() == 0 else {"isolation": "shared", "allow_unisolated": True}
OPTIONS = RunOptions.model_validate({"concurrency": 2, **ISOLATION})


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak_check: None) -> None:
    """The state of these runs in a folder of their own. Nothing is left after any of them."""
    monkeypatch.setenv("HERMES_STATE_DIR", str(tmp_path / "state"))


class Greeting(Environment):
    """The reward is whether a file has a word. The dataset can't be loaded so many times."""

    name = "greeting"
    default_toolsets = ("terminal",)

    def __init__(self, failures: int = 0) -> None:
        super().__init__()
        self.failures = failures
        self.loaded = 0

    async def setup(self) -> None:
        self.loaded += 1
        await asyncio.sleep(0.1)
        if self.loaded <= self.failures:
            raise DatasetError("the disk is away")

    def items(self) -> list[dict[str, str]]:
        return [{"id": "one"}, {"id": "two"}]

    def format_prompt(self, item: Any) -> str:
        return "Write."

    @hookimpl
    async def verify_and_score_trajectory(self, item: Any, exec_tool: Any) -> float:
        return float((await exec_tool("bash", {"command": "grep -q hello greeting.txt"})).success)


def opening(environment: Environment) -> Callable[..., Any]:
    return partial(open_trainer_session, environment, OPTIONS)


def greeted(run: TrainerRun) -> float | None:
    """The reward of a rollout of a trainer that has no event loop."""
    rollout = run.call(run.begin("one"))
    assert json.loads(run.call(rollout.call("terminal", {"command": "echo hello > greeting.txt"})))["exit_code"] == 0
    (record,) = run.call(run.end([(rollout, "Done.")]))
    return record.reward


async def test_groups_in_the_event_loop_of_the_trainer() -> None:
    said = [Reply(tool_calls=[call("terminal", command="echo hello > greeting.txt")]), Reply("Done.")]
    async with ScriptedServer(said) as server, TrainerRun(opening(Greeting()), eager=True) as run:
        agent = run.session.runtime.agent("model", {"model": "scripted", "base_url": server.base_url})
        rolled = await asyncio.gather(*(run.roll_one(item_id, agent=agent) for item_id in run.items))
        assert [each.reward for each in rolled] == [1.0, 1.0]
        groups = await run.roll([("one", 2), ("two", 1)])
    assert [(group.item_id, [each.reward for each in group.kept]) for group in groups] == [
        ("one", [0.0, 0.0]),  # those of the run's own agent, which does nothing
        ("two", [0.0]),
    ]


@pytest.mark.parametrize(
    ("temperature", "said"), [(0.5, "at temperature 0.5"), (None, "at its endpoint's temperature")]
)
async def test_an_agent_that_samples_at_another_temperature_than_the_trainer_is_refused(
    temperature: float | None, said: str
) -> None:
    async with ScriptedServer([]) as server:
        agent = {"model": "scripted", "base_url": server.base_url, "tool_call_parser": None, "temperature": temperature}
        async with open_trainer_session(Greeting(), OPTIONS, agent=agent) as session:
            with pytest.raises(ConfigError, match=f"{said}, and the trainer computes logprobs at 1"):
                check_temperature(session, 1.0)
            if temperature is not None:
                check_temperature(session, temperature)
    async with open_trainer_session(Greeting(), OPTIONS) as session:
        check_temperature(session, 1.0)  # the trainer runs the model itself


async def test_all_who_open_a_run_share_one_attempt() -> None:
    environment = Greeting()
    run = TrainerRun(opening(environment))
    first, *others = [asyncio.create_task(run.open()) for _ in range(3)]
    while not environment.loaded:
        await asyncio.sleep(0.01)
    first.cancel()
    assert await asyncio.gather(*others) == [run, run]
    assert await run.open() is run
    assert environment.loaded == 1
    await run.aclose()


async def test_what_failed_to_open_can_be_opened_again() -> None:
    run = TrainerRun(opening(Greeting(failures=1)))
    with pytest.raises(DatasetError, match="the disk is away"):
        await run.open()
    with pytest.raises(UsageError, match="not open"):
        _ = run.session
    async with run:
        assert [*run.items] == ["one", "two"]


def test_a_trainer_without_an_event_loop_runs_the_model() -> None:
    with TrainerRun(opening(Greeting()), more_room="end one") as run:
        assert greeted(run) == 1.0
        rollouts = [run.call(run.begin("one")) for _ in range(2)]
        with pytest.raises(UsageError, match="end one"):
            run.call(run.begin("two"))
        run.call(run.drop(rollouts[0]))
        with pytest.raises(UnknownNameError, match="'three'"):
            run.call(run.begin("three"))
        run.call(run.begin("two"))
    assert run.closed
    with pytest.raises(LoopEnded):
        run.call(run.context())


def test_a_run_has_no_thread_before_it_is_started() -> None:
    run = TrainerRun(opening(Greeting()))
    work = run.open()
    with pytest.raises(UsageError, match="has no thread"):
        run.call(work)
    work.close()
    run.close()


def test_a_run_that_can_not_be_opened_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(DatasetError):
        TrainerRun(opening(Greeting(failures=1))).start()
    assert threading.active_count() == before


async def test_a_thread_serves_any_event_loop() -> None:
    with TrainerRun(opening(Greeting())) as run:
        task = run.call(run.spawn(run.roll_one("one"), "a rollout"))

        async def outcome() -> float | None:
            return (await task).reward

        assert await run.run(outcome()) == 0.0


def test_an_environment_without_rewards_is_refused(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt": "Tell a joke."}\n')
    env = {"dataset_name": str(tmp_path / "prompts.jsonl")}
    with pytest.raises(UsageError, match="gives no rewards"):
        TrainerRun(partial(open_trainer_session, "prompts", OPTIONS, env=env)).start()


def test_an_agent_without_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="agent 'oracle' have no tokens"):
        TrainerRun(partial(open_trainer_session, Greeting(), OPTIONS, agent={"name": "oracle"})).start()


class Unsteady:
    """Makes runs, the first of which can't be opened."""

    made = 0

    def __call__(self) -> TrainerRun:
        Unsteady.made += 1
        return TrainerRun(opening(Greeting(failures=int(Unsteady.made == 1))))


def test_copies_share_a_run_and_try_again() -> None:
    shared = SharedRun(Unsteady())
    with pytest.raises(DatasetError):
        _ = shared.run
    copy = pickle.loads(pickle.dumps(shared))
    assert copy.run is shared.run
    assert greeted(copy.run) == 1.0
    shared.close()
    copy.close()
    assert copy.run.closed


def test_another_process_has_a_run_of_its_own(tmp_path: Path) -> None:
    shared = SharedRun(partial(TrainerRun, opening(Greeting())))
    assert greeted(shared.run) == 1.0
    (tmp_path / "shared").write_bytes(pickle.dumps(shared))
    program = (
        "import pickle, sys\n"
        "from tests.runs.test_trainer import greeted\n"
        "print(greeted(pickle.load(open(sys.argv[1], 'rb')).run))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "shared")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"1.0\n"), done.stderr
    shared.close()
