"""The driver's end of a guest: one channel at a time, many requests in flight, resumed when the channel is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from hermes_core.errors import ChannelLost, HermesError, InfraError, NoPythonError, SandboxLost
from hermes_core.sandbox.bundle import guest_argv, payload
from hermes_core.sandbox.commands import SlotCommands
from hermes_core.sandbox.contract import Channel, Isolation, Network, Sandbox, SandboxStatus
from hermes_core.sandbox.guest import wire
from hermes_core.sandbox.remote import InputPump, OutputStream, RemoteCommands, error_from_guest

logger = logging.getLogger(__name__)

PREPARE = -1
"""The index of the preparation user's slot."""
HELLO_TIMEOUT_S = 60.0
NO_GUEST = 4
"""The exit status of a bridge that found no guest to join."""
FIRST_ATTEMPTS = 3
"""Tries at a guest that has never answered: what stops it then will not pass by itself."""
_ACK_AT_ONCE = 16 << 10
_ACK_BATCH = 64


@dataclass(frozen=True)
class GuestSettings:
    """What the driver tells a guest once, when it starts."""

    lease_id: str
    driver_id: str
    isolation: Isolation
    slots: int
    workspace_base: str
    state_dir: str
    orphan_ttl_s: float
    uid_base: int | None = None
    max_processes: int = 512
    env: Mapping[str, str] = field(default_factory=dict)
    visible_paths: tuple[str, ...] = ()
    network: Network = Network.OPEN
    take_over: bool = False


@dataclass(eq=False)
class _Pending:
    """A request that is not answered yet; sent again on every new channel."""

    header: dict[str, Any]
    body: bytes
    answer: asyncio.Future[tuple[dict[str, Any], bytes]]
    output: OutputStream | None = None
    input: InputPump | None = None


