"""Makes and ends sandboxes. Creation survives lost answers of the provider, and leaves no sandbox behind."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Literal, cast

from hermes_core.aio import SingleFlight, TaskSet, alongside, complete
from hermes_core.errors import InfraError, NoPythonError, PolicyError, ProvisionError
from hermes_core.sandbox.commands import PREPARE
from hermes_core.sandbox.contract import (
    Backend,
    CanAttach,
    CanSnapshot,
    Isolation,
    Network,
    Phase,
    Sandbox,
    SandboxConfig,
    SandboxSpec,
    SlotUser,
)
from hermes_core.sandbox.direct.client import DirectClient
from hermes_core.sandbox.egress.traffic import Traffic
from hermes_core.sandbox.guest_client.client import GuestClient
from hermes_core.sandbox.guest_client.connection import GuestLife, GuestSettings
from hermes_core.sandbox.pool.adoption import Adoption, new_creation_id
from hermes_core.sandbox.pool.checkpoint import Checkpoint, SavedSandbox
from hermes_core.sandbox.pool.cost import Meter
from hermes_core.sandbox.pool.leases import Client, PooledSandbox
from hermes_core.sandbox.pool.preparation import NewSandbox
from hermes_core.sandbox.pool.profile_check import check_profile, slots_per_sandbox
from hermes_core.sandbox.pool.slot_network import SlotNetwork
from hermes_core.sandbox.promises import create_sandbox, list_sandboxes

log = logging.getLogger(__name__)

END_LIMIT_S = 60.0
"""Time limit in seconds for the end of a sandbox. After that, its watchdog will end it."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
"""The pause between two attempts doubles from the first to the longest, in seconds."""

SLOW_S = 60.0
"""Seconds until the first warning that a sandbox is still being made. Each further warning comes after twice the time.
"""

KeepTrying = Callable[[Exception], bool]
SetUp = Callable[[PooledSandbox], Awaitable[None]]

ClientFactory = Callable[[Sandbox, GuestSettings], Awaitable[Client]]

PrepareSandbox = Callable[[NewSandbox], Awaitable[None]]
"""Puts files into a new sandbox that its slots need and can't download without a network."""


async def start_guest(sandbox: Sandbox, settings: GuestSettings) -> Client:
    """Start the guest in a sandbox.

    Raises:
        NoPythonError: the sandbox has no Python.
        PolicyError: the sandbox can't grant the isolation.
        InfraError: the sandbox can't be reached.
    """
    return await GuestClient.start(sandbox, settings)


def retryable(error: Exception) -> bool:
    """Return whether another attempt may succeed."""
    return isinstance(error, InfraError) and error.retryable


async def _end_preparing(pooled: PooledSandbox) -> None:
    if pooled.preparing is not None:
        await pooled.preparing.aclose()


