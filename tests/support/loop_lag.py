"""The fixture `loop_lag`: your test fails if it keeps the event loop from running for more than 50 ms.

`@pytest.mark.loop_stall(seconds)` sets another limit.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest

LOOP_STALL_S = 0.05
"""The longest that the event loop may be kept from running, unless the test says otherwise."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "loop_stall(seconds): how long the event loop may stall under `loop_lag`")


@pytest.fixture
async def loop_lag(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fails the test if its event loop stalled for more than 50 ms; `loop_stall(seconds)` is another limit.

    What counts is processor time of the loop's thread, and time in which it was blocked: not time in which the
    machine was busy with something else.
    """
    marker = request.node.get_closest_marker("loop_stall")
    limit = marker.args[0] if marker else LOOP_STALL_S
    stalls: list[float] = []
    witness = Witness()

    async def watch() -> None:
        while True:
            began, worked, late = time.monotonic(), time.thread_time(), witness.late_s
            await asyncio.sleep(Witness.INTERVAL_S)
            overrun = time.monotonic() - began - Witness.INTERVAL_S
            stall = max(min(overrun, time.thread_time() - worked), overrun - (witness.late_s - late))
            if stall > limit:
                stalls.append(stall)

    witness.start()
    watcher = asyncio.create_task(watch())
    yield
    await asyncio.sleep(0)
    watcher.cancel()
    await asyncio.wait([watcher])
    witness.stop()
    if stalls:
        pytest.fail(f"the event loop stalled {len(stalls)} times, {max(stalls) * 1000:.0f} ms at worst", pytrace=False)


class Witness(threading.Thread):
    """A thread that only sleeps: when it wakes late, the machine was busy, whatever the event loop did."""

    INTERVAL_S = 0.005

    def __init__(self) -> None:
        super().__init__(name="loop_lag witness", daemon=True)
        self.late_s = 0.0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            time.sleep(self.INTERVAL_S)
            self.late_s += max(0.0, time.monotonic() - began - self.INTERVAL_S)

    def stop(self) -> None:
        self._ended.set()
        self.join()
