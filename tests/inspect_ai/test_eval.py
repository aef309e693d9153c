"""Whole evals by Inspect in our slots: the log, and what is left of one that is cancelled or loses its sandbox."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_core import Runtime
from hermes_core.sandbox.contract import SandboxInfo

pytestmark = [pytest.mark.full, pytest.mark.entry_points, pytest.mark.usefixtures("inspect_extra")]

SCRIPT = Path(__file__).with_name("doubling.py")
SLOW_SAMPLES = 8


def start(logs: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    command = [sys.executable, str(SCRIPT), str(logs), *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_log(logs: Path) -> Any:
    from inspect_ai.log import read_eval_log

    [log] = logs.glob("*.eval")
    return read_eval_log(str(log))


async def sandboxes_of(pid: int) -> list[SandboxInfo]:
    """The local sandboxes of a driver with this process id."""
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")[:24] or "host"
    async with Runtime() as runtime:
        return [info for info in await runtime.backend("local").list() if info.owner.startswith(f"{host}-{pid}-")]


async def wait_for(pid: int, *, left: bool) -> list[SandboxInfo]:
    deadline = time.monotonic() + 150
    while bool(found := await sandboxes_of(pid)) != left:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.3)
    return found


async def wait_until_samples_sleep(pid: int) -> None:
    """Wait until all samples of a slow eval sleep."""
    command, deadline = ["sleep", f"300.{pid}", ""], time.monotonic() + 90
    while [*map(command_line, Path("/proc").glob("[0-9]*"))].count(command) < SLOW_SAMPLES:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.3)


def command_line(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_text(errors="replace").split("\0")
    except OSError:  # it ended
        return []


@pytest.fixture
def slow_eval(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """An eval whose samples sleep in their first command."""
    running = start(tmp_path, "slow")
    yield running
    running.kill()
    running.wait()
    assert running.stdout is not None
    running.stdout.close()


async def test_ten_samples_of_an_eval(tmp_path: Path, record_property: Any) -> None:
    began = time.monotonic()
    running = start(tmp_path)
    said, _ = running.communicate(timeout=180)
    assert running.returncode == 0, said
    record_property("figure", f"an eval of ten samples on local: {time.monotonic() - began:.1f} s with Inspect's start")
    log = read_log(tmp_path)
    assert log.status == "success", log.error
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    assert [sample.error for sample in log.samples] == [None] * 10
    for sample in log.samples:
        assert [message.role for message in sample.messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
        assert "answer\ngiven" in sample.messages[2].text
        actions = {event.action for event in sample.events if event.event == "sandbox"}
        assert actions == {"exec", "write_file", "read_file"}
    assert not await sandboxes_of(running.pid)


async def test_a_cancelled_eval_leaves_nothing(slow_eval: subprocess.Popen[str], tmp_path: Path) -> None:
    await wait_until_samples_sleep(slow_eval.pid)
    slow_eval.send_signal(signal.SIGINT)
    said, _ = slow_eval.communicate(timeout=60)
    assert not await sandboxes_of(slow_eval.pid), said
    assert read_log(tmp_path).status == "cancelled"


async def test_a_killed_eval_leaves_nothing(slow_eval: subprocess.Popen[str]) -> None:
    await wait_for(slow_eval.pid, left=True)
    slow_eval.kill()
    slow_eval.wait()
    await wait_for(slow_eval.pid, left=False)


async def test_a_sample_whose_sandbox_is_killed_has_an_error_and_no_score(
    slow_eval: subprocess.Popen[str], tmp_path: Path
) -> None:
    await wait_until_samples_sleep(slow_eval.pid)
    [info] = await sandboxes_of(slow_eval.pid)
    async with Runtime() as runtime:
        await runtime.backend("local").terminate_id(info.sandbox_id)
    said, _ = slow_eval.communicate(timeout=120)
    log = read_log(tmp_path)
    assert log.status == "error", said
    errors = [sample.error.message for sample in log.samples if sample.error is not None]
    ended = [error for error in errors if not error.startswith("CancelledError")]  # the first one ends the others
    assert ended
    assert all("the sandbox is gone" in error for error in ended), errors
    assert not [sample.scores for sample in log.samples if sample.scores]
    assert not await sandboxes_of(slow_eval.pid)
