"""The commands of a slot and their results: the interface that tools and environments use."""

from __future__ import annotations

import asyncio
import copy
import functools
import shlex
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, StrEnum
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, Self, TypeVar

from hermes_core.errors import ErrorKind

PREPARE = -1
"""The index of the preparation user's slot. Other slots can't tamper with it."""

OUTPUT_LIMIT = 1 << 20
"""Maximum number of bytes of each of stdout and stderr that a command's result keeps, head and tail together."""

MAX_FILE_BYTES = 64 << 20
"""Maximum number of bytes that `read_file` returns at once. Larger files are read in parts."""


Sink = Callable[[bytes], Awaitable[object]]
"""Takes a stream piece by piece. The sender awaits the result of each call before the next one."""

Compression = Literal["", "gz", "bz2", "xz"]
"""The compression of a tar stream."""


class SlotState(StrEnum):
    """The state of a slot in its life."""

    AVAILABLE = "available"
    ACQUIRED = "acquired"
    EXECUTING = "executing"
    RELEASING = "releasing"
    ERROR = "error"


@dataclass(frozen=True)
class SandboxImage:
    """The image that a sandbox was made from."""

    name: str
    digest: str | None = None
    """The digest of its content, such as `sha256:…`; None if the backend does not know it."""
    workdir: str | None = field(default=None, compare=False)
    """The directory in which its programs start; None if the backend does not know it."""
    user: str | None = field(default=None, compare=False)
    """The user that its programs run as, as the image names it; None if the backend does not know it."""
    variables: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The environment variables of its programs, as far as the backend knows them."""
    entrypoint: tuple[str, ...] = field(default=(), compare=False)
    """The entrypoint of its containers; empty if there is none, or the backend does not know it."""
    healthcheck: Mapping[str, Any] | None = field(default=None, compare=False)
    """Docker's health check of its containers; None if there is none, or the backend does not know it."""


class Cwd(Enum):
    """A directory that only the sandbox's image knows."""

    IMAGE = "image"
    """The image's `workdir`. It is the workspace if the backend does not know it."""


def start_directory(cwd: str | Cwd | None, image: SandboxImage | None) -> str:
    """Return the directory in which a slot's commands start; empty for the workspace."""
    if isinstance(cwd, Cwd):
        return (image and image.workdir) or ""
    return cwd or ""


@dataclass(eq=False)
class Slot:
    """A handle on one lease of a slot. It is refused after the end of this lease, also if the slot is leased again."""

    slot_id: str
    """Unique across profiles, sandboxes and time."""
    sandbox_id: str
    profile: str
    workspace_dir: str
    """The slot's directory, as a path inside the sandbox: `/data/slot_0`."""
    generation: int
    """The lease's number. It grows with each lease of the same slot."""
    isolation: str
    """The isolation level that was granted."""
    trajectory_id: str | None = None
    image: SandboxImage | None = None
    """The image of the sandbox; None if its backend has no images."""
    state: SlotState = SlotState.ACQUIRED
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WindowSize:
    """The size of a terminal in characters."""

    rows: int = 30
    columns: int = 120


@dataclass(frozen=True)
class Command:
    """One command, made by `SlotCommands.run` and `start` from their arguments; see there for the fields."""

    args: str | Sequence[str]
    """A text for the slot's shell, or a program and its arguments."""
    _: KW_ONLY
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    stdin: bytes | AsyncIterator[bytes] | None = None
    timeout_s: float | None = None
    output_limit: int = OUTPUT_LIMIT
    """The number of bytes of output kept: by `run`, the head and tail of each stream; by `start`, the last bytes."""
    merge_stderr: bool = False
    spool: bool = False
    pty: WindowSize | None = None
    stdout: Sink | None = None

    @property
    def line(self) -> str:
        """Return the command as a line for a shell."""
        return self.args if isinstance(self.args, str) else shlex.join(self.args)


