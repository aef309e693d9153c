"""Sandboxes made and ended: creation that survives lost answers, the guest started in it, nothing left behind."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from hermes_core.errors import ConfigError, InfraError, NoPythonError, PolicyError
from hermes_core.sandbox.background import Background
from hermes_core.sandbox.contract import Backend, Isolation, Network, Sandbox, SandboxConfig, SandboxSpec
from hermes_core.sandbox.direct import DirectClient
from hermes_core.sandbox.preparation import NewSandbox
from hermes_core.sandbox.slots import PREPARE, Client, Member, new_member

if TYPE_CHECKING:
    from hermes_core.sandbox.checkpoint import Checkpoint, SavedSandbox
    from hermes_core.sandbox.client import GuestSettings

log = logging.getLogger(__name__)

END_LIMIT_S = 60.0
"""How long the end of a sandbox may take before it is left to its dead-man switch, in seconds."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
"""The pause between two attempts doubles from the first to the longest, in seconds."""

ClientFactory = Callable[[Sandbox, "GuestSettings"], Awaitable[Client]]

PrepareSandbox = Callable[[NewSandbox], Awaitable[None]]
"""Puts into a new sandbox what its slots will need and can't get: they have no network."""


async def start_guest(sandbox: Sandbox, settings: GuestSettings) -> Client:
    """Start the guest in a sandbox.

    Raises:
        NoPythonError: the sandbox has no Python.
        PolicyError: the isolation asked for can't be had there.
        InfraError: the sandbox can't be reached.
    """
    from hermes_core.sandbox.client import GuestClient  # the guest's source is read when it is first needed

    return await GuestClient.start(sandbox, settings)


def retryable(error: Exception) -> bool:
    """Whether trying again may help."""
    return isinstance(error, InfraError) and getattr(error, "retryable", True)


def slots_per_sandbox(config: SandboxConfig, isolation: Isolation) -> int:
    """Slots in one sandbox: one at level `dedicated`, else as configured."""
    return 1 if isolation is Isolation.DEDICATED else config.slots_per_sandbox


