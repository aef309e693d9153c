"""The tool backend on sandboxes without Python: the direct mode behind the same pools, on real local sandboxes."""

from __future__ import annotations

import asyncio
import logging

import pytest

from hermes_core.errors import InfraError, NoPythonError, PolicyError, StaleSlotError
from hermes_core.sandbox.contract import Isolation
from hermes_core.sandbox.local.backend import LocalBackend, LocalConfig
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry
from tests.support.processes import listing


async def no_python(sandbox, settings):
    raise NoPythonError("sh: python3: not found", sandbox_id=sandbox.id)


@pytest.fixture
def local(tmp_path):
    return LocalBackend(state_dir=str(tmp_path / "sandboxes"))


def opened(local: LocalBackend, level: Isolation, **config: object) -> ToolBackend:
    settings = {"slots_per_sandbox": 2, "max_sandboxes": 1, "reserve_slots": 0, **config}
    return ToolBackend(
        local,
        profiles={"default": LocalConfig(**settings)},
        tools=ToolRegistry(),
        isolation=level,
        owner="test",
        start_client=no_python,
    )


async def test_a_lease_has_the_variables_that_it_is_given(local):
    async with opened(local, Isolation.SHARED) as backend:
        slot, other = await backend.acquire("a", env={"OF_THE_LEASE": "a b"}), await backend.acquire("b")
        command = {"command": "echo ${OF_THE_LEASE-none}"}
        results = await backend.execute_batch([(slot, "bash", command), (other, "bash", command)])
        assert [result.output for result in results] == ["a b\n", "none\n"]


async def test_it_says_what_is_missing_and_works(local, caplog):
    caplog.set_level(logging.WARNING)
    async with opened(local, Isolation.SHARED) as backend:
        assert "no Python" in caplog.text and "isolation between slots" in caplog.text
        first, second = await backend.acquire("a"), await backend.acquire("b")
        assert first.isolation == "shared"
        assert any("spooled output" in sentence for sentence in backend.missing(first))
        results = await backend.execute_batch(
            [(slot, "bash", {"command": "echo $$ >file; sleep 0.3; pwd"}) for slot in (first, second)]
        )
        assert [result.output.strip() for result in results] == [first.workspace_dir, second.workspace_dir]

        async def build(commands, directory):
            await commands.write_file(f"{directory}/file", b"made")

        place = await backend.prepare(first, "key", build)
        assert (await backend.execute(second, "bash", {"command": f"cat {place}/file"})).output == "made"
        await backend.execute(first, "bash", {"command": "sleep 4331 &"})
        await backend.release(first, reset_workspace=True)
        seen = await backend.execute(
            second, "bash", {"command": f"ls {first.workspace_dir}; {listing('sleep 433[1]')}"}
        )
        assert seen.output == ""
    assert await local.list("test") == []


async def test_a_lease_starts_where_it_is_told_to(local):
    async with opened(local, Isolation.SHARED) as backend:
        slot = await backend.acquire("a", cwd="in/it")
        commands = backend.commands(slot)
        await commands.run("mkdir -p in/it", cwd=slot.workspace_dir)
        await commands.write_file("file", b"x")
        done = await commands.run("pwd; ls; ls ../..; cd /; ls -d usr", cwd=".")
        assert done.text.split() == [f"{slot.workspace_dir}/in/it", "file", "in", "usr"]
        assert (await commands.run("pwd", cwd="/usr")).text == "/usr\n"
        await backend.release(slot)
        again = await backend.acquire("b")
        assert (await backend.commands(again).run("pwd")).text.rstrip("/.\n") == again.workspace_dir


async def test_it_is_said_once_for_all_sandboxes_of_an_image(local, caplog):
    async with opened(local, Isolation.SHARED, min_sandboxes=2, max_sandboxes=2) as backend:
        assert backend.get_status()["sandboxes"] == 2
    assert caplog.text.count("has no Python") == 1


async def test_a_level_that_needs_python_is_refused_at_once(local):
    if Isolation.USER not in local.capabilities.isolation:
        pytest.skip("this host gives no slot of level user")
    with pytest.raises(PolicyError) as caught:
        await opened(local, Isolation.USER).start()
    assert "python3" in str(caught.value)
    assert await local.list("test") == []


async def test_a_used_slot_without_proof_takes_its_sandbox_with_it(local):
    async with opened(local, Isolation.SHARED, slots_per_sandbox=1, max_sandboxes=2) as backend:
        first = await backend.acquire()
        assert first.isolation == "dedicated"
        await backend.execute(first, "bash", {"command": "touch nothing"})
        await backend.release(first, reset_workspace=True)
        second = await backend.acquire()
        assert second.sandbox_id != first.sandbox_id
        with pytest.raises(PolicyError):
            await backend.prepare(second, "key", lambda commands, directory: asyncio.sleep(0), private=True)


async def test_a_sandbox_that_ends_is_noticed(local):
    async with opened(local, Isolation.SHARED, orphan_ttl_s=2.0) as backend:
        slot = await backend.acquire()
        running = asyncio.create_task(backend.execute(slot, "bash", {"command": "sleep 20"}))
        await asyncio.sleep(0.3)
        await local.terminate_id(slot.sandbox_id)
        with pytest.raises(InfraError):
            await running
        async with asyncio.timeout(10):
            replaced = await backend.acquire()
        assert replaced.sandbox_id != slot.sandbox_id


async def test_the_commands_of_a_slot_that_was_released_are_refused(local):
    async with opened(local, Isolation.SHARED) as backend:
        slot = await backend.acquire()
        commands = backend.commands(slot)
        process = await commands.start("sleep 20")
        waiting = asyncio.create_task(commands.wait(process.process_id))
        await asyncio.sleep(0)
        await backend.release(slot, reset_workspace=True)
        with pytest.raises(StaleSlotError):
            await waiting
        for operation in (commands.processes(), commands.poll(process.process_id), commands.run("touch intruder")):
            with pytest.raises(StaleSlotError):
                await operation
