"""The emulator as a process: faults, outages, what it prints, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import hermes_modal.plugin
import modal
import pytest
from hermes_modal_emulator import EmulatorError, ModalEmulator

from hermes_core.errors import ProvisionError
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings

pytestmark = pytest.mark.full

RUN = [sys.executable, "-m", "hermes_modal_emulator"]


@pytest.fixture
async def sandbox(emulator: ModalEmulator) -> AsyncIterator[Any]:
    client = await modal.Client.from_credentials.aio("ak-emulator", "as-emulator")
    app = await modal.App.lookup.aio("faults", client=client, create_if_missing=True)
    made = await modal.Sandbox.create.aio(app=app, client=client, timeout=300)
    yield made
    emulator.clear_faults()
    await made.terminate.aio(wait=True)
    await client.close.aio()


async def said(sandbox: Any, *argv: str) -> bytes:
    process = await sandbox.exec.aio(*argv, text=False)
    out: bytes = await process.stdout.read.aio()
    assert await process.wait.aio() == 0
    return out


async def test_a_fault_fails_the_calls_that_it_names(emulator: ModalEmulator, sandbox: Any) -> None:
    emulator.fault("TaskExecStart", "UNAVAILABLE", times=2)
    assert await said(sandbox, "echo", "absorbed by the SDK") == b"absorbed by the SDK\n"
    emulator.fault("TaskExecStart", "RESOURCE_EXHAUSTED", after=1)
    assert await said(sandbox, "echo", "the first goes well") == b"the first goes well\n"
    with pytest.raises(modal.exception.ResourceExhaustedError):
        await said(sandbox, "true")
    emulator.fault("TaskExecStart", "RESOURCE_EXHAUSTED", retry_after_s=0.5)
    began = time.monotonic()
    await said(sandbox, "true")
    assert time.monotonic() - began >= 0.5
    emulator.fault("TaskExecStart")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(said(sandbox, "true"), 1)
    with pytest.raises(EmulatorError, match="NO_SUCH"):
        emulator.fault("TaskExecStart", "NO_SUCH")


async def test_a_command_outlives_an_outage(emulator: ModalEmulator, sandbox: Any) -> None:
    process = await sandbox.exec.aio("bash", "-c", "for i in 1 2 3 4 5 6; do echo $i; sleep 0.3; done")
    await asyncio.to_thread(emulator.outage, 0.5)
    assert await process.stdout.read.aio() == "1\n2\n3\n4\n5\n6\n"


def _environment(lines: str) -> dict[str, str]:
    pairs = (line.removeprefix("export ").partition("=") for line in lines.splitlines() if line.startswith("export "))
    return {name: value.strip("'") for name, _, value in pairs}


_SLEEPER = """
import modal
app = modal.App.lookup("left", create_if_missing=True)
sandbox = modal.Sandbox.create(app=app, timeout=300)
sandbox.exec("bash", "-c", "sleep 98765 & setsid sleep 98765 & sleep 98765")
sandbox.exec("sh", "-c", "sleep 0.5").wait()
"""


def _sleepers() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"98765" in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(entry.name)
        except OSError:
            continue
    return found


def _gone(check: Callable[[], bool], limit_s: float = 15) -> bool:
    deadline = time.monotonic() + limit_s
    while not (gone := check()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return gone


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.stress)])
def test_nothing_is_left_when_it_is_killed(how: signal.Signals, tmp_path: Path, namespaces: bool) -> None:
    if how is signal.SIGKILL and not namespaces:
        pytest.skip("plain processes outlive a kill -9 of the emulator")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(RUN, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        lines = "".join(process.stdout.readline() for _ in range(6))
        subprocess.run([sys.executable, "-c", _SLEEPER], env={**os.environ, **_environment(lines)}, check=True)
        assert len(_sleepers()) >= 3
        process.send_signal(how)
        process.wait(20)
    assert _gone(lambda: not _sleepers()), _sleepers()
    if how is not signal.SIGKILL:
        assert process.returncode == 0
        assert [*tmp_path.glob("modal-emulator-*")] == []


START = f"'{sys.executable}' -m hermes_modal_emulator --print-env"
WAYS = {
    "plain": f'eval "$({START})"',
    "redirected": f'eval "$({START} 2>/dev/null)"',
    "in a function": f'begin() {{ {START}; true; }}; eval "$(begin)"',
    "or else": f'eval "$({START} || echo false)"',
    "through a pipe": f'eval "$({START} | cat)"',
    "in a subshell of a subshell": f'eval "$( ( {START}; true ); true)"',
}


def _marks(shell: str, way: str) -> Any:
    """Shells differ in which of their processes stays: in a pipe, and in a subshell."""
    tried = (("bash", "plain"), ("sh", "through a pipe"), ("bash", "in a subshell of a subshell"))
    return () if (shell, way) in tried else pytest.mark.stress


@pytest.mark.parametrize(
    ("shell", "way"),
    [pytest.param(shell, way, marks=_marks(shell, way)) for shell in ("bash", "sh") for way in WAYS],
)
def test_one_for_the_rest_of_a_shells_life(shell: str, way: str) -> None:
    script = f"""
        {WAYS[way]}
        sleep 0.5
        echo "$MODAL_SERVER_URL $MODAL_EMULATOR_PID"
        '{sys.executable}' -c 'import modal; print(modal.App.lookup("in-a-shell", create_if_missing=True).app_id)'
    """
    out = subprocess.run([shell, "-c", script], stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout
    (url, pid), (app_id,) = (line.split() for line in out.splitlines())
    assert url.startswith("http://127.0.0.1:") and app_id.startswith("ap-")
    assert _gone(lambda: not Path(f"/proc/{pid}").exists())


async def test_a_server_that_is_not_there_is_said_at_once(
    emulator: ModalEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("MODAL_SERVER_URL", url)
    began = time.monotonic()
    async with Runtime(Settings(), plugins=[hermes_modal.plugin], load_entry_points=False) as runtime:
        with pytest.raises(ProvisionError, match=f"no Modal server is at {url}"):
            await runtime.tool_backend("modal", config={"image": "python:3.11"}).acquire()
    assert time.monotonic() - began < 20, "the SDK's own patience is two minutes"


def test_it_ends_with_its_owner() -> None:
    script = (
        "import os; from hermes_modal_emulator import ModalEmulator; e = ModalEmulator();"
        "print(e.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    out = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60).stdout
    assert _gone(lambda: not Path(f"/proc/{out.strip()}").exists())