class Provisioner:
    """Makes the sandboxes of one tool backend, at most `max_creating` of them at a time."""

    def __init__(
        self,
        backend: Backend,
        *,
        isolation: Isolation,
        owner: str,
        max_creating: int = 4,
        start_client: ClientFactory = start_guest,
        prepare: PrepareSandbox | None = None,
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

    def check(self, config: SandboxConfig) -> None:
        """Refuse what the backend does not declare.

        Raises:
            PolicyError: it can't grant the isolation or the network policy.
            ConfigError: the profile's settings are of another backend, or contradict each other.
        """
        can = self.backend.capabilities
        if not any(level >= self.isolation for level in can.isolation):
            levels = ", ".join(level.label for level in sorted(can.isolation)) or "none"
            raise PolicyError(
                f"backend {self.backend.name!r} can't grant isolation {self.isolation.label!r} here",
                hint=f"it grants: {levels}; `hermes-rl doctor` says what keeps it from more",
            )
        if config.network not in can.network:
            policies = ", ".join(sorted(can.network))
            raise PolicyError(
                f"backend {self.backend.name!r} can't give profile {config.name!r} network {config.network.value!r}",
                hint=f"it offers: {policies}",
            )
        if config.network is Network.SETUP and self._prepare is None:
            raise ConfigError(
                f"profile {config.name!r} has the network {config.network.value!r}, and nothing prepares its sandboxes",
                hint="take an environment that has `prepare_sandbox`, or network: none or open",
            )
        if not isinstance(config, self.backend.config_class):
            wanted = self.backend.config_class.__name__
            raise ConfigError(
                f"profile {config.name!r} is a {type(config).__name__}, backend {self.backend.name!r} takes {wanted}",
                hint=f"build it with {wanted}(name={config.name!r}, ...)",
            )
        if config.min_sandboxes > config.max_sandboxes:
            raise ConfigError(
                f"profile {config.name!r}: min_sandboxes {config.min_sandboxes} is above "
                f"max_sandboxes {config.max_sandboxes}",
                hint="raise max_sandboxes or lower min_sandboxes",
            )
        most = slots_per_sandbox(config, self.isolation) * config.max_sandboxes
        if most <= config.reserve_slots:
            raise ConfigError(
                f"profile {config.name!r} has {most} slots at most and reserves {config.reserve_slots} of them "
                "for verification: none is left for rollouts",
                hint="raise max_sandboxes or slots_per_sandbox, or lower reserve_slots",
            )

    async def make(self, config: SandboxConfig, keep_trying: Callable[[Exception], bool]) -> Member:
        """A new sandbox with its client, ready for leases.

        A `create` whose answer was lost is repeated under the same lease, which gives the sandbox that it made.
        Cancelled or failed, this leaves no sandbox behind.

        Args:
            keep_trying: asked after each failure that may pass, whether to try again.

        Raises:
            InfraError, PolicyError, ConfigError: as the backend or the guest said it.
        """
        pause = FIRST_PAUSE_S
        lease_id = uuid.uuid4().hex
        while True:
            sandbox = None
            try:
                async with self._creating:
                    sandbox = await self.backend.create(self._spec(config, lease_id))
                    member = await self._connect(sandbox, config, lease_id)
                await self._set_up(member, config)
                return member
            except BaseException as error:
                again = isinstance(error, Exception) and retryable(error) and keep_trying(error)
                if sandbox is not None:
                    await self._end_sandbox(sandbox)
                    lease_id = uuid.uuid4().hex
                elif not again:
                    await self._sweep(lease_id)
                if not again:
                    raise
            try:
                await asyncio.sleep(pause)
            except asyncio.CancelledError:
                await self._sweep(lease_id)
                raise
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _set_up(self, member: Member, config: SandboxConfig) -> None:
        """Prepare the sandbox with its network open, and cut that, where the profile says so."""
        if config.network is not Network.SETUP or self._prepare is None:
            return
        work = Background()
        try:
            await self._prepare(NewSandbox(work, member, config.image))
            await member.sandbox.cut_network()
        except BaseException:
            await member.client.aclose()
            raise
        finally:
            await work.aclose()

    def _spec(self, config: SandboxConfig, lease_id: str) -> SandboxSpec:
        from hermes_core.sandbox.anchor import anchor_command

        return SandboxSpec(
            lease_id=lease_id,
            owner=self._owner,
            config=config,
            isolation=self.isolation,
            command=tuple(anchor_command(f"{Sandbox.state_dir}/heartbeat", config.orphan_ttl_s)),
            labels={"profile": config.name},
        )

    async def take_over(self, saved: SavedSandbox, config: SandboxConfig) -> Member:
        """The sandbox of a driver that died, from where that one left it.

        Raises:
            SandboxLost: it has ended, or another one is in its place.
            InfraError: it can't be reached.
            PolicyError: the backend gives no handles on sandboxes that run already.
        """
        from hermes_core.sandbox.line import GuestLife

        attach: Callable[[str], Awaitable[Sandbox]] | None = getattr(self.backend, "attach", None)
        if attach is None or not self.backend.capabilities.attach:
            message = f"backend {self.backend.name!r} can't attach to a sandbox that runs already"
            raise PolicyError(message, hint="`hermes-rl reap` ends what it has left")
        sandbox = await attach(saved.sandbox_id)
        life = GuestLife(saved.instance, saved.boot_id, saved.began)
        settings = replace(self._settings(sandbox, config, saved.lease_id), take_over=life)
        client = await self._start_client(sandbox, settings)
        return self._member(sandbox, client, config, saved.lease_id)

    def _member(self, sandbox: Sandbox, client: Client, config: SandboxConfig, lease_id: str) -> Member:
        member = new_member(sandbox, client, slots_per_sandbox(config, self.isolation), config.cpu)
        member.lease_id = lease_id
        return member

    def _settings(self, sandbox: Sandbox, config: SandboxConfig, lease_id: str) -> GuestSettings:
        from hermes_core.sandbox.client import GuestSettings

        return GuestSettings(
            lease_id=lease_id,
            driver_id=self._driver_id,
            isolation=self.isolation,
            slots=slots_per_sandbox(config, self.isolation),
            workspace_base=sandbox.workspace_base,
            state_dir=sandbox.state_dir,
            orphan_ttl_s=config.orphan_ttl_s,
            uid_base=sandbox.uid_base,
            max_processes=config.max_processes,
            env=dict(config.env_vars),
            inherit=config.slot_variables,
            visible_paths=config.visible_paths,
            network=Network.OPEN if config.network is Network.OPEN else Network.NONE,
        )

    async def _connect(self, sandbox: Sandbox, config: SandboxConfig, lease_id: str) -> Member:
        settings = self._settings(sandbox, config, lease_id)
        try:
            client = await self._start_client(sandbox, settings)
        except NoPythonError:
            direct = await DirectClient.start(sandbox, settings)
            log.warning("sandbox %s has no Python, commands go through sh: %s", sandbox.id, "; ".join(direct.missing))
            client = direct
        try:
            await client.open_slot(PREPARE)
        except BaseException:
            await client.aclose()
            raise
        return self._member(sandbox, client, config, lease_id)

    async def let_go(self, member: Member) -> None:
        """Close the connection to a sandbox that lives on."""
        try:
            await member.client.aclose()
        except Exception as error:
            log.warning("the connection to sandbox %s was not closed cleanly: %r", member.sandbox.id, error)

    def record(self, member: Member, config: SandboxConfig) -> None:
        """Have the checkpoint, if there is one, say what is true now of a sandbox that can be taken over."""
        if self.checkpoint is None or member.client.life is None:
            return
        from hermes_core.sandbox.checkpoint import SavedLease, SavedSandbox

        life = member.client.life
        self.checkpoint.sandboxes[member.lease_id] = SavedSandbox(
            backend=self.backend.name,
            sandbox_id=member.sandbox.id,
            lease_id=member.lease_id,
            profile=config.name,
            config=config.model_dump(mode="json", exclude_unset=True),
            isolation=self.isolation.label,
            instance=life.instance,
            boot_id=life.boot_id,
            began=life.began,
            leases={
                lease.seat.index: SavedLease(trajectory_id=lease.slot.trajectory_id or "", watches=lease.watches)
                for lease in member.leases
                if lease.release is None
            },
        )
        self.checkpoint.save()

    def forget(self, member: Member) -> None:
        """The sandbox is not ours any more."""
        if self.checkpoint is not None and self.checkpoint.sandboxes.pop(member.lease_id, None) is not None:
            self.checkpoint.save()

    async def end(self, member: Member) -> None:
        """End a sandbox and the connection to it; what can't be ended in time is left to its dead-man switch."""
        try:
            async with asyncio.timeout(END_LIMIT_S):
                await member.client.aclose(end_sandbox=member.lost is None)
        except Exception as error:
            log.warning("the connection to sandbox %s was not closed cleanly: %r", member.sandbox.id, error)
        await self._end_sandbox(member.sandbox)

    async def _end_sandbox(self, sandbox: Sandbox) -> None:
        try:
            async with asyncio.timeout(END_LIMIT_S):
                await sandbox.terminate()
        except Exception as error:
            log.warning("sandbox %s could not be ended and will end itself: %r", sandbox.id, error)

    async def _sweep(self, lease_id: str) -> None:
        """End the sandbox of a lease whose `create` gave no answer, if there is one."""
        try:
            async with asyncio.timeout(END_LIMIT_S):
                for info in await self.backend.list(self._owner):
                    if info.lease_id == lease_id:
                        await self.backend.terminate_id(info.sandbox_id)
        except Exception as error:
            log.warning("could not look for the sandbox of lease %s, if any it will end itself: %r", lease_id, error)