class Provisioner:
    """Makes the sandboxes of one tool backend, at most `max_creating` of them at a time.

    Args:
        prepare: prepares each new sandbox of a profile with network `setup`; with snapshots, only the first sandbox,
            from which the others are made.
        take_over: whether to take over sandboxes that an earlier driver of this owner left.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        isolation: Isolation,
        owner: str,
        max_creating: int = 4,
        start_client: ClientFactory = start_guest,
        prepare: PrepareSandbox | None = None,
        take_over: bool = False,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.backend = backend
        self.checkpoint = checkpoint
        self.isolation = isolation
        self._owner = owner
        self._driver_id = uuid.uuid4().hex
        self._creating = asyncio.Semaphore(max_creating)
        self._start_client = start_client
        self._prepare = prepare
        attaches = take_over and checkpoint is None and backend.capabilities.attach
        self._tasks = TaskSet()
        self._adoption = Adoption(backend, owner if attaches else None, self._tasks)
        self._snapshots: dict[str, str] = {}
        self._without_python: set[str] = set()
        self._making: SingleFlight[str] = SingleFlight("the snapshot")
        self._trying: defaultdict[str, list[KeepTrying]] = defaultdict(list)

    def check(self, config: SandboxConfig) -> None:
        """Refuse a profile that the backend can't serve, see `check_profile`. Raises PolicyError, ConfigError."""
        check_profile(self.backend, self.isolation, config, prepares=self._prepare is not None)
        self.backend.note_profile(config)

    async def make(self, config: SandboxConfig, meter: Meter, keep_trying: KeepTrying) -> PooledSandbox:
        """Return a sandbox that is ready for leases: one that an earlier driver left, or a new one.

        If the answer of `create` is lost, the call is repeated with the same creation id, and returns the sandbox that
        the first call made. If this method fails or is cancelled, no sandbox is left behind.

        Args:
            meter: counts the seconds of the sandbox.
            keep_trying: called after each failure that may pass. Returns whether to try again.

        Raises:
            InfraError, PolicyError, ConfigError: from the backend or the guest.
        """
        if config.network is not Network.SETUP and not config.snapshot:
            reusable = not config.root_of_sandbox(self.isolation)  # a sandbox with root slots serves only one lease
            creation_id = await self._adoption.take(config, self.isolation) if reusable else None
            pooled = None if creation_id is None else await self._take_over(config, meter, creation_id)
            return pooled or await self._new(config, meter, keep_trying)
        if not self.backend.capabilities.snapshot:
            return await self._new(config, meter, keep_trying, set_up=partial(self._prepare_and_cut, config))
        snapshot_id = await self._snapshot(config, meter, keep_trying)
        if config.network is Network.SETUP:
            config = config.model_copy(update={"network": Network.NONE})
        try:
            return await self._new(config, meter, keep_trying, snapshot_id=snapshot_id)
        except ProvisionError:
            if self._snapshots.get(config.name) == snapshot_id:
                del self._snapshots[config.name]  # the snapshot may be gone, so make another one the next time
            raise

    async def _new(
        self,
        config: SandboxConfig,
        meter: Meter,
        keep_trying: KeepTrying,
        *,
        snapshot_id: str | None = None,
        set_up: SetUp | None = None,
    ) -> PooledSandbox:
        """Return a new sandbox. Try until that succeeds, or `keep_trying` returns False."""
        pause = FIRST_PAUSE_S
        creation_id = self._new_creation_id(config)
        while True:
            sandbox = None
            try:
                async with self._creating:
                    sandbox = await self._create(self._spec(config, creation_id), snapshot_id)
                    meter.begin(sandbox.id)
                    pooled = await self._connect(sandbox, config, creation_id, restored=snapshot_id is not None)
                if set_up is not None:
                    await self._set_up(pooled, set_up)
                return pooled
            except BaseException as error:
                retry = isinstance(error, Exception) and retryable(error) and keep_trying(error)
                if sandbox is not None:
                    await complete(self._terminate(sandbox, creation_id, meter))
                    if retry:
                        creation_id = self._new_creation_id(config)
                elif not retry:  # `create` may have made a sandbox without answering
                    await complete(self._sweep(creation_id))
                if not retry:
                    raise
            try:
                await asyncio.sleep(pause)
            except asyncio.CancelledError:
                await complete(self._sweep(creation_id))
                raise
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _new_creation_id(self, config: SandboxConfig) -> str:
        """Return a new creation id, and write it to the checkpoint before a sandbox with it can exist."""
        creation_id = new_creation_id(config, self.isolation)
        if self.checkpoint is not None:
            self.checkpoint.note(self.backend.name, creation_id)
        return creation_id

    async def _create(self, spec: SandboxSpec, snapshot_id: str | None) -> Sandbox:
        method = "create" if snapshot_id is None else "restore"
        async with alongside(self._tell_slowness(method, spec)):
            if snapshot_id is None:
                return await create_sandbox(self.backend, method, lambda: self.backend.create(spec))
            restore = cast(CanSnapshot, self.backend).restore
            return await create_sandbox(self.backend, method, lambda: restore(spec, snapshot_id))

    async def _tell_slowness(self, method: str, spec: SandboxSpec) -> None:
        """Warn from time to time that a sandbox is still being made. There is no time limit, as fetching an image may
        take long."""
        elapsed_s = 0.0
        while True:
            pause = elapsed_s or SLOW_S
            await asyncio.sleep(pause)
            elapsed_s += pause
            log.warning(
                "backend %s has spent %d s in `%s` for profile %s: it fetches an image, or it hangs",
                *(self.backend.name, elapsed_s, method, spec.config.name),
            )

    async def _take_over(self, config: SandboxConfig, meter: Meter, creation_id: str) -> PooledSandbox | None:
        """Take over and reset the sandbox of an earlier driver. Return None if it has ended or that driver lives."""
        pooled = None
        try:
            async with self._creating:
                sandbox = await self.backend.create(self._spec(config, creation_id))
            pooled = await self._connect(sandbox, config, creation_id, restored=True, take_over="silent")
            meter.begin(sandbox.id)
            for seat in pooled.vacant:
                await pooled.client.open_slot(seat.index)
                await pooled.client.reset_slot(seat.index)
        except BaseException as error:
            if pooled is not None:
                await self.end(pooled, meter)
            if not isinstance(error, Exception):
                raise
            log.info("the sandbox of an earlier driver was not taken over: %s", error)
            return None
        log.info("sandbox %s was taken over from an earlier driver", pooled.sandbox.id)
        return pooled

    async def _snapshot(self, config: SandboxConfig, meter: Meter, keep_trying: KeepTrying) -> str:
        """Return the id of the snapshot of a prepared sandbox. Concurrent calls share one attempt to make the snapshot.

        A failed attempt is repeated while one of these calls keeps trying. All calls have the same meter, as a profile
        with snapshots has one pool.
        """
        if (snapshot_id := self._snapshots.get(config.name)) is not None:
            return snapshot_id
        callers = self._trying[config.name]
        callers.append(keep_trying)
        try:
            return await self._making.get(self._tasks, partial(self._make_snapshot, config, meter), config.name)
        finally:
            callers.remove(keep_trying)

    async def _make_snapshot(self, config: SandboxConfig, meter: Meter) -> str:
        """Prepare a sandbox, make a snapshot of it, and end it. Return the snapshot's id."""

        def keep_trying(error: Exception) -> bool:
            # The pool counts each call as a failure, so call its function once, although several of its creations wait.
            answers = [each(error) for each in dict.fromkeys(self._trying[config.name])]
            return any(answers)

        open_config = config
        if config.network is not Network.ALLOW:  # whose preparations have the proxy, and the hosts of `setup_network`
            is_open = {"network": Network.OPEN, "setup_network": None, "verify_network": None}
            open_config = config.model_copy(update=is_open)
        pooled = await self._new(open_config, meter, keep_trying, set_up=partial(self._prepare_and_keep, config))
        snapshot_id = self._snapshots[config.name]
        await self.end(pooled, meter)
        return snapshot_id

    async def _set_up(self, pooled: PooledSandbox, set_up: SetUp) -> None:
        try:
            await set_up(pooled)
        except BaseException:
            await pooled.client.aclose()
            raise

    async def _prepare_and_cut(self, config: SandboxConfig, pooled: PooledSandbox) -> None:
        """Prepare the sandbox while its network is open, then cut the network."""
        await self._run_prepare(config, pooled)
        await pooled.sandbox.cut_network()

    async def _prepare_and_keep(self, config: SandboxConfig, pooled: PooledSandbox) -> None:
        """Prepare the sandbox, and make a snapshot of it."""
        await self._run_prepare(config, pooled)
        self._snapshots[config.name] = await cast(CanSnapshot, self.backend).snapshot(pooled.sandbox)

    async def _run_prepare(self, config: SandboxConfig, pooled: PooledSandbox) -> None:
        assert self._prepare is not None
        tasks = TaskSet()
        try:
            await self._prepare(NewSandbox(tasks, pooled, config.image))
        finally:
            await tasks.aclose()

    def _spec(self, config: SandboxConfig, creation_id: str) -> SandboxSpec:
        return SandboxSpec(
            creation_id=creation_id,
            owner=self._owner,
            config=config.for_backend(),
            isolation=self.isolation,
            labels={"profile": config.name},
        )

    async def take_over(self, saved: SavedSandbox, config: SandboxConfig) -> PooledSandbox:
        """Take over the sandbox of a dead driver without resetting it.

        Raises:
            SandboxLost: the sandbox has ended, or has another guest now.
            InfraError: the sandbox can't be reached.
            PolicyError: the backend can't attach to running sandboxes.
        """
        if not self.backend.capabilities.attach:
            message = f"backend {self.backend.name!r} can't attach to a sandbox that runs already"
            raise PolicyError(message, hint="`hermes-rl reap` ends what it left behind")
        sandbox = await cast(CanAttach, self.backend).attach(saved.sandbox_id)
        life = GuestLife(saved.instance, saved.boot_id, saved.began)
        settings = replace(self._settings(sandbox, config, saved.creation_id, restored=False), take_over=life)
        return self._to_pooled(sandbox, await self._start_client(sandbox, settings), config, saved.creation_id)

    def _to_pooled(
        self, sandbox: Sandbox, client: Client, config: SandboxConfig, creation_id: str, *, restored: bool = False
    ) -> PooledSandbox:
        slots = slots_per_sandbox(config, self.isolation)
        pooled = PooledSandbox.of(
            sandbox, client, slots=slots, cpu=config.cpu, creation_id=creation_id, restored=restored
        )
        if (plan := config.network_plan).filters:
            pooled.preparing = SlotNetwork(plan, Traffic(), Phase.SETUP)
            pooled.prepare_commands()  # the first commands open the port, and these outlive every lease
        return pooled

    def _settings(self, sandbox: Sandbox, config: SandboxConfig, creation_id: str, *, restored: bool) -> GuestSettings:
        return GuestSettings(
            creation_id=creation_id,
            driver_id=self._driver_id,
            isolation=self.isolation,
            slots=slots_per_sandbox(config, self.isolation),
            workspace_base=sandbox.workspace_base,
            state_dir=sandbox.state_dir,
            orphan_ttl_s=config.orphan_ttl_s,
            uid_base=sandbox.uid_base,
            own_system=sandbox.own_system,
            slot_root=sandbox.slot_root,
            share_network=config.share_network,
            max_processes=config.max_processes,
            process_memory=config.process_memory,
            env=dict(config.env_vars),
            inherit=config.slot_variables + config.slot_secrets,
            secrets=config.slot_secrets,
            has_secrets=config.has_secrets,
            visible_paths=config.visible_paths,
            network=Network.OPEN if config.network is Network.OPEN else Network.NONE,
            restored=restored,
        )

    async def _connect(
        self,
        sandbox: Sandbox,
        config: SandboxConfig,
        creation_id: str,
        *,
        restored: bool,
        take_over: Literal["silent"] | None = None,
    ) -> PooledSandbox:
        settings = replace(self._settings(sandbox, config, creation_id, restored=restored), take_over=take_over)
        client = await self._start(sandbox, settings, config)
        try:
            if config.slot_user is SlotUser.OWN and not client.own_users:
                raise PolicyError(
                    f"profile {config.name!r} has slot_user 'own', and the sandbox can give its slots no user",
                    hint="that takes python3 (3.7 or later) in the image, and root as the sandbox's own user",
                    sandbox_id=sandbox.id,
                )
            if config.network_plan.filters and client.missing:
                raise PolicyError(
                    f"profile {config.name!r} has lists of hosts, and the sandbox has no Python for what enforces them",
                    hint="use an image with python3 (3.7 or later), or network: none",
                    sandbox_id=sandbox.id,
                )
            await client.open_slot(PREPARE)
        except BaseException:
            await client.aclose()
            raise
        return self._to_pooled(sandbox, client, config, creation_id, restored=restored)

    async def _start(self, sandbox: Sandbox, settings: GuestSettings, config: SandboxConfig) -> Client:
        """Start the guest. Without Python, or if the slot is root and could change the guest, use the direct mode."""
        if config.root_of_sandbox(self.isolation):
            return await DirectClient.start(sandbox, settings, as_root=True)
        try:
            return await self._start_client(sandbox, settings)
        except NoPythonError:
            if settings.take_over is not None:
                raise
            direct = await DirectClient.start(sandbox, settings)
            source = f"image {config.image}" if config.image else f"a sandbox of profile {config.name}"
            if source not in self._without_python:
                self._without_python.add(source)
                log.warning("%s has no Python, commands go through sh: %s", source, "; ".join(direct.missing))
            return direct

    async def aclose(self) -> None:
        """Cancel the attempts that several creations share. The pools end their sandboxes themselves."""
        await self._tasks.aclose()

    async def let_go(self, pooled: PooledSandbox, meter: Meter) -> None:
        """Close the connection to a sandbox that lives on, and stop counting its cost."""
        await _end_preparing(pooled)
        try:
            await pooled.client.aclose()
        except Exception as error:
            log.warning("the connection to sandbox %s was not closed cleanly: %r", pooled.sandbox.id, error)
        meter.end(pooled.sandbox.id)

    def record(self, pooled: PooledSandbox, config: SandboxConfig) -> None:
        """Write a sandbox to the checkpoint, if there is one."""
        if self.checkpoint is not None:
            self.checkpoint.record(self.backend.name, self.isolation, pooled, config)

    def forget(self, pooled: PooledSandbox) -> None:
        """Write to the checkpoint, if there is one, that a sandbox is about to end."""
        if self.checkpoint is not None:
            self.checkpoint.note(self.backend.name, pooled.creation_id)

    async def end(self, pooled: PooledSandbox, meter: Meter) -> None:
        """End a sandbox, also if this call is cancelled. If that takes too long, its watchdog will end it."""
        await complete(self._end(pooled, meter))

    async def _end(self, pooled: PooledSandbox, meter: Meter) -> None:
        await _end_preparing(pooled)
        try:
            async with asyncio.timeout(END_LIMIT_S):
                await pooled.client.aclose(end_sandbox=pooled.lost is None)
        except Exception as error:
            log.warning("the connection to sandbox %s was not closed cleanly: %r", pooled.sandbox.id, error)
        await self._terminate(pooled.sandbox, pooled.creation_id, meter)

    async def _terminate(self, sandbox: Sandbox, creation_id: str, meter: Meter) -> None:
        try:
            async with asyncio.timeout(END_LIMIT_S):
                await sandbox.terminate()
        except Exception as error:
            log.warning("sandbox %s could not be ended and will end itself: %r", sandbox.id, error)
        else:
            self._settle(creation_id)
        finally:
            meter.end(sandbox.id)

    async def _sweep(self, creation_id: str) -> None:
        """End the sandbox of a `create` without an answer, if there is one."""
        try:
            async with asyncio.timeout(END_LIMIT_S):
                for info in await list_sandboxes(self.backend, self._owner):
                    if info.creation_id == creation_id:
                        await self.backend.terminate_id(info.sandbox_id)
        except Exception as error:
            log.warning(
                "could not look for a sandbox with creation id %s, if any it will end itself: %r", creation_id, error
            )
        else:
            self._settle(creation_id)

    def _settle(self, creation_id: str) -> None:
        if self.checkpoint is not None:
            self.checkpoint.settle(creation_id)
