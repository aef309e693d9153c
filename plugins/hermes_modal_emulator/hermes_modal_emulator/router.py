"""The command router: commands in a sandbox, their streams, and snapshots of the sandbox's files."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from grpclib import GRPCError, Status
from modal_proto import task_command_router_pb2 as sr

from hermes_modal_emulator import fs_tool
from hermes_modal_emulator.commands import EmulatedCommand, StdinClosed
from hermes_modal_emulator.machines import FS_TOOL
from hermes_modal_emulator.sandboxes import EmulatedSandbox
from hermes_modal_emulator.serving import Service
from hermes_modal_emulator.streams import ByteLog, OffsetTooOld

_PYTHON = os.path.realpath(sys.executable)
_STDOUT = sr.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
_FS_TOOL_SOURCE = Path(fs_tool.__file__).read_text(encoding="utf-8")


class CommandRouter(Service):
    """`modal.task_command_router.TaskCommandRouter`."""

    descriptor = sr.DESCRIPTOR.services_by_name["TaskCommandRouter"]

    def check(self, method: str, metadata: dict[str, str]) -> None:
        """Check the router's own token."""
        self.cloud.check_token(metadata.get("authorization", "").removeprefix("Bearer "), router=True)

    def _running(self, task_id: str) -> EmulatedSandbox:
        sandbox = self.cloud.task(task_id)
        if sandbox.result is not None:
            raise GRPCError(Status.NOT_FOUND, f"Task {task_id} has finished")
        sandbox.touch()
        return sandbox

    def _exec(self, request: Any) -> EmulatedCommand:
        """Return a command, also of a sandbox that has ended."""
        sandbox = self.cloud.task(request.task_id)
        if request.exec_id not in sandbox.execs:
            raise GRPCError(Status.NOT_FOUND, f"exec {request.exec_id} not found")
        sandbox.touch()
        return sandbox.execs[request.exec_id]

    async def TaskExecStart(self, request: Any, metadata: Any) -> Any:
        sandbox = self._running(request.task_id)
        if request.exec_id in sandbox.execs:  # the request is repeated
            return sr.TaskExecStartResponse()
        argv = list(request.command_args)
        if argv and argv[0] == FS_TOOL:
            argv = [_PYTHON, "-SEc", _FS_TOOL_SOURCE, *argv[1:]]
        command = EmulatedCommand()
        try:
            sandbox.run(
                command,
                argv,
                request.workdir or sandbox.workdir,
                {**self.cloud.values(request.secret_ids, request.secret_sources), **request.env},
                pty=request.pty_info if request.HasField("pty_info") and request.pty_info.enabled else None,
                timeout_s=request.timeout_secs if request.HasField("timeout_secs") else None,
            )
        except OSError as error:
            raise GRPCError(Status.INVALID_ARGUMENT, f"failed to exec {argv[0]!r}: {error.strerror}") from error
        for log, config in ((command.out, request.stdout_config), (command.err, request.stderr_config)):
            if config == sr.TASK_EXEC_STDOUT_CONFIG_DEVNULL:  # the same number for both streams
                log.discard()
        sandbox.execs[request.exec_id] = command
        return sr.TaskExecStartResponse()

    async def TaskExecStdioRead(self, request: Any, sink: Any) -> None:
        command = self._exec(request)
        log = command.out if request.file_descriptor == _STDOUT else command.err
        await _send_all(log, request.offset, lambda chunk, _: sr.TaskExecStdioReadResponse(data=chunk), sink)

    async def TaskExecPoll(self, request: Any, metadata: Any) -> Any:
        command = self._exec(request)
        return sr.TaskExecPollResponse(**(command.exit_status() if command.ended.is_set() else {}))

    async def TaskExecWait(self, request: Any, metadata: Any) -> Any:
        command = self._exec(request)
        await command.ended.wait()
        return sr.TaskExecWaitResponse(**command.exit_status())

    async def TaskExecStdinWrite(self, request: Any, metadata: Any) -> Any:
        await _write(self._exec(request), request.offset, request.data, eof=request.eof)
        return sr.TaskExecStdinWriteResponse()

    async def TaskExecStdinStatus(self, request: Any, metadata: Any) -> Any:
        command = self._exec(request)
        command.stdin_generation += 1  # ends a stream that is still under way
        return sr.TaskExecStdinStatusResponse(num_bytes_written=command.written, closed=command.stdin_closed)

    async def TaskExecStdinWriteStream(self, stream: Any) -> None:
        first = await stream.recv_message()
        if first is None or first.WhichOneof("payload") != "start":
            raise GRPCError(Status.INVALID_ARGUMENT, "the first message must be start")
        command = self._exec(first.start)
        generation, offset = command.stdin_generation, first.start.offset
        while (message := await stream.recv_message()) is not None:
            if generation != command.stdin_generation:
                raise GRPCError(Status.ABORTED, "another stream writes to stdin")
            if message.WhichOneof("payload") == "end":
                await _write(command, offset, b"", eof=True)
                break
            await _write(command, offset, message.data, eof=False)
            offset += len(message.data)
        await stream.send_message(sr.TaskExecStdinWriteStreamResponse())

    async def SandboxStdioReadV2(self, request: Any, sink: Any) -> None:
        main = self.cloud.task(request.task_id).main
        log = main.out if request.file_descriptor == sr.SANDBOX_STDIO_FILE_DESCRIPTOR_STDOUT else main.err

        def answer(chunk: bytes, offset: int) -> Any:
            return sr.SandboxStdioReadV2Response(data=chunk, starting_offset=offset)

        await _send_all(log, request.offset, answer, sink)

    async def SandboxStdinWriteV2(self, request: Any, metadata: Any) -> Any:
        await _write(self._running(request.task_id).main, request.offset, request.data, eof=request.eof)
        return sr.SandboxStdinWriteV2Response()

    async def TaskSnapshotFilesystem(self, request: Any, metadata: Any) -> Any:
        image_id = await self.cloud.snapshot(self._running(request.task_id))
        return sr.TaskSnapshotFilesystemResponse(image_id=image_id)

    async def TaskSetNetworkAccess(self, request: Any, metadata: Any) -> Any:
        self._running(request.task_id).definition.network_access.CopyFrom(request.network_access)
        return sr.TaskSetNetworkAccessResponse()

    async def TaskReloadVolumes(self, request: Any, metadata: Any) -> Any:
        self._running(request.task_id)
        return sr.TaskReloadVolumesResponse()

    async def SandboxWaitUntilReady(self, request: Any, metadata: Any) -> Any:
        self._running(request.task_id)
        return sr.SandboxWaitUntilReadyTcrResponse(ready_at=time.time())


async def _write(command: EmulatedCommand, offset: int, data: bytes, *, eof: bool) -> None:
    try:
        await command.write(offset, data, eof=eof)
    except StdinClosed as error:
        raise GRPCError(Status.FAILED_PRECONDITION, str(error)) from error


async def _send_all(log: ByteLog, offset: int, answer: Any, sink: Any) -> None:
    try:
        async for at, chunk in log.read_from(offset):
            await sink.send(answer(chunk, at), len(chunk))
    except OffsetTooOld as error:
        raise GRPCError(Status.DATA_LOSS, str(error)) from error
