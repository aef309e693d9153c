"""Serve mode when the money is gone, a key is refused, or one of several model servers dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_core.agents.endpoint import balancer
from hermes_core.agents.endpoint.circuit import CircuitState
from hermes_core.agents.endpoint.errors import EndpointDown
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.runtime import Runtime
from hermes_core.sandbox.pool.cost import CostLimitReached, Meter
from hermes_core.settings import Settings


class Watcher:
    """A plugin that knows what was begun, and what ended."""

    def __init__(self) -> None:
        self.sandboxes: list[str] = []
        self.started: list[str] = []
        self.finished: list[str] = []

    @hookimpl
    def hermes_sandbox_created(self, sandbox_id: str) -> None:
        self.sandboxes.append(sandbox_id)

    @hookimpl
    def hermes_trajectory_started(self, trajectory_id: str) -> None:
        self.started.append(trajectory_id)

    @hookimpl
    def hermes_trajectory_finished(self, trajectory_id: str) -> None:
        self.finished.append(trajectory_id)


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
async def runtime(tmp_path: Path, watcher: Watcher) -> AsyncIterator[Runtime]:
    async with Runtime(Settings(state_dir=tmp_path / "state"), plugins=[watcher], load_entry_points=False) as one:
        yield one


def records(tmp_path: Path) -> list[dict[str, Any]]:
    text = (tmp_path / "data/groups.trajectories.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


async def served(env: Any, trainer: Any, *, until: Callable[[], Any] | None = None) -> BaseException | None:
    """Serve until it ends, with a trainer and `until` beside it; the error that it ended with."""
    beside = [asyncio.create_task(trainer.run(1000))]
    if until is not None:
        beside.append(asyncio.create_task(until()))
    try:
        async with asyncio.timeout(120):
            await env.env_manager()
    except (CostLimitReached, EndpointDown) as error:
        return error
    finally:
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)
    return None


async def test_a_key_that_is_refused_is_said_before_the_first_sandbox(
    make_env: Any, token_server: Any, run_api: Any, make_trainer: Any, watcher: Watcher
) -> None:
    token_server.trouble = 401
    env = make_env(token_server.base_url, "vllm", rollout_server_url=run_api.url)
    error = await served(env, make_trainer(run_api.url))
    assert "refused the API key" in str(error)
    assert "set a key" in str(error)
    assert (watcher.sandboxes, watcher.started, token_server.requests) == ([], [], 1)


@pytest.mark.usefixtures("leak_check")
async def test_the_money_is_spent_and_groups_that_have_their_slots_are_sent(
    make_env: Any,
    token_server: Any,
    run_api: Any,
    make_trainer: Any,
    watcher: Watcher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meters, begin = [], Meter.begin

    def noted(meter: Meter, sandbox_id: str) -> None:
        meters.append(meter)
        begin(meter, sandbox_id)

    monkeypatch.setattr(Meter, "begin", noted)
    dear = {"prices": {"sandbox": 3600.0}, "max_cost": 3, "slots_per_sandbox": 8, "max_sandboxes": 1}
    env = make_env(
        *(token_server.base_url, "vllm"),
        rollout_server_url=run_api.url,
        total_steps=50,
        tool_pool_size=3,
        sandbox={"local": dear},
    )
    plain, begun = env.make_environment, []

    def slow(runtime: Any) -> Any:
        environment = plain(runtime)

        async def setup(item: Any, rollout: Any) -> None:
            begun.append(rollout.trajectory_id)
            place = len(begun)
            while not meters[0].is_spent:
                await asyncio.sleep(0.02)
            await asyncio.sleep(place)  # the last goes on while others are refused

        environment.setup_trajectory_workspace = setup
        return environment

    env.make_environment = slow
    error = await served(env, make_trainer(run_api.url))
    assert isinstance(error, CostLimitReached)
    found = records(tmp_path)
    assert sorted(watcher.started) == sorted(watcher.finished) == sorted(each["trajectory_id"] for each in found)
    assert all((each["reward"] is None) == (each["failure"] is not None) for each in found)
    scored = [each for each in found if each["reward"] is not None]
    assert {each["trajectory_id"] for each in scored} == set(begun), "none that had its slot was cancelled"
    assert {each["reward"] for each in scored} == {1.0}
    assert all("max_cost" in each["failure"]["message"] for each in found if each["failure"])
    groups = [each["group"] for each in scored]
    assert env.api.counts["sent"] == len({group for group in groups if groups.count(group) == 2}) == 1


@pytest.mark.usefixtures("leak_check")
async def test_one_of_two_servers_dies_and_the_other_goes_on_until_it_is_back(
    make_env: Any,
    tokenizers: Any,
    token_server: Any,
    run_api: Any,
    make_trainer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(balancer, "AVOID_S", 2.0)
    async with contextlib.AsyncExitStack() as stack:
        other = await stack.enter_async_context(type(token_server)(tokenizers("chatml"), token_server.script))
        env = make_env(token_server.base_url, "vllm", rollout_server_url=run_api.url, total_steps=1000)
        env.config.endpoint_patience = 1.0
        first = env.server_configs[0]
        env.server_configs = [
            first.model_copy(update={"base_url": url}) for url in (token_server.base_url, other.base_url)
        ]
        trainer = make_trainer(run_api.url)
        seen: dict[str, Any] = {}

        async def until() -> None:
            while len(trainer.batches) < 4:
                await asyncio.sleep(0.02)
            seen["both"] = (token_server.requests, other.requests)
            other.trouble = 503
            seen["roller"] = env.roller
            servers = env.roller.context.agent._servers
            while servers[1].endpoint.circuit.state is not CircuitState.OPEN:
                await asyncio.sleep(0.02)
                assert not balancer.should_avoid(servers[0].endpoint.circuit)
            asked, batches = token_server.requests, len(trainer.batches)
            while len(trainer.batches) < batches + 6:
                await asyncio.sleep(0.02)
                assert not balancer.should_avoid(servers[0].endpoint.circuit)
            seen["alone"] = token_server.requests - asked
            other.trouble, before = None, other.requests
            while other.requests < before + 12 or servers[1].endpoint.circuit.state is CircuitState.OPEN:
                await asyncio.sleep(0.02)
            seen["ended"] = True
            serving.cancel()

        serving = asyncio.ensure_future(served(env, trainer, until=until))
        with contextlib.suppress(asyncio.CancelledError):
            assert await serving is None
    assert seen["ended"]
    assert min(seen["both"]) > 2, "each had its share"
    assert seen["alone"] >= 6 * 2 * 2
    found = records(tmp_path)
    assert all((each["reward"] is None) == (each["failure"] is not None) for each in found)
    assert {each["reward"] for each in found} <= {1.0, None}
    assert {each["failure"]["kind"] for each in found if each["failure"]} <= {"model", "cancelled"}
    assert seen["roller"].fatal is None, "one that is down ends nothing"
