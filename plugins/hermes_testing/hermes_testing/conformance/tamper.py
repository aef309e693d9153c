"""A backend between core and the backend under test: loses answers, and cuts, stalls or corrupts channels."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import ClassVar

from hermes_core import (
    Backend,
    Capabilities,
    Channel,
    ChannelLost,
    Diagnosis,
    Isolation,
    Sandbox,
    SandboxConfig,
    SandboxInfo,
    SandboxSpec,
    SandboxStatus,
)


class TamperedChannel(Channel):
    """A channel that can be cut, stalled, or made to return garbage."""

    def __init__(self, inner: Channel) -> None:
        self.inner = inner
        self.garbage = b""
        """Data that the next `read` returns in place of the data that arrive; empty for no change."""
        self.flowing = asyncio.Event()
        """While this event is cleared, nothing is read."""
        self.flowing.set()
        self._is_cut = False

    async def cut(self) -> None:
        """Break the transport, even in the middle of data."""
        self._is_cut = True
        await self.inner.aclose()

    async def read(self, n: int) -> bytes:
        """Wait until `flowing` is set, and read from the channel. After a cut, raise an error. Return garbage once."""
        await self.flowing.wait()
        data = await self.inner.read(n)
        if self._is_cut:
            raise ChannelLost("the channel was cut by the check")
        if self.garbage:
            data, self.garbage = self.garbage, b""
        return data

    async def write(self, data: bytes) -> None:
        """Write as the channel does, until it is cut."""
        if self._is_cut:
            raise ChannelLost("the channel was cut by the check")
        await self.inner.write(data)

    async def wait(self) -> int:
        """As the channel."""
        return await self.inner.wait()

    async def aclose(self) -> None:
        """As the channel."""
        await self.inner.aclose()

    @property
    def stderr_tail(self) -> str:
        """As the channel."""
        return self.inner.stderr_tail


class TamperedSandbox(Sandbox):
    """A sandbox whose channels are `TamperedChannel`s."""

    def __init__(self, inner: Sandbox, backend: TamperedBackend) -> None:
        for name in Sandbox.__annotations__:
            setattr(self, name, getattr(inner, name))
        self._inner = inner
        self._backend = backend

    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        """As the sandbox."""
        if self._backend.unreachable:
            raise ChannelLost("the check lets no channel through", sandbox_id=self.id)
        channel = TamperedChannel(await self._inner.open(argv, env=env))
        self._backend.channels.append(channel)
        return channel

    async def status(self) -> SandboxStatus:
        """As the sandbox."""
        return await self._inner.status()

    async def terminate(self) -> None:
        """End the sandbox, after `end_delay_s` of the backend."""
        await asyncio.sleep(self._backend.end_delay_s)
        await self._inner.terminate()


class TamperedBackend(Backend):
    """The backend under test, with tampered answers and channels."""

    name: ClassVar[str] = "tampered"

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.channels: list[TamperedChannel] = []
        """All channels that were opened, oldest first."""
        self.lose_answers = 0
        """Number of next creations for which the sandbox is made, but the caller gets an error instead."""
        self.lost = 0
        self.unreachable = False
        """Whether opening further channels fails."""
        self.end_delay_s = 0.0
        """Seconds that `terminate` waits before it ends anything."""
        self.__dict__["config_class"] = inner.config_class

    config_class: ClassVar[type[SandboxConfig]]

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """As the backend."""
        return self.inner.capabilities

    def levels(self, config: SandboxConfig) -> frozenset[Isolation]:
        """As the backend."""
        return self.inner.levels(config)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Create a sandbox. For `lose_answers` creations, raise `ChannelLost` although there is a sandbox."""
        sandbox = await self.inner.create(spec)
        if self.lost < self.lose_answers:
            self.lost += 1
            raise ChannelLost("the answer of `create` was lost by the check")
        return TamperedSandbox(sandbox, self)

    async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        """As the backend."""
        return await self.inner.list(owner)

    async def terminate_id(self, sandbox_id: str) -> None:
        """As the backend."""
        await self.inner.terminate_id(sandbox_id)

    async def check(self) -> Diagnosis:
        """As the backend."""
        return await self.inner.check()
