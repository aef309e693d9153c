"""The tool backend, which is how callers use sandboxes: acquire a slot, call tools in it, release it."""

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
from typing import Any, Self, TypedDict, Unpack, cast

from hermes_core.aio import SingleFlight, TaskSet, together
from hermes_core.errors import (
    ConfigError,
    Disturbed,
    ErrorKind,
    HermesError,
    ImageError,
    InfraError,
    PolicyError,
    SandboxLost,
    StaleSlotError,
    UnknownNameError,
    UsageError,
    explain_errors,
    plugin_fault,
)
from hermes_core.events import Events
from hermes_core.sandbox.as_user import AsUser
from hermes_core.sandbox.commands import PREPARE, Cwd, ExecutionResult, Operation, Slot, SlotCommands, start_directory
from hermes_core.sandbox.contract import (
    Backend,
    CanBuild,
    Isolation,
    Network,
    NetworkPlan,
    Phase,
    SandboxConfig,
)
from hermes_core.sandbox.egress.traffic import Traffic
from hermes_core.sandbox.images import Image, ImageBuild
from hermes_core.sandbox.pool.checkpoint import Checkpoint, SavedSandbox
from hermes_core.sandbox.pool.cost import SandboxUsage
from hermes_core.sandbox.pool.leases import Lease, stale
from hermes_core.sandbox.pool.pool import Pool
from hermes_core.sandbox.pool.preparation import Build, check_key, prepare
from hermes_core.sandbox.pool.profile_check import check_ways_out, resolve_isolation
from hermes_core.sandbox.pool.provision import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    ClientFactory,
    PrepareSandbox,
    Provisioner,
    retryable,
    start_guest,
)
from hermes_core.sandbox.pool.slot_network import SlotNetwork
from hermes_core.sandbox.pool.watches import Subscriber, Watchers
from hermes_core.sandbox.promises import list_sandboxes
from hermes_core.tools.base import CallContext, Tool
from hermes_core.tools.registry import ToolRegistry
from hermes_core.tools.slot_tools import SLOT_TOOLS
from hermes_core.validation import validate_data

log = logging.getLogger(__name__)

OVERTIME_S = 15.0
"""Seconds that a tool may take beyond its time limit and the time in which a lost channel may come back. Then it is
cancelled."""


class SlotRequest(TypedDict, total=False):
    """The keyword arguments of `ToolBackend.acquire`, which explains them."""

    profile: str | None
    image: Image | None
    cwd: str | Cwd | None
    env: Mapping[str, str] | None
    as_image: bool
    network: Network | NetworkPlan | None
    phase: Phase
    traffic: Traffic | None
    group: str | None
    verification: bool
    apart_from: str | None
    timeout_s: float | None


