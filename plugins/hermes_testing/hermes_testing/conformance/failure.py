"""Checks of failures: sandboxes that die, answers that are lost, drivers that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest

from hermes_core import HermesError, InfraError, SandboxLost
from hermes_testing.conformance.kit import Kit
from hermes_testing.conformance.tamper import TamperedBackend
from hermes_testing.conformance.waiting import until, within

DEAD_AFTER_S = 3.0
"""The setting `orphan_ttl_s` of sandboxes that must die."""


@pytest.mark.limit(120)
async def killed_while_idle(kit: Kit) -> None:
    """A sandbox that was ended by somebody else is soon reported as `SandboxLost`, not as a command's failure."""
    async with kit.tools(seats=1, per_sandbox=1, orphan_ttl_s=DEAD_AFTER_S) as tools:
        slot = await tools.acquire()
        commands = tools.commands(slot)
        await commands.run("true")
        await kit.backend.terminate_id(slot.sandbox_id)
        await asyncio.sleep(0.2)
        with pytest.raises(InfraError) as raised:
            await within(60, commands.run("true"), "a command in it")
        assert raised.value.sandbox_id == slot.sandbox_id, "the sandbox that the error names"


@pytest.mark.limit(120)
async def killed_in_the_middle(kit: Kit) -> None:
    """A command whose sandbox is ended fails as the infrastructure's fault, and does not hang."""
    async with kit.tools(seats=1, per_sandbox=1, orphan_ttl_s=DEAD_AFTER_S) as tools:
        slot = await tools.acquire()
        running = asyncio.ensure_future(tools.commands(slot).run("sleep 1000"))
        await asyncio.sleep(0.5)
        await kit.backend.terminate_id(slot.sandbox_id)
        with pytest.raises(InfraError):
            await within(60, running, "a command in it")
        await within(60, tools.release(slot, reset_workspace=True), "the release of its slot")


@pytest.mark.limit(120)
async def a_new_sandbox_after_a_death(kit: Kit) -> None:
    """After its sandbox's death the caller gets another slot, which works."""
    async with kit.tools(seats=1, per_sandbox=1, orphan_ttl_s=DEAD_AFTER_S) as tools:
        slot = await tools.acquire()
        await kit.backend.terminate_id(slot.sandbox_id)
        await tools.release(slot)
        async with tools.lease() as other:
            assert (await tools.commands(other).run("echo fine")).text == "fine\n", "a command in the next slot"


@pytest.mark.limit(120)
async def a_creation_whose_answer_is_lost(kit: Kit) -> None:
    """If `create` succeeds but its answer is lost, the retry finds that sandbox, and there is only one."""
    tampered = TamperedBackend(kit.backend)
    tampered.lose_answers = 1
    async with kit.tools(seats=1, per_sandbox=1, backend=tampered) as tools:
        slot = await tools.acquire()
        assert tampered.lost == 1, "answers that the check has lost"
        assert [info.sandbox_id for info in await kit.list_sandboxes()] == [slot.sandbox_id], (
            "the sandboxes that there are"
        )


@pytest.mark.limit(120)
async def nobody_waits_for_a_lost_creation(kit: Kit) -> None:
    """A creation that is given up after its answer was lost leaves no sandbox."""
    tampered = TamperedBackend(kit.backend)
    tampered.lose_answers = 100
    async with kit.tools(seats=1, per_sandbox=1, backend=tampered) as tools:
        for timeout_s in (2, 8, 32):  # until there was time enough for a creation
            with pytest.raises(InfraError):
                await tools.acquire(timeout_s=timeout_s)
            if tampered.lost:
                break
    assert tampered.lost >= 1, "the check has lost no answer"
    assert [info.sandbox_id for info in await kit.list_sandboxes()] == [], "the sandboxes that there are"


@pytest.mark.limit(120)
async def a_failed_start_leaves_nothing(kit: Kit) -> None:
    """Sandboxes that no channel can be opened into have ended when the start has failed, even if their end is slow."""
    tampered = TamperedBackend(kit.backend)
    tampered.unreachable, tampered.end_delay_s = True, 0.3
    tools = kit.tools(seats=1, per_sandbox=1, warm=1, backend=tampered)
    with pytest.raises(HermesError):
        await tools.__aenter__()
    assert [info.sandbox_id for info in await kit.list_sandboxes()] == [], "the sandboxes that there are"


@pytest.mark.limit(180)
async def a_killed_driver_leaves_nothing(kit: Kit) -> None:
    """A driver killed with `kill -9` leaves no sandbox: each ends itself within its time."""
    plugin = kit.rig.runtime.backends.entry(kit.rig.name).plugin
    if not (plugin.builtin or plugin.distribution):
        pytest.skip("the backend is not an installed plugin, so no other driver can be started for it")
    request = {
        "backend": kit.rig.name,
        "isolation": int(kit.level),
        "owner": kit.owner,
        "config": {**kit.rig.config, "orphan_ttl_s": DEAD_AFTER_S},
    }
    driver = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "hermes_testing.conformance.driver"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert driver.stdin is not None and driver.stdout is not None
    try:
        driver.stdin.write(json.dumps(request).encode() + b"\n")
        line = await within(90, driver.stdout.readline(), "a driver of its own, up to its first command")
        assert line == b"ready\n", f"a driver of its own failed: {line!r}"
        assert len(await kit.list_sandboxes()) >= 1, "the other driver's sandbox is not listed"
    finally:
        if driver.returncode is None:
            driver.kill()
        await driver.wait()

    async def gone() -> bool:
        return not await kit.list_sandboxes()

    await until(gone, 90, f"{DEAD_AFTER_S:g} s after its driver's death a sandbox should have ended itself")


async def errors_say_what_to_do(kit: Kit) -> None:
    """A lost sandbox is reported with its id and a sentence."""
    async with kit.sandbox() as sandbox:
        await sandbox.terminate()
        with pytest.raises(SandboxLost) as raised:
            await sandbox.open(["true"])
        error = raised.value
        assert error.sandbox_id == sandbox.id, "the sandbox that the error names"
        assert len(error.message) > 10, f"its message says nothing: {error.message!r}"