class GuestClient:
    """Speaks to the guest of one sandbox. Made by `start`, ended by `aclose`.

    A lost channel is not a lost sandbox: another is opened, every unanswered request is asked again (the guest does
    nothing twice) and every stream goes on at its byte offset. `lost` is set, and everything pending fails with
    `SandboxLost`, once the sandbox has ended or could not be reached for as long as it would wait for us.
    """

    def __init__(self, sandbox: Sandbox, settings: GuestSettings) -> None:
        self.sandbox = sandbox
        self.settings = settings
        self.granted = Isolation.SHARED
        self.lost = asyncio.Event()
        self._pending: dict[str, _Pending] = {}
        self._session_id = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._outbox: deque[bytes] = deque()
        self._outbox_filled = asyncio.Event()
        self._acks: list[str] = []
        self._heard = time.monotonic()
        self._first_hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._runner: asyncio.Task[None] | None = None
        self._closing = False
        self._ending = False
        self._instance: str | None = None

    @classmethod
    async def start(cls, sandbox: Sandbox, settings: GuestSettings) -> Self:
        """Start the guest of this sandbox, or join the one that is there.

        Raises:
            PolicyError: the sandbox can't grant the isolation, or another driver holds it.
            NoPythonError: the sandbox has no python3; `DirectClient` is for those.
            SandboxLost, ChannelLost: it could not be reached.
        """
        client = cls(sandbox, settings)
        client._runner = asyncio.create_task(client._serve(), name=f"guest {sandbox.id}")
        try:
            await asyncio.wait_for(asyncio.shield(client._first_hello), HELLO_TIMEOUT_S)
        except TimeoutError as error:
            await client.aclose()
            message = f"the guest did not answer within {HELLO_TIMEOUT_S:.0f} s"
            raise ChannelLost(message, sandbox_id=sandbox.id) from error
        except BaseException:
            await client.aclose()
            raise
        return client

    async def aclose(self, *, end_sandbox: bool = False) -> None:
        """Let go of the channel; with `end_sandbox` the guest kills everything and ends the sandbox. Idempotent."""
        if end_sandbox and not self.lost.is_set():
            self._ending = True
            self._post({"op": "end"})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.lost.wait(), 2.0)
        self._closing = True
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
        self._fail_all("the connection to the sandbox was closed")
        if self._first_hello.done() and not self._first_hello.cancelled():
            self._first_hello.exception()
        self._first_hello.cancel()

    # --- slots ------------------------------------------------------------------------------------------------------

    async def open_slot(self, index: int) -> str:
        """Make a slot ready; its workspace directory as seen from inside. Idempotent."""
        header, _ = await self.call({"op": "open_slot", "slot": index})
        return str(header["workspace"])

    def commands(self, index: int) -> SlotCommands:
        """The commands of an opened slot; `PREPARE` is the preparation user's."""
        if index == PREPARE:
            workspace = f"{self.settings.workspace_base}/prepared"
        else:
            workspace = f"{self.settings.workspace_base}/slot_{index}"
        return RemoteCommands(self, index, workspace)

    async def kill_slot(self, index: int) -> None:
        """Every process of the slot is dead when this returns; its files stay.

        Raises:
            SlotLost: that could not be proved; the slot is quarantined.
        """
        await self.call({"op": "recycle", "slot": index, "wipe": False})

    async def reset_slot(self, index: int) -> None:
        """Kill, prove, empty the directories, and have the slot ready for its next lease.

        Raises:
            SlotLost: it could not be proved clean; the slot is quarantined.
        """
        await self.call({"op": "recycle", "slot": index, "wipe": True})

    # --- requests ---------------------------------------------------------------------------------------------------

    async def call(
        self,
        header: dict[str, Any],
        body: bytes = b"",
        *,
        output: OutputStream | None = None,
        input: InputPump | None = None,  # noqa: A002
    ) -> tuple[dict[str, Any], bytes]:
        """Ask the guest, across lost channels, and give its answer. Cancelling kills what the request started.

        Raises:
            SandboxLost: the sandbox is gone.
            HermesError: what the guest refused, as the error of its kind.
        """
        if self.lost.is_set() or self._closing:
            raise SandboxLost("the sandbox is gone", hint="acquire another slot", sandbox_id=self.sandbox.id)
        identity = f"{self._session_id}-{next(self._numbers)}"
        header["id"] = identity
        pending = _Pending(header, body, asyncio.get_running_loop().create_future(), output, input)
        self._pending[identity] = pending
        for end in (output, input):
            if end is not None:
                end.attach(identity, self._post)
        self._post(header, body)
        try:
            answer, data = await pending.answer
        except asyncio.CancelledError:
            if identity in self._pending:
                self._post({"op": "cancel", "id": identity})
            raise
        if "error" in answer:
            raise error_from_guest(answer["error"], self.sandbox.id, header.get("slot"))
        return answer, data

    def _post(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        self._outbox.append(wire.encode(header, body))
        self._outbox_filled.set()

    # --- the channel ------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Keep a channel open until the sandbox is lost or we are closed."""
        try:
            while True:
                channel = await self._reach()
                try:
                    await self._session(channel)
                except ChannelLost as error:
                    if self._ending:
                        raise SandboxLost("the sandbox was ended", sandbox_id=self.sandbox.id) from error
                    logger.info("sandbox %s: channel lost, opening another: %s", self.sandbox.id, error)
                finally:
                    await channel.aclose()
        except HermesError as error:
            self._give_up(error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("sandbox %s: the guest client failed", self.sandbox.id)
            self._give_up(InfraError(f"the guest client failed: {error!r}", sandbox_id=self.sandbox.id))

    async def _reach(self) -> Channel:
        """A channel whose guest has said hello; tried until the guest would have given us up."""
        delay = 0.02
        for attempt in itertools.count(1):
            try:
                return await self._open()
            except ChannelLost as error:
                if not self._first_hello.done() and attempt == FIRST_ATTEMPTS:
                    raise
                if await self.sandbox.status() is not SandboxStatus.RUNNING:
                    raise SandboxLost("the sandbox has ended", sandbox_id=self.sandbox.id) from error
                if time.monotonic() - self._heard > self.settings.orphan_ttl_s:
                    message = f"the sandbox could not be reached for {self.settings.orphan_ttl_s:.0f} s"
                    raise SandboxLost(message, sandbox_id=self.sandbox.id) from error
                logger.info("sandbox %s: not reached, trying again: %s", self.sandbox.id, error)
            await asyncio.sleep(delay)
            delay = min(delay * 2, 1.0)
        raise AssertionError("unreachable")

    async def _open(self) -> Channel:
        channel = await self.sandbox.open(guest_argv(self.settings.state_dir, join=self._instance is not None))
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await channel.write(payload())
                await channel.write(self._hello())
                decoder = wire.Decoder()
                header = await self._first_frame(channel, decoder)
            if header["ev"] == "refused":
                raise error_from_guest(header["error"], self.sandbox.id, None)
        except TimeoutError as error:
            await channel.aclose()
            raise ChannelLost("the guest did not answer", sandbox_id=self.sandbox.id) from error
        except BaseException:
            await channel.aclose()
            raise
        self._greeted(header)
        return channel

    def _hello(self) -> bytes:
        config = asdict(self.settings)
        for key in ("driver_id", "take_over", "network", "state_dir"):
            del config[key]
        config["isolation"] = int(self.settings.isolation)
        config["env"] = dict(self.settings.env)
        hello = {
            "op": "hello",
            "driver": self.settings.driver_id,
            "session": self._session_id,
            "take_over": self.settings.take_over,
            "config": config,
        }
        return wire.encode(hello)

    async def _first_frame(self, channel: Channel, decoder: wire.Decoder) -> dict[str, Any]:
        """The guest's answer to hello: the only frame on a channel before we have sent a request on it."""
        while True:
            data = await channel.read(1 << 16)
            if not data:
                await self._explain_end(channel)
            frames = self._decode(decoder, data)
            if frames:
                header: dict[str, Any] = frames[0][0]
                return header

    async def _explain_end(self, channel: Channel) -> None:
        async with asyncio.timeout(5):
            status = await channel.wait()
        text = f"the guest's bridge ended with status {status}: {channel.stderr_tail.strip()[-2000:]}"
        if status == NO_GUEST:
            raise SandboxLost("its guest is dead, and with it the slots", sandbox_id=self.sandbox.id)
        if status == 127:
            raise NoPythonError(text, sandbox_id=self.sandbox.id)
        raise ChannelLost(text, sandbox_id=self.sandbox.id)

    def _decode(self, decoder: wire.Decoder, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        try:
            frames: list[tuple[dict[str, Any], bytes]] = decoder.feed(data)
        except wire.FrameError as error:
            raise ChannelLost(f"garbage on the channel: {error}", sandbox_id=self.sandbox.id) from error
        return frames

    def _greeted(self, header: dict[str, Any]) -> None:
        self._instance = header["instance"]
        self.granted = Isolation(header["granted"])
        self._heard = time.monotonic()
        # A new channel: whatever was on its way on the old one is asked again; the guest does nothing twice.
        self._outbox.clear()
        for pending in list(self._pending.values()):
            again = dict(pending.header)
            if pending.output is not None:
                again["have"] = pending.output.received
            self._post(again, pending.body)
            if pending.answer.cancelled():
                self._post({"op": "cancel", "id": pending.header["id"]})
        if not self._first_hello.done():
            self._first_hello.set_result(None)

    async def _session(self, channel: Channel) -> None:
        """Serve one channel until it is lost."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(channel))
                tasks.create_task(self._write(channel))
                tasks.create_task(self._beat())
        except* HermesError as group:
            raise group.exceptions[0] from group

    async def _read(self, channel: Channel) -> None:
        decoder = wire.Decoder()
        while True:
            data = await channel.read(1 << 18)
            if not data:
                raise ChannelLost("the channel ended", sandbox_id=self.sandbox.id)
            self._heard = time.monotonic()
            for header, body in self._decode(decoder, data):
                self._dispatch(header, body)

    def _dispatch(self, header: dict[str, Any], body: bytes) -> None:
        event = header.get("ev")
        if event == "pong":
            return
        identity = str(header.get("id"))
        pending = self._pending.get(identity)
        if event == "done":
            self._acknowledge(identity, len(body))
            if pending is not None:
                del self._pending[identity]
                if pending.output is not None:
                    pending.output.end()
                if not pending.answer.done():
                    pending.answer.set_result((header, body))
        elif pending is None:
            return
        elif event == "out" and pending.output is not None:
            pending.output.feed(int(header["off"]), body)
        elif event == "taken" and pending.input is not None:
            pending.input.taken(int(header["off"]), resume=bool(header.get("resume")))

    def _acknowledge(self, identity: str, size: int) -> None:
        """The guest may forget this answer: said with the next batch, at once if it is a large one."""
        self._acks.append(identity)
        if size > _ACK_AT_ONCE or len(self._acks) >= _ACK_BATCH:
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
                else:
                    batch = self._outbox.popleft()
                await channel.write(batch)

    async def _beat(self) -> None:
        """Tell the guest that we live, and find out when it can't be heard any more."""
        interval = max(0.2, min(5.0, self.settings.orphan_ttl_s / 6))
        while True:
            self._post_acks()
            self._post({"op": "ping"})
            await asyncio.sleep(interval)
            silent = time.monotonic() - self._heard
            if silent > 2 * interval + 1.0:
                raise ChannelLost(f"nothing heard for {silent:.1f} s", sandbox_id=self.sandbox.id)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _give_up(self, error: HermesError) -> None:
        self.lost.set()
        if not self._first_hello.done():
            self._first_hello.set_exception(error)
        self._fail_all(error.message, error)

    def _fail_all(self, message: str, cause: BaseException | None = None) -> None:
        for pending in self._pending.values():
            if pending.output is not None:
                pending.output.end()
            if not pending.answer.done():
                error = SandboxLost(message, hint="acquire another slot", sandbox_id=self.sandbox.id)
                error.__cause__ = cause
                pending.answer.set_exception(error)
        self._pending.clear()
