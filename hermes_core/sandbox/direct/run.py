"""One command in the direct mode: started by `sh`, with separate streams and a time limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from hermes_core.aio import together
from hermes_core.errors import ChannelLost, CommandError, InfraError
from hermes_core.sandbox.commands import Command, CommandResult, Sink
from hermes_core.sandbox.contract import Channel
from hermes_core.sandbox.direct import sh
from hermes_core.sandbox.linux.output import HeadTail

GRACE_S = 2.0
"""Seconds between TERM and KILL at a time limit."""

LOOKS = 20
"""The number of looks for remaining processes during the grace period."""


def exit_or_signal(status: int) -> tuple[int | None, int | None]:
    """Return a shell's status as (exit code, None) or (None, signal).

    sh reports signal n as 128 + n, so exit codes from 129 to 192, which are rare, are taken for signals.
    """
    return (None, status - 128) if 128 < status <= 192 else (status, None)


async def _reason(channel: Channel) -> str | None:
    """Return the reason why a script of ours ended early; None if it was killed."""
    try:
        status = await channel.wait()
    except ChannelLost:  # a signal ended it, which happens when the sandbox ends
        return None
    return (channel.stderr_tail.strip()[-500:] or f"status {status}") if 0 < status < 128 else None


class _PassedOn:
    """Passes a stream to a sink and counts its bytes, with the methods of `HeadTail` that are used here."""

    truncated = False

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.total = 0

    async def feed(self, data: bytes) -> None:
        self.total += len(data)
        await self._sink(data)

    def value(self) -> bytes:
        return b""


class RunningCommand:
    """One command in progress. Each of its streams has a channel, because sh can't keep them separate otherwise.

    Args:
        mark: the slot's mark, see `DirectSlot`. The number of the command is appended.
        scratch: the directory for our own files.
    """

    def __init__(
        self, shell: sh.Shell, argv: list[str], cwd: str, env: dict[str, str], *, mark: str, scratch: str
    ) -> None:
        self._shell = shell
        number = shell.next_number()
        self.mark = f"{mark}{number};"
        self.cwd = cwd
        self._argv = argv
        self._env = {**env, "HERMES_DIRECT_HELPER": self.mark}
        self._fifo = f"{scratch}/run/{number}"
        self._token = sh.new_token()
        self._timed_out = False

    async def result(self, command: Command) -> CommandResult:
        """Run the command and wait for its end.

        Args:
            command: only its input, sink, output limit and time limit are used.

        Raises:
            CommandError: the command could not be started.
            InfraError: the sandbox can't be reached.
        """
        began = time.monotonic()
        err = HeadTail(command.output_limit)
        out = HeadTail(command.output_limit) if command.stdout is None else _PassedOn(command.stdout)
        stdin = b"" if command.stdin is None else command.stdin
        try:
            outcome = await self._streams(stdin, command.timeout_s, out, None if command.merge_stderr else err)
        except BaseException:
            self._shell.work.spawn(self._kill_all(), "kill a command that was given up")
            raise
        exit_code, signal = exit_or_signal(int(outcome.rest))
        if signal in (9, 15) and not self._timed_out:
            await self._shell.confirm_alive()
        return CommandResult(
            exit_code=exit_code,
            signal=signal,
            timed_out=self._timed_out,
            stdout=out.value(),
            stderr=err.value(),
            stdout_bytes=out.total,
            stderr_bytes=err.total,
            stdout_truncated=out.truncated,
            stderr_truncated=err.truncated,
            duration_s=time.monotonic() - began,
        )

    async def _streams(
        self,
        stdin: bytes | AsyncIterator[bytes],
        timeout_s: float | None,
        out: HeadTail | _PassedOn,
        err: HeadTail | None,
    ) -> sh.ExitLine:
        async with together() as group:
            reading = None if err is None else group.create_task(self._stderr(err))
            feeding = None if isinstance(stdin, bytes) else group.create_task(self._stdin(stdin))
            clock = None if timeout_s is None else group.create_task(self._clock(timeout_s))
            outcome = await group.create_task(self._stdout(stdin, out, err is None))
            if feeding is not None:
                feeding.cancel()
            if reading is not None:
                await asyncio.wait([reading])
            if clock is not None and not self._timed_out:
                clock.cancel()
        return outcome

    async def open_background(self) -> tuple[Channel, str, bytes]:
        """Start the command with both output streams merged, and an input that stays open.

        Returns:
            The channel, the token at the end of the output, and the output so far.

        Raises:
            CommandError: the command could not be started.
            InfraError: the sandbox can't be reached.
        """
        channel = None
        try:
            channel = await self._open_stdout("-", merge=True)
            return channel, self._token, await self._await_start(channel)
        except BaseException as error:
            self._shell.work.spawn(self._kill_all(), "kill a command that was given up")
            if channel is not None:
                await channel.aclose()
            if isinstance(error, ChannelLost):
                await self._shell.check_alive(error)
            raise

    async def _await_start(self, channel: Channel) -> bytes:
        """Wait until the command runs. Return its output so far.

        Raises:
            CommandError: the command could not be started, so nobody will ever write to its standard error.
        """
        try:
            return await sh.await_start(channel, self._token, cwd=self.cwd, program=self._argv[0])
        except sh.Ended as error:
            reason = await _reason(channel)
            if reason is None:
                await self._shell.confirm_alive(error)
                raise CommandError("the command was killed before it had begun", code="killed") from error
            raise CommandError(f"the command could not be started: {reason}", code="spawn") from error

    async def _open_stdout(self, stdin_size: str, *, merge: bool) -> Channel:
        """Start the command, and return its channel.

        Args:
            stdin_size: the number of bytes of input that follow; `-` if it is unknown, `fed` if `FEED` brings it.
        """
        args = [self.cwd, stdin_size, "1" if merge else "", self._fifo, self.mark, self._shell.session, *self._argv]
        channel = await self._shell.open(sh.COMMAND, args, self._env)
        await sh.send(channel, f"{self._token}\n".encode())
        return channel

    async def _stdout(self, stdin: bytes | AsyncIterator[bytes], out: HeadTail | _PassedOn, merge: bool) -> sh.ExitLine:
        data = stdin if isinstance(stdin, bytes) else None
        channel = await self._open_stdout("fed" if data is None else str(len(data)), merge=merge)
        try:
            await sh.send(channel, data or b"")
            return await sh.until_token(channel, self._token, out.feed, await self._await_start(channel))
        except sh.Ended:  # the command has killed its shell, which is no failure of the sandbox
            return sh.ExitLine("exit", str(128 + 9))
        except ChannelLost as error:
            await self._shell.check_alive(error)
            raise
        finally:
            await channel.aclose()

    async def _stdin(self, pieces: AsyncIterator[bytes]) -> None:
        """Send the input. Each piece is sent when the last one was taken, until the input or the command ends."""
        channel = await self._shell.open(sh.FEED, [f"{self._fifo}.in"], self._env)
        try:
            async for piece in pieces:
                for start in range(0, len(piece), sh.READ_SIZE):
                    part = piece[start : start + sh.READ_SIZE]
                    await sh.send(channel, b"%d\n" % len(part) + part)
                    if not await channel.read(1):
                        return
            await sh.send(channel, b"0\n")
            await channel.read(1)
        except ChannelLost as error:
            await self._shell.check_alive(error)
            raise
        finally:
            await channel.aclose()

    async def _stderr(self, err: HeadTail) -> None:
        channel = await self._shell.open(sh.STDERR, [self._fifo], self._env)
        try:
            await sh.until_token(channel, self._token, err.feed)
        except sh.Ended:
            pass
        finally:
            await channel.aclose()

    async def _clock(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        self._timed_out = True
        mark = f"HERMES_DIRECT={self.mark}"
        await self._shell.kill(mark, "TERM", rounds=1)
        for _ in range(LOOKS):
            if not await self._shell.is_there(mark):
                return
            await asyncio.sleep(GRACE_S / LOOKS)
        await self._shell.kill(mark, "KILL")

    async def _kill_all(self) -> None:
        try:
            await self._shell.kill(f"={self.mark}", "KILL")
        except InfraError:
            return  # the slot's release kills them again, or reports the error
