"""The whole way once on the real Modal: slots, a batch, files, a snapshot of what is prepared, and nothing left."""

from __future__ import annotations

import time
import uuid
from typing import Any

import pytest

from hermes_core.sandbox.contract import Isolation
from hermes_core.sandbox.pool.preparation import NewSandbox
from hermes_core.tool_backend import ToolBackend
from hermes_core.tools.registry import ToolRegistry

APP = "hermes-rl-live-tests"


async def prepared(sandbox: NewSandbox) -> None:
    await sandbox.prepare("dependencies", "echo made >file")


async def never(commands: Any, directory: str) -> None:
    raise AssertionError("it is prepared already")


@pytest.mark.parametrize("network", ["open", "setup"])
async def test_slots_and_a_batch(live: str, version: str, network: str) -> None:
    from hermes_modal.backend import ModalBackend
    from hermes_modal.config import ModalSandboxConfig

    backend, owner = ModalBackend(), f"live-{uuid.uuid4().hex[:8]}"
    config = ModalSandboxConfig(
        app_name=APP, network=network, min_sandboxes=0, max_sandboxes=2, reserve_slots=0, acquire_timeout_s=300
    )
    tools = ToolBackend(
        backend,
        profiles={"default": config},
        tools=ToolRegistry(),
        isolation=Isolation.USER,
        owner=owner,
        prepare_sandbox=prepared if network == "setup" else None,
    )
    async with tools:
        slots = [await tools.acquire(f"t{n}", timeout_s=300) for n in range(20)]
        assert len({slot.sandbox_id for slot in slots}) == 2
        began = time.monotonic()
        results = await tools.execute_batch([(slot, "bash", {"command": "sleep 1; id -u"}) for slot in slots])
        assert [result.success for result in results] == [True] * 20
        assert len({(slot.sandbox_id, each.output) for slot, each in zip(slots, results, strict=True)}) == 20
        assert time.monotonic() - began < 10
        if network == "setup" and live == "1":
            place = await tools.prepare(slots[-1], "dependencies", never)
            assert (await tools.commands(slots[-1]).read_file(f"{place}/file")).data == b"made\n"
        for slot in slots:
            await tools.release(slot, reset_workspace=True)
    assert await backend.list(owner) == []
    await backend.aclose()
