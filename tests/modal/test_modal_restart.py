"""A driver that is killed and started again under its name goes on with its sandboxes on Modal."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hermes_modal import ModalSandboxConfig, ModalToolBackend
from hermes_modal_emulator import ModalEmulator

from hermes_core.settings import Settings

pytestmark = pytest.mark.usefixtures("workable")

FIRST = """
import asyncio, os, signal
from hermes_modal import ModalSandboxConfig, ModalToolBackend

async def main():
    backend = ModalToolBackend(ModalSandboxConfig(app_name="mine", orphan_ttl_s=20, slots_per_sandbox=2))
    slot = await backend.acquire("first")
    await backend.execute(slot, "bash", {"command": "echo left >left; nohup sleep 7654321 >/dev/null 2>&1 &"})
    print(slot.sandbox_id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def killed_driver(tmp_path: Path, owner: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", FIRST],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        env=os.environ | {"HERMES_OWNER": owner, "XDG_STATE_HOME": str(tmp_path)},
    )
    assert done.returncode == -9
    return done.stdout.strip()


async def test_a_restarted_driver_takes_over_its_own_sandboxes_and_no_others(
    own_emulator: ModalEmulator, tmp_path: Path, version: str
) -> None:
    other = await asyncio.to_thread(killed_driver, tmp_path, "somebody-else")
    left = await asyncio.to_thread(killed_driver, tmp_path, "me")
    config = ModalSandboxConfig(app_name="mine", orphan_ttl_s=20, slots_per_sandbox=2)
    settings = Settings(owner="me", state_dir=tmp_path)
    async with ModalToolBackend(config, settings=settings) as backend:
        slots = [await backend.acquire(f"t{n}") for n in range(2)]
        assert {slot.sandbox_id for slot in slots} == {left} != {other}
        command = "ls -A; ps ax -o args= | grep -c '^sleep 765432[1]'"
        results = await backend.execute_batch([(slot, "bash", {"command": command}) for slot in slots])
        assert [result.output for result in results] == ["0\n", "0\n"], "emptied, and nothing of it runs"
    assert left not in {each["id"] for each in own_emulator.sandboxes()}
    assert len(own_emulator.sandboxes(running=False)) == 2, "no other was made"