@dataclass(frozen=True)
class CommandResult:
    """The outcome of one command in a slot. A non-zero exit is data, not an error.

    `stdout` and `stderr` hold the head and the tail up to the output limit, with a notice in between about what was
    left out. The `*_bytes` fields count everything that the command wrote.
    """

    exit_code: int | None
    """The exit status, 0–255; None if a signal ended the process."""
    signal: int | None = None
    """The signal that ended the process, or None."""
    timed_out: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    stdout_truncated: bool = False
    """Whether a part of standard output was left out."""
    stderr_truncated: bool = False
    duration_s: float = 0.0
    spool_path: str | None = None
    """The path in the slot of the whole output, if spooling was asked for."""

    @property
    def truncated(self) -> bool:
        """Return whether a part of either stream was left out."""
        return self.stdout_truncated or self.stderr_truncated

    @property
    def bytes_dropped(self) -> int:
        """Return the number of bytes of both streams that were left out, minus the length of the notices about that."""
        return max(0, self.stdout_bytes + self.stderr_bytes - len(self.stdout) - len(self.stderr))

    @property
    def ok(self) -> bool:
        """Return whether the command ended by itself with status 0 within its time limit."""
        return self.exit_code == 0 and not self.timed_out

    @property
    def returncode(self) -> int:
        """Return the status as a shell would: 124 for a time-out, 128 + n for signal n."""
        if self.timed_out:
            return 124
        if self.signal is not None:
            return 128 + self.signal
        return -1 if self.exit_code is None else self.exit_code

    @property
    def text(self) -> str:
        """Return standard output as text. Bytes that are not UTF-8 become U+FFFD."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        """Return standard error as text. Bytes that are not UTF-8 become U+FFFD."""
        return self.stderr.decode("utf-8", "replace")


@dataclass(frozen=True)
class ExecutionResult:
    """The outcome of one tool call, for environment hooks and batches."""

    success: bool
    output: str = ""
    error: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """More about the call: `exit_code`, `timed_out`, `truncated`, `bytes_dropped`, `duration_s`, and so on, as the tool
    provides them."""
    execution_id: str = ""
    slot_id: str = ""
    error_kind: ErrorKind | None = None
    answer: Mapping[str, Any] | None = None
    """The answer to the model, if it differs from `output` and `error`."""

    def to_tool_result(self) -> dict[str, Any]:
        """Return the answer to the model as a JSON-able mapping."""
        if self.answer is not None:
            return dict(self.answer)
        result: dict[str, Any] = {"output": self.output}
        if "exit_code" in self.metadata:
            result["exit_code"] = self.metadata["exit_code"]
        result["error"] = self.error or None
        return result


@dataclass(frozen=True)
class ProcessStatus:
    """One background process of a slot, as `processes` and `poll` return it."""

    process_id: str
    command: str
    cwd: str
    pid: int | None
    started_at: float
    """Start time in seconds since the epoch, by the sandbox's clock."""
    running: bool
    exit_code: int | None = None
    signal: int | None = None
    output_bytes: int = 0
    """Bytes written so far, including those that have left the buffer."""
    uptime_s: float = 0.0
    left_killed: int = 0
    """Number of processes that this process left running at its end, and that `kill` has ended since."""
    pty: WindowSize | None = None
    """The size of its terminal, if it has one."""
    spool_path: str | None = None
    """The path in the slot of its whole output, if spooling was asked for."""


@dataclass(frozen=True)
class LogChunk:
    """Part of a background process's output."""

    data: bytes
    offset: int
    """The byte offset of `data[0]` in everything that the process has written."""
    total: int
    """Bytes written so far."""
    dropped: int
    """The number of requested bytes before `offset` that have left the buffer."""
    running: bool = False
    """Whether more output may follow."""


