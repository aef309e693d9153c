"""The limiter of creations and removals: how many at a time, and how the daemon's failures slow all of them down."""

from __future__ import annotations

import asyncio

import pytest
from hermes_docker import limits
from hermes_docker.daemon import DaemonError
from hermes_docker.limits import Throttle


async def test_so_many_at_a_time() -> None:
    throttle, now, most = Throttle(3), 0, 0

    async def work() -> None:
        nonlocal now, most
        async with throttle.turn():
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.01)
            now -= 1

    async with asyncio.TaskGroup() as group:
        for _ in range(12):
            group.create_task(work())
    assert most == 3


async def failing(throttle: Throttle, status: int | None) -> None:
    with pytest.raises(DaemonError):
        async with throttle.turn():
            raise DaemonError("no", status=status)


async def test_a_failing_daemon_gets_more_and_more_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FIRST_PAUSE_S", 0.2)
    throttle, loop = Throttle(), asyncio.get_running_loop()
    began = loop.time()
    await failing(throttle, 500)
    await failing(throttle, None)
    async with throttle.turn():
        pass
    assert loop.time() - began >= 0.5 * 0.2 + 0.5 * 0.4
    monkeypatch.setattr(limits, "FIRST_PAUSE_S", 60.0)
    began = loop.time()
    await failing(throttle, 404)  # an answer, not a failure
    async with throttle.turn():
        assert loop.time() - began < 20
