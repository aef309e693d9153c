"""The pool of one profile: sandboxes that come and go, and who gets which slot when.

All decisions are made between two awaits, in `_pump`: whoever changes something calls it, so there is no lock. Each
sandbox has one background task for its whole life (`_life`); callers only ever wait for futures, which is why the
cancellation of a caller can't cut anything off half done.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Any

from hermes_core.errors import (
    AcquireTimeout,
    HermesError,
    InfraError,
    PolicyError,
    ProvisionError,
    SandboxLost,
    UsageError,
)
from hermes_core.sandbox.background import Background
from hermes_core.sandbox.contract import SandboxConfig
from hermes_core.sandbox.observers import Observers, tell
from hermes_core.sandbox.provision import Provisioner, retryable, slots_per_sandbox
from hermes_core.sandbox.results import SlotState
from hermes_core.sandbox.slots import Lease, Member, Seat, new_lease
from hermes_core.sandbox.waiting import Line, Waiter

if TYPE_CHECKING:
    from hermes_core.sandbox.checkpoint import SavedLease, SavedSandbox

log = logging.getLogger(__name__)

START_ATTEMPTS = 3
"""How often the first sandboxes are tried before `start` fails."""

OPEN_ATTEMPTS = 3
"""How many slots that can't be opened one waiter is offered."""

RESET_LIMIT_S = 60.0
"""How long the reset of a slot may take before its sandbox is given up, in seconds."""

LAST_PART, LAST_PART_S = 0.25, 300.0
"""What its provider will end gets no new lease in the last part of its life: a quarter, these seconds at most."""

GROUPS_REMEMBERED = 1024


def closed() -> UsageError:
    """The error for a slot asked of a tool backend that is closed, or is being closed."""
    return UsageError("the tool backend is closed", hint="acquire slots inside its `async with` block")