class ToolBackend:
    """The slots of one backend, by profile. This is an async context manager.

    Args:
        profiles: profiles by name. Each has a pool of its own, which is warmed when it is started or first used.
        tools: the tools that `execute` knows in addition to the slot tools `bash`, `read_file` and `write_file`.
        isolation: the minimum isolation of every slot. If the backend does not declare this level, its next stronger
            level is used.
        owner: the owner of the sandboxes, for their labels.
        events: gets the events of sandboxes and of watched processes. The rollout itself announces tool calls.
        max_creating: maximum number of sandboxes that are being made at the same time, over all profiles.
        start_client: returns the client of a new sandbox.
        prepare_sandbox: called with each new sandbox whose profile has the network `setup`, before the network is cut.
            If the backend can make snapshots and the profile asks for them, it is called only with the sandbox from
            which the others are made.
        take_over: continue with the sandboxes that an earlier driver of this owner left, when that driver gives no more
            sign of life. The sandboxes are emptied. This is not possible with a checkpoint, which keeps everything in
            them running.
        checkpoint: file with the owner, and with the state that a later driver needs to take over the sandboxes.
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
        self.isolation = isolation = resolve_isolation(backend, isolation, profiles.values())
        self.default_profile = default_profile
        self._events = events or Events()
        self._watchers = Watchers(self._events)
        self._tasks = TaskSet()
        self._leases: dict[tuple[str, int], Lease] = {}
        self._closing: asyncio.Task[None] | None = None
        # Sandboxes of the previous driver that were not taken over yet, and that the checkpoint still has to name.
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
        """The pools, by profile. A pool for another image or network has a name made from both."""
        self._refused: dict[str, PolicyError] = {}
        """Profiles that this backend can't serve."""
        self._add_pools(profiles)
        self._images: SingleFlight[str | ImageError] = SingleFlight("the image", keep=True, go_on=True)
        """The names of images that are ready, or the errors of images that can't be built or fetched."""
        self._failing: dict[tuple[str, Image], float] = {}
        """For each image that can't be made ready, the loop's time of the first failure in a row."""
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
            except PolicyError as error:  # this matters only to users of this profile
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
        """Make the warm sandboxes of these profiles (by default, of the default profile), in parallel. The sandboxes of
        other profiles are made when they are first needed.

        Raises:
            ProvisionError, PolicyError: the sandboxes can't be made; none is left behind.
            UnknownNameError: there is no such profile.
        """
        pools = [self._pool(name) for name in (profiles if profiles is not None else [self.default_profile])]
        try:
            async with together() as group:
                for pool in pools:
                    group.create_task(pool.start())
        except BaseException:
            await self.aclose()
            raise

    async def take_over(self) -> list[Slot]:
        """Return the slots that the previous driver held according to its checkpoint, with everything that runs in
        them. Call this before anything else.

        Sandboxes that were being made or ended when that driver died are ended. Sandboxes that have ended by themselves
        are forgotten. Each slot is returned once: after a failure, the next call returns the slots that the earlier
        calls could not; after a success, further calls return none.

        Raises:
            UsageError: there is no checkpoint.
            InfraError, PolicyError: a sandbox can't be taken over now. It stays in the checkpoint. The other sandboxes
                are taken over, and the next successful call returns their slots, too.
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
        del self._inherited[saved.creation_id]  # a second connection to its guest would disturb ours
        self._leases |= {(lease.slot.slot_id, lease.slot.generation): lease for lease in leases}
        for lease in leases:
            if (plan := lease.config.network_plan).filters:
                lease.network = SlotNetwork(plan, Traffic())
            for process_id in lease.watches:
                self._watchers.go_on(lease, process_id)
        return [lease.slot for lease in leases]

    async def _end_orphans(self, checkpoint: Checkpoint) -> None:
        """End the sandboxes that no driver will use any more. Other sandboxes of this owner belong to other drivers."""
        left = {creation_id for creation_id, backend in checkpoint.orphans.items() if backend == self.backend.name}
        if not left:
            return
        for info in await list_sandboxes(self.backend, checkpoint.owner):
            if info.creation_id in left:
                log.warning("sandbox %s was being made or ended when its driver died, and is ended", info.sandbox_id)
                await self.backend.terminate_id(info.sandbox_id)
        for creation_id in left:
            del checkpoint.orphans[creation_id]
        checkpoint.save()

    async def aclose(self, *, keep: bool = False) -> None:
        """End all sandboxes, in parallel. All are gone when this returns. Idempotent. Completes even if cancelled.

        Args:
            keep: let sandboxes that can be taken over live, for a later driver or until their `orphan_ttl_s` is over.
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
        for lease in self._leases.values():
            if lease.network is not None:
                await lease.network.aclose()
        self._leases.clear()
        if self._on_closed is not None:
            self._on_closed(self)

    # ------------------------------------------------------------------ leases

    async def acquire(
        self,
        trajectory_id: str | None = None,
        *,
        profile: str | None = None,
        image: Image | None = None,
        cwd: str | Cwd | None = None,
        env: Mapping[str, str] | None = None,
        as_image: bool = False,
        network: Network | NetworkPlan | None = None,
        phase: Phase = Phase.AGENT,
        traffic: Traffic | None = None,
        group: str | None = None,
        verification: bool = False,
        apart_from: str | None = None,
        timeout_s: float | None = None,
    ) -> Slot:
        """Return a slot of the profile. Callers are served in order of arrival, and must release the slot.

        Args:
            trajectory_id: the trajectory that the slot is for; a new id if None.
            image: an image to use instead of the profile's own, by name or to be built. Each image has a pool of its
                own, with the profile's other settings and no warm sandboxes, named after the profile and the image.
            cwd: directory in which commands and tools start and at which relative paths begin, absolute or relative to
                the workspace; or `Cwd.IMAGE`. None is the workspace.
            env: environment variables of every command in the slot.
            as_image: whether commands have the variables of the image, too.
            network: the network policy, instead of the profile's own; or a policy for each phase, of what the profile's
                own permits. As with images, each kind of network has a pool of its own.
            phase: the phase whose policy the slot has at first; `enter_phase` changes it.
            traffic: counts what programs reach through the slot's proxy, if it has one.
            group: slots of one group are placed on one sandbox where possible.
            verification: whether the slot may come from those reserved for verification. It is then a pristine slot.
            apart_from: the id of a sandbox to avoid while another sandbox has a vacant slot.
            timeout_s: maximum wait in seconds; the profile's `acquire_timeout_s` if None. The wait begins when the
                image is ready. The build of the image has a time limit of its own.

        Raises:
            AcquireTimeout: no slot became free in time.
            ImageError: the image can't be built or fetched.
            ProvisionError, PolicyError: no sandbox can be made, and there is none to wait for.
            CostLimitReached: the profile's `max_cost` is spent.
            UnknownNameError: there is no such profile.
            ConfigError: the profile can't be used with another image.
        """
        name = profile or self.default_profile
        pool = self._pool(name)
        limit = pool.config.acquire_timeout_s if timeout_s is None else check_time_limit(timeout_s)
        if image is not None:
            image = await self._image_within(image, name, limit)
        plan = network if isinstance(network, NetworkPlan) else None
        if plan is not None:
            self._check_plan(name, plan)
        pool = self._pool_with(name, image, _of_sandbox(network))
        lease = await pool.acquire(
            trajectory_id or uuid.uuid4().hex,
            group=group,
            verification=verification,
            timeout_s=limit,
            apart_from=apart_from,
        )
        of_image = lease.slot.image.variables if as_image and lease.slot.image is not None else {}
        lease.cwd, lease.env = start_directory(cwd, lease.slot.image), {**of_image, **(env or {})}
        plan = pool.config.network_plan if plan is None else plan.within(self._pool(name).config.network_plan)
        if plan.filters:
            lease.network = SlotNetwork(plan, traffic or Traffic(), phase)
        self._leases[lease.slot.slot_id, lease.slot.generation] = lease
        return lease.slot

    def _check_plan(self, profile: str, plan: NetworkPlan) -> None:
        if plan.filters:
            check_ways_out(self.backend, self.isolation, self._pool(profile).config)

    def check_slot(
        self, *, profile: str | None = None, image: Image | None = None, network: Network | NetworkPlan | None = None
    ) -> None:
        """Refuse arguments with which `acquire` could never succeed. This makes no sandbox.

        Raises:
            UnknownNameError, PolicyError, ConfigError: as `acquire`.
        """
        name = profile or self.default_profile
        check_builds(self.backend, image)
        named = "built" if image is not None and not isinstance(image, str) else image
        if isinstance(network, NetworkPlan):
            self._check_plan(name, network)
        config = self._config_with(name, named, _of_sandbox(network))
        if config.name != name:
            self._provisioner.check(config)

    async def prepare_image(self, image: Image, *, profile: str | None = None) -> str:
        """Build or fetch an image before a slot needs it, once for all callers. Return its name.

        The build goes on if the caller is cancelled, and ends with this tool backend. After an `ImageError`, the image
        is not tried again, and all callers get this error. A backend that builds no images fetches them when it makes
        sandboxes.

        Raises:
            ImageError: the image can't be built or fetched.
            ProvisionError: the backend, or a registry, failed.
            PolicyError: the backend builds no images.
            UnknownNameError: there is no such profile.
        """
        check_builds(self.backend, image)
        name = profile or self.default_profile
        config = self._pool(name).config
        if not self.backend.capabilities.builds:
            assert isinstance(image, str)
            return image
        made = await self._images.get(self._tasks, functools.partial(self._make_image, image, config), (name, image))
        if isinstance(made, ImageError):
            raise made.twin() from made
        return made

    async def _make_image(self, image: Image, config: SandboxConfig) -> str | ImageError:
        try:
            with explain_errors(functools.partial(plugin_fault, self.backend, "prepare_image")):
                return await cast(CanBuild, self.backend).prepare_image(image, config)
        except ImageError as error:
            return error  # the error is kept like the name of an image

    async def _image_within(self, image: Image, profile: str, patience_s: float) -> str:
        """Return the name of an image that is ready.

        Retry transient failures until `patience_s` after the first failure in a row. Later callers share this deadline.
        """
        loop, pause = asyncio.get_running_loop(), FIRST_PAUSE_S
        while True:
            try:
                name = await self.prepare_image(image, profile=profile)
            except InfraError as error:
                if not retryable(error):
                    raise
                if (profile, image) not in self._failing:
                    self._failing[profile, image] = loop.time()
                    message = "image %s could not be made, and is tried again for %g s: %s"
                    log.warning(message, image, patience_s, error)
                if loop.time() + pause > self._failing[profile, image] + patience_s:
                    raise
            else:
                self._failing.pop((profile, image), None)
                return name
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def release(self, slot: Slot, *, reset_workspace: bool = False) -> None:
        """End the lease. Kill the slot's processes, remove its files if `reset_workspace` is set, and verify both.

        If the caller is cancelled, this completes in the background. Idempotent. A slot that was lost with its sandbox
        may be released, too. A slot that can't be proved clean is never leased again, and its sandbox is replaced.
        """
        lease = self._leases.pop((slot.slot_id, slot.generation), None)
        if lease is None:
            return
        released = self._pools[slot.profile].release(lease, reset=reset_workspace)
        if lease.network is not None:
            self._tasks.spawn(lease.network.aclose(), f"close the proxy of {slot.slot_id}")
        await asyncio.shield(released)

    @asynccontextmanager
    async def lease(self, trajectory_id: str | None = None, **request: Unpack[SlotRequest]) -> AsyncIterator[Slot]:
        """Acquire a slot, as `acquire` does, and release it with `reset_workspace=True` at the end of the block."""
        slot = await self.acquire(trajectory_id, **request)
        try:
            yield slot
        finally:
            await self.release(slot, reset_workspace=True)

    def commands(self, slot: Slot) -> SlotCommands:
        """Return the commands of the slot, which work until the slot is released.

        Raises:
            StaleSlotError: the slot was released.
        """
        return self._lease(slot).commands

    def preparation(self, slot: Slot) -> SlotCommands:
        """Return the commands of the preparation user on the slot's sandbox, which work until the slot is released.

        Raises:
            StaleSlotError: the slot was released.
            PolicyError: the slot's user is root, and the preparation user can't be protected from root.
        """
        lease = self._lease(slot)
        if lease.config.root_of_sandbox(self.isolation):
            raise PolicyError(
                "the slot is root: nothing in its sandbox is out of its reach, a preparation neither",
                hint="use the slot's own commands, work in a fresh slot, or leave out slot_user: root",
                sandbox_id=slot.sandbox_id,
                slot_id=slot.slot_id,
            )
        return lease.pooled.prepare_commands(lease.call)

    def missing(self, slot: Slot) -> tuple[str, ...]:
        """Return the operations that the slot lacks because its sandbox has no guest; empty if the sandbox has a guest.

        Raises:
            StaleSlotError: the slot was released.
        """
        return self._lease(slot).pooled.client.missing

    async def kill_everything(self, slot: Slot) -> None:
        """Kill every process of the slot. All are dead when it returns.

        Raises:
            StaleSlotError: the slot was released.
            InfraError: the sandbox can't be reached.
            SlotUnclean: it can't be proved within two minutes that all processes are dead. The slot can't be used any
                more.
        """
        lease = self._lease(slot)
        await lease.call(Operation.of(lease.pooled.client.kill_slot, lease.seat.index))
        await lease.note_kill()

    async def enter_phase(self, slot: Slot, phase: Phase) -> None:
        """Apply the network policy of a phase to the slot. That of the verification applies when all processes of the
        slot are killed next, because processes of the agent would have it, too.

        Raises:
            StaleSlotError: the slot was released.
        """
        if (network := self._lease(slot).network) is not None:
            await network.enter(phase)

    async def empty(self, slot: Slot) -> None:
        """Kill every process of the slot, and remove its files. The lease goes on.

        Raises:
            StaleSlotError, InfraError, SlotUnclean: as `kill_everything` does.
        """
        lease = self._lease(slot)
        await lease.call(Operation.of(lease.pooled.client.reset_slot, lease.seat.index))
        await lease.note_kill()

    async def check_room(self, slot: Slot, *, preparation: bool = False) -> None:
        """Find out why an operation in the slot ran out of disk space. If other slots have filled the sandbox's disk,
        no more slots of this sandbox are leased.

        Args:
            preparation: whether the operation was the preparation user's. Then the slot itself may have filled the
                disk.

        Raises:
            StaleSlotError, InfraError: as `kill_everything` does.
            Disturbed: the disk is full, and not because of this slot.
        """
        lease = self._lease(slot)
        pooled, own = lease.pooled, lease.seat.index
        for index in (PREPARE, own) if preparation else (own,):
            if not await lease.call(Operation.of(pooled.client.is_crowded, index)):
                return
        # Processes may hold deleted files open, which take up room until they end.
        await lease.call(Operation.of(pooled.client.kill_slot, own))
        await lease.note_kill()
        if await lease.call(Operation.of(pooled.client.is_crowded, own)):
            error = Disturbed(
                "other slots have filled the disk of the sandbox",
                hint="give the profile more room (tmpfs_size) or fewer slots_per_sandbox",
                sandbox_id=pooled.sandbox.id,
                slot_id=slot.slot_id,
            )
            self._pools[slot.profile].quarantine(pooled, error)
            raise error

    async def prepare(self, slot: Slot, key: str, build: Build, *, private: bool = False) -> str:
        """Return a directory that `build` fills as the preparation user, once per sandbox and key.

        Slots can read the directory but not write it; with `private`, they can't read it either. Callers with the same
        key wait while it is being built. If `build` fails, all of them get the error, the directory is removed, and the
        next call tries again.

        Raises:
            UsageError: the key can't be a file name.
            StaleSlotError: the slot was released.
            Exception: as `build` raised it.
        """
        lease = self._lease(slot)
        check_key(key)
        return await lease.call(Operation.of(prepare, self._tasks, lease.pooled, key, build, private=private))

    @asynccontextmanager
    async def processor(self, slot: Slot, *, alone: bool = False) -> AsyncIterator[None]:
        """Hold one of the processors of the slot's sandbox while the block runs, or all of them if `alone` is set.
        Entering the block waits until they are free.

        Use this for work that keeps a processor busy. If more such jobs run at the same time than there are processors,
        they take longer than one after another, and miss time limits.

        Raises:
            StaleSlotError: the slot was released, before or during the wait.
            SandboxLost: the slot's sandbox is gone.
        """
        lease = self._lease(slot)
        async with lease.pooled.processors.hold(alone=alone):
            lease.check()
            yield

    # ------------------------------------------------------------------ background processes

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Await `subscriber(update)` for every update of a watched process. Return a function that ends the
        subscription.

        Updates of one process are at least 30 seconds apart, including the update at the process's end. No update is
        delivered twice, even if another driver takes over.
        """
        self._watchers.subscribers.append(subscriber)
        return lambda: self._watchers.subscribers.remove(subscriber)

    def watch(self, slot: Slot, process_id: str, interval_s: float) -> float:
        """Deliver updates about a background process at this interval, and one at its end. Return the interval in
        seconds that is used.

        Raises:
            StaleSlotError: the slot was released.
        """
        return self._watchers.begin(self._lease(slot), process_id, interval_s)

    # ------------------------------------------------------------------ tools

    def tool(self, name: str) -> Tool:
        """Return the slot tool with this name, or the registered tool with this name that runs in a sandbox.

        Raises:
            UnknownNameError: there is no such tool.
            UsageError: the tool is a driver tool.
        """
        if (tool := SLOT_TOOLS.get(name)) is not None:
            return tool
        if name in self._tools:
            return _in_sandbox(self._tools.get(name))
        raise UnknownNameError("tool of the slot", name, self._tool_names())

    def _tool_names(self) -> set[str]:
        return {*SLOT_TOOLS, *(name for name in self._tools.names() if self._tools.get(name).where == "sandbox")}

    async def execute(
        self,
        slot: Slot,
        tool: str | Tool,
        args: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        user: str | None = None,
    ) -> ExecutionResult:
        """Call a tool in the slot: a slot tool, or a registered one that runs in a sandbox.

        Args:
            tool: the tool's name, or the tool itself, because a slot tool and a model's tool can have the same name
                (`read_file`).
            timeout_s: the call's time limit; the profile's `execution_timeout_s` if None.
            user: the user as which the tool runs, in a slot whose own user is root. None is the slot's own user.

        Raises:
            InfraError: the sandbox or the connection to it failed. The error has the ids of sandbox, slot and
                trajectory.
            StaleSlotError: the slot was released.
            UsageError: the time limit is not a positive number.
        """
        lease = self._lease(slot)
        if timeout_s is not None:
            check_time_limit(timeout_s)
        began = time.monotonic()
        with lease.executing():
            result = await self._call(lease, tool, args, timeout_s, user)
        return replace(
            result,
            slot_id=slot.slot_id,
            execution_id=result.execution_id or uuid.uuid4().hex,
            metadata={"duration_s": time.monotonic() - began, **result.metadata},
        )

    async def _call(
        self, lease: Lease, wanted: str | Tool, args: Mapping[str, Any], timeout_s: float | None, user: str | None
    ) -> ExecutionResult:
        try:
            tool = self.tool(wanted) if isinstance(wanted, str) else _in_sandbox(wanted)
        except UsageError as error:
            return ExecutionResult(False, error=str(error), error_kind=ErrorKind.COMMAND)
        limit = tool.time_limit(timeout_s, lease.config.execution_timeout_s)
        context = CallContext(
            trajectory_id=lease.slot.trajectory_id,
            timeout_s=limit,
            commands=lease.commands if user is None else AsUser(lease.commands, user),
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
        """Call many tools at the same time, in many slots. Return the results in the order of the requests.

        A failed request does not affect the others: an exception of `execute` becomes a failed result, with
        `error_kind` `infra` for our failures and `policy` for a released slot.

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
            return _failure(slot, error, ErrorKind.POLICY)
        except InfraError as error:
            return _failure(slot, error, ErrorKind.INFRA)
        except Exception as error:
            log.exception("a request of a batch failed in slot %s", slot.slot_id)
            return _failure(slot, error, ErrorKind.INFRA)

    # ------------------------------------------------------------------ what there is

    def get_status(self) -> dict[str, Any]:
        """Return the counts of sandboxes, slots and waiters: over all profiles, and per profile under `pools`."""
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
        """Return the cost so far of the sandboxes of each used profile, including those with images of their own."""
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
            PolicyError: this backend can't serve the profile.
        """
        if (refused := self._refused.get(profile)) is not None:
            raise refused.twin() from refused
        if profile not in self._pools:
            raise UnknownNameError("profile", profile, [*self._pools, *self._refused])
        return self._pools[profile]

    def _pool_with(self, profile: str, image: str | None, network: Network | None) -> Pool:
        """Return the pool of a profile with another image or network; None is the profile's own. The pool is made on
        first use.

        Raises:
            UnknownNameError, PolicyError: as `_pool` does.
            ConfigError: the profile can't be used with this image or network.
        """
        pool, config = self._pool(profile), self._config_with(profile, image, network)
        if config.name not in self._pools:
            self._pools[config.name] = Pool(config, self._provisioner, self._events, pool.meter)
        return self._pools[config.name]

    def _config_with(self, profile: str, image: str | None, network: Network | None) -> SandboxConfig:
        config, name, changes = self._pool(profile).config, profile, dict[str, Any]()
        if image is not None:
            name, changes["image"] = f"{name}@{image}", image
        if network not in (None, config.network):
            name = f"{name}, network {network}"
            none = {"allowed_hosts": (), "denied_hosts": (), "setup_network": None, "verify_network": None}
            changes |= {"network": network, **none}
        if not changes:
            return config
        changes |= {"name": name, "min_sandboxes": 0}
        return validate_data(type(config), {**config.model_dump(exclude_unset=True), **changes}, f"profile {name!r}")

    def _lease(self, slot: Slot) -> Lease:
        lease = self._leases.get((slot.slot_id, slot.generation))
        if lease is None:
            raise stale(slot)
        return lease


def _of_sandbox(network: Network | NetworkPlan | None) -> Network | None:
    """Return the network policy of the sandbox itself for the policies of a slot's phases."""
    if not isinstance(network, NetworkPlan):
        return network
    return Network.NONE if network.filters else network.agent.network


