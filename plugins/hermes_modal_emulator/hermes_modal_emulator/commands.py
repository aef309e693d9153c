"""A command of an emulated sandbox, which really runs."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from typing import Any

from hermes_modal_emulator.streams import CHUNK_BYTES, ByteLog

LINGER_S = 1.0
"""Seconds for which a command's streams stay open after its end, for the output of its background processes."""


class StdinClosed(Exception):
    """The command reads no more input."""


class EmulatedCommand:
    """A process with its standard streams, in the event loop. It is started once."""

    def __init__(self, tail: int | None = None) -> None:
        self.out, self.err = ByteLog(tail, self._resume), ByteLog(tail, self._resume)
        self.ended = asyncio.Event()
        self.returncode: int | None = None
        self.written = 0
        """Number of bytes that were written to standard input."""
        self.stdin_closed = False
        self.stdin_generation = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._logs: dict[int, ByteLog] = {}
        self._paused: set[int] = set()
        self._drained = asyncio.Event()
        self._input: int | None = None
        self._writing = asyncio.Lock()
        self._end: asyncio.Task[None] | None = None

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None = None,
        pty: Any = None,
        timeout_s: float | None = None,
    ) -> None:
        """Start the command.

        Args:
            pty: a `PTYInfo`; the command then has a terminal, and all of its output is standard output.
            timeout_s: seconds after which the command is killed.

        Raises:
            OSError: there is no such program or directory.
        """
        if pty is None:
            self._start_on_pipes(argv, dict(env), cwd)
        else:
            self._start_on_pty(argv, dict(env), cwd, pty)
        for descriptor in self._logs:
            os.set_blocking(descriptor, False)
            asyncio.get_running_loop().add_reader(descriptor, self._readable, descriptor)
        self._end = asyncio.create_task(self._until_end(timeout_s))

    def _start_on_pipes(self, argv: Sequence[str], env: dict[str, str], cwd: str | None) -> None:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            argv, env=env, cwd=cwd, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, bufsize=0
        )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._process = process
        self._input = os.dup(process.stdin.fileno())
        self._logs = {os.dup(process.stdout.fileno()): self.out, os.dup(process.stderr.fileno()): self.err}
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()
        os.set_blocking(self._input, False)

    def _start_on_pty(self, argv: Sequence[str], env: dict[str, str], cwd: str | None, info: Any) -> None:
        master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", info.winsz_rows or 24, info.winsz_cols or 80, 0, 0))
        env["TERM"] = info.env_term or "xterm-256color"
        try:
            self._process = subprocess.Popen(
                ["setsid", "--ctty", "--wait", *argv],
                env=env,
                cwd=cwd,
                stdin=slave,
                stdout=slave,
                stderr=slave,
                start_new_session=True,
            )
        except OSError:
            os.close(master)
            raise
        finally:
            os.close(slave)
        self._input = os.dup(master)
        os.set_blocking(self._input, False)
        self._logs = {master: self.out}
        self.err.close()

    # --- output

    def _readable(self, descriptor: int) -> None:
        log = self._logs[descriptor]
        try:
            data = os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:  # a PTY that nobody holds any more
            data = b""
        if not data:
            self._close_output(descriptor)
            return
        log.feed(data)
        if log.full:
            self._paused.add(descriptor)
            asyncio.get_running_loop().remove_reader(descriptor)

    def _resume(self) -> None:
        for descriptor in [each for each in self._paused if not self._logs[each].full]:
            self._paused.discard(descriptor)
            asyncio.get_running_loop().add_reader(descriptor, self._readable, descriptor)

    def _close_output(self, descriptor: int) -> None:
        log = self._logs.pop(descriptor)
        self._paused.discard(descriptor)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        log.close()
        if not self._logs:
            self._drained.set()

    # --- input

    async def write(self, offset: int, data: bytes, *, eof: bool) -> None:
        """Write to standard input. Bytes before `written` are skipped, because a request may be repeated.

        Args:
            offset: the position of `data` in the whole input.

        Raises:
            StdinClosed: the command reads no more.
        """
        async with self._writing:
            left = memoryview(data)[max(0, self.written - offset) :]
            if self.stdin_closed or self._input is None:
                if left:
                    raise StdinClosed("stdin is closed")
                return
            while left:
                try:
                    count = os.write(self._input, left[:CHUNK_BYTES])
                except BlockingIOError:
                    await self._writable()
                    continue
                except OSError as error:
                    self._close_input()
                    raise StdinClosed("the process has closed its stdin") from error
                self.written += count
                left = left[count:]
            if eof:
                # A terminal, which has no standard error, marks the end of its input by a character.
                if self.err.ended and self.out in self._logs.values():
                    os.write(self._input, b"\x04")
                self._close_input()

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        assert self._input is not None
        descriptor = self._input
        loop.add_writer(descriptor, ready.cancel)
        ended = loop.create_task(self.ended.wait())
        try:
            await asyncio.wait({ended, ready}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            loop.remove_writer(descriptor)
        if self.ended.is_set():
            self._close_input()
            raise StdinClosed("the process has ended")

    def _close_input(self) -> None:
        self.stdin_closed = True
        if self._input is not None:
            os.close(self._input)
            self._input = None

    # --- the end

    def kill(self) -> None:
        """Send SIGKILL to the process and its group."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _until_end(self, timeout_s: float | None) -> None:
        assert self._process is not None
        try:
            await asyncio.wait_for(wait_for_exit(self._process.pid), timeout_s)
        except TimeoutError:
            self.kill()
            await wait_for_exit(self._process.pid)
        self.returncode = self._process.wait()
        if not self._paused:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), LINGER_S)
        else:  # a slow reader gets all of the output
            await self._drained.wait()
        for descriptor in [*self._logs]:
            self._close_output(descriptor)
        self.ended.set()
        if not self._writing.locked():
            self._close_input()

    async def aclose(self) -> None:
        """Kill the command, and close its streams, also if their output was not read."""
        self.kill()
        if self._end is None or self._process is None:
            self.out.close()
            self.err.close()
            return
        await wait_for_exit(self._process.pid)
        self._end.cancel()
        await asyncio.wait([self._end])
        if self.returncode is None:
            self.returncode = self._process.wait()
        for descriptor in [*self._logs]:
            self._close_output(descriptor)
        self.ended.set()
        self._close_input()

    def exit_status(self) -> dict[str, int]:
        """Return the exit status or the signal, in the fields of the router's answers."""
        assert self.returncode is not None
        return {"signal": -self.returncode} if self.returncode < 0 else {"code": self.returncode}


async def wait_for_exit(pid: int) -> None:
    """Wait until a child process has ended, without reaping it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
