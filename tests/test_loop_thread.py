"""An event loop in a thread of its own: calls from anywhere, cancellation, and its end with the program."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from hermes_core.aio import LoopThread
from hermes_core.errors import UsageError


@pytest.fixture
def thread(leak_check: None) -> Iterator[LoopThread]:
    async def close() -> None:
        await asyncio.sleep(0)

    made = LoopThread("test", close)
    yield made
    made.close()
    made.close()
    assert made.closed


async def _double(number: int) -> int:
    await asyncio.sleep(0.01)
    if number < 0:
        raise LookupError(number)
    return 2 * number


async def test_calls_from_a_loop_and_from_a_thread(thread: LoopThread) -> None:
    assert await thread.run(_double(2)) == 4
    assert await asyncio.gather(*(thread.run(_double(n)) for n in range(50))) == [2 * n for n in range(50)]
    assert thread.call(_double(3)) == 6, "also while the caller's loop runs"
    with pytest.raises(LookupError):
        await thread.run(_double(-1))
    with pytest.raises(LookupError):
        thread.call(_double(-1))

    async def itself() -> None:
        with pytest.raises(UsageError, match="never end"):
            thread.call(_double(1))

    await thread.run(itself())
    thread.close()
    with pytest.raises(UsageError, match="has ended"):
        await thread.run(_double(1))


async def test_cancelled_with_the_caller(thread: LoopThread) -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    caller = asyncio.create_task(thread.run(work()))
    await asyncio.sleep(0.05)
    caller.cancel()
    await asyncio.wait([caller])
    assert caller.cancelled()
    await thread.run(_double(1))
    assert ended == ["cancelled"]


async def test_an_outcome_that_comes_too_late_is_taken_back(thread: LoopThread) -> None:
    taken_back: list[int] = []

    async def stubborn() -> int:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return 7
        return 0

    async def undo(outcome: int) -> None:
        taken_back.append(outcome)

    caller = asyncio.create_task(thread.run(stubborn(), undo))
    await asyncio.sleep(0.05)
    caller.cancel()
    await asyncio.wait([caller])
    while not taken_back:
        await thread.run(_double(1))
    assert taken_back == [7]


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(3)", "raise LookupError", "os.kill(os.getpid(), 2)"])
def test_it_ends_with_the_program(ending: str) -> None:
    program = f"""
    import asyncio, os, time
    from hermes_core.aio import LoopThread

    async def close():
        await asyncio.sleep(0.1)
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.05) for _ in range(5)))
        print("closed")

    thread = LoopThread("test", close)
    {ending}
    time.sleep(0.2)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=30)
    assert done.stdout == "closed\n"
    assert "never" not in done.stderr
