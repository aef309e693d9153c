"""The pool of one profile: who gets which slot when, and how many sandboxes that takes.

All decisions are made between two awaits, in `pump`: whoever changes something calls it, so there is no lock. Callers
only ever wait for futures, which is why the cancellation of a caller can't cut anything off half done.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from hermes_core.aio import TaskSet
from hermes_core.errors import AcquireTimeout, HermesError, SandboxLost
from hermes_core.events import Events
from hermes_core.sandbox.contract import SandboxConfig, SlotUser
from hermes_core.sandbox.pool.checkpoint import SavedLease, SavedSandbox
from hermes_core.sandbox.pool.cost import Meter
from hermes_core.sandbox.pool.fleet import Fleet, closed
from hermes_core.sandbox.pool.leases import Lease, PooledSandbox, Seat, new_lease
from hermes_core.sandbox.pool.profile_check import slots_per_sandbox
from hermes_core.sandbox.pool.provision import Provisioner
from hermes_core.sandbox.pool.waiting import Waiter, WaitQueue
from hermes_core.sandbox.results import SlotState

OPEN_ATTEMPTS = 3
"""How many slots that can't be opened one waiter is offered."""

RESET_LIMIT_S = 60.0
"""How long the reset of a slot may take before its sandbox is given up, in seconds."""

GROUPS_REMEMBERED = 1024


