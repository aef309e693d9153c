"""What the benchmarks run on: this machine, and tool backends on `local` at the levels that it grants."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from hermes_core.errors import PolicyError, ProvisionError
from hermes_core.runtime import Runtime
from hermes_core.sandbox.commands import Slot
from hermes_core.settings import Settings
from hermes_core.tool_backend import ToolBackend

LEVELS = ("shared", "user", "namespace")

NOT_GRANTED = "this host does not grant it"


@asynccontextmanager
async def local_backend(level: str, slots: int) -> AsyncIterator[ToolBackend | None]:
    """A started backend with one sandbox of so many slots (and one in reserve); None if the level is not granted."""
    config = {"slots_per_sandbox": slots + 1, "reserve_slots": 1, "min_sandboxes": 1, "max_sandboxes": 1}
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(Runtime(Settings(plugins=())))
        backend = runtime.tool_backend("local", profiles={}, isolation=level, config=config)
        try:
            await stack.enter_async_context(backend)
        except (PolicyError, ProvisionError) as error:
            if not refused(error):
                raise
            yield None
            return
        yield backend


def refused(error: BaseException | None) -> bool:
    """Whether a level was refused, rather than something having failed."""
    while error is not None:
        if isinstance(error, PolicyError):
            return True
        error = error.__cause__
    return False


async def acquire_all(backend: ToolBackend, count: int) -> list[Slot]:
    """That many slots."""
    return [await backend.acquire() for _ in range(count)]


async def shell(backend: ToolBackend, slot: Slot, command: str, timeout_s: float = 60.0) -> None:
    """One command through the tool backend, as callers run it."""
    result = await backend.execute(slot, "bash", {"command": command}, timeout_s=timeout_s)
    assert result.success, f"{command!r}: {result.error} {dict(result.metadata)}"


def guest_processes(slot: Slot) -> list[int]:
    """Our own processes in the slot's sandbox: the guest, its bridge, the slots' parents."""
    marker = f"HERMES_SANDBOX_ID={slot.sandbox_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and b"hermes_guest" in (entry / "cmdline").read_bytes()
                and marker in (entry / "environ").read_bytes().split(b"\0")
            ):
                found.append(int(entry.name))
        except OSError:  # ended meanwhile, or not ours to read
            continue
    return found


def processor_time(slot: Slot) -> float:
    """User and system seconds of all that ran in the slot's sandbox so far: the guest and all that it waited for."""
    ticks = 0
    for pid in guest_processes(slot):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def machine() -> Mapping[str, Any]:
    """What the figures were taken on, and when."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _line_of("/proc/cpuinfo", "model name", ":") or platform.processor(),
        "system": _line_of("/etc/os-release", "PRETTY_NAME", "=").strip('"') or platform.system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "user": "root" if os.geteuid() == 0 else "an ordinary user",
        "load": round(os.getloadavg()[0], 2),
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
    }


def _line_of(path: str, key: str, separator: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(separator)[2].strip() for line in lines if line.startswith(key)), "")
