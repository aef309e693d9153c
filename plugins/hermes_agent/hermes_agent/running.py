"""A command in a slot, with the methods of a process that hermes-agent uses."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

from hermes_agent.slots import SessionSlot, Slots
from hermes_core import CommandError, HermesError

_NOT_STARTED = {"not_found": 127}
"""Exit statuses of commands that could not be started, by the error's code; 126 for other codes, as in a shell."""

_FAILED = 255
"""The exit status of a command whose outcome is not known."""

_WAIT_S = 0.1
"""Seconds that `poll` waits for a command's end, so that hermes-agent's loop does not spin."""

_AHEAD, _BEHIND_S = 16, 0.005
"""Number of pieces of output that may wait for the reader, and the seconds between looks at this number."""


class Output:
    """Output that the event loop writes piece by piece, and that one thread reads."""

    def __init__(self) -> None:
        self._pieces: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pieces.get, None)

    async def write(self, piece: bytes) -> None:
        """Add a piece, and wait while the reader is behind."""
        self._pieces.put(piece)
        while self._pieces.qsize() > _AHEAD:  # noqa: ASYNC110 (the reader's thread sets no event)
            await asyncio.sleep(_BEHIND_S)

    def end(self) -> None:
        """End the output."""
        self._pieces.put(None)

    def close(self) -> None:
        """Do nothing. hermes-agent calls this when it has read the output."""


class SessionCommand:
    """A running command.

    Args:
        done: called in the event loop when the command has ended by itself.
    """

    def __init__(
        self, slots: Slots, lease: SessionSlot, argv: Sequence[str], stdin: str | None, done: Callable[[], object]
    ) -> None:
        self.stdout = Output()
        self.returncode: int | None = None
        self.error: HermesError | None = None
        """The error because of which the command's outcome is not known; None if there is none."""
        self._done = done
        self._ended = threading.Event()
        self._started = slots.start(self._run(lease, argv, None if stdin is None else stdin.encode()))

    def poll(self) -> int | None:
        """Return the exit status, or None while the command runs."""
        self._ended.wait(_WAIT_S)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the command's end. Return the exit status, or None after `timeout` seconds."""
        self._ended.wait(timeout)
        return self.returncode

    def kill(self) -> None:
        """Kill the command and its processes."""
        self._started.cancel()

    async def _run(self, lease: SessionSlot, argv: Sequence[str], stdin: bytes | None) -> None:
        code = _FAILED
        try:
            result = await lease.commands.run(argv, stdin=stdin, merge_stderr=True, stdout=self.stdout.write)
            code = result.returncode
            self._done()
        except CommandError as error:
            code = _NOT_STARTED.get(error.code, 126)
            await self.stdout.write(f"{error}\n".encode())
        except HermesError as error:
            self.error = error
        finally:
            self.returncode = code
            self.stdout.end()
            self._ended.set()
