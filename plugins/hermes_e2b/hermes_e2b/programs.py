"""Programs in a sandbox, through the process service of E2B's daemon `envd`: bytes in, bytes out, an exit status.

The SDK's own `commands.run` starts a login shell and decodes the output, so that it can't carry bytes.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from connectrpc.errors import ConnectError
from e2b.envd.process import process_pb
from e2b.envd.process.process_connect import ProcessClient
from e2b.envd.rpc import handle_rpc_exception
from protobuf import Oneof

from hermes_core import complete

START_LIMIT_S = 30.0
"""Time limit in seconds until a program has begun."""
CLOSE_LIMIT_MS = 5_000
"""Time limit in milliseconds of the calls that end a stream."""
CHUNK_BYTES = 1 << 20
"""Maximum number of bytes in one call that writes input."""
_HEADERS = {
    "Authorization": "Basic cm9vdDo=",  # the user `root`, without a password
    "Keepalive-Ping-Interval": "50",
}
_SIGNALS = {(signal.strsignal(number) or "").lower(): number for number in signal.valid_signals()}
_SIGNALLED = 128

Events = AsyncGenerator[process_pb.StartResponse, None]


class Program:
    """A running program and the stream of its events. Make it by `start`."""

    def __init__(self, processes: ProcessClient, tag: str, events: Events) -> None:
        self._processes, self._events = processes, events
        self._selector = _select(tag)
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._status.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.on_stderr: Callable[[bytes], None] = lambda data: None

    @classmethod
    async def start(
        cls,
        processes: ProcessClient,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        has_input: bool = True,
        tag: str | None = None,
    ) -> Program:
        """Start `argv` as root in the directory `/`. If this fails or is cancelled, the program is killed.

        Args:
            tag: a name that no other running program has, by which `is_running` finds it.

        Raises:
            Exception: one of the SDK's errors.
        """
        tag = tag or secrets.token_hex(12)
        process = process_pb.ProcessConfig(cmd=argv[0], args=[*argv[1:]], envs=dict(env or {}), cwd="/")
        request = process_pb.StartRequest(process=process, stdin=has_input, tag=tag)
        events: Any = processes.start(request, headers=_HEADERS)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                with sdk_errors():
                    await anext(events)  # says that it has started
        except BaseException:
            await complete(_abandon(processes, tag, events))
            raise
        return cls(processes, tag, events)

    async def output(self) -> AsyncGenerator[bytes, None]:
        """Yield standard output. At its end, `wait` has the exit status. Raise if the stream breaks before that."""
        try:
            with sdk_errors():
                async for message in self._events:
                    event: Any = None if message.event is None else message.event.event
                    match event:
                        case Oneof(field="data", value=data):
                            match data.output:
                                case Oneof(field="stdout", value=piece) if piece:
                                    yield piece
                                case Oneof(field="stderr", value=piece):
                                    self.on_stderr(piece)
                        case Oneof(field="end", value=end):
                            self._status.set_result(_exit_status(end))
            if not self._status.done():
                raise ConnectionError("the stream ended, and no exit status came")
        except Exception as error:
            if not self._status.done():
                self._status.set_exception(error)
            raise
        finally:
            await self._events.aclose()

    async def write(self, data: bytes) -> None:
        """Write to standard input. Return when the program's pipe has taken the data."""
        for at in range(0, len(data), CHUNK_BYTES):
            piece: Any = Oneof("stdin", bytes(data[at : at + CHUNK_BYTES]))
            request = process_pb.SendInputRequest(process=self._selector, input=process_pb.ProcessInput(input=piece))
            with sdk_errors():
                await self._processes.send_input(request)

    async def wait(self) -> int:
        """Return the exit status, which comes after the output. A program that signal N ended has status 128 + N."""
        return await asyncio.shield(self._status)

    async def aclose(self) -> None:
        """Close the program's standard input, and stop listening. The program and its children may live on."""
        with sdk_errors():
            await self._events.aclose()
            if not self._status.done() or self._status.exception() is not None:
                request = process_pb.CloseStdinRequest(process=self._selector)
                await self._processes.close_stdin(request, timeout_ms=CLOSE_LIMIT_MS)


async def is_running(processes: ProcessClient, tag: str) -> bool:
    """Return whether a program with this tag runs."""
    with sdk_errors():
        listed = await processes.list(process_pb.ListRequest(), timeout_ms=int(START_LIMIT_S * 1000))
    return any(process.has_field("tag") and process.tag == tag for process in listed.processes)


@contextmanager
def sdk_errors() -> Iterator[None]:
    """Raise the SDK's errors for those of its RPC library, which also turns a cancellation into an error."""
    try:
        yield
    except ConnectError as error:
        plain = handle_rpc_exception(error)
        if plain is error:
            raise
        raise plain from (None if isinstance(plain, asyncio.CancelledError) else error)


async def _abandon(processes: ProcessClient, tag: str, events: Events) -> None:
    """Kill a program whose start failed, if it runs."""
    with suppress(Exception):  # it never began, or nothing more can be done about it
        await events.aclose()
        request = process_pb.SendSignalRequest(process=_select(tag), signal=process_pb.Signal.SIGKILL)
        await processes.send_signal(request, timeout_ms=CLOSE_LIMIT_MS)


def _select(tag: str) -> process_pb.ProcessSelector:
    selector: Any = Oneof("tag", tag)
    return process_pb.ProcessSelector(selector=selector)


def _exit_status(end: process_pb.ProcessEvent.EndEvent) -> int:
    if end.exited:
        return int(end.exit_code)
    name = end.status.removeprefix("signal: ").removesuffix(" (core dumped)")
    return _SIGNALLED + _SIGNALS.get(name, signal.SIGKILL)
