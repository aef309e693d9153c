"""SWE-ReX as a peer: installed from the package index into an environment of its own, and measured in there."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import Party, Sample

PACKAGES = ("swe-rex==1.4.0", "aiohttp>=3.10")  # it imports aiohttp without asking for it
INSTALL_S = 180
START_S = 120
ROOT = Path(__file__).resolve().parents[1]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


class NotThere(Exception):
    """It can't be measured here; says why."""


@dataclass(frozen=True)
class Installed:
    """Where it is."""

    folder: Path

    @property
    def python(self) -> str:
        """The interpreter that has it."""
        return str(self.folder / "bin" / "python")

    @property
    def packages(self) -> str:
        """Its packages, to be mounted in a container with the same Python: it need not install itself there."""
        return str(self.folder / "lib" / f"python{PYTHON}" / "site-packages")


async def install() -> Installed:
    """Install it, unless it is there from an earlier run: below HERMES_BENCH_CACHE, or the directory for caches.

    Raises:
        NotThere: it can't be installed.
    """
    base = os.environ.get("HERMES_BENCH_CACHE") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hermes-rl-bench"
    )
    folder = Path(base) / f"{PACKAGES[0].replace('==', '-')}-python{PYTHON}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # An environment can't be moved (its path stands in its scripts): the mark says that it is whole.
        try:
            await _do(sys.executable, "-m", "venv", str(folder))
            await _do(str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *PACKAGES)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return Installed(folder)


async def _do(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(INSTALL_S):
            said, _ = await process.communicate()
    except TimeoutError as error:
        raise NotThere(f"SWE-ReX could not be installed within {INSTALL_S} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = (said.decode(errors="replace").strip().splitlines() or ["no word"])[-1]
        raise NotThere(f"SWE-ReX could not be installed: {last[:200]}")


class SweRex:
    """A container with SWE-ReX in it, and the process that talks to it. Made by `open_swerex`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.container = ""
        self.start_s = 0.0

    async def ask(self, request: dict[str, Any], limit_s: float = START_S) -> Any:
        """One request to `benchmarks.swerex_driver`, one at a time.

        Raises:
            NotThere: it failed.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        async with asyncio.timeout(limit_s):
            line = await self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "its process has ended"}
        if answer.get("error") == "TimeoutError":
            raise TimeoutError
        if "error" in answer:
            raise NotThere(f"SWE-ReX failed: {answer['error']}: {answer.get('text')}")
        return answer["value"]


class SweRexParty(Party):
    """One of its two ways to run a command: `session`, a bash that stays, or `execute`, a shell for each."""

    def __init__(self, swerex: SweRex, how: str) -> None:
        self._swerex, self._how = swerex, how

    async def sample(self, at_a_time: int, span_s: float) -> Sample:
        """Measured in its own process."""
        found = await self._swerex.ask({"op": "sample", "how": self._how, "at_a_time": at_a_time, "span_s": span_s})
        return Sample(found["seconds"], found["rate"])

    async def output(self, limit_s: float) -> float:
        """Measured in its own process."""
        return float(await self._swerex.ask({"op": "output", "how": self._how, "limit_s": limit_s}))

    async def time_out(self, command: str, limit_s: float) -> float:
        """With the time limit of the call."""
        request = {"op": "time_out", "how": self._how, "command": command, "limit_s": limit_s}
        return float(await self._swerex.ask(request))


@asynccontextmanager
async def open_swerex(image: str) -> AsyncIterator[SweRex]:
    """Install it if need be, and start a container with it.

    Raises:
        NotThere: it can't be had here.
    """
    installed = await install()
    name = f"hermes-bench-swerex-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory(prefix="bench-swerex-") as scratch:
        remote = Path(scratch) / "swerex-remote"
        remote.write_text('#!/bin/sh\nexec env PYTHONPATH=/opt/swerex python3 -m swerex.server "$@"\n')
        remote.chmod(0o755)
        mounts = [f"{installed.packages}:/opt/swerex:ro", f"{remote}:/usr/local/bin/swerex-remote:ro"]
        with (Path(scratch) / "log").open("w+b") as log:
            process = await asyncio.create_subprocess_exec(
                installed.python,
                "-m",
                "benchmarks.swerex_driver",
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=1 << 26,
            )
            swerex = SweRex(process)
            try:
                started = await swerex.ask({"op": "start", "image": image, "mounts": mounts, "name": name})
                swerex.container, swerex.start_s = started["container"], started["seconds"]
                yield swerex
            finally:
                await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()  # its sign to stop the container and go
    try:
        async with asyncio.timeout(30):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
