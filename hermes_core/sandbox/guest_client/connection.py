"""Reaching a guest: a channel with a finished greeting, and the frames that arrive on it."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from hermes_core.errors import (
    ChannelLost,
    CommandError,
    HermesError,
    InfraError,
    NoPythonError,
    PolicyError,
    SandboxLost,
    SlotLost,
    SlotUnclean,
    explained,
    plugin_fault,
    wrong_answer,
)
from hermes_core.sandbox.contract import Channel, Isolation, Network, Sandbox
from hermes_core.sandbox.guest import wire
from hermes_core.sandbox.guest_client.bundle import NO_GUEST, TOO_OLD, guest_argv, payload
from hermes_core.sandbox.linux.probe import system_identity

_NO_PYTHON = (TOO_OLD, 126, 127)
_GREETING = re.compile(rb'.{8}\{"ev":"(?:hello|refused)"', re.DOTALL)
"""How the guest's first frame begins: two lengths and a header."""
_NOISE_BYTES = 64 << 10
"""Bytes that may come before it: a wrapper named python3, say, may print when it is started."""


@dataclass(frozen=True)
class GuestLife:
    """The identity of a guest, so that it is not confused with another: a process id alone is soon reused."""

    instance: str
    """A random id of this one guest."""
    boot_id: str
    """The id of the kernel that it runs on, from `/proc/sys/kernel/random/boot_id`."""
    began: int
    """Its start time, in clock ticks since the kernel's start."""


@dataclass(frozen=True)
class GuestSettings:
    """What the driver tells a guest once, when it starts."""

    creation_id: str
    driver_id: str
    isolation: Isolation
    slots: int
    workspace_base: str
    state_dir: str
    orphan_ttl_s: float
    uid_base: int | None = None
    own_system: bool = False
    """See `Sandbox.own_system`."""
    slot_root: str | None = None
    """See `Sandbox.slot_root`."""
    share_network: bool = False
    """See `SandboxConfig.share_network`."""
    max_processes: int = 512
    process_memory: int | None = None
    """Memory that each process of a slot may allocate, in MiB."""
    env: Mapping[str, str] = field(default_factory=dict)
    inherit: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    """The inherited variables whose values are masked in output."""
    has_secrets: bool = False
    """Whether the sandbox's own variables include secrets, these or others."""
    visible_paths: tuple[str, ...] = ()
    network: Network = Network.OPEN
    take_over: GuestLife | Literal["silent"] | None = None
    """The guest of a dead driver that this client continues with. `silent` means any guest there, once its driver is
    silent; None takes over nothing."""
    restored: bool = False
    """Whether the sandbox's files come from a snapshot."""


_TOLD = (
    *("creation_id", "slots", "workspace_base", "orphan_ttl_s", "uid_base", "own_system", "slot_root", "share_network"),
    *("max_processes", "inherit", "secrets", "visible_paths", "restored"),
)
"""Settings that the guest gets as they are."""


