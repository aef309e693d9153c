"""Implements `SlotCommands` by requests to the guest."""

from __future__ import annotations

import asyncio
import json
import math
import posixpath
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from hermes_core.aio import alongside
from hermes_core.errors import CommandError
from hermes_core.sandbox.commands import (
    MAX_FILE_BYTES,
    Call,
    Command,
    CommandResult,
    Compression,
    FileContent,
    FileStat,
    Forward,
    LogChunk,
    ProcessStatus,
    Serve,
    Sink,
    SlotCommands,
    WindowSize,
    call_directly,
    operation,
)
from hermes_core.sandbox.guest.wire import CAPTURE_LIMIT, CHUNK, WINDOW
from hermes_core.sandbox.guest_client.forward import open_forward
from hermes_core.sandbox.guest_client.streams import (
    Answer,
    InputStream,
    OutputStream,
    SendRequest,
    once,
    run_with_input,
)
from hermes_core.sandbox.linux.output import HeadTail

GRACE_S = 2.0
"""Seconds between TERM and KILL at a time limit."""
MAX_SCRIPT = 8 << 20
MAX_BUFFER = 8 << 20
MAX_PATH = 4096
MAX_ARGUMENTS = 1536 << 10
MAX_SIDE = 1000
"""Maximum number of rows or columns of a terminal."""
LONGEST_WAIT_S = 3600.0
"""Maximum number of seconds to wait for a log."""
_LABEL = 2000
"""Maximum number of characters of a background process's command in a listing."""
_MAX_JOINED_ON_LOOP = 4 << 20
"""More bytes than this are joined in a thread. Joining 100 MB would stall the event loop for 50 ms."""


