"""Seats and leases: what a pool keeps per slot, and the commands that a lease gives until it ends."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar

from hermes_core.aio import SingleFlight
from hermes_core.errors import InfraError, SandboxLost, StaleSlotError
from hermes_core.sandbox.commands import Call, Operation, SandboxImage, Slot, SlotCommands, SlotState, unguarded
from hermes_core.sandbox.contract import Isolation, Sandbox, SandboxConfig
from hermes_core.sandbox.guest_client.connection import GuestLife

T = TypeVar("T")


class Client(Protocol):
    """What runs a sandbox's slots: the guest's client, or the direct mode if there is no Python."""

    granted: Isolation
    own_users: bool
    """Whether slots have users or user namespaces of their own."""
    processors: int
    """How many processors the sandbox may use."""
    lost: asyncio.Event
    missing: tuple[str, ...]
    """What can't be done in this sandbox, in words; empty with a guest."""
    life: GuestLife | None
    """Identifies the running guest; None if there is none."""

    async def open_slot(self, index: int) -> str:
        """Make the slot ready (idempotent); return its workspace directory."""

    def commands(
        self, index: int, call: Call = unguarded, cwd: str = "", env: Mapping[str, str] | None = None
    ) -> SlotCommands:
        """Return the commands of the slot, or of the preparation user (`PREPARE`); `call` carries them out, relative
        paths start at `cwd`, and every command has the variables `env`."""

    async def kill_slot(self, index: int, *, forget: bool = False) -> None:
        """Kill every process of the slot; all are dead when it returns. With `forget`, nobody will ask for them."""

    async def reset_slot(self, index: int) -> None:
        """Make the slot ready for its next lease. `SlotLost` if it can't be proved clean."""

    async def crowded(self, index: int) -> bool:
        """Whether the sandbox's disk is full, and not of the slot's own files."""

    async def aclose(self, *, end_sandbox: bool = False) -> None:
        """End the connection, and the sandbox with it if asked to."""


class Turns:
    """Allows so many turns at a time, or one holder of all of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._each = asyncio.Semaphore(count)
        self._all = asyncio.Lock()

    @asynccontextmanager
    async def hold(self, *, alone: bool = False) -> AsyncIterator[None]:
        """Hold a turn, or all of them, while the block runs."""
        async with AsyncExitStack() as stack:
            if alone:
                await stack.enter_async_context(self._all)  # two holders of half of them would wait for each other
            for _ in range(self._count if alone else 1):
                await stack.enter_async_context(self._each)
            yield


@dataclass(eq=False)
class PooledSandbox:
    """One sandbox of a pool, with its seats."""

    sandbox: Sandbox
    client: Client
    processors: Turns
    """One turn for each processor that its profile and its host give it."""
    vacant: list[Seat] = field(default_factory=list)
    """Seats that a lease can have."""
    creation_id: str = ""
    """The id under which it was made. Who knows it can take over the sandbox from a dead driver."""
    kept: bool = False
    """Whether it lives on without us."""
    leases: set[Lease] = field(default_factory=set)
    """The leases of the other seats, including those being opened or reset."""
    idle_since: float = 0.0
    """The loop's time at which its last lease ended."""
    draining: bool = False
    """Whether it gets no new leases, and is ended when its last lease has ended."""
    quarantined: bool = False
    """Whether it is draining because it can't be trusted any more."""
    lost: InfraError | None = None
    """Why it can't be reached any more."""
    expires_at: float = math.inf
    """The loop's time after which it gets no new leases, because its provider will end it."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its pool is done with it, or has lost it."""
    restored: bool = False
    """Whether it was made from a snapshot or taken over, so that preparations in it may be complete already."""
    preparations: SingleFlight[str] = field(default_factory=lambda: SingleFlight("the preparation", keep=True))
    """The directories that were, or are being, prepared in it, by key and by whether the directory is private."""

    @classmethod
    def of(
        cls,
        sandbox: Sandbox,
        client: Client,
        *,
        slots: int,
        cpu: float | None = None,
        creation_id: str = "",
        restored: bool = False,
    ) -> PooledSandbox:
        """Return a sandbox with all of its seats vacant. Their ids are as unique as its own, and valid file names.

        Args:
            cpu: how many processors its profile gives it; None means all that its host gives it.
        """
        processors = client.processors if cpu is None else min(client.processors, math.ceil(cpu))
        pooled = cls(sandbox, client, Turns(processors), creation_id=creation_id, restored=restored)
        name = re.sub(r"[^A-Za-z0-9._-]", "-", sandbox.id)
        if name != sandbox.id:
            name = f"{name}-{hashlib.sha256(sandbox.id.encode()).hexdigest()[:8]}"
        pooled.vacant = [Seat(pooled, index, f"{name}_slot_{index}") for index in range(slots)]
        return pooled

    def begin_lease(
        self,
        seat: Seat,
        trajectory_id: str | None,
        config: SandboxConfig,
        record: Callable[[PooledSandbox], None],
        *,
        verification: bool,
    ) -> Lease:
        """Begin the next lease of a vacant seat.

        Args:
            config: the profile's settings.
            record: called when something has changed that the next driver has to know.
        """
        seat.generation += 1
        slot = Slot(
            slot_id=seat.slot_id,
            sandbox_id=self.sandbox.id,
            profile=config.name,
            workspace_dir=seat.workspace_dir,
            generation=seat.generation,
            isolation=self.client.granted.label,
            trajectory_id=trajectory_id,
            image=self.sandbox.image or (SandboxImage(config.image) if config.image else None),
        )
        lease = Lease(config, partial(record, self), seat, slot, verification)
        self.vacant.remove(seat)
        self.leases.add(lease)
        return lease


