"""Checks whose time limit passes: a starved one is told from a slow one, and repeated once."""

import asyncio
import contextlib
import subprocess

import pytest

from hermes_core.datasets import tasks
from hermes_core.errors import CommandError, SlotLost
from hermes_core.rollout import starvation
from hermes_core.rollout.starvation import watch_for_starvation
from hermes_core.sandbox.commands import CommandResult
from tests.rollout.test_rollout import Plain, Slots, roll


class Looked:
    """Commands of a slot, one of which says how long its threads have waited."""

    def __init__(self, said):
        self.said, self.seen = said, asyncio.Event()

    async def run(self, command, **_):
        self.seen.set()
        if isinstance(self.said, Exception):
            raise self.said
        return CommandResult(exit_code=0, stdout=self.said)

    async def check(self):
        await self.seen.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        return "its outcome"


@pytest.mark.parametrize(
    ("said", "is_starved"),
    [
        (b"9000000\n", True),
        (b"4000000\n", False),
        (b"0\n", False),
        (b"", False),
        (CommandError("no sh"), False),
        (SlotLost("gone"), False),
    ],
)
async def test_a_check_is_starved_if_it_waited_for_a_processor(monkeypatch, said, is_starved):
    monkeypatch.setattr(starvation, "LEAST_LIMIT_S", 0)
    commands = Looked(said)
    outcome, reason = await watch_for_starvation(commands, commands.check(), 0.01)
    assert (outcome, reason is not None) == ("its outcome", is_starved)


async def test_what_ends_in_time_or_has_a_short_limit_is_not_looked_at():
    commands = Looked(b"9000000000000")
    for limit_s in (0.0, 1000.0):
        assert await watch_for_starvation(commands, asyncio.sleep(0.01, "done"), limit_s) == ("done", None)
    assert not commands.seen.is_set()


def test_the_script_prints_one_number():
    done = subprocess.run(["sh", "-c", starvation._WAITED], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) >= 0 and not done.stderr


class Turns(Slots):
    """Slots whose processors a check can have to itself."""

    @contextlib.asynccontextmanager
    async def processor(self, slot, *, alone=False):
        self.note(f"processor alone={alone}", slot)
        yield


@pytest.mark.parametrize(("reason", "outcomes", "reward"), [("it waited", 2, 1.0), (None, 1, 0.0)])
async def test_a_check_that_waited_until_its_time_limit_is_repeated_once(monkeypatch, reason, outcomes, reward):
    late, done = CommandResult(exit_code=None, timed_out=True), None
    ran = []

    async def run_all(*_):
        ran.append(1)
        return late if len(ran) == 1 else done

    async def watch(commands, run, limit_s):
        return await run, reason

    async def furnish(item, rollout):
        return {}

    monkeypatch.setattr(tasks, "run_all", run_all)
    monkeypatch.setattr(tasks, "watch_for_starvation", watch)
    environment = tasks.TasksEnvironment(tasks.TasksConfig(dataset_name="none"))
    monkeypatch.setattr(environment, "_furnish", furnish)

    async def verify(given):
        return await environment.verify_and_score_trajectory({"check": ["true"]}, given.rollout)

    backend = Turns()
    trajectory = await roll(Plain(verify=verify), backend=backend)
    assert (trajectory.reward, trajectory.failure, len(ran)) == (reward, None, outcomes)
    assert trajectory.repeated == reason
    assert ("processor alone=True" in backend.log) == (reason is not None)
