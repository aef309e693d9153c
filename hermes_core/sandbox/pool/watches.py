"""Watches of background processes: subscribers get new output at intervals, and when a process ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from hermes_core.aio import TaskSet
from hermes_core.errors import CommandError, InfraError, StaleSlotError
from hermes_core.events import Events
from hermes_core.sandbox.commands import ProcessUpdate, SlotCommands
from hermes_core.sandbox.pool.leases import Lease, Watch

log = logging.getLogger(__name__)

LEAST_INTERVAL_S = 30.0
"""Minimum time between two updates of one process, also of its end."""
MOST_BYTES = 64 << 10
"""Maximum number of bytes of output in one update. If there are more, the newest are delivered."""


Subscriber = Callable[[ProcessUpdate], Awaitable[None]]


class Watchers:
    """The watches of one tool backend, and their subscribers.

    Each update is recorded before it is delivered. So it is delivered at most once, even if the driver dies.
    """

    def __init__(self, events: Events, least_interval_s: float = LEAST_INTERVAL_S) -> None:
        self.subscribers: list[Subscriber] = []
        self.least_interval_s = least_interval_s
        self._events = events
        self._tasks = TaskSet()

    def begin(self, lease: Lease, process_id: str, interval_s: float) -> float:
        """Watch a process until it or the lease ends. Return the interval in seconds, which may be longer."""
        interval_s = max(interval_s, self.least_interval_s)
        lease.watches[process_id] = Watch(interval_s=interval_s)
        lease.record()
        self.go_on(lease, process_id)
        return interval_s

    def go_on(self, lease: Lease, process_id: str) -> None:
        """Continue a watch at its offset, for example one of a previous driver."""
        if not lease.watches[process_id].ended:
            self._tasks.spawn(self._watch(lease, process_id), f"watch of {process_id}")

    async def aclose(self) -> None:
        """Stop all watches."""
        await self._tasks.aclose()

    async def _watch(self, lease: Lease, process_id: str) -> None:
        watch, commands = lease.watches[process_id], lease.commands
        try:
            while not watch.ended:
                wait_s = watch.interval_s
                if watch.delivered:  # the clock may have been set back since then
                    wait_s = min(max(0.0, watch.delivered + watch.interval_s - time.time()), watch.interval_s)
                status = await commands.wait(process_id, timeout_s=wait_s)
                if not status.running and watch.delivered:
                    await asyncio.sleep(min(watch.delivered + self.least_interval_s - time.time(), watch.interval_s))
                await self._update(lease, commands, watch, process_id)
        except (StaleSlotError, CommandError):
            return  # the lease has ended, or the process is forgotten
        except InfraError as error:
            log.warning("process %s is not watched any more: %s", process_id, error)

    async def _update(self, lease: Lease, commands: SlotCommands, watch: Watch, process_id: str) -> None:
        status = await commands.poll(process_id)
        offset = max(watch.offset, status.output_bytes - MOST_BYTES)
        chunk = await commands.log(process_id, offset=offset, limit=status.output_bytes - offset)
        watch.delivered = time.time()
        if status.running and not chunk.data:
            return
        watch.offset, watch.ended = chunk.offset + len(chunk.data), not status.running
        lease.record()
        update = ProcessUpdate(lease.slot.trajectory_id or "", lease.slot, status, chunk.data, chunk.offset)
        self._events.emit("process_updated", trajectory_id=update.trajectory_id, update=update)
        for subscriber in [*self.subscribers]:
            try:
                await subscriber(update)
            except Exception:
                log.exception("a subscriber to background processes failed")
        watch.delivered = time.time()  # again, because the time that subscribers take does not count