@dataclass(eq=False)
class Seat:
    """One slot of a sandbox, over all of its leases."""

    pooled: PooledSandbox
    index: int
    slot_id: str
    workspace_dir: str = ""
    """Known once the slot has been opened."""
    generation: int = 0
    dirty: bool = False
    """Whether its last lease was released without a reset."""


@dataclass
class Watch:
    """A subscription to a process, and how much of it was delivered."""

    interval_s: float
    offset: int = 0
    """How many bytes of its output were delivered."""
    ended: bool = False
    """Whether its end was delivered."""
    delivered: float = 0.0
    """When something was last delivered, in seconds since the epoch; 0 means never."""


@dataclass(eq=False)
class Lease:
    """One trajectory's hold on a seat: from the moment it was chosen until the slot is ready for the next."""

    config: SandboxConfig
    """The profile's settings."""
    record: Callable[[], None]
    """Records what the next driver needs to know of it."""
    seat: Seat
    slot: Slot
    verification: bool
    cwd: str = ""
    """Where relative paths start, relative to the workspace or absolute."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every command."""
    state: dict[str, Any] = field(default_factory=dict)
    """The tools' own memory of this trajectory."""
    watches: dict[str, Watch] = field(default_factory=dict)
    """Subscriptions to its background processes."""
    tool_calls: int = 0
    """How many tool calls run now."""
    release: asyncio.Task[None] | None = None
    """The task that ends it, once started."""

    @property
    def pooled(self) -> PooledSandbox:
        """Return the sandbox that it is on."""
        return self.seat.pooled

    @cached_property
    def commands(self) -> SlotCommands:
        """What can be done in the slot until the lease ends."""
        return self.pooled.client.commands(self.seat.index, self.call, self.cwd, self.env)

    @contextmanager
    def executing(self) -> Iterator[None]:
        """Set the slot's state to say that a tool call runs, while the block runs."""
        self.tool_calls += 1
        if self.slot.state is SlotState.ACQUIRED:
            self.slot.state = SlotState.EXECUTING
        try:
            yield
        finally:
            self.tool_calls -= 1
            if self.tool_calls == 0 and self.slot.state is SlotState.EXECUTING:
                self.slot.state = SlotState.ACQUIRED

    def check(self) -> None:
        """Raise if the lease can't be used (any more).

        Raises:
            StaleSlotError: it was released.
            SandboxLost: its sandbox is gone.
        """
        if self.release is not None:
            raise stale(self.slot)
        if (error := self.pooled.lost) is not None:
            raise located(SandboxLost(error.message, hint=error.hint), self.slot) from error

    async def call(self, operation: Operation[T], /) -> T:
        """Carry out an operation for this lease. Everything that is done in its slot goes through here.

        Raises:
            StaleSlotError: the lease was released, before or during the call.
            InfraError: the sandbox or the connection to it failed; carries the ids.
        """
        self.check()
        try:
            outcome = await operation.begin()
        except InfraError as error:
            # Work that the release itself interrupted is not a failure of the sandbox.
            if self.release is not None:
                raise stale(self.slot) from error
            raise located(error, self.slot).with_traceback(error.__traceback__) from error.__cause__
        if self.release is not None:
            raise stale(self.slot)
        return outcome


def located(error: InfraError, slot: Slot) -> InfraError:
    """Return a copy of the error with the slot's ids where it has none; others may have waited for the same attempt."""
    own = error.twin()
    own.sandbox_id = error.sandbox_id or slot.sandbox_id
    own.slot_id = error.slot_id or slot.slot_id
    own.trajectory_id = error.trajectory_id or slot.trajectory_id
    return own


def stale(slot: Slot) -> StaleSlotError:
    """Return the error for a handle whose lease has ended."""
    return StaleSlotError(
        f"lease {slot.generation} of this slot was released",
        hint="acquire a slot and use its handle; a handle is good for one lease",
        slot_id=slot.slot_id,
        sandbox_id=slot.sandbox_id,
        trajectory_id=slot.trajectory_id,
    )
