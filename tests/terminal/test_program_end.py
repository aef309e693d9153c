"""Programs that close nothing: their standard error stays empty, and what they left is gone soon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hermes_core.runtime import Runtime
from hermes_core.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.entry_points]

PYTHONS = [sys.executable, *filter(None, os.environ.get("HERMES_TEST_PYTHONS", "").split(os.pathsep))]
"""This one, and others that have the packages."""

OWNER = "program-end"
ORPHAN_TTL_S = 3

TERMINAL = """
from hermes_core.terminal import terminal_tool
print(terminal_tool("sleep 300 & echo hello"))
"""
ASYNCHRONOUS = """
import asyncio
from hermes_core.terminal import terminal_tool_async
print(asyncio.run(terminal_tool_async("echo hello")))
"""
FAILING = TERMINAL + "raise SystemExit(0)"
RUNTIME = """
import asyncio, json, os
from hermes_core.runtime import Runtime

async def main():
    config = json.loads(os.environ["CONFIG"])
    tools = Runtime().tool_backend(os.environ["TERMINAL_ENV"], isolation="user", config=config)
    await tools.start()
    slot = await tools.acquire()
    print((await tools.execute(slot, "bash", {"command": "echo hello"})).output)

asyncio.run(main())
"""
MODAL = """
import asyncio
from hermes_modal import ModalToolBackend

async def main():
    backend = ModalToolBackend()
    slot = await backend.acquire()
    print((await backend.execute(slot, "bash", {"command": "echo hello"})).output)

asyncio.run(main())
"""


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The backend that the test asks for: the settings of its sandboxes; the environment names them, too."""
    backend: str = request.param
    config: dict[str, Any] = {"orphan_ttl_s": ORPHAN_TTL_S}
    monkeypatch.setenv("TERMINAL_ENV", backend)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HERMES_OWNER", OWNER + str(os.getpid()))
    monkeypatch.setenv("HERMES_PLUGINS", "" if backend == "local" else backend)
    if backend == "docker":
        config["image"] = request.getfixturevalue("docker_images")[0]
        monkeypatch.setenv("TERMINAL_DOCKER_IMAGE", config["image"])
    elif backend == "ssh":
        (tmp_path / ".ssh").mkdir()
        (tmp_path / ".ssh" / "config").write_text(Path(request.getfixturevalue("ssh_config")).read_text())
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("TERMINAL_SSH_HOST", "hermes-test")
        config["host"] = "hermes-test"
    elif backend == "modal":
        from hermes_modal.testing import ModalEmulator

        emulator = ModalEmulator()
        request.addfinalizer(emulator.close)
        for name, value in emulator.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TERMINAL_MODAL_IMAGE", "python:3.11")
    monkeypatch.setenv("CONFIG", json.dumps(config))
    return config


async def left(backend: str, config: dict[str, Any]) -> list[str]:
    """The sandboxes of the programs that are there."""
    async with Runtime(Settings.load()) as runtime:
        runtime.tool_backend(backend, config=config)
        found = await runtime.backend(backend).list(os.environ["HERMES_OWNER"])
    return [info.sandbox_id for info in found]


BACKENDS = ["local", "docker", "ssh", "modal"]


@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: Path(path).parts[-3])
@pytest.mark.parametrize(
    ("place", "program"),
    [
        *((backend, program) for backend in BACKENDS for program in (TERMINAL, ASYNCHRONOUS, FAILING, RUNTIME)),
        ("modal", MODAL),
    ],
    indirect=["place"],
    ids=[*(f"{b}-{p}" for b in BACKENDS for p in ("terminal", "async", "exit", "runtime")), "modal-backend"],
)
async def test_a_program_that_closes_nothing_ends_quietly(place: dict[str, Any], program: str, python: str) -> None:
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "hello" in done.stdout
    backend = os.environ["TERMINAL_ENV"]
    deadline = time.monotonic() + 10 * ORPHAN_TTL_S
    while (there := await left(backend, place)) and program is RUNTIME and time.monotonic() < deadline:
        time.sleep(0.5)
    assert there == []