class RemoteCommands(SlotCommands):
    """`SlotCommands` over a guest; see there.

    Args:
        request: sends a request to the guest.
        index: the slot's number.
        env: environment variables of every command.
    """

    def __init__(
        self,
        request: SendRequest,
        index: int,
        workspace_dir: str,
        call: Call = call_directly,
        cwd: str = "",
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(workspace_dir, call, cwd)
        self._request = request
        self._index = index
        self._env = {} if env is None else env

    # --- commands ---------------------------------------------------------------------------------------------------

    async def _run(self, command: Command) -> CommandResult:
        """Run a command to its end."""
        if command.output_limit <= 0:
            raise CommandError(f"output_limit must be above 0, not {command.output_limit}", code="invalid")
        header, script = self._launch(command)
        header |= {"op": "exec", "merge": command.merge_stderr, "grace": GRACE_S}
        if command.timeout_s is not None:
            header["timeout"] = _seconds("timeout_s", command.timeout_s)
        try:
            if command.stdout is not None:
                return await self._run_streamed(header, script, command.stdin, command.stdout)
            if command.output_limit > CAPTURE_LIMIT:
                return await self._run_windowed(header, script, command)
            return _command_result(*await self._exec(header | {"mode": "capture"}, script, command.stdin))
        except CommandError as error:
            if error.code != "killed":
                raise
            return CommandResult(exit_code=None, signal=9, stderr=error.message.encode())

    async def _run_windowed(self, header: dict[str, Any], script: bytes, command: Command) -> CommandResult:
        """Run with standard output as a stream, because an answer of many megabytes would delay neighbours."""
        output = HeadTail(command.output_limit)

        async def keep(piece: bytes) -> None:
            output.feed(piece)

        result = await self._run_streamed(header, script, command.stdin, keep)
        return replace(result, stdout=output.value(), stdout_truncated=output.truncated)

    async def _run_streamed(
        self, header: dict[str, Any], script: bytes, stdin: bytes | AsyncIterator[bytes] | None, sink: Sink
    ) -> CommandResult:
        """Run with standard output sent to `sink`, at the speed of the sink."""
        stream = OutputStream()
        async with alongside(self._exec(header | {"mode": "stream"}, script, stdin, stream)) as call:
            async for piece in stream:
                await sink(piece)
            return _command_result(*await call)

    async def _exec(
        self,
        header: dict[str, Any],
        script: bytes,
        stdin: bytes | AsyncIterator[bytes] | None,
        output: OutputStream | None = None,
    ) -> Answer:
        """Run with input of any size. Input of at most one piece is sent with the request."""
        if stdin is None:
            return await self._request(header, script, output=output)
        header["input"] = True
        if isinstance(stdin, bytes) and len(stdin) <= CHUNK:
            header["eof"] = True
            return await self._request(header, script + stdin, output=output)
        stream = InputStream()
        feeding = stream.pump(once(stdin) if isinstance(stdin, bytes) else stdin)
        return await run_with_input(self._request(header, script, input=stream, output=output), feeding)

    def _launch(self, command: Command) -> tuple[dict[str, Any], bytes]:
        """Return the header of a request for a command, and its script.

        Raises:
            CommandError: the command can't be passed to a process.
        """
        script, argv = _script(command.args)
        cwd = self._directory(command.cwd)
        env = {**self._env, **(command.env or {})}
        header: dict[str, Any] = {
            "slot": self._index,
            "script": len(script),
            "limit": command.output_limit,
            "spool": command.spool,
        }
        if command.pty is not None:
            header["pty"] = _size(command.pty)
        if argv:
            header["argv"] = argv
        if cwd:
            header["cwd"] = _path(cwd)
        if env:
            header["env"] = env
        words = "".join((*argv, cwd, *env, *env.values()))
        if "\0" in words:
            raise CommandError("an argument, the directory or a variable contains a NUL byte", code="invalid")
        if len(_encode(words)) > MAX_ARGUMENTS:
            raise CommandError("the arguments and variables are too long", code="too_large", hint="use standard input")
        return header, script

    # --- background processes ---------------------------------------------------------------------------------------

    async def _start(self, command: Command) -> ProcessStatus:
        """Start a background process."""
        if not 0 <= command.output_limit <= MAX_BUFFER:
            message = f"buffer_bytes must be between 0 and {MAX_BUFFER}, not {command.output_limit}"
            raise CommandError(message, code="invalid")
        header, script = self._launch(command)
        answer, _ = await self._request(header | {"op": "start", "label": command.line[:_LABEL]}, script)
        return _process_status(answer["process"])

    @operation
    async def processes(self) -> Sequence[ProcessStatus]:
        """Return the slot's background processes, oldest first."""
        answer, _ = await self._request({"op": "processes", "slot": self._index})
        return [_process_status(process) for process in answer["processes"]]

    @operation
    async def poll(self, process_id: str) -> ProcessStatus:
        """Return one background process."""
        return await self._about("poll", process_id)

    @operation
    async def log(
        self, process_id: str, *, offset: int = 0, limit: int = 200_000, wait_s: float | None = None
    ) -> LogChunk:
        """Return the output of a background process from a byte offset on."""
        header = {
            "op": "log",
            "slot": self._index,
            "process": process_id,
            "offset": max(0, offset),
            "limit": max(0, limit),
            "wait": None if wait_s is None else _seconds("wait_s", min(wait_s, LONGEST_WAIT_S), least=0.0),
        }
        answer, data = await self._request(header)
        return LogChunk(data, answer["offset"], answer["total"], answer["dropped"], answer["running"])

    @operation
    async def wait(self, process_id: str, *, timeout_s: float | None = None) -> ProcessStatus:
        """Wait until a background process ends, or until the time limit."""
        timeout = None if timeout_s is None else _seconds("timeout_s", timeout_s, least=0.0)
        return await self._about("wait", process_id, timeout=timeout)

    @operation
    async def write(self, process_id: str, data: bytes, *, eof: bool = False) -> int:
        """Write to the standard input of a background process. Return the number of bytes written."""
        written = 0
        while True:
            part = data[written : written + WINDOW]
            is_last = written + len(part) == len(data)
            header = {"op": "write", "slot": self._index, "process": process_id, "eof": eof and is_last}
            answer, _ = await self._request(header, part)
            written += int(answer["taken"])
            if is_last or answer["taken"] < len(part):
                return written

    @operation
    async def resize(self, process_id: str, size: WindowSize) -> ProcessStatus:
        """Resize the terminal of a background process."""
        return await self._about("resize", process_id, pty=_size(size))

    @operation
    async def kill(self, process_id: str, *, grace_s: float = 2.0) -> ProcessStatus:
        """Send TERM, and KILL after the grace period, to a background process and all processes that it started."""
        return await self._about("kill", process_id, grace=_seconds("grace_s", grace_s, least=0.0) or 0.0)

    async def _about(self, op: str, process_id: str, **arguments: Any) -> ProcessStatus:
        header = {"op": op, "slot": self._index, "process": process_id, **arguments}
        answer, _ = await self._request(header)
        return _process_status(answer["process"])

    # --- forwards ---------------------------------------------------------------------------------------------------

    def forward(self, serve: Serve, *, port: int | None = None, most: int = 64) -> AbstractAsyncContextManager[Forward]:
        """Open a port of the slot's loopback during the block, and call `serve` with each connection."""
        if port is not None and not 0 < port < 1 << 16:
            raise CommandError(f"a port is a number from 1 to 65535, not {port}", code="invalid")
        if most < 1:
            raise CommandError(f"most must be above 0, not {most}", code="invalid")
        return open_forward(self._request, self.call, self._index, serve, port=port or 0, most=most)

    # --- files ------------------------------------------------------------------------------------------------------

    @operation
    async def read_file(self, path: str, *, offset: int = 0, limit: int = MAX_FILE_BYTES) -> FileContent:
        """Return up to `limit` bytes of a regular file from `offset`."""
        if offset < 0 or limit < 0:
            raise CommandError("offset and limit must not be negative", code="invalid")
        data, result = await self._stream(
            "read", {"path": self._path(path), "offset": offset, "limit": min(limit, MAX_FILE_BYTES)}
        )
        return FileContent(data=data, offset=offset, size=int(result["size"]))

    @operation
    async def write_file(self, path: str, data: bytes, *, mode: int | None = None, append: bool = False) -> None:
        """Replace a file or append to it. Either all data is written, or an error is raised."""
        await self._builtin(
            "write", {"path": self._path(path), "size": len(data), "mode": mode, "append": append}, data
        )

    @operation
    async def stat(self, path: str) -> FileStat:
        """Return size, kind, mode and time of a path."""
        result, _ = await self._builtin("stat", {"path": self._path(path)})
        return FileStat(**result["stat"])

    @operation
    async def list_dir(
        self, path: str = ".", *, recursive: bool = False, max_entries: int = 10_000
    ) -> Sequence[FileStat]:
        """Return the entries of a directory, sorted by path."""
        arguments = {"path": self._path(path), "recursive": recursive, "max_entries": max_entries}
        data, _ = await self._stream("list", arguments)
        return [FileStat(**entry) for entry in json.loads(data)]

    @operation
    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or a directory tree."""
        await self._builtin("remove", {"path": self._path(path), "recursive": recursive})

    @operation
    async def clear(self, keep: Sequence[str] = ()) -> None:
        """Remove all files of the slot, except the entries `keep` of its workspace."""
        await self._builtin("clear", {"keep": list(keep)})

    @operation
    async def tar_in(self, path: str, data: bytes | AsyncIterator[bytes], *, compression: Compression = "") -> None:
        """Unpack a tar stream below a directory."""
        await self._builtin("tar_in", {"path": self._path(path), "compression": compression}, data)

    @operation
    async def tar_out(self, path: str = ".", *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Return an uncompressed tar of a directory's contents."""
        data, _ = await self._stream("tar_out", {"path": self._path(path), "max_bytes": max_bytes})
        return data

    @operation
    async def tar_out_to(self, sink: Sink, path: str = ".", *, max_bytes: int = MAX_FILE_BYTES) -> int:
        """Write an uncompressed tar of a directory's contents to `sink`, piece by piece. Return its size in bytes."""
        size, _ = await self._stream_to("tar_out", {"path": self._path(path), "max_bytes": max_bytes}, sink)
        return size

    def _path(self, path: str) -> str:
        return _path(path and posixpath.join(self.cwd, path))

    def _directory(self, cwd: str | None) -> str:
        return posixpath.join(self.cwd, cwd) if cwd else self.cwd

    async def _builtin(
        self, name: str, arguments: Mapping[str, Any], stdin: bytes | AsyncIterator[bytes] | None = None
    ) -> tuple[dict[str, Any], bytes]:
        header = {
            "op": "exec",
            "slot": self._index,
            "mode": "capture",
            "limit": 1 << 20,
            "builtin": name,
            "args": arguments,
        }
        result = _command_result(*await self._exec(header, b"", stdin))
        return self._outcome(name, result), result.stdout

    async def _stream(self, name: str, arguments: Mapping[str, Any]) -> tuple[bytes, dict[str, Any]]:
        """Return the whole output of a file operation."""
        pieces: list[bytes] = []

        async def keep(piece: bytes) -> None:
            pieces.append(piece)

        size, outcome = await self._stream_to(name, arguments, keep)
        data = await asyncio.to_thread(_join, pieces) if size > _MAX_JOINED_ON_LOOP else _join(pieces)
        return data, outcome

    async def _stream_to(self, name: str, arguments: Mapping[str, Any], sink: Sink) -> tuple[int, dict[str, Any]]:
        """Carry out a file operation and pass its output to `sink`. Return the number of bytes, and the outcome. The
        output is a stream with a window, so that a large file never delays a neighbour's answers."""
        stream = OutputStream()
        header = {"op": "exec", "mode": "stream", "slot": self._index, "builtin": name, "args": arguments}
        async with alongside(self._request(header, output=stream)) as call:
            async for piece in stream:
                await sink(piece)
            result = _command_result(*await call)
        return stream.received, self._outcome(name, result)

    def _outcome(self, name: str, result: CommandResult) -> dict[str, Any]:
        """Return the outcome that a file operation wrote to standard error. Raises CommandError if it failed."""
        slot_id = f"slot_{self._index}"
        try:
            outcome: dict[str, Any] = json.loads(result.stderr)
            if outcome.get("ok"):
                return outcome
            message, code = str(outcome["message"]), str(outcome["code"])
        except (ValueError, KeyError, AttributeError, RecursionError) as error:  # it was killed, or Python failed
            text = result.error_text[-500:] or f"it ended with status {result.returncode}"
            code = "killed" if result.signal == signal.SIGKILL else "failed"
            raise CommandError(f"{name} failed: {text}", code=code, slot_id=slot_id) from error
        raise CommandError(f"{name}: {message}", code=code, slot_id=slot_id)


def _join(pieces: list[bytes]) -> bytes:
    """Join the pieces, and empty the list. In a thread, joining large pieces does not hold the interpreter's lock."""
    data = b"".join(pieces)
    pieces.clear()
    return data


def _path(path: str) -> str:
    if "\0" in path or not path:
        raise CommandError(f"not a path: {path!r}", code="invalid", hint="a path has at least one character and no NUL")
    if len(_encode(path)) > MAX_PATH:
        raise CommandError(f"the path is too long: {path[:100]!r}…", code="invalid")
    return path


def _seconds(name: str, value: float, *, least: float | None = None) -> float | None:
    """Return a time limit as it is sent; None is no limit. Raises CommandError if it is too small."""
    if math.isnan(value) or (value <= 0 if least is None else value < least):
        raise CommandError(f"{name} must be a number of seconds above zero, not {value}", code="invalid")
    return None if math.isinf(value) else value


def _script(args: str | Sequence[str]) -> tuple[bytes, list[str]]:
    """Return (a script for the shell, the words of a command). One of the two is empty.

    Raises:
        CommandError: there are no words, or the script can't be run.
    """
    if not isinstance(args, str):
        if not args:
            raise CommandError("the command is empty", code="invalid")
        return b"", list(args)
    if "\0" in args:
        raise CommandError("the command contains a NUL byte", code="invalid", hint="write binary data to a file first")
    script = _encode(args)
    if len(script) > MAX_SCRIPT:
        message = f"the command is {len(script)} bytes long"
        raise CommandError(message, code="too_large", hint="write it to a file and run that")
    return script, []


def _encode(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        place = text[max(0, error.start - 50) : error.end + 50]
        raise CommandError(f"there are no bytes for {place!r}: {error.reason}", code="invalid") from error


def _size(size: WindowSize) -> list[int]:
    if not (1 <= size.rows <= MAX_SIDE and 1 <= size.columns <= MAX_SIDE):
        message = f"a terminal has 1 to {MAX_SIDE} rows and columns, not {size.rows} and {size.columns}"
        raise CommandError(message, code="invalid")
    return [size.rows, size.columns]


def _command_result(answer: Mapping[str, Any], data: bytes) -> CommandResult:
    streams, start = [], 0
    for size, total, truncated in answer["out"]:
        streams.append((data[start : start + size], total, truncated))
        start += size
    stdout, stderr = streams[0], streams[1] if len(streams) > 1 else (b"", 0, False)
    return CommandResult(
        exit_code=answer.get("exit"),
        signal=answer.get("signal"),
        timed_out=bool(answer["timed_out"]),
        stdout=stdout[0],
        stderr=stderr[0],
        stdout_bytes=stdout[1],
        stderr_bytes=stderr[1],
        stdout_truncated=bool(stdout[2]),
        stderr_truncated=bool(stderr[2]),
        duration_s=float(answer["duration"]),
        spool_path=answer.get("spool"),
    )


def _process_status(process: Mapping[str, Any]) -> ProcessStatus:
    return ProcessStatus(
        process_id=process["id"],
        command=process["command"],
        cwd=process["cwd"],
        pid=process["pid"],
        started_at=process["started"],
        running=process["running"],
        exit_code=process.get("exit"),
        signal=process.get("signal"),
        output_bytes=process["bytes"],
        uptime_s=process["uptime"],
        left_killed=process["left"],
        pty=None if process["pty"] is None else WindowSize(*process["pty"]),
        spool_path=process["spool"],
    )