class Pool:
    """The sandboxes and slots of one profile."""

    def __init__(self, config: SandboxConfig, provisioner: Provisioner, observers: Observers) -> None:
        provisioner.check(config)
        self.config = config
        self.profile = config.name
        self.slots = slots_per_sandbox(config, provisioner.isolation)
        self._provisioner = provisioner
        self._observers = observers
        self._members: list[Member] = []
        self._line = Line()
        self._homes: dict[str, Member] = {}
        self._work = Background()
        self._creations: set[asyncio.Task[None]] = set()
        self._ending = 0
        self._begun = False
        self._closing = False
        self._warm: asyncio.Future[None] | None = None
        self._failures = 0
        self._error: Exception | None = None
        """The last failed creation, until one succeeds."""
        self._hopeless = False
        """Whether that one can't pass: nothing is created until somebody asks again."""
        self._timer: asyncio.TimerHandle | None = None

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
        if self._count_usable() >= self.config.min_sandboxes:
            return
        self._warm = asyncio.get_running_loop().create_future()
        self._pump()
        await self._warm

    async def acquire(
        self, trajectory_id: str | None, *, group: str | None, verification: bool, timeout_s: float
    ) -> Lease:
        """A slot, in order of arrival.

        Raises:
            AcquireTimeout: none became free in time.
            ProvisionError, PolicyError: no sandbox can be made, and there is none to wait for.
        """
        if self._closing:
            raise closed()
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        waiter = Waiter(future, trajectory_id, group, verification)
        self._begun, self._hopeless = True, False
        self._line.join(waiter)
        self._pump()
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except BaseException as error:
            self._line.leave(waiter)
            if not future.cancelled() and future.exception() is None:
                self._vacate(future.result())  # served and cut off in the same turn of the loop
            self._pump()
            if isinstance(error, TimeoutError):
                raise self._timed_out(timeout_s) from self._error
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
        usable = self._usable()
        return {
            "sandboxes": len(self._members),
            "healthy_sandboxes": len(usable),
            "creating": len(self._creations),
            "min_sandboxes": self.config.min_sandboxes,
            "max_sandboxes": self.config.max_sandboxes,
            "total_slots": len(usable) * self.slots,
            "available_slots": sum(len(member.vacant) for member in usable),
            "reserve_slots": self.config.reserve_slots,
            "slots_per_sandbox": self.slots,
            "waiting": len(self._line),
        }

    async def take_over(self, saved: SavedSandbox) -> list[Lease]:
        """The leases on a sandbox that a dead driver left, with the sandbox.

        Raises:
            SandboxLost, InfraError, PolicyError: it can't be had, or not now.
        """
        if self._closing:
            raise closed()
        member = await self._provisioner.take_over(saved, self.config)
        try:
            leases = [await self._resume(member, index, held) for index, held in saved.leases.items()]
        except BaseException:
            await self._provisioner.let_go(member)
            raise
        for seat in member.vacant:
            seat.dirty = True  # it is not known how its last lease ended
        self._begun = True
        self._work.spawn(self._lead(member), f"sandbox of profile {self.profile}")
        self._adopt(member)
        return leases

    async def _resume(self, member: Member, index: int, held: SavedLease) -> Lease:
        seat = next((seat for seat in member.vacant if seat.index == index), None)
        if seat is None:
            raise SandboxLost(f"it has no slot {index}", sandbox_id=member.sandbox.id)
        seat.workspace_dir = await member.client.open_slot(index)
        lease = new_lease(self, seat, held.trajectory_id, verification=False)
        lease.watches = held.watches
        return lease

    def record(self, lease: Lease) -> None:
        """Something has changed about a lease that a driver after us has to know."""
        if lease.member in self._members:
            self._provisioner.record(lease.member, self.config)

    async def aclose(self, *, keep: bool = False) -> None:
        """End all sandboxes, in parallel, and wait until nothing of the pool is left; or `keep` them. Idempotent."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        for waiter in [*self._line]:
            self._fail(waiter, closed())
        if self._warm is not None and not self._warm.done():
            self._warm.set_exception(closed())
        for creation in self._creations:
            creation.cancel()
        for member in [*self._members]:
            member.kept = keep and member.client.life is not None
            self._retire(member)
        await self._work.join()

    # ------------------------------------------------------------------ decisions: no awaits from here on

    def _pump(self) -> None:
        """Bring the pool to what it should be: waiters served, sandboxes made or retired."""
        if self._closing:
            return
        while (waiter := self._line.next(self._can_serve)) is not None:
            self._grant(waiter)
        self._grow()
        self._retire_idle()

    def _usable(self) -> list[Member]:
        return [member for member in self._members if not member.draining]

    def _count_usable(self) -> int:
        return len(self._usable())

    def _taken(self, *, verification: bool) -> int:
        return sum(lease.verification == verification for member in self._usable() for lease in member.leases)

    def _can_serve(self, verification: bool) -> bool:
        """Whether there is a slot for a waiter of that kind: ordinary ones leave the reserve alone."""
        usable = self._usable()
        if not any(member.vacant for member in usable):
            return False
        most = len(usable) * self.slots - self.config.reserve_slots
        return verification or self._taken(verification=False) < most

    def _grant(self, waiter: Waiter) -> None:
        seat = self._place(waiter.group)
        lease = new_lease(self, seat, waiter.trajectory_id, verification=waiter.verification)
        self.record(lease)
        if waiter.group is not None:
            self._homes.pop(waiter.group, None)
            self._homes[waiter.group] = seat.member
            if len(self._homes) > GROUPS_REMEMBERED:
                del self._homes[next(iter(self._homes))]
        if seat.workspace_dir and not (seat.dirty and waiter.verification):
            waiter.future.set_result(lease)
        else:
            self._work.spawn(self._open(waiter, lease), f"open {seat.slot_id}")

    def _place(self, group: str | None) -> Seat:
        """The best vacant seat: on the group's sandbox, else where the group fits, else where most are taken."""
        roomy = [member for member in self._usable() if member.vacant]
        home = self._homes.get(group) if group is not None else None
        if home is not None and home in roomy:
            member = home
        elif group is not None:
            member = max(roomy, key=lambda each: len(each.vacant))
        else:  # so that the others fall idle and can be retired
            member = min(roomy, key=lambda each: len(each.vacant))
        return min(member.vacant, key=lambda seat: (seat.dirty, not seat.workspace_dir, seat.index))

    def _wanted(self) -> int:
        """How many sandboxes there should be."""
        if not self._begun:
            return 0
        if not self._line:
            return self.config.min_sandboxes
        ordinary = self._taken(verification=False) + self._line.ordinary
        verification = self._taken(verification=True) + self._line.verification
        seats = ordinary + max(verification, self.config.reserve_slots)
        return max(self.config.min_sandboxes, math.ceil(seats / self.slots))

    def _grow(self) -> None:
        if self._hopeless:
            return
        short = self._wanted() - self._count_usable() - len(self._creations)
        room = self.config.max_sandboxes - len(self._members) - len(self._creations) - self._ending
        for _ in range(min(short, room)):
            task = self._work.spawn(self._life(), f"sandbox of profile {self.profile}")
            self._creations.add(task)

    def _retire_idle(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        spare = self._count_usable() - max(self._wanted(), self.config.min_sandboxes)
        idle = sorted((member for member in self._usable() if not member.leases), key=lambda each: each.idle_since)
        loop = asyncio.get_running_loop()
        for member in idle[: max(spare, 0)]:
            due = member.idle_since + self.config.idle_timeout
            if due > loop.time():
                self._timer = loop.call_at(due, self._pump)
                return
            log.info("sandbox %s was idle for %g s and is ended", member.sandbox.id, self.config.idle_timeout)
            self._retire(member)

    def _retire(self, member: Member) -> None:
        self._forget(member)
        self._ending += 1
        member.over.set()

    def _expire(self, member: Member) -> None:
        """The end of its life is near: no new leases, and another in its place if one is wanted."""
        if member.draining or member not in self._members:
            return
        log.info("sandbox %s nears the end of its life and gets no new leases", member.sandbox.id)
        member.draining = True
        if not member.leases:
            self._retire(member)
        self._pump()

    def _forget(self, member: Member) -> None:
        self._members.remove(member)
        if not member.kept:
            self._provisioner.forget(member)
        if member.expiry is not None:
            member.expiry.cancel()
        self._hopeless = False  # there is room again
        self._homes = {group: home for group, home in self._homes.items() if home is not member}

    def _quarantine(self, member: Member, error: BaseException) -> None:
        """No further lease on a sandbox that can't be trusted; it ends when those that there are have ended."""
        if member.draining or member not in self._members:
            return
        member.draining = True
        log.warning("sandbox %s is quarantined: %s", member.sandbox.id, error)
        self._tell_lost(member, f"quarantined: {error}")

    def _lose(self, member: Member) -> None:
        """A sandbox that can't be reached any more: out of the pool at once, its leases fail."""
        if member not in self._members:
            return
        member.lost = SandboxLost("the sandbox died or can't be reached any more", sandbox_id=member.sandbox.id)
        self._forget(member)
        for lease in member.leases:
            lease.slot.state = SlotState.ERROR
        log.warning("sandbox %s is lost, with %d leases", member.sandbox.id, len(member.leases))
        if not member.draining:
            self._tell_lost(member, str(member.lost.message))
        member.over.set()
        self._pump()

    def _tell_lost(self, member: Member, reason: str) -> None:
        tell(
            self._observers.sandbox_lost,
            sandbox_id=member.sandbox.id,
            backend=self._provisioner.backend.name,
            profile=self.profile,
            reason=reason,
        )

    def _vacate(self, lease: Lease) -> None:
        member = lease.member
        member.leases.discard(lease)
        member.vacant.append(lease.seat)
        self.record(lease)
        if member.leases:
            return
        member.idle_since = asyncio.get_running_loop().time()
        if member.draining and member in self._members:
            self._retire(member)

    def _fail(self, waiter: Waiter, error: Exception) -> None:
        self._line.leave(waiter)
        if not waiter.gone:
            waiter.future.set_exception(error)

    def _timed_out(self, timeout_s: float) -> AcquireTimeout:
        now = self.status()
        creation = f"; the last sandbox could not be made: {self._error}" if self._error is not None else ""
        return AcquireTimeout(
            f"no slot of profile {self.profile!r} became free within {timeout_s:g} s: "
            f"{now['available_slots']} of {now['total_slots']} slots free ({now['reserve_slots']} reserved for "
            f"verification), {now['healthy_sandboxes']} of at most {now['max_sandboxes']} sandboxes, "
            f"{now['creating']} being made, {now['waiting']} others waiting{creation}",
            hint="raise max_sandboxes, slots_per_sandbox or acquire_timeout_s, or run fewer rollouts at a time",
        )

    # ------------------------------------------------------------------ background work

    async def _life(self) -> None:
        """One sandbox, from its creation to its end."""
        me = asyncio.current_task()
        assert me is not None
        try:
            member = await self._provisioner.make(self.config, self._try_again)
        except Exception as error:
            self._creations.discard(me)
            self._creation_failed(error)
            return
        finally:
            self._creations.discard(me)
        self._adopt(member)
        await self._lead(member)

    async def _lead(self, member: Member) -> None:
        """A sandbox that is there, to its end."""
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(member))
                await member.over.wait()
                watch.cancel()
        finally:
            await (self._provisioner.let_go(member) if member.kept else self._provisioner.end(member))
        if member.lost is None:
            self._ending -= 1
        tell(
            self._observers.sandbox_terminated,
            sandbox_id=member.sandbox.id,
            backend=self._provisioner.backend.name,
            profile=self.profile,
        )
        self._pump()

    async def _watch(self, member: Member) -> None:
        await member.client.lost.wait()
        self._lose(member)

    def _adopt(self, member: Member) -> None:
        self._error, self._failures, self._hopeless = None, 0, False
        member.idle_since = asyncio.get_running_loop().time()
        self._members.append(member)
        self._provisioner.record(member, self.config)
        if (life := member.sandbox.lifetime_s) is not None:
            last = min(life * LAST_PART, LAST_PART_S)
            member.expiry = asyncio.get_running_loop().call_later(life - last, self._expire, member)
        tell(
            self._observers.sandbox_created,
            sandbox_id=member.sandbox.id,
            backend=self._provisioner.backend.name,
            profile=self.profile,
        )
        if self._closing:
            self._retire(member)
        if self._warm is not None and not self._warm.done() and self._count_usable() >= self.config.min_sandboxes:
            self._warm.set_result(None)
        self._pump()

    def _try_again(self, error: Exception) -> bool:
        """Whether a creation that failed is still wanted, and may yet succeed."""
        self._error = error
        self._failures += 1
        log.warning("a sandbox of profile %s could not be made: %s", self.profile, error)
        if self._warm is not None and not self._warm.done() and self._failures >= START_ATTEMPTS:
            self._warm.set_exception(self._seen_by_caller(error))
        # The creation that asks is one of those counted.
        return not self._closing and self._wanted() > self._count_usable() + len(self._creations) - 1

    def _creation_failed(self, error: Exception) -> None:
        """A creation came to its end without a sandbox: those who have nothing else to wait for are told."""
        self._error = error
        if not retryable(error):
            self._hopeless = True
            if self._warm is not None and not self._warm.done():
                self._warm.set_exception(self._seen_by_caller(error))
            if not self._creations:
                slots = self._count_usable() * self.slots
                for waiter in [*self._line]:
                    if slots <= (0 if waiter.verification else self.config.reserve_slots):
                        self._fail(waiter, self._seen_by_caller(error))
        self._pump()

    def _seen_by_caller(self, error: Exception) -> HermesError:
        """The error that ended a creation, once for each who waited for it."""
        kind = PolicyError if isinstance(error, HermesError) and not isinstance(error, InfraError) else ProvisionError
        message = error.message if isinstance(error, HermesError) else f"{type(error).__name__}: {error}"
        hint = error.hint if isinstance(error, HermesError) else None
        raised = kind(f"no sandbox of profile {self.profile!r} could be made: {message}", hint=hint)
        raised.__cause__ = error
        return raised

    async def _open(self, waiter: Waiter, lease: Lease) -> None:
        """Make a seat ready for its first lease, or clean for a verification."""
        seat, client = lease.seat, lease.member.client
        try:
            if seat.dirty:
                await client.reset_slot(seat.index)
                seat.dirty = False
            seat.workspace_dir = lease.slot.workspace_dir = await client.open_slot(seat.index)
        except Exception as error:
            self._quarantine(lease.member, error)
            self._vacate(lease)
            waiter.failures += 1
            if waiter.failures >= OPEN_ATTEMPTS:
                self._fail(waiter, self._seen_by_caller(error))
            elif not waiter.gone:
                self._line.join(waiter)
        else:
            if waiter.gone:
                self._vacate(lease)
            else:
                waiter.future.set_result(lease)
        self._pump()

    async def _release(self, lease: Lease, reset: bool) -> None:
        """End what the lease left running, and its files if asked to; without proof the sandbox goes."""
        seat, member = lease.seat, lease.member
        try:
            if member.lost is None and not self._closing:
                async with asyncio.timeout(RESET_LIMIT_S):
                    client = member.client
                    await (client.reset_slot(seat.index) if reset else client.kill_slot(seat.index, forget=True))
                seat.dirty = not reset
        except Exception as error:
            self._quarantine(member, error)
        finally:
            lease.slot.state = SlotState.ERROR if member.lost is not None or member.draining else SlotState.AVAILABLE
            self._vacate(lease)
        self._pump()
