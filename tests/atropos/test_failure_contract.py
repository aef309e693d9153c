"""What Atropos gets of each kind of failure: no group with a failed rollout, and a score for what the agent did."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hermes_testing.scripted_server import Fault, Reply, ScriptedServer, call

from hermes_core.errors import InfraError, SetupFailed, VerifierError


async def stuck() -> None:
    """Ignore a first cancellation, as some code does."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(3600)
    await asyncio.sleep(3600)


@pytest.fixture
def failing(atropos_extra: None) -> type[Any]:
    """An environment whose items are named after what happens to their rollouts."""
    from hermes_atropos import HermesAgentBaseEnv, HermesAgentEnvConfig

    class Failing(HermesAgentBaseEnv):  # type: ignore[misc, valid-type]
        name = "failing"
        env_config_cls = HermesAgentEnvConfig
        short = 0

        async def setup(self) -> None:
            self.verifying = asyncio.Event()

        async def get_next_item(self) -> Any:
            return None

        def format_prompt(self, item: Any) -> str:
            return str(item["id"])

        async def setup_trajectory_workspace(self, item: Any, *, trajectory_id: str) -> None:
            if item["id"] == "setup":
                raise SetupFailed("no such repository")
            if item["id"] == "stuck":
                await stuck()

        async def verify_and_score_trajectory(self, item: Any, result: Any, *, rollout: Any) -> float:
            self.short += item["id"] == "short"
            if item["id"] == "infra" or (item["id"] == "short" and self.short == 1):
                raise InfraError("the sandbox is gone")
            if item["id"] == "cancelled":
                self.verifying.set()
                await asyncio.sleep(3600)
            if item["id"] == "verifier":
                raise VerifierError("no verdict")
            if item["id"] == "tampered":
                await rollout.commands.read_file("removed by the agent")
            return 0.5

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            raise AssertionError("the hook is there")

        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            pass

    return Failing


def script(request: dict[str, Any]) -> Reply | Fault:
    prompt = next(message["content"] for message in request["messages"] if message["role"] == "user")
    if prompt == "model":
        return Fault(400, "not this one")
    if prompt == "time limit" and request["messages"][-1]["role"] == "user":
        return Reply(tool_calls=[call("terminal", command="sleep 3600")])
    return Reply("Done.")


CASES = {
    # what happens: scores that are sent, or None; whether the item is rolled out again; kinds of failures
    "nothing": ([0.5, 0.5], False, {None}),
    "time limit": ([0.5, 0.5], False, {None}),
    "tampered": ([0.0, 0.0], False, {None}),
    "infra": (None, True, {"infra"}),
    "stuck": (None, True, {"infra"}),
    "model": (None, True, {"model"}),
    "setup": (None, False, {"setup"}),
    "verifier": (None, False, {"verifier"}),
    "short": (None, True, {None, "infra"}),
}


async def test_no_failure_reaches_the_trainer_as_a_reward(make_env: Any, failing: type[Any], tmp_path: Path) -> None:
    got: dict[str, Any] = {}
    async with ScriptedServer(script) as server:
        limits = {"rollout_timeout": 2, "deadline": 12, "infra_retries": 0, "group_refills": 0, "tool_pool_size": 20}
        env = make_env(server.base_url, kind=failing, dataset_name=None, max_num_workers=10, **limits)
        async with asyncio.timeout(100), env.running():

            async def collect(name: str) -> None:
                groups, again = await env.collect_trajectories({"id": name})
                got[name] = (groups[0]["scores"] if groups else None, bool(again))

            cancelled = asyncio.create_task(collect("cancelled"))
            await env.verifying.wait()
            cancelled.cancel()
            await asyncio.gather(cancelled, *(collect(name) for name in CASES), return_exceptions=True)
    records = [json.loads(line) for line in (tmp_path / "data/groups.trajectories.jsonl").read_text().splitlines()]
    for name, (scores, again, kinds) in CASES.items():
        mine = [record for record in records if record["item_id"] == name]
        assert len(mine) == 2, name
        assert got[name] == (scores, again), name
        assert {record["failure_kind"] for record in mine} == kinds, name
    assert {record["failure_kind"] for record in records if record["item_id"] == "cancelled"} == {"cancelled"}
    for record in records:
        assert record["mask_sample"] == (record["failure_kind"] is not None) == (record["reward"] is None)
        assert record["failure_reason"] == (record["failure"] and record["failure"]["message"])
    assert {record["stop_reason"] for record in records if record["item_id"] == "time limit"} == {"time_limit"}
