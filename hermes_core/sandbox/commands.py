"""What can be done in a slot, and what comes of it: the interface that tools and environments use."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MethodType
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast

from hermes_core.errors import ErrorKind

PREPARE = -1
"""The index of the preparation user's slot, which no other slot can meddle with."""

OUTPUT_LIMIT = 1 << 20
"""Bytes of each of stdout and stderr that a command's result keeps, head and tail together."""

MAX_FILE_BYTES = 64 << 20
"""The most that `read_file` gives in one piece; larger files are read in parts."""


Compression = Literal["", "gz", "bz2", "xz"]
"""What a tar is compressed with."""


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


P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Operation(Protocol[P, T_co]):
    """Something that can be done in a slot: a method of its commands."""

    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T_co]:
        """Do it."""


class Call(Protocol):
    """Carries an operation of a slot out. That of a lease refuses it once the lease has ended."""

    def __call__(self, operation: Operation[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        """Await `operation(*args, **kwargs)` and return its outcome."""


Around = Callable[[Call], Call]
"""Makes of a `Call` another one that uses it."""


def unguarded(operation: Operation[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
    """Carry an operation out on nobody's behalf: the `Call` of commands that belong to no lease."""
    return operation(*args, **kwargs)


class _HasCall(Protocol):
    @property
    def call(self) -> Call:
        """What carries its operations out."""


S = TypeVar("S", bound=_HasCall)
Method = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]


def operation(method: Method[S, P, T]) -> Method[S, P, T]:
    """Have the `call` of its object carry a method out: all that can be done in a slot goes through there, once."""

    @functools.wraps(method)
    def begin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        return self.call(cast("Operation[P, T]", MethodType(method, self)), *args, **kwargs)

    return begin


class SlotCommands(Protocol):
    """The commands of one slot.

    Relative paths start at the slot's workspace. Every method may be cancelled: what it started is then killed.
    All of them raise `InfraError` (`ChannelLost`, `SandboxLost`, `SlotLost`) when the sandbox can't be reached,
    `StaleSlotError` after release, and `CommandError` with a `code` when the operation itself fails.
    """

    @property
    def workspace_dir(self) -> str:
        """The slot's workspace, as seen from inside the sandbox."""

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | AsyncIterator[bytes] | None = None,
        timeout_s: float | None = None,
        output_limit: int = OUTPUT_LIMIT,
        merge_stderr: bool = False,
        spool: bool = False,
        pty: WindowSize | None = None,
    ) -> CommandResult:
        """Run a command to its end: a string by the slot's shell, a sequence as it is.

        What can't be started is a `CommandError`: its code is `not_found`, `permission` or the like for the program,
        and begins with `cwd_` for the directory. Without a guest, a program that is there and can't be loaded (it has
        another format, its interpreter is missing) is not told from one that ended with status 126 or 127.

        Args:
            cwd: directory, relative to the workspace.
            env: further environment variables.
            stdin: what it reads, at once or as it comes; None is an empty input.
            timeout_s: after this TERM, a grace period, KILL of all that it started; None is no limit.
            output_limit: bytes kept of each stream, half of them the head, half the tail; of standard error no more
                than 2 MiB.
            merge_stderr: both streams in one, in the order written.
            spool: keep the whole output in a file of the slot (`CommandResult.spool_path`).
            pty: run it in a terminal of this size, which is its standard input, output and error: all output is in
                `stdout`. Where none is to be had, `CommandError` with code `no_pty`.
        """

    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        buffer_bytes: int = 200_000,
        spool: bool = False,
        pty: WindowSize | None = None,
    ) -> ProcessStatus:
        """Start a background process; its exit code and the end of its log outlive it, by half an hour.

        What can't be started is a `CommandError`, as of `run`.

        A slot has 64 of them at most, ended ones included; those that ended first make room for new ones.

        Args:
            buffer_bytes: how much of the end of its output `log` can give.
            spool: keep the whole output in a file of the slot (`ProcessStatus.spool_path`).
            pty: as of `run`.
        """

    async def processes(self) -> Sequence[ProcessStatus]:
        """The slot's background processes, running and ended, oldest first."""

    async def poll(self, process_id: str) -> ProcessStatus:
        """One background process. `CommandError` with code `unknown_process` if there is none of that id."""

    async def log(
        self, process_id: str, *, offset: int = 0, limit: int = 200_000, wait_s: float | None = None
    ) -> LogChunk:
        """Its output from a byte offset on; the first byte still held when that one has left the buffer.

        Args:
            wait_s: where there is none from there on yet, wait for some, for the end of the process, or for so long.
        """

    async def wait(self, process_id: str, *, timeout_s: float | None = None) -> ProcessStatus:
        """Wait for its end, or until the time limit; the status says which."""

    async def write(self, process_id: str, data: bytes, *, eof: bool = False) -> int:
        """Write to its standard input, and close it if `eof`; the number of bytes taken.

        A terminal is not closed: its end-of-file is the key Ctrl-D, after which it can be written to again.
        """

    async def resize(self, process_id: str, size: WindowSize) -> ProcessStatus:
        """Give its terminal another size. Without one, `CommandError` with code `no_pty`."""

    async def kill(self, process_id: str, *, grace_s: float = 2.0) -> ProcessStatus:
        """TERM, then KILL after the grace period, to it and all that it started.

        If it has ended, to what it left running: `left_killed` says how many those were.
        """

    async def read_file(self, path: str, *, offset: int = 0, limit: int = MAX_FILE_BYTES) -> FileContent:
        """Up to `limit` bytes of a regular file from `offset`, opened with the slot's rights."""

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None, append: bool = False) -> None:
        """Replace (or extend) a file, making its parent directories; all of it or an error."""

    async def stat(self, path: str) -> FileStat:
        """What the path is; a link is not followed."""

    async def list_dir(
        self, path: str = ".", *, recursive: bool = False, max_entries: int = 10_000
    ) -> Sequence[FileStat]:
        """The entries of a directory, sorted by path relative to it. More than `max_entries` is code `too_large`."""

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or, if `recursive`, a directory tree."""

    async def clear(self, keep: Sequence[str] = ()) -> None:
        """Remove all files of the slot (its workspace, home, temporary files) but for some entries of its workspace."""

    async def tar_in(self, path: str, data: bytes | AsyncIterator[bytes], *, compression: Compression = "") -> None:
        """Unpack a tar stream below the directory `path`, which is made. Members can't leave it.

        Args:
            compression: what it is compressed with. It is never guessed: a plain tar begins with a file's name, which
                can look like anything. Without a guest: plain or `gz` only.
        """

    async def tar_out(self, path: str = ".", *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """A plain tar of the directory's contents. More than `max_bytes` is code `too_large`."""

    async def tar_out_to(
        self, sink: Callable[[bytes], Awaitable[object]], path: str = ".", *, max_bytes: int = MAX_FILE_BYTES
    ) -> int:
        """The same to `sink`, piece by piece, none before it has taken the last one; the number of bytes.

        What came before an error is no archive. Without a guest it is one piece.
        """
