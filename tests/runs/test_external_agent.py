"""Rollouts whose model the caller runs, on the real local backend: calls, time limits, failures, and what is left."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hermes_core import (
    DrivenRollout,
    Environment,
    FailureKind,
    InfraError,
    RolloutContext,
    RolloutEnded,
    RunOptions,
    Runtime,
    Settings,
    SetupFailed,
    StopReason,
    UsageError,
    VerifierError,
    hookimpl,
    open_session,
)

ISOLATION = {"isolation": "user"} if os.geteuid() == 0 else {"isolation": "shared", "allow_unisolated": True}
ITEM = {"id": "one", "prompt": "Write."}


class Greeting(Environment):
    """The reward is whether a file has a word, and a half more if the model says so."""

    name = "greeting"
    default_toolsets = ("terminal",)
    setups: tuple[Exception | None, ...] = ()
    verdict: Exception | None = None

    def __init__(self) -> None:
        super().__init__()
        self.set_up = 0

    def items(self) -> list[dict[str, str]]:
        return [ITEM]

    def format_prompt(self, item: Any) -> str:
        return str(item["prompt"])

    @hookimpl
    async def setup_trajectory_workspace(self, item: Any) -> dict[str, Any]:
        self.set_up += 1
        error = (*self.setups, *[None] * self.set_up)[self.set_up - 1]
        if error is not None:
            raise error
        return {}

    @hookimpl
    async def verify_and_score_trajectory(self, item: Any, result: Any, exec_tool: Any) -> float:
        if self.verdict is not None:
            raise self.verdict
        found = await exec_tool("bash", {"command": "grep -q hello greeting.txt"})
        return float(found.success) + 0.5 * (result.messages[-1]["content"] == "Written.")


@asynccontextmanager
async def driving(path: Path, environment: Environment, **options: Any) -> AsyncIterator[RolloutContext]:
    """The context of rollouts of this environment."""
    chosen = RunOptions.model_validate({"concurrency": 2, **ISOLATION, **options})
    async with (
        Runtime(Settings(state_dir=path / "state"), load_entry_points=False) as runtime,
        open_session(runtime, environment, "nop", chosen, work_of="model") as session,
        session.sandboxes() as context,
    ):
        yield session.tools.offer_tools(context, ITEM, "one")


async def test_the_callers_calls_run_in_the_slot_and_their_work_is_scored(tmp_path: Path) -> None:
    async with driving(tmp_path, Greeting()) as context:
        rollout = DrivenRollout(context, ITEM)
        assert await rollout.begin()
        written = json.loads(await rollout.call("terminal", {"command": "echo hello > greeting.txt; pwd"}))
        refused = json.loads(await rollout.call("terminal", {"comand": "ls"}))
        unknown = json.loads(await rollout.call("browse", {"url": "/"}))
        record = await rollout.end("Written.")
        assert record is await rollout.end("again")
        with pytest.raises(RolloutEnded, match="the model was done"):
            await rollout.call("terminal", {"command": "ls"})
    assert (written["exit_code"], "comand" in refused["error"], "browse" in unknown["error"]) == (0, True, True)
    assert (record.reward, record.failure, record.stop_reason) == (1.5, None, StopReason.FINISHED)
    assert [message["role"] for message in record.messages] == ["user", *["assistant", "tool"] * 3, "assistant"]
    assert [call.error is None for call in record.calls] == [True, False, False]


async def test_calls_at_the_same_time_run_in_their_order(tmp_path: Path) -> None:
    async with driving(tmp_path, Greeting()) as context:
        rollout = DrivenRollout(context, ITEM)
        assert await rollout.begin()
        calls = [rollout.call("terminal", {"command": f"echo {n} >> said; cat said"}) for n in range(3)]
        answers = [json.loads(answer)["output"].split() for answer in await asyncio.gather(*calls)]
        assert answers == [["0"], ["0", "1"], ["0", "1", "2"]]
        assert (await rollout.end()).stop_reason == StopReason.EMPTY_RESPONSE


async def test_the_time_of_the_tools_ends_and_the_work_is_scored(tmp_path: Path) -> None:
    async with driving(tmp_path, Greeting(), rollout_timeout=1.0) as context:
        rollout = DrivenRollout(context, ITEM)
        assert await rollout.begin()
        await rollout.call("terminal", {"command": "echo hello > greeting.txt"})
        with pytest.raises(RolloutEnded, match="its time is up"):
            await rollout.call("terminal", {"command": "sleep 60"})
        record = await rollout.end("Written.")
    assert (record.reward, record.stop_reason, record.failure) == (1.0, StopReason.TIME_LIMIT, None)


async def test_a_model_that_takes_too_long_is_a_failure_of_the_model(tmp_path: Path) -> None:
    async with driving(tmp_path, Greeting(), model_timeout=0.2) as context:
        rollout = DrivenRollout(context, ITEM)
        assert await rollout.begin()
        await asyncio.sleep(0.6)
        with pytest.raises(RolloutEnded, match="model_timeout"):
            await rollout.call("terminal", {"command": "ls"})
        record = await rollout.end("Written.")
    assert (record.reward, record.failure and record.failure.kind) == (None, FailureKind.MODEL)


async def test_a_setup_that_met_a_broken_sandbox_is_repeated_and_others_are_not(tmp_path: Path) -> None:
    lost, wrong = InfraError("lost"), SetupFailed("no such dataset")
    for setups, begins, times, kind in (
        ((lost, lost), True, 3, None),
        ((lost,) * 3, False, 3, FailureKind.INFRA),
        ((wrong,), False, 1, FailureKind.SETUP),
    ):
        environment = Greeting()
        environment.setups = setups
        async with driving(tmp_path, environment) as context:
            rollout = DrivenRollout(context, ITEM)
            assert await rollout.begin() is begins
            record = await rollout.end("Written.")
            if not begins:
                with pytest.raises(RolloutEnded, match=str(setups[0])):
                    await rollout.call("terminal", {"command": "ls"})
        assert environment.set_up == times
        assert (record.failure and record.failure.kind) == kind
        assert (record.reward is None) is not begins
        assert record.infra_retries == times - 1


async def test_a_sandbox_that_is_lost_later_is_a_failure_and_nothing_is_repeated(tmp_path: Path) -> None:
    environment = Greeting()
    async with driving(tmp_path, environment) as context:
        rollout = DrivenRollout(context, ITEM)
        assert await rollout.begin()
        backend = context.backend.backend
        for sandbox in await backend.list():
            if f"-{os.getpid()}-" in sandbox.owner:  # the others are of other tests and programs
                await backend.terminate_id(sandbox.sandbox_id)
        with pytest.raises(RolloutEnded):
            await rollout.call("terminal", {"command": "ls"})
        record = await rollout.end("Written.")
    assert (record.reward, record.failure and record.failure.kind) == (None, FailureKind.INFRA)
    assert environment.set_up == 1


async def test_a_failed_verification_gives_no_reward(tmp_path: Path) -> None:
    environment = Greeting()
    environment.verdict = VerifierError("no")
    async with driving(tmp_path, environment) as context:
        rollout = DrivenRollout(context, ITEM)
        assert await rollout.begin()
        record = await rollout.end("Written.")
    assert (record.reward, record.failure and record.failure.kind) == (None, FailureKind.VERIFIER)


async def test_closing_it_ends_it_as_cancelled(tmp_path: Path) -> None:
    async with driving(tmp_path, Greeting()) as context:
        rollout = DrivenRollout(context, ITEM)
        assert await rollout.begin()
        call = asyncio.create_task(rollout.call("terminal", {"command": "sleep 60"}))
        await asyncio.sleep(0.2)
        await rollout.aclose()
        with pytest.raises(RolloutEnded):
            await call
        record = await rollout.end()
        assert (record.reward, record.failure and record.failure.kind) == (None, FailureKind.CANCELLED)
        other = DrivenRollout(context, ITEM)
        assert await other.begin(), "its slot was released"
        await other.aclose()


async def test_settings_with_which_nothing_can_begin_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driving(tmp_path, Greeting()) as context:

        async def refused(*args: Any, **kwargs: Any) -> None:
            raise UsageError("no such slot")

        monkeypatch.setattr(context.backend, "acquire", refused)
        rollout = DrivenRollout(context, ITEM)
        with pytest.raises(UsageError, match="no such slot"):
            await rollout.begin()
        assert (await rollout.end()).failure is not None
