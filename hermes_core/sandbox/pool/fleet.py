"""The sandboxes of one pool: made as they are wanted, watched, replaced, and ended.

Each has one background task for its whole life (`_life`). As in the pool, all decisions are made between two awaits.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from hermes_core.aio import TaskSet
from hermes_core.errors import HermesError, InfraError, PolicyError, ProvisionError, SandboxLost, UsageError
from hermes_core.events import Events
from hermes_core.sandbox.contract import SandboxConfig
from hermes_core.sandbox.pool.cost import Meter
from hermes_core.sandbox.pool.leases import PooledSandbox
from hermes_core.sandbox.pool.provision import Provisioner, retryable
from hermes_core.sandbox.results import SlotState

log = logging.getLogger(__name__)

START_ATTEMPTS = 3
"""How often the first sandboxes are tried before `start` fails."""

LEAVING_BESIDE = 2
"""Quarantined sandboxes that may be there beside `max_sandboxes`: what dies slowly shall not stop the pool, and not
exhaust the host either."""

LAST_PART, LAST_PART_S = 0.25, 300.0
"""What its provider will end gets no new lease in the last part of its life: a quarter, these seconds at most."""


def closed() -> UsageError:
    """The error for a slot asked of a tool backend that is closed, or is being closed."""
    return UsageError("the tool backend is closed", hint="acquire slots inside its `async with` block")


class Owner(Protocol):
    """The pool whose sandboxes they are."""

    def wanted(self) -> int:
        """How many sandboxes there should be."""

    def pump(self) -> None:
        """Something has changed: bring the pool to what it should be."""

    def give_up(self, error: Exception) -> None:
        """The last creation failed in a way that can't pass: tell those who have nothing else to wait for."""


