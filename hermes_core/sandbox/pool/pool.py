"""The pool of one profile: decides who gets which slot when, and how many sandboxes to run.

`Pool._decide` makes every decision without an await, so that no lock is needed. It returns a `Decision`, which
`Pool.pump` carries out: its tasks call the provisioner to make and end sandboxes, open and reset slots, and pump again
when they are done. Callers only wait for futures, so cancelling a caller leaves nothing half done.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import Any

from hermes_core.aio import TaskSet
from hermes_core.errors import (
    AcquireTimeout,
    HermesError,
    ImageError,
    InfraError,
    PolicyError,
    ProvisionError,
    SandboxLost,
    UsageError,
)
from hermes_core.events import Events
from hermes_core.sandbox.commands import SlotState
from hermes_core.sandbox.contract import SandboxConfig
from hermes_core.sandbox.pool.checkpoint import SavedSandbox
from hermes_core.sandbox.pool.cost import Meter
from hermes_core.sandbox.pool.leases import Lease, PooledSandbox, Seat
from hermes_core.sandbox.pool.profile_check import slots_per_sandbox
from hermes_core.sandbox.pool.provision import Provisioner, retryable
from hermes_core.sandbox.pool.waiting import Waiter, WaitQueue

log = logging.getLogger(__name__)

START_ATTEMPTS = 3
"""The number of failed creations in a row after which `start` fails."""

OPEN_ATTEMPTS = 3
"""The number of slots that could not be opened for a waiter after which the waiter fails."""

RESET_LIMIT_S = 60.0
"""Time limit of a reset in seconds. After that, the sandbox is quarantined."""

LEAVING_BESIDE = 2
"""Maximum number of quarantined sandboxes beyond `max_sandboxes`. Sandboxes that end slowly must neither stop the pool
nor exhaust the host."""

LAST_PART, LAST_PART_S = 0.25, 300.0
"""If a provider ends sandboxes after a time, they get no new leases in the last quarter of this time, at most 300 s."""

GROUPS_REMEMBERED = 1024


@dataclass
class Decision:
    """The work for `pump`. The changes to waiters, seats and leases have been made already."""

    refused: list[tuple[Waiter, HermesError]]
    """The waiters that can't be served, with the reason."""
    served: list[tuple[Waiter, Lease]]
    """The waiters that are served, with their leases."""
    missing: int
    """The number of sandboxes to make."""
    ended: list[PooledSandbox]
    """The sandboxes to end."""
    due: float
    """The loop's time at which to decide again even if nothing happens; infinity if there is none."""