@dataclass(frozen=True)
class FileStat:
    """Information about a path in a slot."""

    path: str
    kind: str
    """One of `file`, `dir`, `link` and `other`."""
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
    """News about a background process."""

    trajectory_id: str
    slot: Slot
    status: ProcessStatus
    """The status of the process. If `running` is false, this is the last update."""
    output: bytes
    """The bytes written by the process since the last update; only the newest of them if there are too many."""
    offset: int
    """The byte offset of `output` in everything that the process has written."""


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Operation(Generic[T]):
    """One operation of a slot, before it begins."""

    name: str
    """The method of `SlotCommands`."""
    begin: Callable[[], Coroutine[Any, Any, T]]
    command: Command | None = None
    """The command of a `run`. None for all other operations."""

    @classmethod
    def of(cls, method: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> Operation[T]:
        """Return the operation of calling `method(*args, **kwargs)`."""
        return Operation(method.__name__, functools.partial(method, *args, **kwargs))


class Call(Protocol):
    """Carries out an operation of a slot. The `Call` of a lease refuses operations after the lease has ended."""

    def __call__(self, operation: Operation[T], /) -> Coroutine[Any, Any, T]:
        """Await `operation.begin()` and return its outcome."""


class Around(Protocol):
    """Observes operations, and carries out each by the `call` in its arguments."""

    def __call__(self, call: Call, operation: Operation[T], /) -> Coroutine[Any, Any, T]:
        """Await `call(operation)` and return its outcome."""


def call_directly(operation: Operation[T], /) -> Coroutine[Any, Any, T]:
    """Carry out an operation without a check. This is the `Call` of commands that belong to no lease."""
    return operation.begin()


class Connection(Protocol):
    """One connection that a program in a slot has made to a forward. Both directions end independently."""

    async def read(self, n: int = 65536) -> bytes:
        """Return 1 to `n` bytes from the program; empty at the end.

        Raises:
            ConnectionError: the program has broken the connection, or the lease has ended.
        """

    async def write(self, data: bytes) -> None:
        """Send bytes to the program, and wait until there is room for more.

        Raises:
            ConnectionError: see `read`.
        """

    async def finish(self) -> None:
        """Send the end of our data to the program. Idempotent."""


Serve = Callable[[Connection], Awaitable[None]]
"""Serves one connection to its end. The connection is closed when it returns, and reset if it raises."""


@dataclass(frozen=True)
class Forward:
    """A port in a slot, whose connections are served on the driver."""

    port: int
    listening: asyncio.Task[Any] = field(compare=False, repr=False)
    """Ends when the port is closed, for example because the slot's processes were killed."""

    @property
    def is_open(self) -> bool:
        """Return whether the port is open."""
        return not self.listening.done()

    async def wait_closed(self) -> None:
        """Wait until the port is closed."""
        await asyncio.wait([self.listening])

    @property
    def url(self) -> str:
        """Return the address for a program in the slot that speaks HTTP: `http://127.0.0.1:PORT`."""
        return f"http://127.0.0.1:{self.port}"


class SlotCommands(ABC):
    """The commands of one slot.

    Relative paths start at the slot's workspace, or at the `cwd` of its lease. If a method is cancelled, the processes
    that it started are killed. All methods raise `InfraError` (`ChannelLost`, `SandboxLost`, `SlotLost`) if the sandbox
    can't be reached, `StaleSlotError` after release, and `CommandError` with a `code` if the operation itself fails.

    Attributes:
        workspace_dir: the slot's workspace, as a path inside the sandbox.
        cwd: the directory for relative paths, absolute or relative to the workspace.
        call: carries out each operation, exactly once.
    """

    def __init__(self, workspace_dir: str, call: Call = call_directly, cwd: str = "") -> None:
        self.workspace_dir = workspace_dir
        self.cwd = cwd
        self.call = call

    def around(self, wrap: Around) -> Self:
        """Return the same commands, observed by `wrap`."""
        inner, observed = self.call, copy.copy(self)

        def call(operation: Operation[T], /) -> Coroutine[Any, Any, T]:
            return wrap(inner, operation)

        observed.call = call
        return observed

    def run(
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
        stdout: Sink | None = None,
    ) -> Coroutine[Any, Any, CommandResult]:
        """Run a command and wait for its end. The slot's shell runs a string; a sequence is run without a shell.

        If the command can't be started, `CommandError` is raised. Its code is `not_found`, `permission` or similar if
        the program is the reason, and begins with `cwd_` if the directory is. Without a guest, a program that exists
        but can't be loaded (wrong format, missing interpreter) gives a result with status 126 or 127 instead.

        Args:
            cwd: directory, relative to the workspace.
            env: additional environment variables.
            stdin: input, all at once or as a stream; None is an empty input.
            timeout_s: seconds after which all processes that the command started get TERM and, after a grace period,
                KILL. None is no limit.
            output_limit: bytes kept of each stream, half of them the head, half the tail; at most 2 MiB of standard
                error.
            merge_stderr: put both streams into one, in the order written.
            spool: keep the whole output in a file of the slot (`CommandResult.spool_path`).
            pty: run the command in a terminal of this size, which is its standard input, output and error; all output
                is in `stdout`. If no terminal is available, `CommandError` with code `no_pty` is raised.
            stdout: gets standard output piece by piece while the command runs. The command waits while the sink is
                behind. The result then has only the size of standard output. If the sink raises, the command is killed.
        """
        value = Command(
            command,
            cwd=cwd,
            env=env,
            stdin=stdin,
            timeout_s=timeout_s,
            output_limit=output_limit,
            merge_stderr=merge_stderr,
            spool=spool,
            pty=pty,
            stdout=stdout,
        )
        return self.call(Operation("run", functools.partial(self._run, value), value))

    def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        buffer_bytes: int = 200_000,
        spool: bool = False,
        pty: WindowSize | None = None,
    ) -> Coroutine[Any, Any, ProcessStatus]:
        """Start a background process. Its exit code and the end of its log are kept for half an hour after its end.

        If the command can't be started, `CommandError` is raised, as by `run`.

        A slot has at most 64 background processes, including ended ones. New ones replace those that ended first.

        Args:
            buffer_bytes: number of bytes at the end of the output that `log` can return.
            spool: keep the whole output in a file of the slot (`ProcessStatus.spool_path`).
            pty: see `run`.
        """
        value = Command(command, cwd=cwd, env=env, output_limit=buffer_bytes, spool=spool, pty=pty)
        return self.call(Operation("start", functools.partial(self._start, value)))

    @abstractmethod
    async def _run(self, command: Command) -> CommandResult:
        """Run a command to its end."""

    @abstractmethod
    async def _start(self, command: Command) -> ProcessStatus:
        """Start a command as a background process."""

    @abstractmethod
    async def processes(self) -> Sequence[ProcessStatus]:
        """Return the slot's background processes, running and ended, oldest first."""

    @abstractmethod
    async def poll(self, process_id: str) -> ProcessStatus:
        """Return one background process. Raise `CommandError` with code `unknown_process` if there is none with that
        id."""

    @abstractmethod
    async def log(
        self, process_id: str, *, offset: int = 0, limit: int = 200_000, wait_s: float | None = None
    ) -> LogChunk:
        """Return the output of a background process from a byte offset on, or from the oldest byte in the buffer.

        Args:
            wait_s: if there is no output from the offset on, wait up to this long for some, or for the process's end.
        """

    @abstractmethod
    async def wait(self, process_id: str, *, timeout_s: float | None = None) -> ProcessStatus:
        """Wait until a background process ends, or until the time limit. Return its status then."""

    @abstractmethod
    async def write(self, process_id: str, data: bytes, *, eof: bool = False) -> int:
        """Write to the standard input of a background process, then close it if `eof`. Return the number of bytes
        written.

        A terminal is not closed. It gets the key Ctrl-D, and more can be written after that.
        """

    @abstractmethod
    async def resize(self, process_id: str, size: WindowSize) -> ProcessStatus:
        """Resize the terminal of a background process. Raises `CommandError` with code `no_pty` if it has none."""

    @abstractmethod
    async def kill(self, process_id: str, *, grace_s: float = 2.0) -> ProcessStatus:
        """Send TERM, and KILL after the grace period, to a background process and all processes that it started.

        If the process has ended already, the signals go to the processes that it left running, and `left_killed` is
        their number.
        """

    @abstractmethod
    async def read_file(self, path: str, *, offset: int = 0, limit: int = MAX_FILE_BYTES) -> FileContent:
        """Return up to `limit` bytes of a regular file from `offset`. The file is opened with the slot's rights."""

    @abstractmethod
    async def write_file(self, path: str, data: bytes, *, mode: int | None = None, append: bool = False) -> None:
        """Replace a file or append to it, and make its parent directories. Either all data is written, or an error is
        raised."""

    @abstractmethod
    async def stat(self, path: str) -> FileStat:
        """Return information about the path. Links are not followed."""

    @abstractmethod
    async def list_dir(
        self, path: str = ".", *, recursive: bool = False, max_entries: int = 10_000
    ) -> Sequence[FileStat]:
        """Return the entries of a directory, sorted by their path relative to it. More than `max_entries` is an error
        with code `too_large`."""

    @abstractmethod
    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or, if `recursive`, a directory tree."""

    @abstractmethod
    async def clear(self, keep: Sequence[str] = ()) -> None:
        """Remove all files of the slot (workspace, home, temporary files), except the entries of its workspace named in
        `keep`."""

    @abstractmethod
    async def tar_in(self, path: str, data: bytes | AsyncIterator[bytes], *, compression: Compression = "") -> None:
        """Unpack a tar stream into the directory `path`, which is created. No member is written outside of it.

        Args:
            compression: how the stream is compressed. This is never guessed, because a plain tar begins with a file
                name, which can look like anything. Without a guest: plain or `gz` only.
        """

    @abstractmethod
    async def tar_out(self, path: str = ".", *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Return a plain tar of the directory's contents. More than `max_bytes` is an error with code `too_large`."""

    @abstractmethod
    async def tar_out_to(self, sink: Sink, path: str = ".", *, max_bytes: int = MAX_FILE_BYTES) -> int:
        """Write a plain tar of the directory's contents to `sink` piece by piece, and return the number of bytes.

        The next piece is sent when the sink has taken the last one. After an error, the pieces sent so far are not a
        valid archive. Without a guest there is only one piece.
        """

    @abstractmethod
    def forward(self, serve: Serve, *, port: int | None = None, most: int = 64) -> AbstractAsyncContextManager[Forward]:
        """Open a port of the slot's loopback (127.0.0.1) during the block; `serve` gets each connection to it.

        `serve` runs on the driver, once for each connection and at most `most` times at once; further connections wait
        in the slot. If it raises, that connection is reset and the error logged. The number of bytes in transit is
        bounded in each direction of a connection, and a lost channel loses none of them. Only programs of this slot are
        served.

        The port is closed and its connections are reset at the end of the block, and as soon as the slot's processes
        are killed or its lease ends.

        Entering the block raises `CommandError` if the port can't be opened. The code is `in_use`, `permission`,
        `unguarded` (the slot shares its loopback with other slots, and its connections can't be told from theirs: level
        `shared`) or `no_forward` (there is no guest).

        Args:
            port: the port's number; None is any free port.
            most: maximum number of open connections.
        """


S = TypeVar("S", bound=SlotCommands)
Method = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]


def operation(method: Method[S, P, T]) -> Method[S, P, T]:
    """Decorate a method of `SlotCommands`, so that its object's `call` carries it out. Every operation of a slot passes
    through `call` exactly once."""

    @functools.wraps(method)
    def begin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        return self.call(Operation.of(method, self, *args, **kwargs))

    return begin
