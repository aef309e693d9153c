"""The commands of one slot, spoken to the guest: `SlotCommands` as frames."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hermes_core.errors import ChannelLost, CommandError, HermesError, InfraError, PolicyError, SlotLost
from hermes_core.sandbox.commands import MAX_FILE_BYTES, OUTPUT_LIMIT
from hermes_core.sandbox.guest.wire import CHUNK, WINDOW
from hermes_core.sandbox.output import HeadTail
from hermes_core.sandbox.results import CommandResult, FileContent, FileStat, LogChunk, ProcessStatus

if TYPE_CHECKING:
    from hermes_core.sandbox.client import GuestClient

Post = Callable[[Mapping[str, Any], bytes], None]
Answer = tuple[dict[str, Any], bytes]
CAPTURE_LIMIT = 2 << 20
"""The largest `output_limit` that the guest keeps by itself: its results travel in one frame, and neighbours wait for
that. Above it standard output is streamed, and head and tail are kept here."""
GRACE_S = 2.0
"""Seconds between TERM and KILL at a time limit."""


def error_from_guest(error: Mapping[str, Any], sandbox_id: str, slot: int | None) -> HermesError:
    """The typed error for what the guest says."""
    message, code = str(error.get("message")), str(error.get("code"))
    slot_id = None if slot is None else f"slot_{slot}"
    match error.get("kind"):
        case "command":
            return CommandError(message, code=code, slot_id=slot_id)
        case "policy":
            return PolicyError(message, hint="ask for a weaker level, or use another backend", sandbox_id=sandbox_id)
        case _ if code == "unclean":
            return SlotLost(message, hint="it is quarantined with its sandbox", sandbox_id=sandbox_id, slot_id=slot_id)
        case _:
            return InfraError(message, sandbox_id=sandbox_id, slot_id=slot_id)


class OutputStream:
    """The receiving end of a stream: pieces in order, none twice, the sender held to a window."""

    def __init__(self) -> None:
        self.received = 0
        self._taken = 0
        self._confirmed = 0
        self._pieces: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self._identity = ""
        self._post: Post | None = None

    def attach(self, identity: str, post: Post) -> None:
        """Bind it to its request."""
        self._identity, self._post = identity, post

    def feed(self, offset: int, data: bytes) -> None:
        """A piece that starts at `offset`; what is known already is left out.

        Raises:
            ChannelLost: bytes are missing before this piece, so the channel can't be trusted.
        """
        if offset > self.received:
            raise ChannelLost(f"a stream jumped from byte {self.received} to {offset}")
        fresh = data[self.received - offset :]
        if fresh:
            self.received += len(fresh)
            self._pieces.append(fresh)
            self._changed.set()

    def end(self) -> None:
        """No more pieces will come."""
        self._ended = True
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                self._taken += len(piece)
                if self._taken - self._confirmed >= WINDOW // 2 and self._post is not None and not self._ended:
                    self._confirmed = self._taken
                    self._post({"op": "credit", "id": self._identity, "off": self._taken}, b"")
                yield piece
            if self._ended:
                return
            self._changed.clear()
            await self._changed.wait()


class InputPump:
    """The sending end of a command's input: never more than a window ahead of what the command has taken."""

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source = source
        self._kept = bytearray()
        self._base = 0
        self._sent = 0
        self._finished = False
        self._room = asyncio.Event()
        self._identity = ""
        self._post: Post | None = None

    def attach(self, identity: str, post: Post) -> None:
        """Bind it to its request."""
        self._identity, self._post = identity, post

    def taken(self, offset: int, *, resume: bool) -> None:
        """The command has everything before `offset`; on a new channel the rest is sent again."""
        del self._kept[: max(0, offset - self._base)]
        self._base = max(self._base, offset)
        if resume:
            self._sent = self._base
            self._send_kept()
        self._room.set()

    async def run(self) -> None:
        """Send the source to its end."""
        async for data in self._source:
            for start in range(0, len(data), CHUNK):
                while self._sent - self._base >= WINDOW:
                    self._room.clear()
                    await self._room.wait()
                self._kept += data[start : start + CHUNK]
                self._send_kept()
        self._finished = True
        self._send_kept()

    def _send_kept(self) -> None:
        assert self._post is not None
        data = bytes(self._kept[self._sent - self._base :])
        self._post({"op": "in", "id": self._identity, "off": self._sent, "eof": self._finished}, data)
        self._sent += len(data)


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


