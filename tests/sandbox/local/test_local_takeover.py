"""A restarted driver goes on with the sandboxes that it left under its owner's name; never with a living driver's."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from hermes_core.runtime import Runtime
from hermes_core.settings import Settings
from tests.support.processes import runs

LEVEL = "user" if os.geteuid() == 0 else "shared"


FIRST = """
import asyncio, os, pathlib, signal, sys
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings

owner, state_dir, level, mark = sys.argv[1:]

async def fill(commands, directory):
    await commands.run("echo prepared >file", cwd=directory)

async def main():
    runtime = Runtime(Settings(owner=owner, state_dir=pathlib.Path(state_dir)), load_entry_points=False)
    profiles = {"default": {"slots_per_sandbox": 2, "reserve_slots": 0, "orphan_ttl_s": 8}}
    backend = runtime.tool_backend("local", profiles=profiles, isolation=level)
    slot = await backend.acquire("first")
    await backend.prepare(slot, "whole", fill)
    result = await backend.execute(slot, "bash", {"command": f"echo left >left; sleep {mark} & echo $!"})
    assert result.success, result.error
    print(slot.sandbox_id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def runtime_of(owner: str | None, state_dir: Path) -> Runtime:
    return Runtime(Settings(owner=owner, state_dir=state_dir), load_entry_points=False)


def profiles(**changes: Any) -> dict[str, dict[str, Any]]:
    return {"default": {"slots_per_sandbox": 2, "reserve_slots": 0, "orphan_ttl_s": 8, **changes}}


def left_by_a_killed_driver(owner: str, state_dir: Path, mark: str) -> str:
    argv = [sys.executable, "-c", FIRST, owner, str(state_dir), LEVEL, mark]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == -9
    return done.stdout.strip()


async def never(commands: Any, directory: str) -> None:
    raise AssertionError("it is prepared already")


async def test_a_restarted_driver_goes_on_with_its_sandbox(tmp_path: Path) -> None:
    owner, mark = f"test-{uuid.uuid4().hex[:8]}", f"8{uuid.uuid4().int % 10**6:06d}"
    left = await asyncio.to_thread(left_by_a_killed_driver, owner, tmp_path, mark)
    async with runtime_of(owner, tmp_path) as runtime:
        backend = runtime.tool_backend("local", profiles=profiles(acquire_timeout_s=40), isolation=LEVEL)
        async with backend.lease("second") as slot:
            assert slot.sandbox_id == left
            assert not runs(f"^sleep {mark} $"), "what ran in its slots is dead"
            listed = await backend.execute(slot, "bash", {"command": "ls -A"})
            assert (listed.success, listed.output) == (True, "")
            prepared = await backend.prepare(slot, "whole", never)
            assert (await backend.commands(slot).read_file(f"{prepared}/file")).data == b"prepared\n"
        await backend.aclose()
        assert await runtime.backend("local").list(owner) == []


@pytest.mark.full  # two that live are kept apart: see below
@pytest.mark.parametrize("change", ["owner", "profile"])
async def test_another_owner_or_profile_makes_its_own(tmp_path: Path, change: str) -> None:
    owner, mark = f"test-{uuid.uuid4().hex[:8]}", f"8{uuid.uuid4().int % 10**6:06d}"
    left = await asyncio.to_thread(left_by_a_killed_driver, owner, tmp_path, mark)
    other = None if change == "owner" else owner
    wanted = profiles(env_vars={"ANOTHER": "1"}) if change == "profile" else profiles()
    async with runtime_of(other, tmp_path) as runtime:
        backend = runtime.tool_backend("local", profiles=wanted, isolation=LEVEL)
        async with backend.lease() as slot:
            assert slot.sandbox_id != left


async def test_two_living_drivers_of_one_owner_keep_apart(tmp_path: Path) -> None:
    owner = f"test-{uuid.uuid4().hex[:8]}"
    async with runtime_of(owner, tmp_path) as one, runtime_of(owner, tmp_path) as other:
        mine = one.tool_backend("local", profiles=profiles(), isolation=LEVEL)
        theirs = other.tool_backend("local", profiles=profiles(acquire_timeout_s=40), isolation=LEVEL)
        async with mine.lease("mine") as first, theirs.lease("theirs") as second:
            assert first.sandbox_id != second.sandbox_id
            results = [
                await each.execute(slot, "bash", {"command": "echo on"})
                for each, slot in ((mine, first), (theirs, second))
            ]
            assert [result.output for result in results] == ["on\n", "on\n"]
