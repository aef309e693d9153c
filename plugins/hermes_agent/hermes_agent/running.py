"""A command of a slot, in the form in which hermes-agent follows a process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from io import FileIO

from hermes_agent.slots import Lease, Slots
from hermes_core import CommandError, HermesError

_NOT_STARTED = {"not_found": 127}
"""The exit status of a command that could not be started, by the error's code; 126 for others, as in a shell."""

_FAILED = 255
"""The exit status of a command whose outcome is not known."""

_WAIT_S = 0.1
"""Seconds that one look at a command waits for its end, so that nobody has to sleep in between."""


class RunningCommand:
    """A command that runs. Its output comes through a pipe, as the output of a process does."""

    def __init__(self, slots: Slots, lease: Lease, argv: Sequence[str], stdin: str | None) -> None:
        readable, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self.stdout = FileIO(readable, "rb")
        self.returncode: int | None = None
        self.error: HermesError | None = None
        """Why its outcome is not known; None as long as it is."""
        self._ended = threading.Event()
        data = None if stdin is None else stdin.encode()
        try:
            self._started = slots.start(self._run(lease, argv, data))
        except BaseException:
            os.close(self._pipe)
            self.stdout.close()
            raise

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        self._ended.wait(_WAIT_S)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end; return the exit status, or None if it still runs."""
        self._ended.wait(timeout)
        return self.returncode

    def kill(self) -> None:
        """Kill it, and everything that it started."""
        self._started.cancel()

    # --- in the event loop

    async def _run(self, lease: Lease, argv: Sequence[str], stdin: bytes | None) -> None:
        code = _FAILED
        try:
            done = await lease.commands.run(argv, stdin=stdin, merge_stderr=True, stdout=self._write)
            code = done.returncode
        except CommandError as error:
            code = _NOT_STARTED.get(error.code, 126)
            await self._write(f"{error}\n".encode())
        except HermesError as error:
            self.error = error
        finally:
            os.close(self._pipe)
            self.returncode = code
            self._ended.set()

    async def _write(self, data: bytes) -> None:
        """Write to the pipe, and wait while it is full."""
        while data:
            try:
                data = data[os.write(self._pipe, data) :]
            except BlockingIOError:
                await self._writable()
            except BrokenPipeError:
                return  # nobody reads any more: hermes-agent has given up on what the command left behind

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(self._pipe, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(self._pipe)