class Fleet:
    """The sandboxes of one pool."""

    def __init__(
        self,
        config: SandboxConfig,
        provisioner: Provisioner,
        events: Events,
        *,
        work: TaskSet,
        owner: Owner,
        meter: Meter,
    ) -> None:
        self._config = config
        self._meter = meter
        self._provisioner = provisioner
        self._events = events
        self._work = work
        self._owner = owner
        self.sandboxes: list[PooledSandbox] = []
        self.creations: set[asyncio.Task[None]] = set()
        self.error: Exception | None = None
        """The last failed creation, until one succeeds."""
        self.hopeless = False
        """Whether that one can't pass: nothing is created until somebody asks again."""
        self._ending: set[PooledSandbox] = set()
        self._closing = False
        self._warm: asyncio.Future[None] | None = None
        self._failures = 0
        self._timer: asyncio.TimerHandle | None = None

    def usable(self) -> list[PooledSandbox]:
        """Those that get new leases."""
        return [pooled for pooled in self.sandboxes if not pooled.draining]

    def count_usable(self) -> int:
        """How many get new leases."""
        return len(self.usable())

    async def warm(self) -> None:
        """Wait until the minimum is there.

        Raises:
            ProvisionError, PolicyError: it can't be made; what was made already stays until `close`.
        """
        if self.count_usable() >= self._config.min_sandboxes:
            return
        self._warm = asyncio.get_running_loop().create_future()
        self._owner.pump()
        await self._warm

    def grow(self) -> None:
        """Begin to make those that are missing."""
        if self.hopeless or not self._meter.may_grow:
            return
        short = self._owner.wanted() - self.count_usable() - len(self.creations)
        room = self._config.max_sandboxes - self._counted() - len(self.creations)
        for _ in range(min(short, room)):
            task = self._work.spawn(self._life(), f"sandbox of profile {self._config.name}")
            self.creations.add(task)

    def _counted(self) -> int:
        """How many count against `max_sandboxes`."""
        there = {*self.sandboxes, *self._ending}
        leaving = sum(pooled.quarantined for pooled in there)
        return len(there) - min(leaving, LEAVING_BESIDE)

    def retire_idle(self) -> None:
        """End those that have been idle for long enough, down to the minimum; look again when the next one is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        spare = self.count_usable() - self._owner.wanted()
        patience = 0.0 if self._meter.spent else self._config.idle_timeout
        idle = sorted((pooled for pooled in self.usable() if not pooled.leases), key=lambda each: each.idle_since)
        loop = asyncio.get_running_loop()
        for pooled in idle[: max(spare, 0)]:
            due = pooled.idle_since + patience
            if due > loop.time():
                self._timer = loop.call_at(due, self._owner.pump)
                return
            log.info("sandbox %s was idle for %g s and is ended", pooled.sandbox.id, patience)
            self._retire(pooled)

    def retire_unleased(self, pooled: PooledSandbox) -> None:
        """Its last lease has ended: it ends too, if it gets no new ones."""
        if pooled.draining and pooled in self.sandboxes:
            self._retire(pooled)

    def retire_used(self, pooled: PooledSandbox) -> None:
        """No further lease on a sandbox that was good for one; it ends with that one."""
        pooled.draining = True

    def quarantine(self, pooled: PooledSandbox, error: BaseException) -> None:
        """No further lease on a sandbox that can't be trusted; it ends when those that there are have ended."""
        if pooled.draining or pooled not in self.sandboxes:
            return
        pooled.draining = pooled.quarantined = True
        log.warning("sandbox %s is quarantined: %s", pooled.sandbox.id, error)
        self._emit("sandbox_lost", pooled, reason=f"quarantined: {error}")

    def join(self, pooled: PooledSandbox) -> None:
        """One that was there before: it is one of the fleet from now on."""
        self._work.spawn(self._lead(pooled), f"sandbox of profile {self._config.name}")
        self._adopt(pooled)

    def record(self, pooled: PooledSandbox) -> None:
        """Something has changed about it that a driver after us has to know."""
        if pooled in self.sandboxes:
            self._provisioner.record(pooled, self._config)

    def close(self, *, keep: bool = False) -> None:
        """Begin the end of all of them, or let them go where they are to be kept and can be taken over.

        Who waits for the `TaskSet` waits for that.
        """
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        self._not_warm(closed())
        for creation in self.creations:
            creation.cancel()
        for pooled in [*self.sandboxes]:
            pooled.kept = keep and pooled.client.life is not None
            self._retire(pooled)

    def seen_by_caller(self, error: Exception) -> HermesError:
        """The error that ended a creation, once for each who waited for it."""
        kind = PolicyError if isinstance(error, HermesError) and not isinstance(error, InfraError) else ProvisionError
        message = error.message if isinstance(error, HermesError) else f"{type(error).__name__}: {error}"
        hint = error.hint if isinstance(error, HermesError) else None
        raised = kind(f"no sandbox of profile {self._config.name!r} could be made: {message}", hint=hint)
        raised.__cause__ = error
        return raised

    # ------------------------------------------------------------------ the life of one

    async def _life(self) -> None:
        """One sandbox, from its creation to its end."""
        me = asyncio.current_task()
        assert me is not None
        try:
            pooled = await self._provisioner.make(self._config, self._meter, self._try_again)
        except Exception as error:
            self.creations.discard(me)
            self._creation_failed(error)
            return
        finally:
            self.creations.discard(me)
        self._adopt(pooled)
        await self._lead(pooled)

    async def _lead(self, pooled: PooledSandbox) -> None:
        """One that is there, to its end."""
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(pooled))
                await pooled.over.wait()
                watch.cancel()
        finally:
            await (self._let_go(pooled) if pooled.kept else self._provisioner.end(pooled, self._meter))
        self._ending.discard(pooled)
        self._emit("sandbox_terminated", pooled)
        self._owner.pump()

    async def _let_go(self, pooled: PooledSandbox) -> None:
        await self._provisioner.let_go(pooled)
        self._meter.end(pooled.sandbox.id)

    def _try_again(self, error: Exception) -> bool:
        """Whether a creation that failed is still wanted, and may yet succeed."""
        known = str(self.error) == str(error)  # for each sandbox, and each attempt at one: it is said once
        self.error = error
        self._failures += 1
        level = logging.DEBUG if known else logging.WARNING
        log.log(level, "a sandbox of profile %s could not be made: %s", self._config.name, error)
        if self._failures >= START_ATTEMPTS:
            self._not_warm(self.seen_by_caller(error))
        # The creation that asks is one of those counted.
        return not self._closing and self._owner.wanted() > self.count_usable() + len(self.creations) - 1

    def _creation_failed(self, error: Exception) -> None:
        """A creation came to its end without a sandbox."""
        self.error = error
        if not retryable(error):
            self.hopeless = True
            self._not_warm(self.seen_by_caller(error))
            if not self.creations:
                self._owner.give_up(error)
        self._owner.pump()

    def _adopt(self, pooled: PooledSandbox) -> None:
        self.error, self._failures, self.hopeless = None, 0, False
        pooled.idle_since = asyncio.get_running_loop().time()
        self.sandboxes.append(pooled)
        self._meter.begin(pooled.sandbox.id)
        self.record(pooled)
        if (life := pooled.sandbox.lifetime_s) is not None:
            last = min(life * LAST_PART, LAST_PART_S)
            pooled.expiry = asyncio.get_running_loop().call_later(life - last, self._expire, pooled)
        self._emit("sandbox_created", pooled)
        if self._closing:
            self._retire(pooled)
        if self._warm is not None and not self._warm.done() and self.count_usable() >= self._config.min_sandboxes:
            self._warm.set_result(None)
        self._owner.pump()

    async def _watch(self, pooled: PooledSandbox) -> None:
        await pooled.client.lost.wait()
        self._lose(pooled)

    def _lose(self, pooled: PooledSandbox) -> None:
        """A sandbox that can't be reached any more: out of the pool at once, its leases fail."""
        if pooled not in self.sandboxes:
            return
        pooled.lost = SandboxLost("the sandbox died or can't be reached any more", sandbox_id=pooled.sandbox.id)
        self._forget(pooled)
        for lease in pooled.leases:
            lease.slot.state = SlotState.ERROR
        log.warning("sandbox %s is lost, with %d leases", pooled.sandbox.id, len(pooled.leases))
        if not pooled.draining:
            self._emit("sandbox_lost", pooled, reason=str(pooled.lost.message))
        pooled.over.set()
        self._owner.pump()

    def _expire(self, pooled: PooledSandbox) -> None:
        """The end of its life is near: no new leases, and another in its place if one is wanted."""
        if pooled.draining or pooled not in self.sandboxes:
            return
        log.info("sandbox %s nears the end of its life and gets no new leases", pooled.sandbox.id)
        pooled.draining = True
        if not pooled.leases:
            self._retire(pooled)
        self._owner.pump()

    def _retire(self, pooled: PooledSandbox) -> None:
        self._forget(pooled)
        self._ending.add(pooled)
        pooled.over.set()

    def _forget(self, pooled: PooledSandbox) -> None:
        self.sandboxes.remove(pooled)
        if not pooled.kept:
            self._provisioner.forget(pooled)
        if pooled.expiry is not None:
            pooled.expiry.cancel()
        self.hopeless = False  # there is room again

    def _not_warm(self, error: HermesError) -> None:
        if self._warm is not None and not self._warm.done():
            self._warm.set_exception(error)

    def _emit(self, event: str, pooled: PooledSandbox, **more: str) -> None:
        self._events.emit(
            event,
            sandbox_id=pooled.sandbox.id,
            backend=self._provisioner.backend.name,
            profile=self._config.name,
            **more,
        )
