"""Groups on the real local backend, without a trainer: replacements, groups that stay short, and the end of a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hermes_core.agents.base import AgentTask, StopReason
from hermes_core.agents.endpoint.errors import EndpointDown
from hermes_core.environment import Environment, EnvironmentConfig
from hermes_core.errors import FailureKind, ModelError, UsageError
from hermes_core.rollout import running
from hermes_core.runs.group import Group, GroupRoller, Rolled
from hermes_core.runs.options import RunOptions
from hermes_core.runs.session import open_session
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings

ISOLATION = {"isolation": "user"} if os.geteuid() == 0 else {"isolation": "shared", "allow_unisolated": True}

Work = Callable[[AgentTask], Coroutine[Any, Any, None]]


class Plain(Environment):
    """Gives every rollout a half."""

    name = "plain"

    def items(self) -> list[dict[str, str]]:
        return []

    def format_prompt(self, item: Any) -> str:
        return f"do {item['id']}"

    async def verify_and_score_trajectory(self, item: Any, result: Any) -> tuple[float, dict[str, Any]]:
        return 0.5, {}


class Worker:
    """An agent that does what a function says."""

    name = "worker"

    def __init__(self, work: Work) -> None:
        self._work = work

    async def run(self, task: AgentTask) -> Any:
        await self._work(task)
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self) -> None:
        pass


class Records:
    """What was taken down."""

    def __init__(self) -> None:
        self.rolled: list[Rolled] = []
        self.groups: list[Group] = []

    def add(self, rolled: Rolled, result: Any) -> None:
        self.rolled.append(rolled)

    def add_group(self, group: Group) -> None:
        self.groups.append(group)


@asynccontextmanager
async def rolling(
    path: Path, work: Work, *, refills: int = 0, deadline: float | None = None, **config: Any
) -> AsyncIterator[tuple[Any, Records]]:
    """A roller of groups with room for four rollouts, and what it takes down."""
    given = {"concurrency": 4, "infra_retries": 0, "deadline": deadline, **ISOLATION}
    records, options = Records(), RunOptions.model_validate(given)
    async with Runtime(Settings(state_dir=path / "state"), load_entry_points=False) as runtime:
        environment = Plain(EnvironmentConfig(**config))
        async with (
            open_session(runtime, environment, Worker(work), options) as session,
            session.sandboxes() as context,
        ):
            yield (
                GroupRoller(context, session.tools, records, room=session.room, refills=refills, exact=False),
                records,
            )


def failing(times: int, error: Exception) -> tuple[Work, list[AgentTask]]:
    """Work whose first so many rollouts fail, and the rollouts that were begun."""
    begun: list[AgentTask] = []

    async def work(task: AgentTask) -> None:
        begun.append(task)
        if len(begun) <= times:
            raise error

    return work, begun


async def test_failed_rollouts_are_replaced_and_kept_apart(tmp_path: Path) -> None:
    work, _ = failing(2, ModelError("no"))
    async with rolling(tmp_path, work, refills=2) as (roller, records):
        group = await roller.roll({"id": "one"}, 3)
    assert group.whole
    assert [rolled.reward for rolled in group.kept] == [0.5] * 3
    assert [rolled.record.failure.kind for rolled in group.failed] == [FailureKind.MODEL] * 2
    assert {rolled.record.group for rolled in records.rolled} == {group.group_id}
    assert sorted(rolled.record.rollout_index for rolled in records.rolled) == [0, 1, 2, 3, 4]
    assert records.groups == [group]
    assert roller.fatal is None


async def test_a_group_whose_replacements_are_used_up_stays_short(tmp_path: Path) -> None:
    work, _ = failing(3, ModelError("no"))
    async with rolling(tmp_path, work, refills=2) as (roller, records):
        group = await roller.roll({"id": "one"}, 2)
        alone = await roller.roll_one({"id": "one"})
    assert (len(group.kept), len(group.failed), group.whole, group.unlucky) == (1, 3, False, True)
    assert (alone.whole, alone.group_id != group.group_id) == (True, True)
    assert records.groups == [group], "one rollout is not counted as a group"


async def test_one_rollout_can_have_an_agent_and_a_group_of_its_own(tmp_path: Path) -> None:
    ours, theirs = failing(0, ModelError("no")), failing(0, ModelError("no"))
    async with rolling(tmp_path, ours[0]) as (roller, records):
        for _ in range(2):
            group = await roller.roll_one({"id": "one"}, agent=Worker(theirs[0]), group_id="mine")
            assert (group.whole, group.group_id) == (True, "mine")
    assert (len(ours[1]), len(theirs[1])) == (0, 2)
    assert [rolled.record.group for rolled in records.rolled] == ["mine"] * 2


async def test_an_agent_in_the_slot_has_a_slot_and_no_tools_also_in_place_of_another(tmp_path: Path) -> None:
    class Inside(Worker):
        in_slot = True

    ours, theirs = failing(0, ModelError("no")), failing(0, ModelError("no"))
    async with rolling(tmp_path, ours[0]) as (roller, _):
        assert (await roller.roll_one({"id": "one"}, agent=Inside(theirs[0]))).whole
        assert (await roller.roll_one({"id": "one"})).whole
    assert [(task.tool_schemas, task.slot is None) for task in theirs[1]] == [([], False)]
    assert ours[1][0].tool_schemas


async def test_nothing_is_begun_when_the_model_is_down(tmp_path: Path) -> None:
    work, begun = failing(100, EndpointDown("in trouble"))
    async with rolling(tmp_path, work, refills=50) as (roller, records):
        with pytest.raises(EndpointDown):
            await roller.roll({"id": "one"}, 2)
        assert isinstance(roller.fatal, EndpointDown)
        with pytest.raises(EndpointDown):
            await roller.roll({"id": "two"}, 8)
    assert len(begun) == len(records.rolled) <= 2
    assert [group.whole for group in records.groups] == [False, False]


async def test_a_wrong_request_ends_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, _ = failing(0, ModelError("no"))
    async with rolling(tmp_path, work) as (roller, _):

        async def refused(*args: Any, **kwargs: Any) -> None:
            raise UsageError("no such slot")

        monkeypatch.setattr(roller.context.backend, "acquire", refused)
        with pytest.raises(UsageError, match="no such slot"):
            await roller.roll({"id": "one"}, 2)
        assert isinstance(roller.fatal, UsageError)


async def test_all_rollouts_of_a_group_have_the_same_tools(tmp_path: Path) -> None:
    offered: dict[str, set[tuple[str, ...]]] = {}

    async def work(task: AgentTask) -> None:
        prompt = task.messages[-1]["content"]
        offered.setdefault(prompt, set()).add(tuple(tool["function"]["name"] for tool in task.tool_schemas))

    async with rolling(tmp_path, work, distribution="balanced") as (roller, _):
        await asyncio.gather(*(roller.roll({"id": str(n)}, 3) for n in range(12)))
    assert all(len(names) == 1 for names in offered.values())
    assert len({next(iter(names)) for names in offered.values()}) > 1, "each group draws its own"


def test_no_trainer_is_imported() -> None:
    code = "import hermes_core.runs.group, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not [name for name in json.loads(done.stdout) if "atropos" in name]


@pytest.mark.usefixtures("leak_check")
async def test_a_group_ends_with_its_survivors_when_a_rollout_is_stuck(tmp_path: Path) -> None:
    begun: list[AgentTask] = []

    async def work(task: AgentTask) -> None:
        begun.append(task)
        if len(begun) > 4:
            await together.wait()
        while task is begun[0] and not ended.is_set() and clock() < last:  # it ignores its cancellation
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    ended, together = asyncio.Event(), asyncio.Barrier(4)
    clock = asyncio.get_running_loop().time
    last = clock() + 30
    async with rolling(tmp_path, work, refills=5, deadline=3.0) as (roller, _):
        began = clock()
        group = await roller.roll({"id": "one"}, 4)
        assert clock() - began < 15
        assert (len(group.kept), group.whole, group.unlucky) == (3, False, True)
        (failed,) = group.failed
        assert failed.record.failure is not None
        assert (failed.reward, failed.record.failure.kind, len(begun)) == (None, FailureKind.INFRA, 4)
        async with asyncio.timeout(10):  # the slot of the stuck one can be leased again
            assert (await roller.roll({"id": "two"}, 4)).whole
        assert len(roller.context.running) == 1
        ended.set()
    assert len(roller.context.running) == 0


async def test_a_run_does_not_wait_for_a_rollout_that_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running, "LEAVE_S", 0.2)
    over = asyncio.Event()

    async def work(task: AgentTask) -> None:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()

    async with asyncio.timeout(20), rolling(tmp_path, work, deadline=1.0) as (roller, _):
        assert not (await roller.roll_one({"id": "one"})).whole
    assert "1 rollouts were cancelled at their deadline and do not end" in caplog.text
    over.set()
    while len(roller.context.running):
        await asyncio.sleep(0.01)
