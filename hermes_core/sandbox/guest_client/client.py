"""The driver's connection to a guest: one channel at a time, and many requests, which outlive lost channels."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from hermes_core.errors import ChannelLost, CommandError, HermesError, InfraError, PolicyError, SandboxLost
from hermes_core.sandbox.commands import PREPARE, Call, SlotCommands, call_directly
from hermes_core.sandbox.contract import Channel, Isolation, Sandbox, SandboxStatus
from hermes_core.sandbox.guest import wire
from hermes_core.sandbox.guest_client.commands import RemoteCommands
from hermes_core.sandbox.guest_client.connection import (
    GuestConnection,
    GuestLife,
    GuestSettings,
    error_from_guest,
    greet,
)
from hermes_core.sandbox.guest_client.streams import InputStream, OutputStream

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0
"""How long the guest may take to kill all processes and remove all files when the sandbox shall end. A provider may be
unable to remove files that the guest leaves."""
FIRST_ATTEMPTS = 3
"""Attempts to reach a guest that has never answered. After these, the reason is not temporary."""
_ACK_AT_ONCE = 16 << 10
"""An answer of more bytes is confirmed at once, because the guest keeps it in memory until then."""
_ACK_BATCH = 64


@dataclass(eq=False)
class _Pending:
    """A request without an answer so far. It is sent again on every new channel."""

    header: dict[str, Any]
    body: bytes
    answer: asyncio.Future[tuple[dict[str, Any], bytes]]
    output: OutputStream | None = None
    input: InputStream | None = None

    def end_streams(self) -> None:
        """End the streams of a request that has ended."""
        for stream in (self.output, self.input):
            if stream is not None:
                stream.end()


class GuestClient:
    """The connection to the guest of one sandbox. Made by `start`, ended by `aclose`.

    When the channel is lost, another one is opened, every unanswered request is sent again (the guest carries out none
    twice), and every stream continues at its byte offset. When the sandbox has ended, or could not be reached for as
    long as the guest waits for us, `lost` is set, and all requests fail with `SandboxLost`.
    """

    missing: tuple[str, ...] = ()

    def __init__(self, sandbox: Sandbox, settings: GuestSettings) -> None:
        self.sandbox = sandbox
        self.settings = settings
        self.granted = Isolation.SHARED
        self.own_users = False
        self.processors = 1
        self.lost = asyncio.Event()
        self._pending: dict[str, _Pending] = {}
        self._session_id = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._outbox: deque[bytes] = deque()
        self._outbox_filled = asyncio.Event()
        self._acks: list[str] = []
        self._last_frame_at = time.monotonic()
        self._first_hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._runner: asyncio.Task[None] | None = None
        self._closing = False
        self._ending = False
        self.life = settings.take_over if isinstance(settings.take_over, GuestLife) else None
        """The identity of the guest; None until its first hello."""
        self._reason: HermesError | None = None

    @classmethod
    async def start(cls, sandbox: Sandbox, settings: GuestSettings) -> Self:
        """Start the guest of this sandbox, or join the existing one.

        Raises:
            PolicyError: the sandbox can't grant the isolation, or another driver holds it.
            NoPythonError: the sandbox has no python3. Use `DirectClient` instead.
            SandboxLost, ChannelLost: the guest could not be reached.
        """
        client = cls(sandbox, settings)
        # This task lives until `aclose`. No task group of a caller lasts that long.
        client._runner = asyncio.create_task(client._serve(), name=f"guest {sandbox.id}")
        try:
            await client._await_greeting(HELLO_TIMEOUT_S)
        except BaseException:
            await client.aclose()
            raise
        return client

    async def _await_greeting(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.shield(self._first_hello)
        except TimeoutError as error:
            raise ChannelLost(f"the guest did not answer within {limit_s:.0f} s", sandbox_id=self.sandbox.id) from error
        if self.granted < self.settings.isolation:
            message = f"the sandbox grants isolation {self.granted.label!r} only, not {self.settings.isolation.label!r}"
            raise PolicyError(message, hint="use a weaker level or another backend", sandbox_id=self.sandbox.id)

    async def aclose(self, *, end_sandbox: bool = False) -> None:
        """Close the channel. With `end_sandbox`, the guest first ends the sandbox. Idempotent."""
        if end_sandbox and self._runner is not None and not self._runner.done() and not self._closing:
            self._ending = True
            self._post({"op": "end"})
            # Don't wait for `lost`: at its end, `asyncio.run` cancels every task, including the one that sets `lost`.
            await asyncio.wait([self._runner], timeout=END_TIMEOUT_S)
        self._closing = True
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
        self._fail_all(SandboxLost("the connection to the sandbox was closed", sandbox_id=self.sandbox.id))
        if self._first_hello.done() and not self._first_hello.cancelled():
            self._first_hello.exception()  # otherwise asyncio warns of an exception that nobody read
        self._first_hello.cancel()

    # --- slots ------------------------------------------------------------------------------------------------------

    async def open_slot(self, index: int) -> str:
        """Make a slot ready. Return the path of its workspace inside the sandbox. Idempotent."""
        header, _ = await self.request({"op": "open_slot", "slot": index})
        return str(header["workspace"])

    def commands(
        self, index: int, call: Call = call_directly, cwd: str = "", env: Mapping[str, str] | None = None
    ) -> SlotCommands:
        """Return the commands of an open slot. `PREPARE` is the preparation user's slot.

        Args:
            call: carries out each operation.
            cwd: the directory for relative paths, absolute or relative to the workspace.
            env: environment variables of every command.
        """
        if index == PREPARE:
            workspace = f"{self.settings.workspace_base}/prepared"
        else:
            workspace = f"{self.settings.workspace_base}/slot_{index}"
        return RemoteCommands(self.request, index, workspace, call, cwd, env=env)

    async def kill_slot(self, index: int, *, forget: bool = False) -> None:
        """Kill every process of the slot. All are dead when this returns. The slot's files stay; with `forget`, its
        background processes and their logs don't.

        Raises:
            SlotLost: the death of all processes could not be proved; the slot is quarantined.
        """
        await self.request({"op": "recycle", "slot": index, "wipe": False, "forget": forget})

    async def reset_slot(self, index: int) -> None:
        """Kill the slot's processes, prove that none is left, empty its directories, and make it ready for the next
        lease.

        Raises:
            SlotLost: the slot could not be proved clean; it is quarantined.
        """
        await self.request({"op": "recycle", "slot": index, "wipe": True})

    async def is_crowded(self, index: int) -> bool:
        """Return whether the sandbox's disk is full of other files than the slot's. `PREPARE` is the preparation."""
        header, _ = await self.request({"op": "check_disk", "slot": index})
        return bool(header["crowded"])

    # --- requests ---------------------------------------------------------------------------------------------------

    async def request(
        self,
        header: dict[str, Any],
        body: bytes = b"",
        *,
        output: OutputStream | None = None,
        input: InputStream | None = None,  # noqa: A002
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request to the guest and return its answer, also if channels are lost meanwhile. Cancelling this call
        kills the processes that the request started.

        Raises:
            SandboxLost: the sandbox is gone.
            HermesError: the guest refused the request.
        """
        if self.lost.is_set() or self._closing:
            raise self._sandbox_lost()
        identity = f"{self._session_id}-{next(self._numbers)}"
        header["id"] = identity
        try:
            frame = wire.encode(header, body)
        except wire.FrameError as error:
            raise CommandError(f"the request is too large: {error}", code="too_large") from error
        pending = _Pending(header, body, asyncio.get_running_loop().create_future(), output, input)
        self._pending[identity] = pending
        self._send(frame)
        for end in (output, input):
            if end is not None:
                end.attach(identity, self._post)
        if input is not None:
            input.resume()
        try:
            answer, data = await pending.answer
        except asyncio.CancelledError:
            # Even if the answer has arrived: else a new background process would live on, and nobody would know its id.
            if identity in self._pending or identity in self._acks:
                self._post({"op": "cancel", "id": identity})
            raise
        if "error" in answer:
            raise error_from_guest(answer["error"], self.sandbox.id, header.get("slot"))
        return answer, data

    def _post(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        self._send(wire.encode(header, body))

    def _send(self, frame: bytes) -> None:
        self._outbox.append(frame)
        self._outbox_filled.set()

    # --- the channel ------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Keep a channel open until the sandbox is lost or the client is closed."""
        try:
            while not self._closing:
                connection = await self._reach()
                try:
                    # A separate task, because after a failure Python 3.11.2's task groups leave their task marked as
                    # being cancelled, and a later `asyncio.timeout` in it raises CancelledError.
                    await asyncio.create_task(self._session(connection), name=f"channel of {self.sandbox.id}")
                except ChannelLost as error:
                    if self._ending:
                        raise SandboxLost("the sandbox was ended", sandbox_id=self.sandbox.id) from error
                    logger.info("sandbox %s: channel lost, opening another: %s", self.sandbox.id, error)
                finally:
                    await connection.channel.aclose()
        except HermesError as error:
            self._give_up(error)
        except Exception as error:
            logger.exception("sandbox %s: the guest client failed", self.sandbox.id)
            self._give_up(InfraError(f"the guest client failed: {error!r}", sandbox_id=self.sandbox.id))

    async def _reach(self) -> GuestConnection:
        """Return a connection to the guest. Keep trying for as long as the guest waits for us."""
        delay = 0.02
        for attempt in itertools.count(1):
            try:
                return await self._open()
            except ChannelLost as error:
                if self.life is None and attempt == FIRST_ATTEMPTS:
                    raise
                await self._check_alive(error)
                logger.info("sandbox %s: not reached, trying again: %s", self.sandbox.id, error)
            await asyncio.sleep(delay)
            delay = min(delay * 2, 1.0)
        raise AssertionError("unreachable")

    async def _check_alive(self, cause: ChannelLost) -> None:
        """Raise `SandboxLost` if another attempt is useless."""
        if time.monotonic() - self._last_frame_at > self.settings.orphan_ttl_s:
            message = f"the sandbox could not be reached for {self.settings.orphan_ttl_s:.0f} s"
            raise SandboxLost(message, sandbox_id=self.sandbox.id) from cause
        try:
            status = await self.sandbox.status()
        except InfraError as error:  # the provider can't be reached either, which says nothing about the sandbox
            logger.info("sandbox %s: its status is not known: %s", self.sandbox.id, error)
            return
        if status != SandboxStatus.RUNNING:
            raise SandboxLost("the sandbox has ended", sandbox_id=self.sandbox.id) from cause

    async def _open(self) -> GuestConnection:
        patience_s = self.settings.orphan_ttl_s - (time.monotonic() - self._last_frame_at)
        # An attempt that hangs must leave time for another.
        limit = HELLO_TIMEOUT_S if self.life is None else max(1.0, patience_s / 2)
        connection, greeting = await greet(
            self.sandbox, self.settings, self._session_id, join=self.life is not None, limit_s=limit
        )
        try:
            self._on_greeting(greeting)
        except BaseException:
            await connection.channel.aclose()
            raise
        return connection

    def _on_greeting(self, header: dict[str, Any]) -> None:
        life = GuestLife(str(header["instance"]), str(header["boot"]), int(header["began"]))
        if self.life not in (None, life):
            raise SandboxLost("there is another guest in the sandbox now", sandbox_id=self.sandbox.id)
        self.life = life
        self.granted = Isolation(header["granted"])
        self.own_users = header["mechanism"] != "shared"
        self.processors = int(header["processors"])
        self._last_frame_at = time.monotonic()
        # Send all unanswered requests again. The guest knows those that it has received by their ids.
        self._outbox.clear()
        self._acks = [identity for identity in header["known"] if identity not in self._pending]
        for pending in list(self._pending.values()):
            repetition = dict(pending.header)
            if pending.output is not None:
                repetition["have"] = pending.output.received
            self._post(repetition, pending.body)
            if pending.input is not None:
                pending.input.resume()
            if pending.answer.cancelled():
                self._post({"op": "cancel", "id": pending.header["id"]})
        if self._ending:
            self._post({"op": "end"})
        if not self._first_hello.done():
            self._first_hello.set_result(None)

    async def _session(self, connection: GuestConnection) -> None:
        """Serve one channel until it is lost."""
        failure: Exception | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(connection))
                tasks.create_task(self._write(connection.channel))
                tasks.create_task(self._beat())
        except* HermesError as group:
            failure = group.exceptions[0]
        if failure is not None:  # raised outside, because Python 3.11.2 wraps errors from inside into another group
            raise failure

    async def _read(self, connection: GuestConnection) -> None:
        while (frame := await connection.next()) is not None:
            self._last_frame_at = time.monotonic()
            try:
                self._dispatch(*frame)
            except (KeyError, TypeError, ValueError) as error:
                raise ChannelLost(f"a frame that is not understood: {error!r}", sandbox_id=self.sandbox.id) from error
        raise ChannelLost("the channel ended", sandbox_id=self.sandbox.id)

    def _dispatch(self, header: dict[str, Any], body: bytes) -> None:
        event = header["ev"]
        if event == "pong":
            return
        identity = str(header["id"])
        pending = self._pending.get(identity)
        if event == "done":
            self._settle(identity, pending, header, body)
        elif pending is None:
            return
        elif event == "out" and pending.output is not None:
            pending.output.feed(int(header["off"]), body, bool(header.get("eof")))
        elif event == "taken" and pending.input is not None:
            pending.input.confirm(int(header["off"]))

    def _settle(self, identity: str, pending: _Pending | None, header: dict[str, Any], body: bytes) -> None:
        if pending is not None:
            total = header["out"][0][1] if "out" in header else 0
            if pending.output is not None and total > pending.output.received:
                raise ChannelLost("an answer came before the end of its stream", sandbox_id=self.sandbox.id)
            pending.end_streams()
            del self._pending[identity]
            if not pending.answer.done():
                pending.answer.set_result((header, body))
        self._acks.append(identity)
        if len(body) > _ACK_AT_ONCE or len(self._acks) >= _ACK_BATCH:
            self._post_acks()

    def _post_acks(self) -> None:
        if self._acks:
            self._post({"op": "ack", "ids": self._acks})
            self._acks = []

    async def _write(self, channel: Channel) -> None:
        while True:
            await self._outbox_filled.wait()
            self._outbox_filled.clear()
            while self._outbox:
                if len(self._outbox) > 1:
                    batch = b"".join(self._outbox)
                    self._outbox.clear()
                else:  # without a copy
                    batch = self._outbox.popleft()
                await channel.write(batch)

    async def _beat(self) -> None:
        """Send heartbeats, and raise `ChannelLost` if the guest is silent for too long."""
        interval = wire.beat_interval_s(self.settings.orphan_ttl_s)
        while True:
            self._post_acks()
            self._post({"op": "ping"})
            await asyncio.sleep(interval)
            silence_s = time.monotonic() - self._last_frame_at
            if silence_s > wire.silence_s(self.settings.orphan_ttl_s):
                raise ChannelLost(f"nothing heard for {silence_s:.1f} s", sandbox_id=self.sandbox.id)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _give_up(self, error: HermesError) -> None:
        self._reason = error
        self.lost.set()
        if not self._first_hello.done():
            self._first_hello.set_exception(error)
        self._fail_all(error)

    def _sandbox_lost(self) -> SandboxLost:
        message = "the sandbox is gone" + (f": {self._reason.message}" if self._reason is not None else "")
        error = SandboxLost(message, hint="acquire another slot", sandbox_id=self.sandbox.id)
        error.__cause__ = self._reason
        return error

    def _fail_all(self, cause: HermesError) -> None:
        self._reason = self._reason or cause
        for pending in self._pending.values():
            pending.end_streams()
            if not pending.answer.done():
                pending.answer.set_exception(self._sandbox_lost())
        self._pending.clear()
