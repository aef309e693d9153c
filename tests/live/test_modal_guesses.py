"""What the emulator guesses about Modal, held against Modal: each test that fails there names a guess to fix."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

Create = Callable[..., Any]


async def run(sandbox: Any, script: str, **given: Any) -> tuple[bytes, int]:
    process = await sandbox.exec.aio("bash", "-c", script, text=False, **given)
    return await process.stdout.read.aio(), await process.wait.aio()


async def test_a_background_child_does_not_hold_the_output(create: Create) -> None:
    sandbox = await create()
    began = time.monotonic()
    assert await run(sandbox, "sleep 30 & echo on") == (b"on\n", 0)
    assert time.monotonic() - began < 25


async def test_statuses_of_commands(create: Create) -> None:
    import modal

    sandbox = await create()
    assert (await run(sandbox, "exit 7"))[1] == 7
    assert (await run(sandbox, "kill -9 $$"))[1] == 137
    out, status = await run(sandbox, "echo before; sleep 60", timeout=2)
    assert (out, status in (-1, 137)) == (b"before\n", True)
    with pytest.raises(modal.exception.Error):
        process = await sandbox.exec.aio("no-such-program-here", text=False)
        if await process.wait.aio() in (126, 127):
            raise modal.exception.NotFoundError("told by its status")


async def test_an_exec_that_runs_keeps_a_sandbox_from_being_idle(create: Create) -> None:
    """The guest's channel is such an exec: `idle_timeout` must not end a sandbox that is in use."""
    sandbox = await create(idle_timeout=10)
    process = await sandbox.exec.aio("sleep", "25", text=False)
    assert await process.wait.aio() == 0
    assert await sandbox.poll.aio() is None


async def test_an_idle_sandbox_ends(create: Create) -> None:
    sandbox = await create(idle_timeout=10)
    await asyncio.wait_for(sandbox.wait.aio(raise_on_termination=False), 90)


async def test_the_end_of_the_main_process_ends_the_sandbox(create: Create) -> None:
    """The dead-man switch depends on it."""
    sandbox = await create("sh", "-c", "sleep 3; exit 0")
    running = await sandbox.exec.aio("sleep", "100", text=False)
    await asyncio.wait_for(sandbox.wait.aio(raise_on_termination=False), 60)
    assert await running.wait.aio() != 0


async def test_what_becomes_of_a_dead_sandboxs_commands(create: Create) -> None:
    import modal

    sandbox = await create()
    running = await sandbox.exec.aio("sleep", "100", text=False)
    await sandbox.terminate.aio(wait=True)
    assert await running.wait.aio() == 137
    with pytest.raises((modal.exception.NotFoundError, modal.exception.ConflictError)):
        await sandbox.exec.aio("true")


async def test_a_name_is_given_once(create: Create) -> None:
    """A lease is a sandbox's name: this is why one lease has one sandbox."""
    import modal

    name = f"live-{uuid.uuid4().hex[:12]}"
    first = await create(name=name)
    with pytest.raises(modal.exception.AlreadyExistsError):
        await create(name=name)
    await first.terminate.aio(wait=True)
    await create(name=name)


async def test_tags_are_found_at_once(create: Create) -> None:
    """A creation whose answer was lost is looked for by its tags."""
    import modal

    mark = uuid.uuid4().hex
    sandbox = await create(tags={"mark": mark})
    client = await modal.Client.from_env.aio()
    app = await modal.App.lookup.aio("hermes-rl-live-tests", client=client)
    listed = modal.Sandbox.list.aio(app_id=app.app_id, tags={"mark": mark}, client=client)
    assert [each.object_id async for each in listed] == [sandbox.object_id]


async def test_a_snapshot_keeps_files_owners_and_modes(create: Create, live: str) -> None:
    first = await create()
    script = "mkdir -p /data/kept; echo x >/data/kept/file; chmod 640 /data/kept/file; chown 1234:1234 /data/kept/file"
    assert (await run(first, script))[1] == 0
    image = await first.snapshot_filesystem.aio()
    second = await create(image=image)
    if live == "emulator" and (await run(second, "test -e /data/kept"))[1] != 0:
        pytest.skip("the emulator keeps no snapshots without namespaces")
    assert await run(second, "stat -c '%u %g %a' /data/kept/file; cat /data/kept/file") == (b"1234 1234 640\nx\n", 0)


async def test_what_the_levels_need(create: Create) -> None:
    """`user`: root may change to ids that have no passwd entry, and counts their processes."""
    sandbox = await create()
    script = """python3 -c '
import os, resource
os.setgroups([]); os.setresgid(1900000000, 1900000000, 1900000000); os.setresuid(1900000000, 1900000000, 1900000000)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
try:
    os.fork()
except BlockingIOError:
    print(os.getuid(), "counted")
'"""
    assert (await run(sandbox, script))[0].splitlines()[:1] == [b"1900000000 counted"]


async def test_system_v_objects_can_be_switched_off(create: Create) -> None:
    """Else slots of one sandbox share them, and docs/how-it-works/threat-model.md has to say so."""
    sandbox = await create()
    assert (await run(sandbox, "echo 0 >/proc/sys/kernel/shmmni && cat /proc/sys/kernel/shmmni")) == (b"0\n", 0)