class Pool:
    """The sandboxes and slots of one profile.

    Args:
        meter: the meter of the profile, shared with the pools of its other images. None makes a new one.

    Attributes:
        begun: whether the pool was started, or a slot was requested.
    """

    def __init__(
        self, config: SandboxConfig, provisioner: Provisioner, events: Events, meter: Meter | None = None
    ) -> None:
        provisioner.check(config)
        self.config = config
        self.slots = slots_per_sandbox(config, provisioner.isolation)
        self._root_of_sandbox = config.root_of_sandbox(provisioner.isolation)
        self.meter = meter or Meter(config.name, config.price_per_hour, config.max_cost)
        self.begun = False
        self._provisioner = provisioner
        self._events = events
        self._tasks = TaskSet()
        self._queue = WaitQueue()
        self._sandboxes: list[PooledSandbox] = []
        """The existing sandboxes, until they have ended."""
        self._creations: set[asyncio.Task[None]] = set()
        self._homes: dict[str, PooledSandbox] = {}
        """The sandbox of each group's last slot."""
        self._error: Exception | None = None
        """The error of the last failed creation, until one succeeds."""
        self._failures = 0
        """Failed creations since the last one that succeeded."""
        self._hopeless = False
        """Whether retrying the last creation is useless. Then none is made until someone asks or a sandbox ends."""
        self._warm: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False

    # ------------------------------------------------------------------ what the tool backend calls

    async def start(self) -> None:
        """Make the warm sandboxes, in parallel.

        Raises:
            ProvisionError, PolicyError: not all of the sandboxes could be made. The others stay until `aclose`.
        """
        self.begun = True
        if len(self._usable()) >= self.config.min_sandboxes:
            return
        self._warm = asyncio.get_running_loop().create_future()
        self.pump()
        await self._warm

    async def acquire(
        self,
        trajectory_id: str | None,
        *,
        group: str | None,
        verification: bool,
        timeout_s: float,
        apart_from: str | None = None,
    ) -> Lease:
        """Return the lease of a slot. Callers are served in order of arrival.

        Args:
            group: slots of one group go to the same sandbox if they fit.
            verification: whether the slot may be one of the reserve.
            apart_from: the id of a sandbox to avoid if possible.

        Raises:
            AcquireTimeout: no slot became free in time.
            ProvisionError, PolicyError: there is no sandbox to wait for, and none can be made.
            CostLimitReached: the profile's `max_cost` is spent. Verifications still get free slots.
        """
        if self._closing:
            raise _closing_error()
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        waiter = Waiter(future, trajectory_id, group, verification, apart_from)
        self.begun, self._hopeless = True, False
        self._queue.join(waiter)
        self.pump()
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except BaseException as error:
            self._queue.leave(waiter)
            if not future.cancelled() and future.exception() is None:
                self._vacate(future.result())  # it was served and cancelled in the same turn of the loop
            self.pump()
            if isinstance(error, TimeoutError):
                raise self._timeout_error(timeout_s) from self._error
            raise

    def release(self, lease: Lease, *, reset: bool) -> asyncio.Task[None]:
        """End a lease. Return the task that does it, the same one for each call with this lease."""
        if lease.release is None:
            lease.slot.state = SlotState.RELEASING
            lease.release = self._tasks.spawn(self._release(lease, reset), f"release {lease.slot.slot_id}")
            lease.record()
        return lease.release

    async def take_over(self, saved: SavedSandbox) -> list[Lease]:
        """Take over a sandbox that a dead driver left, and return its leases.

        Raises:
            SandboxLost, InfraError, PolicyError: the sandbox can't be taken over, at least not now.
        """
        if self._closing:
            raise _closing_error()
        pooled = await self._provisioner.take_over(saved, self.config)
        try:
            leases = []
            for index, saved_lease in saved.leases.items():
                seat = next((seat for seat in pooled.vacant if seat.index == index), None)
                if seat is None:
                    raise SandboxLost(f"it has no slot {index}", sandbox_id=pooled.sandbox.id)
                seat.workspace_dir = await pooled.client.open_slot(index)
                leases.append(self._begin_lease(seat, saved_lease.trajectory_id, verification=False))
                leases[-1].watches = saved_lease.watches
        except BaseException:
            await self._provisioner.let_go(pooled, self.meter)
            raise
        for seat in pooled.vacant:
            seat.dirty = True  # the dead driver may not have reset it
        self.begun = True
        self._tasks.spawn(self._manage(pooled), f"sandbox of profile {self.config.name}")
        self._add(pooled)
        return leases

    def status(self) -> dict[str, Any]:
        """Return the numbers of sandboxes, slots and waiters."""
        usable, usage = self._usable(), self.meter.usage()
        return {
            "sandboxes": len(self._existing()),
            "healthy_sandboxes": len(usable),
            "creating": len(self._creations),
            "min_sandboxes": self.config.min_sandboxes,
            "max_sandboxes": self.config.max_sandboxes,
            "total_slots": len(usable) * self.slots,
            "available_slots": sum(len(pooled.vacant) for pooled in usable),
            "reserve_slots": self.config.reserve_slots,
            "slots_per_sandbox": self.slots,
            "waiting": self._queue.count(verification=False) + self._queue.count(verification=True),
            "sandbox_s": round(usage.sandbox_s, 3),
            "cost": usage.cost,
        }

    async def aclose(self, *, keep: bool = False) -> None:
        """End all sandboxes, in parallel, and wait until they have ended. Idempotent.

        Args:
            keep: don't end sandboxes that another driver can take over.
        """
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        self._fail_start(_closing_error())
        for waiter in self._queue:
            waiter.refuse(_closing_error())
        for creation in self._creations:
            creation.cancel()
        for pooled in self._existing():
            pooled.kept = keep and pooled.client.life is not None
            self._end(pooled)
        await self._tasks.join()

    # ------------------------------------------------------------------ decisions, without an await

    def _decide(self, now: float) -> Decision:
        """Decide who gets which slot, who would wait in vain, and which sandboxes to make or end."""
        for pooled in self._usable():
            if pooled.expires_at <= now:
                log.info("sandbox %s nears the end of its life and gets no new leases", pooled.sandbox.id)
                self._drain(pooled)
        refused = self._hopeless_waiters()
        for waiter, _ in refused:
            self._queue.leave(waiter)
        served = []
        while (head := next(filter(self._can_serve, self._queue.heads()), None)) is not None:
            self._queue.leave(head)
            served.append((head, self._place(head)))
        missing = self._missing_sandboxes()
        idle, idle_due = self._idle_sandboxes(now)
        drained = [pooled for pooled in self._existing() if pooled.draining and not pooled.leases]
        expiries = [pooled.expires_at for pooled in self._usable()]
        budget = self.meter.next_change_s()
        due = min(idle_due, *expiries, math.inf if budget is None else now + budget)
        return Decision(refused, served, missing, drained + idle, due)

    def _existing(self) -> list[PooledSandbox]:
        return [pooled for pooled in self._sandboxes if not pooled.over.is_set()]

    def _usable(self) -> list[PooledSandbox]:
        """Return the sandboxes that get new leases."""
        return [pooled for pooled in self._existing() if not pooled.draining]

    def _hopeless_waiters(self) -> list[tuple[Waiter, HermesError]]:
        """Return the waiters that no existing or affordable sandbox can serve, with the errors for them."""
        spent = self.meter.is_spent
        if not spent and self._growth_error() is None:
            return []
        slots = len(self._usable()) * self.slots
        refused: list[tuple[Waiter, HermesError]] = []
        for waiter in self._queue:
            if spent and not waiter.verification:
                refused.append((waiter, self.meter.refusal()))
            elif slots <= (0 if waiter.verification else self.config.reserve_slots) and (error := self._growth_error()):
                refused.append((waiter, error))
        return refused

    def _growth_error(self) -> HermesError | None:
        """Return a new error that says why no further sandbox will be made; None if one may be made."""
        if self._creations:
            return None
        if self._hopeless and self._error is not None:
            return self._error_for_caller(self._error)
        return None if self.meter.may_grow else self.meter.refusal()

    def _can_serve(self, waiter: Waiter) -> bool:
        """Return whether there is a slot for a waiter. Only verifications may use the reserve."""
        usable = self._usable()
        if not any(pooled.vacant for pooled in usable):
            return False
        most = len(usable) * self.slots - self.config.reserve_slots
        return waiter.verification or self._count_leases(verification=False) < most

    def _count_leases(self, *, verification: bool) -> int:
        return sum(lease.verification == verification for pooled in self._usable() for lease in pooled.leases)

    def _place(self, waiter: Waiter) -> Lease:
        """Begin a lease of the best vacant seat."""
        group = waiter.group
        candidates = [pooled for pooled in self._usable() if pooled.vacant]
        candidates = [pooled for pooled in candidates if pooled.sandbox.id != waiter.apart_from] or candidates
        home = None if group is None else self._homes.pop(group, None)
        if home is not None and home in candidates:
            pooled = home
        elif group is not None:  # the emptiest sandbox, so that the whole group fits there
            pooled = max(candidates, key=lambda each: len(each.vacant))
        else:  # the fullest sandbox, so that others become idle and can be ended
            pooled = min(candidates, key=lambda each: len(each.vacant))
        if group is not None:
            self._homes[group] = pooled  # as the newest entry, as `pop` removed it
            if len(self._homes) > GROUPS_REMEMBERED:
                del self._homes[next(iter(self._homes))]
        # Prefer a clean and open seat, which needs no request to the guest.
        seat = min(pooled.vacant, key=lambda each: (each.dirty, not each.workspace_dir, each.index))
        return self._begin_lease(seat, waiter.trajectory_id, verification=waiter.verification)

    def _begin_lease(self, seat: Seat, trajectory_id: str | None, *, verification: bool) -> Lease:
        return seat.pooled.begin_lease(seat, trajectory_id, self.config, self._record, verification=verification)

    def _target_size(self) -> int:
        """Return how many sandboxes the pool should have."""
        if not self.begun:
            return 0
        least = 0 if self.meter.is_spent else self.config.min_sandboxes
        rollouts_waiting = self._queue.count(verification=False)
        verifications_waiting = self._queue.count(verification=True)
        rollouts = self._count_leases(verification=False) + rollouts_waiting
        # If nobody waits, `least` is enough, because a sandbox with leases is never idle. But when `max_cost` is spent,
        # idle sandboxes end at once, and running rollouts still need the reserve for their verifications.
        if not rollouts_waiting and not verifications_waiting and not (self.meter.is_spent and rollouts):
            return least
        verifications = self._count_leases(verification=True) + verifications_waiting
        seats = rollouts + max(verifications, self.config.reserve_slots)
        return max(least, math.ceil(seats / self.slots))

    def _missing_sandboxes(self) -> int:
        """Return how many more sandboxes to make, without those that are being made."""
        if self._hopeless or not self.meter.may_grow:
            return 0
        alive = [pooled for pooled in self._sandboxes if pooled.lost is None]
        quarantined = sum(pooled.quarantined for pooled in alive)
        room = self.config.max_sandboxes - (len(alive) - min(quarantined, LEAVING_BESIDE))
        shortage = self._target_size() - len(self._usable())
        return max(0, min(shortage, room) - len(self._creations))

    def _idle_sandboxes(self, now: float) -> tuple[list[PooledSandbox], float]:
        """Return the sandboxes that have been idle for too long, and the loop's time at which the next one is to
        be ended; infinity if there is none."""
        patience = 0.0 if self.meter.is_spent else self.config.idle_timeout
        usable = self._usable()
        surplus = max(0, len(usable) - self._target_size())
        idle = sorted((pooled for pooled in usable if not pooled.leases), key=lambda each: each.idle_since)[:surplus]
        expired = [pooled for pooled in idle if pooled.idle_since + patience <= now]
        for pooled in expired:
            log.info("sandbox %s was idle for %g s and is ended", pooled.sandbox.id, patience)
        return expired, min((pooled.idle_since + patience for pooled in idle[len(expired) :]), default=math.inf)

    def _record_failure(self, error: Exception) -> bool:
        """Record a failed creation. Return whether the sandbox is still needed, so that another attempt is made."""
        is_repeated = str(self._error) == str(error)  # warn only once of an error that comes again and again
        self._error = error
        self._failures += 1
        level = logging.DEBUG if is_repeated else logging.WARNING
        log.log(level, "a sandbox of profile %s could not be made: %s", self.config.name, error)
        if self._failures >= START_ATTEMPTS:
            self._fail_start(self._error_for_caller(error))
        # `_creations` includes the creation that has failed.
        return not self._closing and self._target_size() > len(self._usable()) + len(self._creations) - 1

    # ------------------------------------------------------------------ carrying decisions out

    def pump(self) -> None:
        """Decide, and carry the decision out. Call it after each change."""
        if self._closing:
            return
        loop = asyncio.get_running_loop()
        decision = self._decide(loop.time())
        for waiter, error in decision.refused:
            waiter.refuse(error)
        for waiter, lease in decision.served:
            self._hand_out(waiter, lease)
        for _ in range(decision.missing):
            self._creations.add(self._tasks.spawn(self._make_and_manage(), f"sandbox of profile {self.config.name}"))
        for pooled in decision.ended:
            self._end(pooled)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if decision.due == math.inf else loop.call_at(decision.due, self.pump)

    def _hand_out(self, waiter: Waiter, lease: Lease) -> None:
        lease.record()
        if lease.seat.workspace_dir and not (lease.seat.dirty and waiter.verification):
            waiter.future.set_result(lease)
        else:
            self._tasks.spawn(self._open(waiter, lease), f"open {lease.seat.slot_id}")

    def _vacate(self, lease: Lease) -> None:
        pooled = lease.pooled
        pooled.leases.discard(lease)
        pooled.vacant.append(lease.seat)
        lease.record()
        if not pooled.leases:
            pooled.idle_since = asyncio.get_running_loop().time()

    def _add(self, pooled: PooledSandbox) -> None:
        """Add a new sandbox, which is ready."""
        now = asyncio.get_running_loop().time()
        self._error, self._failures, self._hopeless = None, 0, False
        pooled.idle_since = now
        if (life := pooled.sandbox.lifetime_s) is not None:
            pooled.expires_at = now + life - min(life * LAST_PART, LAST_PART_S)
        self._sandboxes.append(pooled)
        self.meter.begin(pooled.sandbox.id)
        self._record(pooled)
        self._emit("sandbox_created", pooled)
        if self._closing:
            self._end(pooled)
        if self._warm is not None and not self._warm.done() and len(self._usable()) >= self.config.min_sandboxes:
            self._warm.set_result(None)
        self.pump()

    def _drain(self, pooled: PooledSandbox) -> None:
        """Give a sandbox no new leases. It ends with its last lease, and another one may be made."""
        pooled.draining, self._hopeless = True, False

    def quarantine(self, pooled: PooledSandbox, error: BaseException) -> None:
        """Drain a sandbox that can't be trusted any more."""
        if pooled.draining or pooled.over.is_set():
            return
        self._drain(pooled)
        pooled.quarantined = True
        log.warning("sandbox %s is quarantined: %s", pooled.sandbox.id, error)
        self._emit("sandbox_lost", pooled, reason=f"quarantined: {error}")

    def _drop_lost(self, pooled: PooledSandbox) -> None:
        """Remove a sandbox that can't be reached any more. Its leases fail."""
        if pooled.over.is_set():
            return
        pooled.lost = SandboxLost("the sandbox died or can't be reached any more", sandbox_id=pooled.sandbox.id)
        for lease in pooled.leases:
            lease.slot.state = SlotState.ERROR
        log.warning("sandbox %s is lost, with %d leases", pooled.sandbox.id, len(pooled.leases))
        if not pooled.draining:
            self._emit("sandbox_lost", pooled, reason=str(pooled.lost.message))
        self._end(pooled)
        self.pump()

    def _end(self, pooled: PooledSandbox) -> None:
        """Make `_manage` end a sandbox."""
        if not pooled.kept:
            self._provisioner.forget(pooled)
        self._hopeless = False  # the provider may have room now
        pooled.over.set()

    def _record(self, pooled: PooledSandbox) -> None:
        """Write the sandbox to the checkpoint."""
        if not pooled.over.is_set():
            self._provisioner.record(pooled, self.config)

    def _fail_start(self, error: HermesError) -> None:
        if self._warm is not None and not self._warm.done():
            self._warm.set_exception(error)

    def _emit(self, event: str, pooled: PooledSandbox, **more: str) -> None:
        backend, profile = self._provisioner.backend.name, self.config.name
        self._events.emit(event, sandbox_id=pooled.sandbox.id, backend=backend, profile=profile, **more)

    def _error_for_caller(self, error: Exception) -> HermesError:
        """Return a new error for a caller whose sandbox could not be made because of `error`."""
        kind: type[HermesError] = ProvisionError
        if isinstance(error, ImageError):
            kind = ImageError
        elif isinstance(error, HermesError) and not isinstance(error, InfraError):
            kind = PolicyError
        message = error.message if isinstance(error, HermesError) else f"{type(error).__name__}: {error}"
        hint = error.hint if isinstance(error, HermesError) else None
        result = kind(f"no sandbox of profile {self.config.name!r} could be made: {message}", hint=hint)
        result.__cause__ = error
        return result

    def _timeout_error(self, timeout_s: float) -> AcquireTimeout:
        now = self.status()
        creation = f"; the last sandbox could not be made: {self._error}" if self._error is not None else ""
        return AcquireTimeout(
            f"no slot of profile {self.config.name!r} became free within {timeout_s:g} s: "
            f"{now['available_slots']} of {now['total_slots']} slots free ({now['reserve_slots']} reserved for "
            f"verification), {now['healthy_sandboxes']} of at most {now['max_sandboxes']} sandboxes, "
            f"{now['creating']} being made, {now['waiting']} others waiting{creation}",
            hint="raise max_sandboxes, slots_per_sandbox or acquire_timeout_s, or run fewer rollouts at a time",
        )

    # ------------------------------------------------------------------ tasks

    async def _make_and_manage(self) -> None:
        """Make one sandbox, and manage it until its end."""
        pooled, task = None, asyncio.current_task()
        assert task is not None
        try:
            pooled = await self._provisioner.make(self.config, self.meter, self._record_failure)
        except Exception as error:
            self._error = error
            if not retryable(error):
                self._hopeless = True
                self._fail_start(self._error_for_caller(error))
        finally:
            self._creations.discard(task)
        if pooled is None:
            self.pump()
        else:
            self._add(pooled)
            await self._manage(pooled)

    async def _manage(self, pooled: PooledSandbox) -> None:
        """Wait until a sandbox is lost or `_end` is called, and end it."""
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(pooled))
                await pooled.over.wait()
                watch.cancel()
        finally:
            end = self._provisioner.let_go if pooled.kept else self._provisioner.end
            await end(pooled, self.meter)
        self._sandboxes.remove(pooled)
        self._emit("sandbox_terminated", pooled)
        self.pump()

    async def _watch(self, pooled: PooledSandbox) -> None:
        await pooled.client.lost.wait()
        self._drop_lost(pooled)

    async def _open(self, waiter: Waiter, lease: Lease) -> None:
        """Open a seat for its first lease, or reset it for a verification, and serve the waiter."""
        seat, client = lease.seat, lease.pooled.client
        try:
            if seat.dirty:
                await client.reset_slot(seat.index)
                seat.dirty = False
            seat.workspace_dir = lease.slot.workspace_dir = await client.open_slot(seat.index)
        except Exception as error:
            self.quarantine(lease.pooled, error)
            self._vacate(lease)
            waiter.failures += 1
            if waiter.failures >= OPEN_ATTEMPTS:
                waiter.refuse(self._error_for_caller(error))
            elif not waiter.gone:
                self._queue.join(waiter)
        else:
            if waiter.gone:
                self._vacate(lease)
            else:
                waiter.future.set_result(lease)
        self.pump()

    async def _release(self, lease: Lease, reset: bool) -> None:
        """Kill the lease's processes, and with `reset` remove its files. Without proof, quarantine the sandbox.

        If the slot was root of the sandbox, the sandbox ends, because no reset can know what root has changed.
        """
        seat, pooled = lease.seat, lease.pooled
        try:
            if self._root_of_sandbox:
                self._drain(pooled)
            elif pooled.lost is None and not self._closing:
                async with asyncio.timeout(RESET_LIMIT_S):
                    client = pooled.client
                    await (client.reset_slot(seat.index) if reset else client.kill_slot(seat.index, forget=True))
                seat.dirty = not reset
        except Exception as error:
            self.quarantine(pooled, error)
        finally:
            lease.slot.state = SlotState.ERROR if pooled.lost is not None or pooled.draining else SlotState.AVAILABLE
            self._vacate(lease)
        self.pump()


def _closing_error() -> UsageError:
    """Return the error for a request to a tool backend that is closed, or is being closed."""
    return UsageError("the tool backend is closed", hint="acquire slots inside its `async with` block")