def check_builds(backend: Backend, image: Image | None) -> None:
    """Refuse an image that is to be built if the backend builds no images.

    Raises:
        PolicyError: the image is to be built, and the backend builds no images.
    """
    if isinstance(image, ImageBuild) and not backend.capabilities.builds:
        raise PolicyError(
            f"backend {backend.name!r} builds no images, and {image} is to be built",
            hint="use a backend that builds images, such as one with containers; name an image that exists; or see in "
            "the environment's settings (`hermes-rl envs NAME`) whether it works without",
        )


def _about(saved: SavedSandbox) -> tuple[str, str, str]:
    return saved.sandbox_id, saved.backend, saved.profile


def _in_sandbox(tool: Tool) -> Tool:
    """Return the tool, after a check that it runs in a sandbox.

    Raises:
        UsageError: the tool is a driver tool.
    """
    if tool.where == "driver":
        raise UsageError(
            f"{tool.name!r} is a driver tool: it runs in the driver's process, not in the slot",
            hint=f"call its function, or `runtime.tools.call(runtime.tools.get({tool.name!r}), CallContext(), …)`",
        )
    return tool


def check_time_limit(timeout_s: float) -> float:
    """Return the time limit in seconds, unchanged.

    Raises:
        UsageError: the time limit is not a positive, finite number.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise UsageError(f"a time limit is a positive number of seconds, not {timeout_s!r}", hint="leave it out")
    return timeout_s


def _failure(slot: Slot, error: Exception, kind: ErrorKind) -> ExecutionResult:
    text = str(error) if isinstance(error, HermesError) else f"{type(error).__name__}: {error}"
    return ExecutionResult(False, error=text, slot_id=slot.slot_id, execution_id=uuid.uuid4().hex, error_kind=kind)
