"""`hermes-rl ps` and `hermes-rl reap`: what is there, what is dead, and what is a live sibling's."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hermes_core.cli import sandboxes as leftovers
from hermes_core.cli.main import main
from hermes_core.runtime import Runtime
from hermes_core.sandbox.contract import Isolation, Sandbox, SandboxSpec, SandboxStatus
from hermes_core.sandbox.guest_client.client import GuestClient
from hermes_core.sandbox.guest_client.connection import GuestSettings
from hermes_core.sandbox.local.backend import LocalBackend, LocalConfig
from hermes_core.settings import Settings


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    made = Runtime(Settings(owner="me"), load_entry_points=False)
    made._backends["local"] = made._keep(LocalBackend(state_dir=str(tmp_path / "sandboxes")))
    return made


async def started(backend: LocalBackend, owner: str) -> Sandbox:
    """A sandbox that outlives its driver's silence by far."""
    spec = SandboxSpec(
        creation_id=uuid.uuid4().hex,
        owner=owner,
        config=LocalConfig(orphan_ttl_s=600),
        isolation=Isolation.SHARED,
    )
    return await backend.create(spec)


def settings(sandbox: Sandbox, orphan_ttl_s: float = 600) -> GuestSettings:
    return GuestSettings(
        creation_id="creation",
        driver_id="driver",
        isolation=Isolation.SHARED,
        slots=1,
        workspace_base=sandbox.workspace_base,
        state_dir=sandbox.state_dir,
        orphan_ttl_s=orphan_ttl_s,
    )


@pytest.mark.full
async def test_the_dead_are_reaped_and_the_living_are_not(runtime: Runtime) -> None:
    async with runtime:
        backend = runtime.backend("local")
        assert isinstance(backend, LocalBackend)
        living, dead, others = [await started(backend, owner) for owner in ("me", "me", "someone")]
        driver = await GuestClient.start(living, settings(living))
        late = await GuestClient.start(dead, settings(dead))
        await late.aclose()
        await asyncio.sleep(1)  # its last words make the heart beat once more
        try:
            assert {found.info.sandbox_id for found in (await leftovers.find(runtime)).sandboxes} == {
                living.id,
                dead.id,
                others.id,
            }
            mine = (await leftovers.find(runtime, ["local"], "me")).sandboxes
            assert {found.info.sandbox_id for found in mine} == {living.id, dead.id}
            planned = {
                each.found.info.sandbox_id: each.outcome for each in await leftovers.reap(runtime, mine, dry_run=True)
            }
            assert planned == {living.id: "left", dead.id: "would end"}
            assert await dead.status() is SandboxStatus.RUNNING
            done = {
                each.found.info.sandbox_id: (each.outcome, each.why) for each in await leftovers.reap(runtime, mine)
            }
            assert done == {living.id: ("left", "its driver is alive"), dead.id: ("ended", "its driver is dead")}
            assert await living.status() is SandboxStatus.RUNNING
            assert await dead.status() is SandboxStatus.GONE
            assert await others.status() is SandboxStatus.RUNNING
        finally:
            await driver.aclose(end_sandbox=True)
            for sandbox in (living, dead, others):
                await sandbox.terminate()


async def test_one_that_waits_for_its_driver_is_reaped_only_when_asked_for(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "LISTEN_S", 2)
    async with runtime:
        backend = runtime.backend("local")
        assert isinstance(backend, LocalBackend)
        left = await started(backend, "me")
        try:
            await (await GuestClient.start(left, settings(left, 24 * 3600))).aclose()
            await asyncio.sleep(1)  # its last words make the heart beat once more
            found = (await leftovers.find(runtime, ["local"], "me")).sandboxes
            (kept,) = await leftovers.reap(runtime, found)
            assert kept.outcome == "left" and "24h" in kept.why
            (ended,) = await leftovers.reap(runtime, found, waiting=True)
            assert ended.outcome == "ended"
        finally:
            await left.terminate()


