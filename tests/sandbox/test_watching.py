"""Watches of background processes: what is delivered, how often, and that nothing is delivered twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hermes_core.events import Events
from hermes_core.sandbox.commands import ProcessUpdate
from hermes_core.sandbox.contract import Isolation
from hermes_core.sandbox.local.backend import LocalBackend, LocalConfig
from hermes_core.sandbox.pool.checkpoint import Checkpoint
from hermes_core.sandbox.pool.watches import LEAST_INTERVAL_S
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry
from hermes_core.tools.terminal import TERMINAL


class Heard:
    """Listens and subscribes."""

    def __init__(self) -> None:
        self.observed: list[ProcessUpdate] = []
        self.updates: list[ProcessUpdate] = []
        self.when: list[float] = []
        self.ended = asyncio.Event()

    def process_updated(self, *, trajectory_id: str, update: ProcessUpdate) -> None:
        assert trajectory_id == update.trajectory_id
        self.observed.append(update)

    async def __call__(self, update: ProcessUpdate) -> None:
        self.updates.append(update)
        self.when.append(time.monotonic())
        if not update.status.running:
            self.ended.set()

    @property
    def output(self) -> bytes:
        return b"".join(update.output for update in self.updates)


@asynccontextmanager
async def opened(folder: Path, heard: Heard, least_s: float = 0.5) -> AsyncIterator[ToolBackend]:
    """A tool backend whose updates may come more often than they should."""
    backend = LocalBackend()
    level = max(level for level in backend.capabilities.isolation if level is not Isolation.DEDICATED)
    events = Events()
    events.listen("process_updated", heard.process_updated)
    config = LocalConfig(name="default", slots_per_sandbox=2, min_sandboxes=0, reserve_slots=0)
    try:
        with Checkpoint(folder, "watching-" + folder.name) as checkpoint:
            tools = ToolBackend(
                backend,
                profiles={"default": config},
                tools=ToolRegistry(),
                isolation=level,
                owner="",
                events=events,
                checkpoint=checkpoint,
            )
            tools._watchers.least_interval_s = least_s
            tools.subscribe(heard)
            try:
                yield tools
            finally:
                await tools.aclose()
    finally:
        await backend.aclose()


async def test_what_is_new_is_told_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    heard = Heard()
    async with opened(tmp_path, heard) as tools, tools.lease("traj") as slot:
        args = {"command": "for i in 1 2 3 4 5 6; do echo $i; sleep 0.4; done; exit 3", "background": True}
        answer = (await tools.execute(slot, TERMINAL, {**args, "check_interval": 0.1})).to_tool_result()
        assert "every 0.5 s (raised from 0.1 s)" in answer["check_interval_note"]
        async with asyncio.timeout(30):
            await heard.ended.wait()
        await asyncio.sleep(1.2)
    assert heard.output == b"1\n2\n3\n4\n5\n6\n" and heard.observed == heard.updates
    assert len(heard.updates) >= 3 and heard.updates[-1].status.exit_code == 3
    assert [update.status.running for update in heard.updates[:-1]] == [True] * (len(heard.updates) - 1)
    assert {update.trajectory_id for update in heard.updates} == {"traj"}
    assert all(later - sooner > 0.45 for sooner, later in zip(heard.when, heard.when[1:], strict=False))


async def test_an_end_is_told_at_once_if_nothing_was_before(tmp_path: Path) -> None:
    heard = Heard()
    async with opened(tmp_path, heard, LEAST_INTERVAL_S) as tools, tools.lease() as slot:
        process = await tools.commands(slot).start("echo quick; exit 4")
        assert tools.watch(slot, process.process_id, 5) == LEAST_INTERVAL_S
        async with asyncio.timeout(10):
            await heard.ended.wait()
        assert [(update.output, update.status.exit_code) for update in heard.updates] == [(b"quick\n", 4)]


async def test_a_subscriber_that_fails_keeps_nobody_from_hearing(tmp_path: Path) -> None:
    heard = Heard()

    async def fails(update: ProcessUpdate) -> None:
        raise RuntimeError("broken")

    async with opened(tmp_path, heard) as tools, tools.lease() as slot:
        tools._watchers.subscribers.insert(0, fails)
        process = await tools.commands(slot).start("exit 1")
        tools.watch(slot, process.process_id, 1)
        async with asyncio.timeout(10):
            await heard.ended.wait()


async def test_a_released_slot_is_watched_no_more(tmp_path: Path) -> None:
    heard = Heard()
    async with opened(tmp_path, heard) as tools:
        async with tools.lease() as slot:
            process = await tools.commands(slot).start("sleep 1000")
            tools.watch(slot, process.process_id, 0.5)
        await asyncio.sleep(0.8)
        assert heard.updates == [] and not len(tools._watchers._tasks)


async def test_nothing_is_told_twice_by_the_next_driver(tmp_path: Path) -> None:
    first, second, third = Heard(), Heard(), Heard()
    async with opened(tmp_path, first) as tools:
        slot = await tools.acquire("traj")
        commands = tools.commands(slot)
        ends = await commands.start("echo a; read x; echo b; exit 5")
        over = await commands.start("echo over")
        for process in (ends, over):
            tools.watch(slot, process.process_id, 0.5)
        async with asyncio.timeout(20):
            while b"a\n" not in first.output or b"over\n" not in first.output:
                await asyncio.sleep(0.05)
        await tools.aclose(keep=True)
    async with opened(tmp_path, second) as tools:
        (slot,) = await tools.take_over()
        await tools.commands(slot).write(ends.process_id, b"\n")
        async with asyncio.timeout(20):
            await second.ended.wait()
        await tools.aclose(keep=True)
    assert (second.output, second.updates[0].offset) == (b"b\n", 2)
    async with opened(tmp_path, third) as tools:
        assert await tools.take_over()
        await asyncio.sleep(1.2)
    assert third.updates == []


def watch_arguments() -> Any:
    return [({"check_interval": 0}, "check_interval"), ({"check_interval": -5}, "check_interval")]


@pytest.mark.parametrize(("args", "says"), watch_arguments())
async def test_an_interval_that_is_none(tmp_path: Path, args: dict[str, Any], says: str) -> None:
    async with opened(tmp_path, Heard()) as tools, tools.lease() as slot:
        result = await tools.execute(slot, TERMINAL, {"command": "true", "background": True, **args})
        assert not result.success and says in str(result.to_tool_result())
