"""What callers of the tool backend hold: slots, and the results of what ran in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hermes_core.errors import ErrorKind


class SlotState(StrEnum):
    """Where a slot is in its life."""

    AVAILABLE = "available"
    ACQUIRED = "acquired"
    EXECUTING = "executing"
    RELEASING = "releasing"
    ERROR = "error"


@dataclass(eq=False)
class Slot:
    """A handle on one lease of a slot. It is refused once released, even if the slot has a new owner."""

    slot_id: str
    """Unique across profiles, sandboxes and time."""
    sandbox_id: str
    profile: str
    workspace_dir: str
    """The slot's directory as seen from inside the sandbox: `/data/slot_0`."""
    generation: int
    """The lease's number; grows with each lease of the same slot."""
    isolation: str
    """The level that was granted."""
    trajectory_id: str | None = None
    state: SlotState = SlotState.ACQUIRED
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CommandResult:
    """The outcome of one command in a slot. A non-zero exit is data, not an error.

    `stdout` and `stderr` hold the head and the tail up to the output limit, with a notice of what was left out in
    between; the `*_bytes` fields count everything that the command wrote.
    """

    exit_code: int | None
    """0–255 as the process exited; None when a signal ended it."""
    signal: int | None = None
    """The signal that ended it, or None."""
    timed_out: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    stdout_truncated: bool = False
    """Whether something of standard output was left out."""
    stderr_truncated: bool = False
    duration_s: float = 0.0
    spool_path: str | None = None
    """Where in the slot the whole output is, when spooling was asked for."""

    @property
    def truncated(self) -> bool:
        """Whether something of either stream was left out."""
        return self.stdout_truncated or self.stderr_truncated

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with status 0 within its time limit."""
        return self.exit_code == 0 and not self.timed_out

    @property
    def returncode(self) -> int:
        """The status as a shell would give it: 124 for a time-out, 128 + n for signal n."""
        if self.timed_out:
            return 124
        if self.signal is not None:
            return 128 + self.signal
        return -1 if self.exit_code is None else self.exit_code

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        """Standard error as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stderr.decode("utf-8", "replace")


@dataclass(frozen=True)
class ExecutionResult:
    """The outcome of one tool call, as environment hooks and batches see it."""

    success: bool
    output: str = ""
    error: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """`exit_code`, `timed_out`, `truncated`, `duration_s`, … as the tool has them."""
    execution_id: str = ""
    slot_id: str = ""
    error_kind: ErrorKind | None = None
    answer: Mapping[str, Any] | None = None
    """What the model is told, where it differs from `output` and `error`."""

    def to_tool_result(self) -> dict[str, Any]:
        """What the model sees, as a JSON-able mapping."""
        if self.answer is not None:
            return dict(self.answer)
        result: dict[str, Any] = {"output": self.output}
        if "exit_code" in self.metadata:
            result["exit_code"] = self.metadata["exit_code"]
        result["error"] = self.error or None
        return result


@dataclass(frozen=True)
class WindowSize:
    """The size of a terminal in characters."""

    rows: int = 30
    columns: int = 120


@dataclass(frozen=True)
class ProcessStatus:
    """One background process of a slot, as `list` and `poll` give it."""

    process_id: str
    command: str
    cwd: str
    pid: int | None
    started_at: float
    """Seconds since the epoch, by the sandbox's clock."""
    running: bool
    exit_code: int | None = None
    signal: int | None = None
    output_bytes: int = 0
    """Bytes written so far, those that have left the buffer included."""
    uptime_s: float = 0.0
    left_killed: int = 0
    """Processes that it had left running at its own end, and that `kill` ended since."""
    pty: WindowSize | None = None
    """The size of its terminal, if it has one."""
    spool_path: str | None = None
    """Where in the slot its whole output is, when spooling was asked for."""


@dataclass(frozen=True)
class LogChunk:
    """Part of a background process's output."""

    data: bytes
    offset: int
    """The byte offset of `data[0]` in everything that the process has written."""
    total: int
    """Bytes written so far."""
    dropped: int
    """Bytes before `offset` that were asked for but have left the buffer."""
    running: bool = False
    """Whether there may be more to come."""


@dataclass(frozen=True)
class FileStat:
    """What a path in a slot is."""

    path: str
    kind: str
    """`file`, `dir`, `link` or `other`."""
    size: int
    mode: int
    mtime: float


@dataclass(frozen=True)
class FileContent:
    """Part of a file: `data` starts at `offset`; `size` is the whole file's."""

    data: bytes
    offset: int
    size: int


@dataclass(frozen=True)
class ProcessUpdate:
    """What is new about a background process."""

    trajectory_id: str
    slot: Slot
    status: ProcessStatus
    """With `running` false, this is the last update."""
    output: bytes
    """What it has written since the update before, the newest part of it at least."""
    offset: int
    """Of `output` in all that it has written."""
