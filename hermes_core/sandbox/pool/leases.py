"""A pool's state: its sandboxes, their seats (slots) and leases, through which all commands of a slot go."""

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
from hermes_core.sandbox.commands import (
    PREPARE,
    Call,
    Operation,
    SandboxImage,
    Slot,
    SlotCommands,
    SlotState,
    call_directly,
)
from hermes_core.sandbox.contract import Isolation, Sandbox, SandboxConfig
from hermes_core.sandbox.guest_client.connection import GuestLife
from hermes_core.sandbox.pool.slot_network import SlotNetwork

T = TypeVar("T")


class Client(Protocol):
    """The driver's connection to a sandbox: to its guest, or the direct mode if the sandbox has no Python."""

    granted: Isolation
    own_users: bool
    """Whether slots have users or user namespaces of their own."""
    processors: int
    """The number of processors that the sandbox may use."""
    lost: asyncio.Event
    missing: tuple[str, ...]
    """Descriptions of the operations that this sandbox does not support; empty with a guest."""
    life: GuestLife | None
    """Identifies the running guest; None if there is none."""

    async def open_slot(self, index: int) -> str:
        """Make the slot ready, and return its workspace directory. Idempotent."""

    def commands(
        self, index: int, call: Call = call_directly, cwd: str = "", env: Mapping[str, str] | None = None
    ) -> SlotCommands:
        """Return the commands of the slot, or of the preparation user (`PREPARE`). `call` carries out each operation,
        relative paths start at `cwd`, and every command has the variables `env`."""

    async def kill_slot(self, index: int, *, forget: bool = False) -> None:
        """Kill every process of the slot. All are dead when it returns. With `forget`, their logs are dropped too."""

    async def reset_slot(self, index: int) -> None:
        """Make the slot ready for its next lease. Raises `SlotLost` if it can't be proved clean."""

    async def is_crowded(self, index: int) -> bool:
        """Return whether the sandbox's disk is full of other files than the slot's."""

    async def aclose(self, *, end_sandbox: bool = False) -> None:
        """Close the connection. With `end_sandbox`, end the sandbox first."""


class Turns:
    """A semaphore of `count` turns. One holder can also have all turns."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._each = asyncio.Semaphore(count)
        self._all = asyncio.Lock()

    @asynccontextmanager
    async def hold(self, *, alone: bool = False) -> AsyncIterator[None]:
        """Hold one turn, or all turns if `alone`, while the block runs."""
        async with AsyncExitStack() as stack:
            if alone:
                await stack.enter_async_context(self._all)  # two holders with half the turns each would never end
            for _ in range(self._count if alone else 1):
                await stack.enter_async_context(self._each)
            yield


@dataclass(eq=False)
class PooledSandbox:
    """One sandbox of a pool, with its seats."""

    sandbox: Sandbox
    client: Client
    processors: Turns
    """One turn for each processor that its profile and its host give the sandbox."""
    vacant: list[Seat] = field(default_factory=list)
    """The seats without a lease."""
    creation_id: str = ""
    """The id under which it was made. A driver that knows it can take over the sandbox from a dead driver."""
    kept: bool = False
    """Whether the sandbox lives on after the pool is closed."""
    leases: set[Lease] = field(default_factory=set)
    """The leases of the other seats, including those being opened or reset."""
    idle_since: float = 0.0
    """The loop's time at which its last lease ended."""
    draining: bool = False
    """Whether it gets no new leases, and ends with its last lease."""
    quarantined: bool = False
    """Whether it is draining because it can't be trusted any more."""
    lost: InfraError | None = None
    """The error if it can't be reached any more."""
    expires_at: float = math.inf
    """The loop's time after which it gets no new leases, because its provider will end it."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the pool has finished with it or lost it."""
    restored: bool = False
    """Whether it was made from a snapshot or taken over, so that preparations may be complete already."""
    preparing: SlotNetwork | None = None
    """The way out of preparations; None as for a lease."""
    preparations: SingleFlight[str] = field(default_factory=lambda: SingleFlight("the preparation", keep=True))
    """The prepared directories, by key and by whether the directory is private."""

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
        """Return a sandbox with all seats vacant. The ids of the slots are unique, and valid file names.

        Args:
            cpu: the number of processors that its profile gives it. None: all that its host gives it.
        """
        processors = client.processors if cpu is None else min(client.processors, math.ceil(cpu))
        pooled = cls(sandbox, client, Turns(processors), creation_id=creation_id, restored=restored)
        name = re.sub(r"[^A-Za-z0-9._-]", "-", sandbox.id)
        if name != sandbox.id:
            name = f"{name}-{hashlib.sha256(sandbox.id.encode()).hexdigest()[:8]}"
        pooled.vacant = [Seat(pooled, index, f"{name}_slot_{index}") for index in range(slots)]
        return pooled

    def prepare_commands(self, call: Call = call_directly) -> SlotCommands:
        """Return the commands of the preparation user."""

        def make(env: Mapping[str, str]) -> SlotCommands:
            return self.client.commands(PREPARE, call, "", env)

        return make({}) if self.preparing is None else self.preparing.wrap(make, {})

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
            record: called with the sandbox to write it to the checkpoint.
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
    """One slot of a sandbox, which has one lease after the other."""

    pooled: PooledSandbox
    index: int
    slot_id: str
    workspace_dir: str = ""
    """Empty until the slot has been opened."""
    generation: int = 0
    """The number of leases so far."""
    dirty: bool = False
    """Whether its last lease was released without a reset."""