class GuestConnection:
    """A channel whose guest has been greeted, with the frames received so far."""

    def __init__(self, channel: Channel, sandbox_id: str) -> None:
        self.channel = channel
        self._sandbox_id = sandbox_id
        self._decoder = wire.Decoder()
        self._frames: deque[tuple[dict[str, Any], bytes]] = deque()

    async def greeting(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the first frame, and drop what was printed before it; None at the end of the stream."""
        noise = bytearray()
        while (found := _GREETING.search(noise)) is None:
            data = await self._read()
            if not data:
                return None
            noise += data
            if len(noise) > _NOISE_BYTES:
                said = f"garbage on the channel, and no greeting: {bytes(noise[:40])!r}"
                raise ChannelLost(said, sandbox_id=self._sandbox_id)
        self._feed(bytes(noise[found.start() :]))
        return await self.next()

    async def next(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the next frame; None at the end of the stream."""
        while not self._frames:
            data = await self._read()
            if not data:
                return None
            self._feed(data)
        return self._frames.popleft()

    def _feed(self, data: bytes) -> None:
        try:
            self._frames.extend(self._decoder.feed(data))
        except wire.FrameError as error:
            raise ChannelLost(f"garbage on the channel: {error}", sandbox_id=self._sandbox_id) from error

    async def _read(self) -> bytes:
        fault = partial(plugin_fault, self.channel, "read", sandbox_id=self._sandbox_id)
        with explained(fault, but=(HermesError, TimeoutError)):
            data = await self.channel.read(1 << 18)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise wrong_answer(self.channel, "read", data, "bytes", sandbox_id=self._sandbox_id)
        return data


async def greet(
    sandbox: Sandbox, settings: GuestSettings, session: str, *, join: bool, limit_s: float
) -> tuple[GuestConnection, dict[str, Any]]:
    """Open a channel to the sandbox's guest and say hello. Return the connection and the guest's answer.

    Args:
        session: one id per client. The guest keeps a session's requests across channels, but not those of other
            sessions.
        join: never start a guest.

    Raises:
        ChannelLost: it failed, but may work the next time.
        HermesError: it can never work.
    """
    channel: Channel | None = None
    try:
        async with asyncio.timeout(limit_s):
            fault = partial(plugin_fault, sandbox, "open", sandbox_id=sandbox.id)
            with explained(fault, but=(HermesError, TimeoutError)):
                opened = await sandbox.open(guest_argv(settings.state_dir, join=join))
                if not isinstance(opened, Channel):
                    raise wrong_answer(sandbox, "open", opened, "a Channel", sandbox_id=sandbox.id)
                channel = opened
            connection = GuestConnection(channel, sandbox.id)
            answer = await _ask(connection, payload() + _hello(settings, session))
            if answer is None:
                raise await _no_greeting(channel, sandbox.id)
        if answer[0].get("ev") != "hello":
            raise error_from_guest(answer[0].get("error", {}), sandbox.id, None)
    except BaseException as error:
        if channel is not None:
            await channel.aclose()
        if isinstance(error, TimeoutError):
            raise ChannelLost(f"the guest did not answer within {limit_s:.0f} s", sandbox_id=sandbox.id) from error
        raise
    return connection, answer[0]


async def _ask(connection: GuestConnection, words: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Send `words` and return the first frame that comes back; None if the other side is gone."""
    try:
        await connection.channel.write(words)
    except ChannelLost:
        return None
    return await connection.greeting()


def _hello(settings: GuestSettings, session: str) -> bytes:
    config = {
        **{name: getattr(settings, name) for name in _TOLD},
        "isolation": int(settings.isolation),
        "driver_etc": system_identity(),
        "process_memory": (settings.process_memory or 0) << 20,
        "env": dict(settings.env),
    }
    hello = {"op": "hello", "driver": settings.driver_id, "session": session, "config": config}
    whom = settings.take_over.instance if isinstance(settings.take_over, GuestLife) else settings.take_over
    return wire.encode(hello | {"take_over": whom or ""})


async def _no_greeting(channel: Channel, sandbox_id: str) -> HermesError:
    """Return why the guest's bridge ended without a message."""
    status = await channel.wait()
    words = channel.stderr_tail.strip()[-2000:]
    if status == NO_GUEST:
        message = "its guest is dead, and with it the slots" + (f"; its last words: {words}" if words else "")
        return SandboxLost(message, hint="acquire another slot", sandbox_id=sandbox_id)
    if status in _NO_PYTHON:
        return NoPythonError(words or "there is no python3 in it", sandbox_id=sandbox_id)
    return ChannelLost(f"the guest's bridge ended with status {status}: {words}", sandbox_id=sandbox_id)


_HINTS = {
    "isolation": "use a weaker level or another backend",
    "driver": "take over the lease if that driver is dead",
    "lease": "create a sandbox of your own",
}


def error_from_guest(error: Mapping[str, Any], sandbox_id: str, slot: int | None) -> HermesError:
    """Return the typed error for an error of the guest."""
    message, code = str(error.get("message")), str(error.get("code"))
    slot_id = None if slot is None else f"slot_{slot}"
    match error.get("kind"):
        case "command":
            return CommandError(message, code=code, slot_id=slot_id)
        case "policy":
            return PolicyError(message, hint=_HINTS.get(code), sandbox_id=sandbox_id)
        case _ if code in ("unclean", "unready"):
            lost = SlotUnclean if code == "unclean" else SlotLost
            return lost(message, hint="it is quarantined with its sandbox", sandbox_id=sandbox_id, slot_id=slot_id)
        case _:
            return InfraError(message, sandbox_id=sandbox_id, slot_id=slot_id)
