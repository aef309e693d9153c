"""Opens a channel to a guest, exchanges greetings, and reads the frames that arrive."""

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
    explain_errors,
    plugin_fault,
    wrong_answer,
)
from hermes_core.sandbox.contract import Channel, Isolation, Network, Sandbox
from hermes_core.sandbox.guest import wire
from hermes_core.sandbox.guest_client.bundle import NO_GUEST, TOO_OLD, guest_argv, payload
from hermes_core.sandbox.linux.probe import system_identity

_NO_PYTHON = (TOO_OLD, 126, 127)
_GREETING = re.compile(rb'.{8}\{"ev":"(?:hello|refused)"', re.DOTALL)
"""The beginning of the guest's first frame: two lengths and a header."""
_NOISE_BYTES = 64 << 10
"""Maximum number of bytes before the first frame. For example, a wrapper named python3 may print something."""


@dataclass(frozen=True)
class GuestLife:
    """The identity of a guest. A process id alone is not enough, because the kernel reuses it."""

    instance: str
    """A random id of this guest."""
    boot_id: str
    """The kernel's boot id, from `/proc/sys/kernel/random/boot_id`."""
    began: int
    """The start time of the guest's process, in clock ticks since the boot."""


@dataclass(frozen=True)
class GuestSettings:
    """The settings of a guest, which the driver sends in its first hello."""

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
    """Whether the sandbox's own variables include secrets, in `secrets` or not."""
    visible_paths: tuple[str, ...] = ()
    network: Network = Network.OPEN
    take_over: GuestLife | Literal["silent"] | None = None
    """The guest of a dead driver that this client takes over. `silent`: any guest in the sandbox, when its driver has
    become silent. None: no guest is taken over."""
    restored: bool = False
    """Whether the sandbox's files come from a snapshot."""


_PASSED_ON = (
    *("creation_id", "slots", "workspace_base", "orphan_ttl_s", "uid_base", "own_system", "slot_root", "share_network"),
    *("max_processes", "inherit", "secrets", "visible_paths", "restored"),
)
"""Settings that are sent unchanged."""


class GuestConnection:
    """A channel to a guest, and the frames that have been received."""

    def __init__(self, channel: Channel, sandbox_id: str) -> None:
        self.channel = channel
        self._sandbox_id = sandbox_id
        self._decoder = wire.Decoder()
        self._frames: deque[tuple[dict[str, Any], bytes]] = deque()

    async def greeting(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the first frame, and drop the bytes before it. None: the stream has ended."""
        noise = bytearray()
        while (match := _GREETING.search(noise)) is None:
            data = await self._read()
            if not data:
                return None
            noise += data
            if len(noise) > _NOISE_BYTES:
                message = f"garbage on the channel, and no greeting: {bytes(noise[:40])!r}"
                raise ChannelLost(message, sandbox_id=self._sandbox_id)
        self._feed(bytes(noise[match.start() :]))
        return await self.next()

    async def next(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the next frame. None: the stream has ended."""
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
        with explain_errors(fault, but=(HermesError, TimeoutError)):
            data = await self.channel.read(1 << 18)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise wrong_answer(self.channel, "read", data, "bytes", sandbox_id=self._sandbox_id)
        return data


async def greet(
    sandbox: Sandbox, settings: GuestSettings, session: str, *, join: bool, limit_s: float
) -> tuple[GuestConnection, dict[str, Any]]:
    """Open a channel to the sandbox's guest and send a hello. Return the connection and the guest's answer.

    Args:
        session: the id of the client. The guest keeps a session's requests when channels change, and drops those of
            other sessions.
        join: join a running guest, and never start one.

    Raises:
        ChannelLost: the attempt failed, and another one may succeed.
        HermesError: no attempt can succeed.
    """
    channel: Channel | None = None
    try:
        async with asyncio.timeout(limit_s):
            fault = partial(plugin_fault, sandbox, "open", sandbox_id=sandbox.id)
            with explain_errors(fault, but=(HermesError, TimeoutError)):
                result = await sandbox.open(guest_argv(settings.state_dir, join=join))
                if not isinstance(result, Channel):
                    raise wrong_answer(sandbox, "open", result, "a Channel", sandbox_id=sandbox.id)
                channel = result
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


async def _ask(connection: GuestConnection, data: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Send `data` and return the first frame that comes back. None: the other side is gone."""
    try:
        await connection.channel.write(data)
    except ChannelLost:
        return None
    return await connection.greeting()


def _hello(settings: GuestSettings, session: str) -> bytes:
    config = {
        **{name: getattr(settings, name) for name in _PASSED_ON},
        "isolation": int(settings.isolation),
        "driver_etc": system_identity(),
        "process_memory": (settings.process_memory or 0) << 20,
        "env": dict(settings.env),
    }
    hello = {"op": "hello", "driver": settings.driver_id, "session": session, "config": config}
    take_over = settings.take_over.instance if isinstance(settings.take_over, GuestLife) else settings.take_over
    return wire.encode(hello | {"take_over": take_over or ""})


async def _no_greeting(channel: Channel, sandbox_id: str) -> HermesError:
    """Return the error for a guest's bridge that ended without a greeting."""
    status = await channel.wait()
    stderr = channel.stderr_tail.strip()[-2000:]
    if status == NO_GUEST:
        message = "its guest is dead, and with it the slots" + (f"; its last words: {stderr}" if stderr else "")
        return SandboxLost(message, hint="acquire another slot", sandbox_id=sandbox_id)
    if status in _NO_PYTHON:
        return NoPythonError(stderr or "there is no python3 in it", sandbox_id=sandbox_id)
    return ChannelLost(f"the guest's bridge ended with status {status}: {stderr}", sandbox_id=sandbox_id)


_HINTS = {
    "isolation": "use a weaker level or another backend",
    "driver": "take over the lease if that driver is dead",
    "lease": "create a sandbox of your own",
}


def error_from_guest(error: Mapping[str, Any], sandbox_id: str, slot: int | None) -> HermesError:
    """Return the typed error for an error in an answer of the guest."""
    message, code = str(error.get("message")), str(error.get("code"))
    slot_id = None if slot is None else f"slot_{slot}"
    match error.get("kind"):
        case "command":
            return CommandError(message, code=code, slot_id=slot_id)
        case "policy":
            return PolicyError(message, hint=_HINTS.get(code), sandbox_id=sandbox_id)
        case _ if code in ("unclean", "unready"):
            kind = SlotUnclean if code == "unclean" else SlotLost
            return kind(message, hint="it is quarantined with its sandbox", sandbox_id=sandbox_id, slot_id=slot_id)
        case _:
            return InfraError(message, sandbox_id=sandbox_id, slot_id=slot_id)
