"""Forwards of leased slots: what a guest's own tests can't show."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from hermes_core.errors import StaleSlotError
from hermes_core.runtime import Runtime
from hermes_core.sandbox.commands import Connection
from hermes_core.sandbox.contract import Isolation
from hermes_core.settings import Settings

BUSYBOX = shutil.which("busybox")


async def upper(connection: Connection) -> None:
    """Answer a line in capitals."""
    await connection.write((await connection.read()).upper())


@pytest.mark.root
@pytest.mark.skipif(BUSYBOX is None, reason="no busybox")
async def test_a_root_without_bash_and_python(tmp_path: Path) -> None:
    """The port needs no program of the slot."""
    assert BUSYBOX is not None
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    shutil.copy(BUSYBOX, root / "bin/busybox")
    for directory in ("usr", "etc", "dev", "proc", "tmp", "root"):
        (root / directory).mkdir()
    for name in ("sh", "nc", "printf", "cat", "ls"):
        (root / "bin" / name).symlink_to("busybox")
    async with Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False) as runtime:
        if Isolation.PRIVATE_ROOT not in runtime.backend("local").capabilities.isolation:
            pytest.skip("this host grants no roots of their own")
        config = {"slots_per_sandbox": 1, "root": str(root)}
        backend = runtime.tool_backend("local", isolation="private-root", config=config)
        async with backend, backend.lease() as slot:
            commands = backend.commands(slot)
            async with commands.forward(upper) as forward:
                done = await commands.run(f"echo hello | nc 127.0.0.1 {forward.port}; ls /bin", timeout_s=20)
                assert done.text.split() == ["HELLO", "busybox", "cat", "ls", "nc", "printf", "sh"]


async def test_a_released_slot_opens_no_port(tmp_path: Path) -> None:
    async with (
        Runtime(Settings(state_dir=tmp_path / "state"), load_entry_points=False) as runtime,
        runtime.tool_backend("local", config={"slots_per_sandbox": 1}) as backend,
    ):
        slot = await backend.acquire()
        commands = backend.commands(slot)
        await backend.release(slot, reset_workspace=True)
        before = asyncio.all_tasks()
        with pytest.raises(StaleSlotError):
            async with commands.forward(upper):
                pass
        assert asyncio.all_tasks() <= before
