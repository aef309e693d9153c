"""A log of the commands that the hooks of a rollout run in sandboxes, with bounded output."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Iterator
from typing import TypeVar

from hermes_core.records.record import SandboxCommand
from hermes_core.sandbox.commands import CommandResult, ExecutionResult
from hermes_core.sandbox.linux.output import join_capture, trim_end, trim_start

MOST_COMMANDS = 200
"""Maximum number of commands that are kept: half of them the first ones, half the last ones."""

MAX_COMMAND = 4000
"""Maximum number of bytes of a command line."""

MAX_OUTPUT = 16_000
"""Maximum number of bytes of a command's output: half of them from its start, half from its end."""

T = TypeVar("T")

_Outcome = tuple[int | None, bytes, int]
"""A command's exit status, its output, and the number of bytes that are missing in this output."""


class CommandLog:
    """The commands that the hooks of one rollout ran."""

    def __init__(self) -> None:
        self.stage = "setup"
        """The rollout's present stage, which is logged with commands that begin."""
        self.left_out = 0
        """Number of commands that were not kept."""
        self._first: list[SandboxCommand] = []
        self._last: deque[SandboxCommand] = deque(maxlen=MOST_COMMANDS - MOST_COMMANDS // 2)

    def __iter__(self) -> Iterator[SandboxCommand]:
        yield from self._first
        yield from self._last

    async def run(self, line: str, work: Awaitable[T]) -> T:
        """Await `work`, which runs a command line, and return its result. The command is logged even if it fails."""
        stage, started = self.stage, time.time()
        try:
            result = await work
        except BaseException as error:
            reason = "cancelled" if isinstance(error, asyncio.CancelledError) else str(error)
            self._add(stage, line, started, (None, reason.encode("utf-8", "replace"), 0))
            raise
        self._add(stage, line, started, _outcome(result))
        return result

    def _add(self, stage: str, line: str, started: float, outcome: _Outcome) -> None:
        exit_code, output, lost = outcome
        shown, dropped = _cut(output, MAX_OUTPUT)
        entry = SandboxCommand(
            stage=stage,
            command=_cut(line.encode("utf-8", "replace"), MAX_COMMAND)[0],
            started=started,
            ended=time.time(),
            exit_code=exit_code,
            output=shown,
            bytes_dropped=dropped + lost,
        )
        if len(self._first) < MOST_COMMANDS // 2:
            self._first.append(entry)
            return
        self.left_out += len(self._last) == self._last.maxlen
        self._last.append(entry)


def _outcome(result: object) -> _Outcome:
    if isinstance(result, ExecutionResult):
        about = result.metadata
        output = f"{result.output}{result.error}".encode("utf-8", "replace")
        exit_code, signal, timed_out = about.get("exit_code"), about.get("signal"), about.get("timed_out", False)
        lost = about.get("bytes_dropped", 0)
    else:
        assert isinstance(result, CommandResult)
        output, lost = result.stdout + result.stderr, result.bytes_dropped
        exit_code, signal, timed_out = result.exit_code, result.signal, result.timed_out
    if timed_out:
        return None, output + b"\n[ended at its time limit]", lost
    if signal is not None:
        return None, output + b"\n[killed by signal %d]" % signal, lost
    return exit_code, output, lost


def _cut(data: bytes, limit: int) -> tuple[str, int]:
    """Return the data as text, and the number of bytes left out. If there are more than `limit` bytes, the text has
    half of `limit` from the start and half from the end."""
    head, tail = data, b""
    if len(data) > limit:
        head, tail = trim_end(data[: limit // 2]), trim_start(data[-limit // 2 :])
    shown = join_capture(head, tail, len(data))
    return shown.decode("utf-8", "replace"), len(data) - len(head) - len(tail)
