"""The emulator's sandboxes: their commands, their time limits, and their ends."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from typing import Any

from modal_proto import api_pb2 as pb

from hermes_modal_emulator.commands import EmulatedCommand
from hermes_modal_emulator.machines import BASE_ENV, Machine

STDIO_TAIL = 16 << 20
"""Number of bytes of a main process's output that are kept, the last ones."""
Status = pb.GenericResult


def v1_id(prefix: str) -> str:
    """Return an id with 22 letters and digits. By this length, the SDK recognises a V1 object."""
    return f"{prefix}-" + hashlib.sha256(os.urandom(16)).hexdigest()[:22]


def v2_id(prefix: str) -> str:
    """Return a longer id, which the SDK takes for that of a V2 object."""
    return f"{prefix}-01" + hashlib.sha256(os.urandom(16)).hexdigest()[:24].upper()


class EmulatedSandbox:
    """One sandbox, from its creation on."""

    def __init__(self, request: Any, *, v2: bool, env: dict[str, str]) -> None:
        self.id = v2_id("sb") if v2 else v1_id("sb")
        self.task_id = v2_id("ta") + "V" if v2 else v1_id("ta")
        self.v2 = v2
        self.app_id: str = request.app_id
        self.definition = request.definition
        self.tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        marks = {"MODAL_SANDBOX_ID": self.id, "MODAL_TASK_ID": self.task_id, "MODAL_IMAGE_ID": self.definition.image_id}
        self.env = {**BASE_ENV, **env, **marks}
        self.created = time.time()
        self.result: Any = None
        self.finished = asyncio.Event()
        self.main = EmulatedCommand(tail=STDIO_TAIL)
        self.execs: dict[str, EmulatedCommand] = {}
        self.machine: Machine | None = None
        self._active = time.monotonic()
        self._watcher: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def workdir(self) -> str:
        """Return the directory in which commands start."""
        return self.definition.workdir or "/root"

    def touch(self) -> None:
        """Begin the idle time anew."""
        self._active = time.monotonic()

    def _touch_if_used(self) -> None:
        """Begin the idle time anew if a command runs."""
        if any(not each.ended.is_set() for each in self.execs.values()):
            self.touch()

    async def start(self, machine: Machine) -> None:
        """Start the machine and the main process.

        Raises:
            MachineError, OSError: one of them can't be started.
        """
        self.machine = machine
        await machine.start()
        self.run(self.main, list(self.definition.entrypoint_args) or ["sleep", "infinity"], self.workdir, {})
        self._watcher = asyncio.create_task(self._watch())

    def run(self, command: EmulatedCommand, argv: list[str], cwd: str, env: dict[str, str], **how: Any) -> None:
        """Start a command in the sandbox. Raises `OSError` if it can't be started.

        Args:
            how: `pty` and `timeout_s` of `EmulatedCommand.start`.
        """
        assert self.machine is not None
        command.start(self.machine.argv(argv, cwd), env={**self.env, **env}, cwd=self.machine.cwd(cwd), **how)

    async def _watch(self) -> None:
        """Wait for the end of the main process, the lifetime, or the idle time, and finish then."""
        limits = self.definition
        deadline = time.monotonic() + limits.timeout_secs if limits.timeout_secs else None
        while True:
            waits = [] if deadline is None else [deadline - time.monotonic()]
            if limits.idle_timeout_secs:
                self._touch_if_used()
                waits.append(min(1.0, max(0.0, self._active + limits.idle_timeout_secs - time.monotonic())))
            try:
                await asyncio.wait_for(self.main.ended.wait(), max(0.0, min(waits)) if waits else None)
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    self.finish(Status(status=Status.GENERIC_STATUS_TIMEOUT))
                    return
                self._touch_if_used()
                if limits.idle_timeout_secs and time.monotonic() >= self._active + limits.idle_timeout_secs:
                    self.finish(Status(status=Status.GENERIC_STATUS_IDLE_TIMEOUT))
                    return
                continue
            code = self.main.returncode or 0
            status = Status.GENERIC_STATUS_FAILURE if code else Status.GENERIC_STATUS_SUCCESS
            self.finish(Status(status=status, exitcode=code if code >= 0 else 128 - code))
            return

    def finish(self, result: Any) -> None:
        """Mark the sandbox as ended, with this result, and begin to clean up."""
        if self._ending is None:
            self.result = result
            self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        if self.machine is not None:
            await self.machine.stop()
        for command in (self.main, *self.execs.values()):
            await command.aclose()
        self.finished.set()

    async def aclose(self) -> None:
        """End the sandbox, and wait until nothing of it is left."""
        self.finish(Status(status=Status.GENERIC_STATUS_TERMINATED))
        assert self._ending is not None
        await self._ending
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
