"""Stalls of a run: a loop that is really blocked and a rollout that is really stuck are written down, once."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_core.agents.base import AgentTask, StopReason
from hermes_core.environment import Environment
from hermes_core.rollout.running import RunningRollouts
from hermes_core.runs import stall_watchdog as stalls
from hermes_core.runs.runner import run_rollouts
from hermes_core.runs.stall_watchdog import STALLS, stalls_noticed
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings

ISOLATION = {"isolation": "user"} if os.geteuid() == 0 else {"isolation": "shared", "allow_unisolated": True}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "LOOK_S", 0.1)
    monkeypatch.setattr(stalls, "LAG_S", 1.0)


def watching() -> int:
    return sum(thread.name == "stall watch" for thread in threading.enumerate())


def blocking_call(until: Callable[[], object], most_s: float = 10.0) -> None:
    """Block the event loop until something is true."""
    end = time.monotonic() + most_s
    while not until() and time.monotonic() < end:
        time.sleep(0.05)


async def waits_for(event: asyncio.Event) -> None:
    await event.wait()


async def test_a_blocked_loop_is_written_down_by_who_does_not_need_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, never = tmp_path / "folder" / STALLS, asyncio.Event()
    waiting = [asyncio.create_task(waits_for(never), name=f"waiting {n}") for n in range(8)]
    async with stalls_noticed(RunningRollouts(), path, 600.0):
        await asyncio.sleep(0.3)
        blocking_call(lambda: "stacks" in caplog.text)
        blocking_call(lambda: False, 1.0)  # the same stall is not told again
    for task in waiting:
        task.cancel()
    (line,) = caplog.messages
    assert "the event loop has been blocked for" in line
    assert str(path) in line
    written = path.read_text()
    assert written.count("===") == 1
    threads, tasks = written.split("--- tasks")
    assert "blocking_call" in threads, "the function that blocks"
    assert "8 (waiting 0, waiting 1" in tasks
    assert "in waits_for" in tasks
    assert "in wait\n" in tasks, "all that a task awaits, not only its first function"


class Endless:
    """An agent that waits for an event."""

    name = "endless"

    def __init__(self, event: asyncio.Event) -> None:
        self._event = event

    async def run(self, task: AgentTask) -> Any:
        await waits_for(self._event)
        task.result.stop(StopReason.FINISHED)
        return task.result

    async def aclose(self) -> None:
        pass


class Two(Environment):
    """Two tasks."""

    name = "two"

    def items(self) -> list[dict[str, str]]:
        return [{"id": "one"}, {"id": "two"}]

    def format_prompt(self, item: Any) -> str:
        return "wait"

    async def verify_and_score_trajectory(self, item: Any, result: Any) -> float:
        return 1.0


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    assert not watching()


async def test_a_stuck_rollout_is_written_down_in_the_folder_of_its_run(
    runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    event = asyncio.Event()

    async def end_later() -> None:
        while not (runs / STALLS).exists():
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        event.set()

    async with asyncio.timeout(60), Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False) as runtime:
        ending = asyncio.create_task(end_later())
        summary = await run_rollouts(runtime, Two(), Endless(event), out_dir=runs, stall_timeout=1.0, **ISOLATION)
        await ending
    assert summary.complete
    told = [line for line in caplog.messages if "none of 2 rollouts has ended for" in line]
    assert len(told) == 1
    written = (runs / STALLS).read_text()
    assert "2 (rollout " in written
    assert "in run_rollout" not in written.split("2 (rollout ")[1].split("\n\n")[0], "a rollout is a task of its own"
    assert "await waits_for(self._event)" in written


@pytest.mark.few(1)
@pytest.mark.parametrize("timeout_s", [None, 0.3])
async def test_nothing_is_noticed_when_it_is_off_or_nothing_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, timeout_s: float | None
) -> None:
    async with stalls_noticed(RunningRollouts(), tmp_path / STALLS, timeout_s):
        assert watching() == (timeout_s is not None)
        await asyncio.sleep(1.0)
        if timeout_s is None:
            blocking_call(lambda: False, 1.0)
    assert not (tmp_path / STALLS).exists()
    assert not caplog.messages


async def test_stacks_that_can_not_be_written_are_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    async with stalls_noticed(RunningRollouts(), tmp_path / "file" / STALLS, 600.0):
        await asyncio.sleep(0.3)
        blocking_call(lambda: "could not be written" in caplog.text)
    assert "could not be written" in caplog.text