class Pool:
    """The sandboxes and slots of one profile.

    Args:
        meter: that of the profile, which pools of its other images share; None is one of its own.
    """

    def __init__(
        self, config: SandboxConfig, provisioner: Provisioner, events: Events, meter: Meter | None = None
    ) -> None:
        provisioner.check(config)
        self.config = config
        self.profile = config.name
        self.slots = slots_per_sandbox(config, provisioner.isolation)
        self._provisioner = provisioner
        self._queue = WaitQueue()
        self._homes: dict[str, PooledSandbox] = {}
        self._work = TaskSet()
        self.meter = meter or Meter(config.name, config.price_per_hour, config.max_cost)
        self._fleet = Fleet(config, provisioner, events, work=self._work, owner=self, meter=self.meter)
        self._budget: asyncio.TimerHandle | None = None
        self._begun = False
        self._closing = False

    # ------------------------------------------------------------------ what the tool backend calls

    @property
    def begun(self) -> bool:
        """Whether it has been started, or a slot of it asked for."""
        return self._begun

    async def start(self) -> None:
        """Make the warm sandboxes, in parallel.

        Raises:
            ProvisionError, PolicyError: they can't be made; what was made already stays until `aclose`.
        """
        self._begun = True
        await self._fleet.warm()

    async def acquire(
        self,
        trajectory_id: str | None,
        *,
        group: str | None,
        verification: bool,
        timeout_s: float,
        apart_from: str | None = None,
    ) -> Lease:
        """A slot, in order of arrival.

        Raises:
            AcquireTimeout: none became free in time.
            ProvisionError, PolicyError: no sandbox can be made, and there is none to wait for.
            CostLimitReached: the profile's `max_cost` is spent. Verifications still get slots that there are.
        """
        if self._closing:
            raise closed()
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        waiter = Waiter(future, trajectory_id, group, verification, apart_from)
        self._begun, self._fleet.hopeless = True, False
        self._queue.join(waiter)
        self.pump()
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except BaseException as error:
            self._queue.leave(waiter)
            if not future.cancelled() and future.exception() is None:
                self._vacate(future.result())  # served and cut off in the same turn of the loop
            self.pump()
            if isinstance(error, TimeoutError):
                raise self._timed_out(timeout_s) from self._fleet.error
            raise

    def release(self, lease: Lease, *, reset: bool) -> asyncio.Task[None]:
        """End a lease; the task that does it, always the same for one lease."""
        if lease.release is None:
            lease.slot.state = SlotState.RELEASING
            lease.release = self._work.spawn(self._release(lease, reset), f"release {lease.slot.slot_id}")
            self.record(lease)
        return lease.release

    def status(self) -> dict[str, Any]:
        """Counts of sandboxes, slots and waiters."""
        usable, usage = self._fleet.usable(), self.meter.usage()
        return {
            "sandboxes": len(self._fleet.sandboxes),
            "healthy_sandboxes": len(usable),
            "creating": len(self._fleet.creations),
            "min_sandboxes": self.config.min_sandboxes,
            "max_sandboxes": self.config.max_sandboxes,
            "total_slots": len(usable) * self.slots,
            "available_slots": sum(len(pooled.vacant) for pooled in usable),
            "reserve_slots": self.config.reserve_slots,
            "slots_per_sandbox": self.slots,
            "waiting": len(self._queue),
            "sandbox_s": round(usage.sandbox_s, 3),
            "cost": usage.cost,
        }

    async def take_over(self, saved: SavedSandbox) -> list[Lease]:
        """The leases on a sandbox that a dead driver left, with the sandbox.

        Raises:
            SandboxLost, InfraError, PolicyError: it can't be had, or not now.
        """
        if self._closing:
            raise closed()
        pooled = await self._provisioner.take_over(saved, self.config)
        try:
            leases = [await self._resume(pooled, index, held) for index, held in saved.leases.items()]
        except BaseException:
            await self._provisioner.let_go(pooled)
            raise
        for seat in pooled.vacant:
            seat.dirty = True  # it is not known how its last lease ended
        self._begun = True
        self._fleet.join(pooled)
        return leases

    async def _resume(self, pooled: PooledSandbox, index: int, held: SavedLease) -> Lease:
        seat = next((seat for seat in pooled.vacant if seat.index == index), None)
        if seat is None:
            raise SandboxLost(f"it has no slot {index}", sandbox_id=pooled.sandbox.id)
        seat.workspace_dir = await pooled.client.open_slot(index)
        lease = self._begin(seat, held.trajectory_id, verification=False)
        lease.watches = held.watches
        return lease

    def _begin(self, seat: Seat, trajectory_id: str | None, *, verification: bool) -> Lease:
        return new_lease(
            seat,
            trajectory_id,
            profile=self.profile,
            config=self.config,
            record=self.record,
            verification=verification,
        )

    def record(self, lease: Lease) -> None:
        """Something has changed about a lease that a driver after us has to know."""
        self._fleet.record(lease.pooled)

    async def aclose(self, *, keep: bool = False) -> None:
        """End all sandboxes, in parallel, and wait until nothing of the pool is left; or `keep` them. Idempotent."""
        self._closing = True
        if self._budget is not None:
            self._budget.cancel()
        for waiter in [*self._queue]:
            self._fail(waiter, closed())
        self._fleet.close(keep=keep)
        await self._work.join()

    # ------------------------------------------------------------------ decisions: no awaits from here on

    def pump(self) -> None:
        """Bring the pool to what it should be: waiters served, sandboxes made or retired."""
        if self._closing:
            return
        self._keep_budget()
        while (waiter := self._queue.next(self._can_serve)) is not None:
            self._grant(waiter)
        self._fleet.grow()
        self._fleet.retire_idle()

    def _keep_budget(self) -> None:
        """Turn away whom the rest of `max_cost` is not for, and look again when that is another."""
        if self._budget is not None:
            self._budget.cancel()
            self._budget = None
        if not self.meter.may_grow:
            if self.meter.spent:
                for waiter in [*self._queue]:
                    if not waiter.verification:
                        self._fail(waiter, self.meter.refusal())
            if not self._fleet.creations:
                self._fail_hopeless(self.meter.refusal)
        if (pause := self.meter.next_change_s()) is not None:
            self._budget = asyncio.get_running_loop().call_later(pause, self.pump)

    def _taken(self, *, verification: bool) -> int:
        return sum(lease.verification == verification for pooled in self._fleet.usable() for lease in pooled.leases)

    def _can_serve(self, verification: bool) -> bool:
        """Whether there is a slot for a waiter of that kind: ordinary ones leave the reserve alone."""
        usable = self._fleet.usable()
        if not any(pooled.vacant for pooled in usable):
            return False
        most = len(usable) * self.slots - self.config.reserve_slots
        return verification or self._taken(verification=False) < most

    def _grant(self, waiter: Waiter) -> None:
        seat = self._place(waiter)
        lease = self._begin(seat, waiter.trajectory_id, verification=waiter.verification)
        self.record(lease)
        if waiter.group is not None:
            self._homes.pop(waiter.group, None)
            self._homes[waiter.group] = seat.pooled
            if len(self._homes) > GROUPS_REMEMBERED:
                del self._homes[next(iter(self._homes))]
        if seat.workspace_dir and not (seat.dirty and waiter.verification):
            waiter.future.set_result(lease)
        else:
            self._work.spawn(self._open(waiter, lease), f"open {seat.slot_id}")

    def _place(self, waiter: Waiter) -> Seat:
        """The best vacant seat: on the group's sandbox, else where the group fits, else where most are taken."""
        group = waiter.group
        roomy = [pooled for pooled in self._fleet.usable() if pooled.vacant]
        roomy = [pooled for pooled in roomy if pooled.sandbox.id != waiter.apart_from] or roomy
        home = self._homes.get(group) if group is not None else None
        if home is not None and home in roomy:
            pooled = home
        elif group is not None:
            pooled = max(roomy, key=lambda each: len(each.vacant))
        else:  # so that the others fall idle and can be retired
            pooled = min(roomy, key=lambda each: len(each.vacant))
        return min(pooled.vacant, key=lambda seat: (seat.dirty, not seat.workspace_dir, seat.index))

    def wanted(self) -> int:
        """How many sandboxes there should be."""
        if not self._begun:
            return 0
        least = 0 if self.meter.spent else self.config.min_sandboxes
        ordinary = self._taken(verification=False) + self._queue.ordinary
        if not self._queue and not (self.meter.spent and ordinary):
            return least
        verification = self._taken(verification=True) + self._queue.verification
        seats = ordinary + max(verification, self.config.reserve_slots)
        return max(least, math.ceil(seats / self.slots))

    def give_up(self, error: Exception) -> None:
        """No sandbox can be made: those who have nothing else to wait for are told."""
        self._fail_hopeless(lambda: self._fleet.seen_by_caller(error))

    def _fail_hopeless(self, reason: Callable[[], HermesError]) -> None:
        """Fail those for whom the sandboxes that there are have no slot, ever."""
        slots = self._fleet.count_usable() * self.slots
        for waiter in [*self._queue]:
            if slots <= (0 if waiter.verification else self.config.reserve_slots):
                self._fail(waiter, reason())

    def _vacate(self, lease: Lease) -> None:
        pooled = lease.pooled
        pooled.leases.discard(lease)
        pooled.vacant.append(lease.seat)
        self.record(lease)
        if pooled.leases:
            return
        pooled.idle_since = asyncio.get_running_loop().time()
        self._fleet.retire_unleased(pooled)

    def _fail(self, waiter: Waiter, error: Exception) -> None:
        self._queue.leave(waiter)
        if not waiter.gone:
            waiter.future.set_exception(error)

    def _timed_out(self, timeout_s: float) -> AcquireTimeout:
        now = self.status()
        creation = f"; the last sandbox could not be made: {self._fleet.error}" if self._fleet.error is not None else ""
        return AcquireTimeout(
            f"no slot of profile {self.profile!r} became free within {timeout_s:g} s: "
            f"{now['available_slots']} of {now['total_slots']} slots free ({now['reserve_slots']} reserved for "
            f"verification), {now['healthy_sandboxes']} of at most {now['max_sandboxes']} sandboxes, "
            f"{now['creating']} being made, {now['waiting']} others waiting{creation}",
            hint="raise max_sandboxes, slots_per_sandbox or acquire_timeout_s, or run fewer rollouts at a time",
        )

    # ------------------------------------------------------------------ background work

    async def _open(self, waiter: Waiter, lease: Lease) -> None:
        """Make a seat ready for its first lease, or clean for a verification."""
        seat, client = lease.seat, lease.pooled.client
        try:
            if seat.dirty:
                await client.reset_slot(seat.index)
                seat.dirty = False
            seat.workspace_dir = lease.slot.workspace_dir = await client.open_slot(seat.index)
        except Exception as error:
            self._fleet.quarantine(lease.pooled, error)
            self._vacate(lease)
            waiter.failures += 1
            if waiter.failures >= OPEN_ATTEMPTS:
                self._fail(waiter, self._fleet.seen_by_caller(error))
            elif not waiter.gone:
                self._queue.join(waiter)
        else:
            if waiter.gone:
                self._vacate(lease)
            else:
                waiter.future.set_result(lease)
        self.pump()

    async def _release(self, lease: Lease, reset: bool) -> None:
        """End what the lease left running, and its files if asked to; without proof the sandbox goes.

        With that of a slot that was root nothing else is tried: what root has changed, no reset can know.
        """
        seat, pooled = lease.seat, lease.pooled
        try:
            if self.config.slot_user is SlotUser.ROOT:
                self._fleet.retire_used(pooled)
            elif pooled.lost is None and not self._closing:
                async with asyncio.timeout(RESET_LIMIT_S):
                    client = pooled.client
                    await (client.reset_slot(seat.index) if reset else client.kill_slot(seat.index, forget=True))
                seat.dirty = not reset
        except Exception as error:
            self._fleet.quarantine(pooled, error)
        finally:
            lease.slot.state = SlotState.ERROR if pooled.lost is not None or pooled.draining else SlotState.AVAILABLE
            self._vacate(lease)
        self.pump()