class RemoteCommands:
    """`SlotCommands` over a guest. Documented there."""

    def __init__(self, client: GuestClient, index: int, workspace_dir: str) -> None:
        self._client = client
        self._index = index
        self._workspace_dir = workspace_dir

    @property
    def workspace_dir(self) -> str:
        """The slot's workspace, as seen from inside the sandbox."""
        return self._workspace_dir

    # --- commands ---------------------------------------------------------------------------------------------------

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        output_limit: int = OUTPUT_LIMIT,
        merge_stderr: bool = False,
        spool: bool = False,
    ) -> CommandResult:
        """Run a command to its end."""
        if output_limit <= 0:
            raise CommandError(f"output_limit must be above 0, not {output_limit}", code="invalid")
        header = {"op": "exec", "limit": output_limit, "merge": merge_stderr, "grace": GRACE_S, "spool": spool}
        header |= _launch(command, cwd, env)
        if timeout_s is not None:
            header["timeout"] = timeout_s
        script = _script(command)
        try:
            if output_limit > CAPTURE_LIMIT:
                return await self._run_streamed(header, script, stdin, output_limit)
            answer, data = await self._exec(header | {"mode": "capture"}, script, stdin)
        except CommandError as error:
            if error.code != "killed":
                raise
            return CommandResult(exit_code=None, signal=9, stderr=error.message.encode())
        return _command_result(answer, data, output_limit)

    async def _run_streamed(
        self, header: dict[str, Any], script: bytes, stdin: bytes | None, output_limit: int
    ) -> CommandResult:
        """Standard output under the window, so that a result of many megabytes never delays a neighbour."""
        stream, kept = OutputStream(), HeadTail(output_limit)
        async with _background(self._exec(header | {"mode": "stream"}, script, stdin, stream)) as call:
            async for piece in stream:
                kept.feed(piece)
            answer, data = await call
        result = _command_result(answer, data, bool(header["merge"]))
        return replace(result, stdout=kept.value(), truncated=kept.truncated or result.stderr_bytes > len(data))

    async def _exec(
        self,
        header: dict[str, Any],
        script: bytes,
        stdin: bytes | AsyncIterator[bytes] | None,
        output: OutputStream | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """Run with input of any size: small ones travel with the request."""
        header |= {"slot": self._index, "script": len(script)}
        if stdin is None:
            return await self._client.call(header, script, output=output)
        header["input"] = True
        if isinstance(stdin, bytes) and len(stdin) <= CHUNK:
            header["eof"] = True
            return await self._client.call(header, script + stdin, output=output)
        pump = InputPump(_once(stdin) if isinstance(stdin, bytes) else stdin)
        return await self._with_pump(header, script, pump, output)

    async def _with_pump(
        self, header: dict[str, Any], script: bytes, pump: InputPump, output: OutputStream | None
    ) -> tuple[dict[str, Any], bytes]:
        """The command may end without reading its input: the pump is then simply stopped."""
        call = asyncio.ensure_future(self._client.call(header, script, input=pump, output=output))
        await asyncio.sleep(0)
        feeding = asyncio.ensure_future(pump.run())
        try:
            await asyncio.wait({call, feeding}, return_when=asyncio.FIRST_EXCEPTION)
            if feeding.done() and not feeding.cancelled() and feeding.exception() is not None:
                feeding.result()
            return await call
        finally:
            for task in (call, feeding):
                task.cancel()
            await asyncio.gather(call, feeding, return_exceptions=True)

    # --- background processes ---------------------------------------------------------------------------------------

    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        buffer_bytes: int = 200_000,
    ) -> ProcessStatus:
        """Start a background process."""
        label = command if isinstance(command, str) else " ".join(command)
        script = _script(command)
        header = {
            "op": "start",
            "slot": self._index,
            "limit": buffer_bytes,
            "script": len(script),
            "label": label[:4096],
        }
        answer, _ = await self._client.call(header | _launch(command, cwd, env), script)
        return _process_status(answer["process"])

    async def processes(self) -> Sequence[ProcessStatus]:
        """The slot's background processes, oldest first."""
        answer, _ = await self._client.call({"op": "processes", "slot": self._index})
        return [_process_status(process) for process in answer["processes"]]

    async def poll(self, process_id: str) -> ProcessStatus:
        """One background process."""
        return await self._about("poll", process_id)

    async def log(self, process_id: str, *, offset: int = 0, limit: int = 200_000) -> LogChunk:
        """Its output from a byte offset on."""
        header = {
            "op": "log",
            "slot": self._index,
            "process": process_id,
            "offset": max(0, offset),
            "limit": max(0, limit),
        }
        answer, data = await self._client.call(header)
        return LogChunk(data=data, offset=answer["offset"], total=answer["total"], dropped=answer["dropped"])

    async def wait(self, process_id: str, *, timeout_s: float | None = None) -> ProcessStatus:
        """Wait for its end, or until the time limit."""
        return await self._about("wait", process_id, timeout=1e9 if timeout_s is None else timeout_s)

    async def write(self, process_id: str, data: bytes, *, eof: bool = False) -> int:
        """Write to its standard input; the number of bytes taken."""
        header = {"op": "write", "slot": self._index, "process": process_id, "eof": eof}
        answer, _ = await self._client.call(header, data[:WINDOW])
        return int(answer["taken"])

    async def kill(self, process_id: str, *, grace_s: float = 2.0) -> ProcessStatus:
        """TERM, then KILL after the grace period, to it and all that it started."""
        return await self._about("kill", process_id, grace=grace_s)

    async def _about(self, op: str, process_id: str, **arguments: Any) -> ProcessStatus:
        header = {"op": op, "slot": self._index, "process": process_id, **arguments}
        answer, _ = await self._client.call(header)
        return _process_status(answer["process"])

    # --- files ------------------------------------------------------------------------------------------------------

    async def read_file(self, path: str, *, offset: int = 0, limit: int = MAX_FILE_BYTES) -> FileContent:
        """Up to `limit` bytes of a regular file from `offset`."""
        if offset < 0 or limit < 0:
            raise CommandError("offset and limit must not be negative", code="invalid")
        data, result = await self._stream("read", {"path": _path(path), "offset": offset, "limit": limit})
        return FileContent(data=data, offset=offset, size=int(result["size"]))

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None, append: bool = False) -> None:
        """Replace or extend a file; all of it or an error."""
        await self._builtin("write", {"path": _path(path), "size": len(data), "mode": mode, "append": append}, data)

    async def stat(self, path: str) -> FileStat:
        """What the path is."""
        result, _ = await self._builtin("stat", {"path": _path(path)})
        return FileStat(**result["stat"])

    async def list_dir(
        self, path: str = ".", *, recursive: bool = False, max_entries: int = 10_000
    ) -> Sequence[FileStat]:
        """The entries of a directory, sorted by path."""
        arguments = {"path": _path(path), "recursive": recursive, "max_entries": max_entries}
        data, _ = await self._stream("list", arguments)
        return [FileStat(**entry) for entry in json.loads(data)]

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or a directory tree."""
        await self._builtin("remove", {"path": _path(path), "recursive": recursive})

    async def tar_in(self, path: str, data: bytes | AsyncIterator[bytes]) -> None:
        """Unpack a tar stream below a directory."""
        await self._builtin("tar_in", {"path": _path(path)}, data)

    async def tar_out(self, path: str = ".", *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """A plain tar of a directory's contents."""
        data, _ = await self._stream("tar_out", {"path": _path(path), "max_bytes": max_bytes})
        return data

    async def _builtin(
        self, name: str, arguments: Mapping[str, Any], stdin: bytes | AsyncIterator[bytes] | None = None
    ) -> tuple[dict[str, Any], bytes]:
        header = {"op": "exec", "mode": "capture", "limit": 1 << 20, "builtin": name, "args": arguments}
        answer, data = await self._exec(header, b"", stdin)
        stdout, stderr = _captures(answer, data)
        return self._outcome(name, answer, stderr), stdout

    async def _stream(self, name: str, arguments: Mapping[str, Any]) -> tuple[bytes, dict[str, Any]]:
        """A file operation whose data flows under the window, so that a large one never delays a neighbour."""
        stream = OutputStream()
        header = {"op": "exec", "mode": "stream", "slot": self._index, "builtin": name, "args": arguments}
        async with _background(self._client.call(header, output=stream)) as call:
            pieces = [piece async for piece in stream]
            answer, data = await call
        return b"".join(pieces), self._outcome(name, answer, data)

    def _outcome(self, name: str, answer: Mapping[str, Any], stderr: bytes) -> dict[str, Any]:
        try:
            result: dict[str, Any] = json.loads(stderr)
        except ValueError as error:
            text = stderr.decode("utf-8", "replace")[-500:] or f"ended by {answer.get('signal', answer.get('exit'))}"
            raise CommandError(f"{name} failed: {text}", slot_id=f"slot_{self._index}") from error
        if not result.get("ok"):
            raise CommandError(f"{name}: {result['message']}", code=str(result["code"]), slot_id=f"slot_{self._index}")
        return result


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, Answer]) -> AsyncIterator[asyncio.Task[Answer]]:
    """The request runs while its stream is read; it ends, one way or the other, with the block."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _path(path: str) -> str:
    if "\0" in path or not path:
        raise CommandError(f"not a path: {path!r}", code="invalid", hint="a path has at least one character and no NUL")
    return path


def _script(command: str | Sequence[str]) -> bytes:
    if isinstance(command, str):
        if "\0" in command:
            raise CommandError(
                "the command contains a NUL byte", code="invalid", hint="write binary data to a file first"
            )
        return command.encode("utf-8", "surrogateescape")
    return b""


def _launch(command: str | Sequence[str], cwd: str | None, env: Mapping[str, str] | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if not isinstance(command, str):
        fields["argv"] = list(command)
        if not fields["argv"]:
            raise CommandError("the command is empty", code="invalid")
    if cwd is not None:
        fields["cwd"] = cwd
    if env:
        fields["env"] = dict(env)
    words = [*fields.get("argv", ()), cwd or "", *(env or {}).keys(), *(env or {}).values()]
    if any("\0" in word for word in words):
        raise CommandError("an argument, the directory or a variable contains a NUL byte", code="invalid")
    return fields


def _captures(answer: Mapping[str, Any], data: bytes) -> tuple[bytes, bytes]:
    """The captured streams, with a notice where the middle was left out."""
    streams = []
    start = 0
    for kept, _ in answer["out"]:
        streams.append(data[start : start + kept])
        start += kept
    return streams[0], (streams[1] if len(streams) > 1 else b"")


def _command_result(answer: Mapping[str, Any], data: bytes, limit: int) -> CommandResult:
    stdout, stderr = _captures(answer, data)
    sizes = [total for _, total in answer["out"]]
    return CommandResult(
        exit_code=answer.get("exit"),
        signal=answer.get("signal"),
        timed_out=bool(answer["timed_out"]),
        stdout=stdout,
        stderr=stderr,
        stdout_bytes=sizes[0],
        stderr_bytes=sizes[1] if len(sizes) > 1 else 0,
        truncated=any(total > limit for total in sizes),
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
    )
