"""The tool backend: what callers see of sandboxes. Acquire a slot, call tools in it, release it."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from hermes_core.aio import TaskSet
from hermes_core.errors import (
    ConfigError,
    ErrorKind,
    HermesError,
    InfraError,
    PolicyError,
    SandboxLost,
    StaleSlotError,
    UnknownNameError,
    UsageError,
)
from hermes_core.events import Events
from hermes_core.sandbox.commands import PREPARE, Around, ExecutionResult, Slot, SlotCommands
from hermes_core.sandbox.contract import Backend, Isolation, SandboxConfig, SlotUser
from hermes_core.sandbox.pool.checkpoint import Checkpoint, SavedSandbox
from hermes_core.sandbox.pool.cost import SandboxUsage
from hermes_core.sandbox.pool.leases import Lease, stale
from hermes_core.sandbox.pool.pool import Pool
from hermes_core.sandbox.pool.preparation import Build, check_key, prepare
from hermes_core.sandbox.pool.provision import ClientFactory, PrepareSandbox, Provisioner, start_guest
from hermes_core.sandbox.pool.watches import Subscriber, Watchers
from hermes_core.tools.base import CallContext, Tool
from hermes_core.tools.registry import ToolRegistry
from hermes_core.tools.slot_tools import SLOT_TOOLS
from hermes_core.validation import validated

log = logging.getLogger(__name__)

OVERTIME_S = 15.0
"""How long after its time limit, and the time in which a lost channel may come back, a tool is cut off, in seconds."""


class ToolBackend:
    """Slots of one backend, by profile; an async context manager.

    Args:
        profiles: by name; each has a pool of its own, warmed when it is started or first asked for.
        tools: the tools that `execute` knows besides the slot tools `bash`, `read_file` and `write_file`.
        isolation: the least that every slot gets; the backend's next stronger level where it does not declare this one.
        owner: who the sandboxes belong to, for their labels.
        events: told of its sandboxes and of watched processes; not of tool calls, which the rollout announces.
        max_creating: sandboxes being made at the same time, over all profiles.
        start_client: gives the client of a new sandbox.
        prepare_sandbox: called with each new sandbox whose profile has the network `setup`, before it is cut; or with
            the one that the others are made from, where the backend can make snapshots and the profile asks for them.
        take_over: go on with the sandboxes that an earlier driver of this owner left, once nothing is heard of it.
            They are emptied. Not with a checkpoint, by which everything in them goes on.
        checkpoint: where it is written what a driver after us needs to take the sandboxes over; whose they are, too.
        on_closed: called with this tool backend once it is closed.

    Raises:
        ConfigError, PolicyError, UnknownNameError: a profile can't be served by this backend.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        profiles: Mapping[str, SandboxConfig],
        tools: ToolRegistry,
        isolation: Isolation,
        owner: str,
        default_profile: str = "default",
        events: Events | None = None,
        max_creating: int = 4,
        start_client: ClientFactory = start_guest,
        prepare_sandbox: PrepareSandbox | None = None,
        take_over: bool = False,
        checkpoint: Checkpoint | None = None,
        on_closed: Callable[[ToolBackend], object] | None = None,
    ) -> None:
        self.backend = backend
        self._on_closed = on_closed
        self.isolation = isolation = backend.capabilities.least(isolation)
        self.default_profile = default_profile
        self._events = events or Events()
        self._watchers = Watchers(self._events)
        self._tasks = TaskSet()
        self._leases: dict[tuple[str, int], Lease] = {}
        self._closing: asyncio.Task[None] | None = None
        # What the driver before us held and we do not yet. The checkpoint names what we make, too.
        self._inherited = {} if checkpoint is None else dict(checkpoint.sandboxes)
        self._taken: list[Slot] = []
        self._provisioner = Provisioner(
            backend,
            isolation=isolation,
            owner=owner if checkpoint is None else checkpoint.owner,
            max_creating=max_creating,
            start_client=start_client,
            prepare=prepare_sandbox,
            take_over=take_over,
            checkpoint=checkpoint,
        )
        self._pools: dict[str, Pool] = {}
        """By profile, and by profile and image."""
        self._refused: dict[str, PolicyError] = {}
        """Profiles that this backend can't serve."""
        self._add_pools(profiles)
        self._tools = tools
        self.default_timeout_s = self._pool(default_profile).config.execution_timeout_s

    def _add_pools(self, profiles: Mapping[str, SandboxConfig]) -> None:
        for name, config in profiles.items():
            if config.name != name:
                raise ConfigError(
                    f"profile {name!r} has the name {config.name!r} in its settings", hint=f"set name: {name}"
                )
            try:
                self._pools[name] = Pool(config, self._provisioner, self._events)
            except PolicyError as error:  # of no matter to those who use another one
                self._refused[name] = error

    # ------------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def start(self, profiles: Sequence[str] | None = None) -> None:
        """Make the warm sandboxes of these profiles (the default one), in parallel; others when first asked for.

        Raises:
            ProvisionError, PolicyError: they can't be made; nothing of them is left.
            UnknownNameError: there is no such profile.
        """
        pools = [self._pool(name) for name in (profiles if profiles is not None else [self.default_profile])]
        try:
            async with asyncio.TaskGroup() as group:
                for pool in pools:
                    group.create_task(pool.start())
        except BaseException as error:
            await self.aclose()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0]  # noqa: B904 - the group adds nothing
            raise

    async def take_over(self) -> list[Slot]:
        """Return the slots that the driver before us held, by its checkpoint, with all that runs there. Call it first.

        What the checkpoint says was being made or ended when it died is ended. What has ended by itself is forgotten.
        Each slot is given once: another call gives what those before it could not, and none after one that succeeded.

        Raises:
            UsageError: there is no checkpoint.
            InfraError, PolicyError: a sandbox can't be had now. It stays in the checkpoint; the others are ours, and
                the next call that succeeds gives their slots too.
        """
        checkpoint = self._provisioner.checkpoint
        if checkpoint is None:
            raise UsageError("take_over needs a checkpoint", hint="pass checkpoint= to tool_backend()")
        failure: HermesError | None = None
        for saved in [*self._inherited.values()]:
            if saved.backend != self.backend.name or saved.profile not in self._pools:
                log.warning("sandbox %s of the checkpoint is of backend %s, profile %s: left alone", *_about(saved))
                continue
            try:
                self._taken += await self._take_one(saved)
            except SandboxLost as error:
                log.warning("sandbox %s of the checkpoint has ended: %s", saved.sandbox_id, error.message)
                del self._inherited[saved.creation_id]
                checkpoint.give_up(saved)
            except (InfraError, PolicyError) as error:
                failure = failure or error
        await self._end_orphans(checkpoint)
        if failure is not None:
            raise failure
        slots, self._taken = self._taken, []
        return slots

    async def _take_one(self, saved: SavedSandbox) -> list[Slot]:
        leases = await self._pools[saved.profile].take_over(saved)
        del self._inherited[saved.creation_id]  # a second connection to its guest would fight ours
        self._leases |= {(lease.slot.slot_id, lease.slot.generation): lease for lease in leases}
        for lease in leases:
            for process_id in lease.watches:
                self._watchers.go_on(lease, process_id)
        return [lease.slot for lease in leases]

    async def _end_orphans(self, checkpoint: Checkpoint) -> None:
        """End the sandboxes that no driver will use any more; others of this owner belong to other drivers."""
        left = {creation_id for creation_id, backend in checkpoint.orphans.items() if backend == self.backend.name}
        if not left:
            return
        for info in await self.backend.list(checkpoint.owner):
            if info.creation_id in left:
                log.warning("sandbox %s was being made or ended when its driver died, and is ended", info.sandbox_id)
                await self.backend.terminate_id(info.sandbox_id)
        for creation_id in left:
            del checkpoint.orphans[creation_id]
        checkpoint.save()

    async def aclose(self, *, keep: bool = False) -> None:
        """End all sandboxes, in parallel; nothing is left when it returns. Idempotent, and completes if cancelled.

        Args:
            keep: let those that can be taken over live, for a driver after us or until their `orphan_ttl_s` is over.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(keep), name="close the tool backend")
        await asyncio.shield(self._closing)

    async def _close(self, keep: bool) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tasks.aclose())
            group.create_task(self._watchers.aclose())
            for pool in self._pools.values():
                group.create_task(pool.aclose(keep=keep))
        await self._provisioner.aclose()
        self._leases.clear()
        if self._on_closed is not None:
            self._on_closed(self)

    # ------------------------------------------------------------------ leases

    async def acquire(
        self,
        trajectory_id: str | None = None,
        *,
        profile: str | None = None,
        image: str | None = None,
        group: str | None = None,
        verification: bool = False,
        apart_from: str | None = None,
        timeout_s: float | None = None,
    ) -> Slot:
        """Return a slot of the profile, in order of arrival; the caller releases it.

        Args:
            trajectory_id: who the slot is for; a new id if None.
            image: what the sandbox is made from in place of the profile's own image. Each image has a pool of its own,
                with the profile's other settings and nothing kept warm, under the profile's name and the image's.
            group: slots of one group are placed on one sandbox where they fit.
            verification: may take the slots that are reserved for verification; gets a pristine one.
            apart_from: the id of a sandbox that it is not placed on while another one has a vacant slot.
            timeout_s: how long to wait; the profile's `acquire_timeout_s` if None.

        Raises:
            AcquireTimeout: no slot became free in time.
            ProvisionError, PolicyError: no sandbox can be made, and there is none to wait for.
            CostLimitReached: the profile's `max_cost` is spent.
            UnknownNameError: there is no such profile.
            ConfigError: the profile can't be had with another image.
        """
        name = profile or self.default_profile
        pool = self._pool(name) if image is None else self._pool_of_image(name, image)
        limit = pool.config.acquire_timeout_s if timeout_s is None else check_time_limit(timeout_s)
        lease = await pool.acquire(
            trajectory_id or uuid.uuid4().hex,
            group=group,
            verification=verification,
            timeout_s=limit,
            apart_from=apart_from,
        )
        self._leases[lease.slot.slot_id, lease.slot.generation] = lease
        return lease.slot

    async def release(self, slot: Slot, *, reset_workspace: bool = False) -> None:
        """End the lease: its processes are killed and, if asked, its files removed, with proof.

        Completes in the background when the caller is cancelled. Idempotent; releasing a slot that was lost with its
        sandbox is fine. A slot that can't be proved clean is never leased again: its sandbox is replaced.
        """
        lease = self._leases.pop((slot.slot_id, slot.generation), None)
        if lease is None:
            return
        await asyncio.shield(self._pools[slot.profile].release(lease, reset=reset_workspace))

    @asynccontextmanager
    async def lease(
        self,
        trajectory_id: str | None = None,
        *,
        profile: str | None = None,
        image: str | None = None,
        group: str | None = None,
        verification: bool = False,
        apart_from: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Slot]:
        """`acquire`, and always `release(reset_workspace=True)` at the end of the block."""
        slot = await self.acquire(
            trajectory_id,
            profile=profile,
            image=image,
            group=group,
            verification=verification,
            apart_from=apart_from,
            timeout_s=timeout_s,
        )
        try:
            yield slot
        finally:
            await self.release(slot, reset_workspace=True)

    def commands(self, slot: Slot, *, around: Around | None = None) -> SlotCommands:
        """Return what can be done in the slot until it is released.

        Args:
            around: makes of the `call` that carries each command out another one, to hear of what goes wrong there.

        Raises:
            StaleSlotError: it was released.
        """
        return self._lease(slot).commands(around=around)

    def preparation(self, slot: Slot, *, around: Around | None = None) -> SlotCommands:
        """Return the commands of the preparation user on the slot's sandbox, until the slot is released.

        Args:
            around: as of `commands`.

        Raises:
            StaleSlotError: it was released.
            PolicyError: the slot is root, who is above that user.
        """
        lease = self._lease(slot)
        if lease.config.slot_user is SlotUser.ROOT:
            raise PolicyError(
                "the slot is root: nothing in its sandbox is out of its reach, a preparation neither",
                hint="use the slot's own commands, work in a fresh slot, or leave out slot_user: root",
                sandbox_id=slot.sandbox_id,
                slot_id=slot.slot_id,
            )
        return lease.commands(PREPARE, around)

    def missing(self, slot: Slot) -> tuple[str, ...]:
        """Say what can't be done in the slot because its sandbox has no guest; empty where it has one.

        Raises:
            StaleSlotError: it was released.
        """
        return self._lease(slot).pooled.client.missing

    async def kill_everything(self, slot: Slot) -> None:
        """Kill every process of the slot; all are dead when it returns.

        Raises:
            StaleSlotError: it was released.
            InfraError: the sandbox can't be reached.
            SlotUnclean: that they are dead can't be proved, within two minutes; the slot can't be used any more.
        """
        lease = self._lease(slot)
        await lease.call(lease.pooled.client.kill_slot, lease.seat.index)

    async def empty(self, slot: Slot) -> None:
        """Kill every process of the slot, and remove its files. The lease goes on.

        Raises:
            StaleSlotError, InfraError, SlotUnclean: as `kill_everything` does.
        """
        lease = self._lease(slot)
        await lease.call(lease.pooled.client.reset_slot, lease.seat.index)

    async def prepare(self, slot: Slot, key: str, build: Build, *, private: bool = False) -> str:
        """Return the directory that `build` fills as the preparation user, once per sandbox and key.

        Slots read it and can't write it; with `private` they can't read it either. While it is being built, everyone
        who asks for it waits; its failure is everyone's, removes the directory, and the next call tries again.

        Raises:
            UsageError: the key can't be a file's name.
            StaleSlotError: the slot was released.
            Exception: as `build` raised it.
        """
        lease = self._lease(slot)
        check_key(key)
        return await lease.call(prepare, self._tasks, lease.pooled, key, build, private=private)

    @asynccontextmanager
    async def processor(self, slot: Slot, *, alone: bool = False) -> AsyncIterator[None]:
        """Hold one of the processors of the slot's sandbox while the block runs, or all of them; waits for its turn.

        For work that keeps a processor busy. Where more of that runs at a time than there are processors, all of it
        takes longer together than one after another, and what has a time limit misses it.

        Raises:
            StaleSlotError: the slot was released, before or meanwhile.
            SandboxLost: its sandbox is gone.
        """
        lease = self._lease(slot)
        async with lease.pooled.processors.hold(alone=alone):
            lease.check()
            yield

    # ------------------------------------------------------------------ background processes

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Have `subscriber(update)` awaited for every update of a watched process; the returned function ends that.

        Updates of one process are at least 30 seconds apart, its end included, and none is delivered twice, nor again
        by a driver that takes over.
        """
        self._watchers.subscribers.append(subscriber)
        return lambda: self._watchers.subscribers.remove(subscriber)

    def watch(self, slot: Slot, process_id: str, interval_s: float) -> float:
        """Deliver what is new about a background process every so many seconds, and its end; return the interval used.

        Raises:
            StaleSlotError: the slot was released.
        """
        return self._watchers.begin(self._lease(slot), process_id, interval_s)

    # ------------------------------------------------------------------ tools

    def tool(self, name: str) -> Tool:
        """Return the slot tool of that name, or the registered one that runs in a sandbox.

        Raises:
            UnknownNameError: there is none.
        """
        if (tool := SLOT_TOOLS.get(name)) is not None:
            return tool
        if name in self._tool_names():
            return self._tools.get(name)
        raise UnknownNameError("tool of the slot", name, self._tool_names())

    def _tool_names(self) -> set[str]:
        return {*SLOT_TOOLS, *(each for each in self._tools.names() if self._tools.get(each).where == "sandbox")}

    async def execute(
        self, slot: Slot, tool: str | Tool, args: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> ExecutionResult:
        """Call a tool in the slot: a slot tool, or one of the registry that runs in a sandbox.

        Args:
            tool: its name; or the tool itself, since a slot tool and a model's tool may have one name (`read_file`).
            timeout_s: the call's time limit; the profile's `execution_timeout_s` if None.

        Raises:
            InfraError: the sandbox or the way to it failed; carries the ids of sandbox, slot and trajectory.
            StaleSlotError: the slot was released.
            UsageError: the time limit is not a positive number.
        """
        lease = self._lease(slot)
        if timeout_s is not None:
            check_time_limit(timeout_s)
        began = time.monotonic()
        with lease.executing():
            result = await self._call(lease, tool, args, timeout_s)
        return replace(
            result,
            slot_id=slot.slot_id,
            execution_id=result.execution_id or uuid.uuid4().hex,
            metadata={"duration_s": time.monotonic() - began, **result.metadata},
        )

    async def _call(
        self, lease: Lease, wanted: str | Tool, args: Mapping[str, Any], timeout_s: float | None
    ) -> ExecutionResult:
        try:
            tool = self.tool(wanted) if isinstance(wanted, str) else wanted
            if tool.where != "sandbox":
                raise UnknownNameError("tool of the slot", tool.name, self._tool_names())
        except UnknownNameError as error:
            return ExecutionResult(False, error=str(error), error_kind=ErrorKind.COMMAND)
        limit = tool.time_limit(timeout_s, lease.config.execution_timeout_s)
        context = CallContext(
            trajectory_id=lease.slot.trajectory_id,
            timeout_s=limit,
            commands=lease.commands(),
            slot=lease.slot,
            state=lease.state,
            watch=functools.partial(self._watchers.begin, lease),
        )
        try:
            async with asyncio.timeout(limit + lease.config.orphan_ttl_s + OVERTIME_S):
                return await self._tools.call(tool, context, args)
        except TimeoutError:
            log.error("tool %s did not keep its time limit of %g s and was cut off", tool.name, limit)
            error_text = f"{tool.name} was cut off: it did not keep its time limit of {limit:g} s"
            return ExecutionResult(False, error=error_text, error_kind=ErrorKind.TIMEOUT, metadata={"timed_out": True})

    async def execute_batch(
        self, requests: Sequence[tuple[Slot, str, Mapping[str, Any]]], *, timeout_s: float | None = None
    ) -> list[ExecutionResult]:
        """Call many tools at the same time, in many slots; the results are in the order of the requests.

        Each request fails by itself: whatever `execute` would raise becomes its failed result, with `error_kind`
        `infra` for what is ours and `policy` for a released slot.

        Raises:
            UsageError: the time limit is not a positive number.
        """
        if timeout_s is not None:
            check_time_limit(timeout_s)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._execute_one(*request, timeout_s)) for request in requests]
        return [task.result() for task in tasks]

    async def _execute_one(
        self, slot: Slot, tool_name: str, args: Mapping[str, Any], timeout_s: float | None
    ) -> ExecutionResult:
        try:
            return await self.execute(slot, tool_name, args, timeout_s=timeout_s)
        except StaleSlotError as error:
            return _failed(slot, error, ErrorKind.POLICY)
        except InfraError as error:
            return _failed(slot, error, ErrorKind.INFRA)
        except Exception as error:
            log.exception("a request of a batch failed in slot %s", slot.slot_id)
            return _failed(slot, error, ErrorKind.INFRA)

    # ------------------------------------------------------------------ what there is

    def get_status(self) -> dict[str, Any]:
        """Count sandboxes, slots and waiters: over all profiles, and per profile under `pools`."""
        pools = {name: pool.status() for name, pool in self._pools.items()}
        summed = ("sandboxes", "healthy_sandboxes", "max_sandboxes", "total_slots", "available_slots", "waiting")
        return {
            **{key: sum(status[key] for status in pools.values()) for key in summed},
            "slots_per_sandbox": pools[self.default_profile]["slots_per_sandbox"],
            "default_profile": self.default_profile,
            "profiles": list(pools),
            "active_pools": [name for name, pool in self._pools.items() if pool.begun],
            "pools": pools,
        }

    def usage(self) -> dict[str, SandboxUsage]:
        """Return what the sandboxes of each used profile have cost so far, including those of tasks' own images."""
        return {pool.meter.profile: pool.meter.usage() for pool in self._pools.values() if pool.begun}

    def list_profiles(self) -> dict[str, dict[str, Any]]:
        """Return the profiles' settings, and whether each has been started."""
        return {
            name: {
                "image": pool.config.image,
                "gpu": getattr(pool.config, "gpu", None),
                "cpu": pool.config.cpu,
                "memory": pool.config.memory,
                "slots_per_sandbox": pool.slots,
                "min_sandboxes": pool.config.min_sandboxes,
                "max_sandboxes": pool.config.max_sandboxes,
                "active": pool.begun,
            }
            for name, pool in self._pools.items()
        }

    def _pool(self, profile: str) -> Pool:
        """Return the pool of a profile.

        Raises:
            UnknownNameError: there is no such profile.
            PolicyError: this backend can't serve it.
        """
        if (refused := self._refused.get(profile)) is not None:
            raise refused.twin() from refused
        if profile not in self._pools:
            raise UnknownNameError("profile", profile, [*self._pools, *self._refused])
        return self._pools[profile]

    def _pool_of_image(self, profile: str, image: str) -> Pool:
        """Return the pool of a profile with another image, which is made when it is first asked for.

        Raises:
            UnknownNameError, PolicyError: as `_pool` does.
            ConfigError: the profile can't be had with another image.
        """
        pool, name = self._pool(profile), f"{profile}@{image}"
        if name not in self._pools:
            changes = {"name": name, "image": image, "min_sandboxes": 0}
            settings = {**pool.config.model_dump(exclude_unset=True), **changes}
            config = validated(type(pool.config), settings, f"profile {name!r}")
            self._pools[name] = Pool(config, self._provisioner, self._events, pool.meter)
        return self._pools[name]

    def _lease(self, slot: Slot) -> Lease:
        lease = self._leases.get((slot.slot_id, slot.generation))
        if lease is None:
            raise stale(slot)
        return lease


def _about(saved: SavedSandbox) -> tuple[str, str, str]:
    return saved.sandbox_id, saved.backend, saved.profile


def check_time_limit(timeout_s: float) -> float:
    """Return the time limit in seconds; fractions stay.

    Raises:
        UsageError: it is not a positive, finite number.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise UsageError(f"a time limit is a positive number of seconds, not {timeout_s!r}", hint="leave it out")
    return timeout_s


def _failed(slot: Slot, error: Exception, kind: ErrorKind) -> ExecutionResult:
    text = str(error) if isinstance(error, HermesError) else f"{type(error).__name__}: {error}"
    return ExecutionResult(False, error=text, slot_id=slot.slot_id, execution_id=uuid.uuid4().hex, error_kind=kind)
