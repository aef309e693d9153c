"""A driver that dies, and the next one that takes its sandboxes over, with all that runs in them."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hermes_core.errors import ConfigError, UsageError
from hermes_core.sandbox.contract import SandboxStatus
from hermes_core.sandbox.local.backend import LocalBackend
from hermes_core.sandbox.pool.checkpoint import Checkpoint
from hermes_core.tool_backend import ToolBackend

SCRIPT = Path(__file__).with_name("recovery_driver.py")
_spec = importlib.util.spec_from_file_location("recovery_driver", SCRIPT)
assert _spec is not None and _spec.loader is not None
driver = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(driver)

COUNT = 20
TTL_S = 30.0


class Driver:
    """Another process that holds sandboxes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, folder: Path, count: int = COUNT, ttl_s: float = TTL_S) -> Driver:
        arguments = [str(SCRIPT), str(folder), str(ttl_s), str(count)]
        return cls(await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE))

    async def says(self, word: str) -> Any:
        """The next line with this word."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if word in (said := json.loads(line)):
                return said[word]
        raise AssertionError(f"the driver ended before it said {word}")

    async def kill(self) -> list[dict[str, Any]]:
        """`kill -9`; what it had still said."""
        assert self._process.stdout is not None
        if self._process.returncode is None:
            self._process.kill()
        rest = await self._process.stdout.read()
        await self._process.wait()
        return [json.loads(line) for line in rest.splitlines() if line.endswith(b"}")]


@asynccontextmanager
async def next_driver(folder: Path, ttl_s: float = TTL_S) -> AsyncIterator[ToolBackend]:
    """The driver after that one, in this process."""
    backend = LocalBackend()
    try:
        with Checkpoint(folder, "never used") as checkpoint:
            tools = driver.tool_backend(backend, driver.strongest(backend), checkpoint, ttl_s)
            try:
                yield tools
            finally:
                await tools.aclose()
        assert not [info for info in await backend.list(checkpoint.owner) if info.status is SandboxStatus.RUNNING]
    finally:
        await backend.aclose()


async def everything_is_there(tools: ToolBackend, said: list[dict[str, Any]]) -> int:
    """Every process that was said to be started is there, with all of its output and its own exit code."""
    slots = {slot.trajectory_id: slot for slot in await tools.take_over()}
    for each in said:
        assert each["task"] in slots
    found = 0
    for slot in slots.values():
        commands = tools.commands(slot)
        known = {status.process_id: status for status in await commands.processes()}
        for each in said:
            assert each["task"] != slot.trajectory_id or each["process"] in known
        for status in known.values():
            number = int(status.command.rpartition(" ")[2])
            early = await commands.log(status.process_id)
            ended = await commands.wait(status.process_id, timeout_s=60)
            assert (ended.running, ended.exit_code, ended.signal) == (False, number, None)
            log = await commands.log(status.process_id)
            assert log.data == driver.output(number) and early.data == log.data[: len(early.data)]
            found += 1
    assert found >= len(said)
    return found


async def test_a_living_driver_s_sandboxes_are_its_own_and_a_killed_one_s_processes_go_on(tmp_path: Path) -> None:
    first = await Driver.start(tmp_path)
    await first.says("done")
    with pytest.raises(UsageError, match="another driver that lives"):
        Checkpoint(tmp_path, "other")
    await first.kill()
    async with next_driver(tmp_path) as tools:
        assert await everything_is_there(tools, []) == COUNT
    assert not (tmp_path / "processes.json").exists()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
async def test_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    await killed_at_a_moment(tmp_path, random.Random(seed).uniform(0.3, 2.0))


async def killed_at_a_moment(folder: Path, seconds: float) -> None:
    first = await Driver.start(folder)
    await first.says("taken")
    await asyncio.sleep(seconds)
    said = [each for each in await first.kill() if "started" in each]
    async with next_driver(folder) as tools:
        await everything_is_there(tools, said)


@pytest.mark.full
async def test_two_deaths_in_a_row_lose_nothing(tmp_path: Path) -> None:
    first = await Driver.start(tmp_path, count=8)
    await first.says("done")
    await first.kill()
    second = await Driver.start(tmp_path, count=0)
    assert sum((await second.says("taken")).values()) == 8
    await second.kill()
    async with next_driver(tmp_path) as tools:
        assert await everything_is_there(tools, []) == 8


@pytest.mark.full
async def test_past_the_time_limit_nothing_is_left(tmp_path: Path) -> None:
    first = await Driver.start(tmp_path, count=4, ttl_s=2.0)
    sandboxes = set(await first.says("sandboxes"))
    await first.says("done")
    await first.kill()
    backend = LocalBackend()
    try:
        deadline = time.monotonic() + 60
        while True:
            listed = await backend.list("recovery-" + tmp_path.name)
            if not sandboxes & {info.sandbox_id for info in listed if info.status is SandboxStatus.RUNNING}:
                break
            assert time.monotonic() < deadline, "they live on"
            await asyncio.sleep(0.2)
    finally:
        await backend.aclose()
    async with next_driver(tmp_path, ttl_s=2.0) as tools:
        assert await tools.take_over() == []


async def test_let_live_and_taken_over(tmp_path: Path) -> None:
    backend = LocalBackend()
    try:
        with Checkpoint(tmp_path, f"recovery-{os.getpid()}") as checkpoint:
            tools = driver.tool_backend(backend, driver.strongest(backend), checkpoint, TTL_S)
            slot = await tools.acquire("task")
            process = await tools.commands(slot).start("cat; exit 5")
            await tools.aclose(keep=True)
    finally:
        await backend.aclose()
    async with next_driver(tmp_path) as tools:
        (again,) = await tools.take_over()
        assert (again.sandbox_id, again.trajectory_id) == (slot.sandbox_id, "task")
        await tools.commands(again).write(process.process_id, b"here\n", eof=True)
        ended = await tools.commands(again).wait(process.process_id, timeout_s=20)
        assert ended.exit_code == 5 and (await tools.commands(again).log(process.process_id)).data == b"here\n"
        await tools.release(again, reset_workspace=True)
        fresh = await tools.acquire("another")
        assert await tools.commands(fresh).processes() == []


@pytest.mark.full
@pytest.mark.parametrize("field", ["instance", "boot_id", "began", "creation_id"])
async def test_another_sandbox_is_not_taken_for_it(tmp_path: Path, field: str) -> None:
    first = await Driver.start(tmp_path, count=1)
    await first.says("done")
    await first.kill()
    path = tmp_path / "processes.json"
    saved = json.loads(path.read_text())
    (sandbox,) = saved["sandboxes"]
    sandbox[field] = 1 if field == "began" else "another"
    path.write_text(json.dumps(saved))
    async with next_driver(tmp_path) as tools:
        if field in ("instance", "creation_id"):  # the guest itself says no
            with pytest.raises(Exception, match="another driver"):
                await tools.take_over()
            assert path.exists()
            await tools.backend.terminate_id(sandbox["sandbox_id"])
        assert await tools.take_over() == []


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "processes.json").write_text('{"version": 2, "sandboxes": []}')
    with pytest.raises(ConfigError, match=r"processes\.json can't be used"):
        Checkpoint(tmp_path, "owner")
    (tmp_path / "processes.json").write_text("{")
    with pytest.raises(ConfigError, match=r"processes\.json can't be used"):
        Checkpoint(tmp_path, "owner")


def test_the_file_is_replaced_as_a_whole_and_for_its_user_only(tmp_path: Path) -> None:
    with Checkpoint(tmp_path / "state", "mine") as checkpoint:
        checkpoint.save()
        assert json.loads(checkpoint.path.read_text()) == {
            "version": 1,
            "owner": "mine",
            "sandboxes": [],
            "unsettled": {},
        }
        assert checkpoint.path.stat().st_mode & 0o777 == 0o600
        assert checkpoint.path.parent.stat().st_mode & 0o777 == 0o700
        assert sorted(path.name for path in checkpoint.path.parent.iterdir()) == ["processes.json", "processes.lock"]