@dataclass
class Watch:
    """A subscription to a background process."""

    interval_s: float
    offset: int = 0
    """The number of bytes of its output that were delivered."""
    ended: bool = False
    """Whether its end was delivered."""
    delivered: float = 0.0
    """The time of the last delivery in seconds since the epoch; 0 is never."""


@dataclass(eq=False)
class Lease:
    """The lease of a seat by one trajectory, from the pool's decision until the slot is ready for its next lease."""

    config: SandboxConfig
    """The profile's settings."""
    record: Callable[[], None]
    """Writes the lease to the checkpoint."""
    seat: Seat
    slot: Slot
    verification: bool
    cwd: str = ""
    """The directory for relative paths, absolute or relative to the workspace."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every command."""
    network: SlotNetwork | None = None
    """The way out of the slot; None if its sandbox has an open network, or none in all phases."""
    state: dict[str, Any] = field(default_factory=dict)
    """State that tools keep for this trajectory."""
    watches: dict[str, Watch] = field(default_factory=dict)
    """Subscriptions to its background processes."""
    tool_calls: int = 0
    """The number of running tool calls."""
    release: asyncio.Task[None] | None = None
    """The task that ends the lease; None until the release."""

    @property
    def pooled(self) -> PooledSandbox:
        """Return the sandbox of the slot."""
        return self.seat.pooled

    @cached_property
    def commands(self) -> SlotCommands:
        """The commands of the slot. They fail when the lease has ended."""

        def make(env: Mapping[str, str]) -> SlotCommands:
            return self.pooled.client.commands(self.seat.index, self.call, self.cwd, env)

        return make(self.env) if self.network is None else self.network.wrap(make, self.env)

    async def note_kill(self) -> None:
        """Note that all processes of the slot were killed."""
        if self.network is not None:
            await self.network.on_kill()

    @contextmanager
    def executing(self) -> Iterator[None]:
        """Set the slot's state to EXECUTING during the block."""
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
        """Check that the lease can be used.

        Raises:
            StaleSlotError: it was released.
            SandboxLost: its sandbox is gone.
        """
        if self.release is not None:
            raise stale(self.slot)
        if (error := self.pooled.lost) is not None:
            raise with_slot_ids(SandboxLost(error.message, hint=error.hint), self.slot) from error

    async def call(self, operation: Operation[T], /) -> T:
        """Carry out an operation for this lease. All operations on its slot go through here.

        Raises:
            StaleSlotError: the lease was released, before or during the call.
            InfraError: the sandbox or the connection to it failed. The error has the ids of the slot.
        """
        self.check()
        try:
            outcome = await operation.begin()
        except InfraError as error:
            # If the release interrupted the operation, the sandbox has not failed.
            if self.release is not None:
                raise stale(self.slot) from error
            raise with_slot_ids(error, self.slot).with_traceback(error.__traceback__) from error.__cause__
        if self.release is not None:
            raise stale(self.slot)
        return outcome


def with_slot_ids(error: InfraError, slot: Slot) -> InfraError:
    """Return a copy of an error, with the slot's ids added. A copy, because other slots may get the same error."""
    copy = error.twin()
    copy.sandbox_id = error.sandbox_id or slot.sandbox_id
    copy.slot_id = error.slot_id or slot.slot_id
    copy.trajectory_id = error.trajectory_id or slot.trajectory_id
    return copy


def stale(slot: Slot) -> StaleSlotError:
    """Return the error for the use of a slot after its release."""
    return StaleSlotError(
        f"lease {slot.generation} of this slot was released",
        hint="acquire a slot and use its handle; a handle is good for one lease",
        slot_id=slot.slot_id,
        sandbox_id=slot.sandbox_id,
        trajectory_id=slot.trajectory_id,
    )
