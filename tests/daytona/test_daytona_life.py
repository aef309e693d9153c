"""Sandboxes found, taken over and ended by others than the driver that made them; and what doctor says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_core.sandbox.contract import SandboxSpec
from hermes_core.sandbox.uids import uid_base_in_own_kernel

MakeSpec = Callable[..., SandboxSpec]

DRIVER = """
import asyncio
from hermes_core import Isolation, Settings, ToolBackend
from hermes_core.tools.registry import ToolRegistry
from hermes_daytona.backend import DaytonaBackend
from hermes_daytona.config import DaytonaConfig

async def main():
    tools = ToolBackend(DaytonaBackend(), profiles={"default": DaytonaConfig(orphan_ttl_s=3)}, tools=ToolRegistry(),
                        isolation=Isolation.USER, owner="killed")
    async with tools:
        slot = await tools.acquire("a")
        await tools.execute(slot, "bash", {"command": "nohup sleep 1000 >/dev/null 2>&1 &"})
        print(slot.sandbox_id, flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


def cli(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", "from hermes_core.cli.main import main; main()", *arguments]
    environment = os.environ | {"HERMES_PLUGINS": "daytona"}
    return subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=folder, timeout=120)


async def test_all_pages_of_the_list_are_read(backend: Any, make_spec: MakeSpec) -> None:
    async with asyncio.TaskGroup() as group:
        creations = [group.create_task(backend.create(make_spec(owner="one"))) for _ in range(6)]
    other = await backend.create(make_spec(owner="other"))
    wanted = {creation.result().id for creation in creations}
    assert {info.sandbox_id for info in await backend.list("one")} == wanted
    assert {info.sandbox_id for info in await backend.list()} == wanted | {other.id}


async def test_what_is_not_ours_is_left_alone(backend: Any, emulator: Any) -> None:
    from daytona_api_client_async import CreateSandbox

    found = await backend._service.create(CreateSandbox(name="theirs", labels={"team": "them"}))
    assert await backend.list() == []
    await backend.terminate_id(found.id)
    assert [each["name"] for each in emulator.sandboxes] == ["theirs"]
    await backend._service.delete(found.id)


async def test_an_attached_sandbox_has_the_same_ids(backend: Any, make_spec: MakeSpec) -> None:
    first = await backend.create(make_spec(workspace_base="/srv/slots", max_lifetime=600))
    again = await backend.attach(first.id)
    assert (again.uid_base, again.state_dir) == (first.uid_base, "/srv/slots/.hermes")
    assert again.uid_base is not None
    assert 500 < again.lifetime_s <= first.lifetime_s < 600


@pytest.mark.parametrize(("ids", "low", "high"), [(1 << 32, 1_900_000_000, 1_933_554_432), (65536, 20_000, 65_024)])
def test_ids_fit_the_sandbox(ids: int, low: int, high: int) -> None:
    chosen = {uid_base_in_own_kernel(str(n), ids) for n in range(500)}
    assert all(each is not None and low <= each <= high for each in chosen)
    assert len(chosen) > 50
    assert uid_base_in_own_kernel("x", 20_100) is None


def test_a_killed_driver_leaves_nothing(emulator: Any, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as driver:
        assert driver.stdout is not None
        sandbox_id = driver.stdout.readline().strip()
        assert [each["id"] for each in emulator.sandboxes] == [sandbox_id]
        driver.send_signal(signal.SIGKILL)
        killed = time.monotonic()
    while emulator.sandboxes and time.monotonic() - killed < 40:
        time.sleep(0.2)
    assert emulator.sandboxes == []


def test_reap_ends_what_a_killed_driver_left(emulator: Any, tmp_path: Path) -> None:
    patient = DRIVER.replace("orphan_ttl_s=3", "orphan_ttl_s=250")
    with subprocess.Popen([sys.executable, "-c", patient], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as driver:
        assert driver.stdout is not None
        sandbox_id = driver.stdout.readline().strip()
        listed = cli("ps", "daytona", folder=tmp_path)
        assert sandbox_id in listed.stdout, listed.stderr
        driver.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while emulator.sandboxes and time.monotonic() < deadline:
        reaped = cli("reap", "daytona", "--any-owner", folder=tmp_path)
        assert reaped.returncode == 0, reaped.stderr
    assert emulator.sandboxes == []


def test_rollouts_from_the_command_line(emulator: Any, tmp_path: Path) -> None:
    tasks = [
        {"id": f"t{n}", "prompt": "Write a number.", "check": f"grep -q {n} file", "solution": f"echo {n} >file"}
        for n in range(4)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    done = cli("validate", "tasks", "--env.dataset_name=tasks.jsonl", "--backend", "daytona", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert emulator.sandboxes == []


def test_doctor_says_what_is_missing(emulator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    well = cli("doctor", "daytona", folder=tmp_path)
    assert well.returncode == 0 and "version emulator" in well.stdout, well.stdout + well.stderr
    monkeypatch.setenv("DAYTONA_API_KEY", "wrong")
    assert "does not take the key" in cli("doctor", "daytona", folder=tmp_path).stdout
    monkeypatch.delenv("DAYTONA_API_KEY")
    assert "there is no Daytona API key" in cli("doctor", "daytona", folder=tmp_path).stdout
    monkeypatch.setenv("DAYTONA_API_KEY", "x")
    monkeypatch.setenv("DAYTONA_API_URL", "http://127.0.0.1:9/api")
    assert "does not answer" in cli("doctor", "daytona", folder=tmp_path).stdout