async def test_a_sandbox_that_is_being_made_is_left(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "LISTEN_S", 1)
    async with runtime:
        made = await started(runtime.backend("local"), "me")  # type: ignore[arg-type]
        try:
            found = (await leftovers.find(runtime, ["local"], "me")).sandboxes
            (young,) = await leftovers.reap(runtime, found)
            assert young.outcome == "left" and "no heartbeat yet" in young.why
            monkeypatch.setattr(leftovers, "STARTING_S", 0.0)
            (old,) = await leftovers.reap(runtime, found)
            assert old.outcome == "ended"
        finally:
            await made.terminate()


async def test_the_sandbox_of_a_driver_that_was_killed(
    hermes: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "LISTEN_S", 2)
    program = """if True:
        import asyncio
        from hermes_core import Runtime

        async def main():
            config = {"orphan_ttl_s": 60, "min_sandboxes": 1, "max_sandboxes": 1, "reserve_slots": 0}
            opening = Runtime(load_entry_points=False)
            async with opening as runtime, runtime.tool_backend("local", isolation="shared", config=config) as tools:
                print((await tools.acquire("a")).sandbox_id, flush=True)
                await asyncio.sleep(600)

        asyncio.run(main())
    """
    owner = f"killed-{uuid.uuid4().hex[:8]}"
    environ = {**os.environ, "HERMES_OWNER": owner}
    driver = await asyncio.create_subprocess_exec(sys.executable, "-c", program, env=environ, stdout=-1)
    try:
        assert driver.stdout is not None
        sandbox_id = (await driver.stdout.readline()).decode().strip()
    finally:
        driver.kill()
        await driver.wait()
    await asyncio.sleep(1)  # its last words make the heart beat once more

    async def said(*arguments: str) -> list[tuple[Any, ...]]:
        done = await asyncio.to_thread(hermes, *arguments, "--owner", owner, "--json")
        rows = json.loads(done.stdout)
        return [(row["sandbox"], row["status"], row.get("outcome"), row.get("why")) for row in rows]

    assert await said("ps", "local") == [(sandbox_id, "running", None, None)]
    dead = "its driver is dead"
    assert await said("reap", "local", "--dry-run") == [(sandbox_id, "running", "would end", dead)]
    assert await said("reap", "local") == [(sandbox_id, "running", "ended", dead)]
    assert await said("ps", "local") == []


@pytest.mark.parametrize("word", ["ended", "would end", "left", "failed"])
def test_the_help_explains_every_outcome(hermes: Callable[..., Result], word: str) -> None:
    assert f"\n  {word} " in hermes("reap", "--help").stdout


@pytest.fixture
def hermes() -> Callable[..., Result]:
    return lambda *arguments: CliRunner().invoke(main, arguments)


def test_the_command_line_says_whose(hermes: Callable[..., Result]) -> None:
    refused = hermes("reap")
    assert refused.exit_code == 2
    assert "--any-owner" in refused.stderr
    both = hermes("reap", "--owner", "me", "--any-owner")
    assert both.exit_code == 2
    assert json.loads(hermes("ps", "local", "--owner", "nobody", "--json").stdout) == []
    assert json.loads(hermes("reap", "local", "--owner", "nobody", "--json").stdout) == []
    assert hermes("ps", "nowhere").exit_code == 2


async def test_a_backend_that_is_out_of_reach_is_told(runtime: Runtime) -> None:
    async with runtime:

        async def fails(owner: Any = None) -> Any:
            raise ExceptionGroup("unhandled errors in a TaskGroup", [OSError("unplugged")])

        runtime.backend("local").list = fails  # type: ignore[method-assign]
        census = await leftovers.find(runtime)
        assert census.sandboxes == ()
        assert census.problems["local"].startswith("LocalBackend.list() raised OSError: unplugged (a bug in the plugin")
