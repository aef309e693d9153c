"""Tasks with an owner, one attempt for all who want its outcome, and an event loop in a thread of its own.

A shared attempt serves the others whoever is cancelled, and ends with its owner. The loop in a thread takes calls from
anywhere, cancels them with their callers, and ends with the program.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

from hermes_core.aio import BrokenOff, LoopThread, SingleFlight, TaskSet, alongside, complete, repeat_call, together
from hermes_core.errors import InfraError, UsageError


class Attempts:
    """Attempts that end when a test says so, and how many there were at a time."""

    def __init__(self) -> None:
        self.begun = self.now = self.most = self.undone = 0
        self.go = asyncio.Event()
        self.error: Exception | None = None
        self.undoing = asyncio.Event()
        self.undoing.set()

    async def __call__(self) -> int:
        self.begun += 1
        self.now += 1
        self.most = max(self.most, self.now)
        number = self.begun
        try:
            await self.go.wait()
            if self.error is not None:
                raise self.error
            return number
        except asyncio.CancelledError:
            await self.undoing.wait()
            self.undone += 1
            raise
        finally:
            self.now -= 1


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture
async def work():
    work = TaskSet()
    yield work
    await work.aclose()
    assert len(work) == 0


@pytest.fixture
def attempts() -> Attempts:
    return Attempts()


Asking = Callable[[int], list["asyncio.Task[int]"]]


@pytest.fixture
async def flight() -> SingleFlight[int]:
    return SingleFlight("the test")


@pytest.fixture
async def ask(flight: SingleFlight[int], work: TaskSet, attempts: Attempts) -> Asking:
    return lambda count: [asyncio.create_task(flight.get(work, attempts)) for _ in range(count)]


async def test_all_who_ask_meanwhile_share_one_attempt_and_the_next_begins_another(attempts, ask):
    tasks = ask(10)
    await turns()
    tasks += ask(10)
    await turns()
    attempts.go.set()
    assert await asyncio.gather(*tasks) == [1] * 20
    assert await asyncio.gather(*ask(2)) == [2, 2]
    assert attempts.most == 1


async def test_an_outcome_that_is_kept_is_given_to_all_who_ask_later(work, attempts):
    flight = SingleFlight("the test", keep=True)
    attempts.go.set()
    assert [await flight.get(work, attempts) for _ in range(3)] == [1, 1, 1]
    assert flight.kept == {None: 1} and attempts.begun == 1
    del flight.kept[None]
    assert await flight.get(work, attempts) == 2


async def test_keys_are_apart(flight, work, attempts):
    tasks = [asyncio.create_task(flight.get(work, attempts, key)) for key in "aabb"]
    await turns()
    attempts.go.set()
    assert await asyncio.gather(*tasks) == [1, 1, 2, 2] and attempts.most == 2


async def test_the_others_are_served_when_the_one_who_began_is_cancelled(attempts, ask):
    first, *others = ask(4)
    await turns()
    first.cancel()
    await turns()
    attempts.go.set()
    assert await asyncio.gather(*others) == [1, 1, 1]
    assert first.cancelled() and attempts.begun == 1 and attempts.undone == 0


async def test_the_last_one_takes_the_attempt_with_it_and_waits_until_it_is_undone(attempts, ask):
    attempts.undoing.clear()
    first, last = ask(2)
    await turns()
    first.cancel()
    last.cancel()
    await turns()
    assert first.cancelled() and not last.done() and attempts.now == 1
    (again,) = ask(1)
    await turns()
    assert attempts.begun == 1, "not before the first one is undone"
    attempts.undoing.set()
    attempts.go.set()
    assert await again == 2
    assert last.cancelled() and (attempts.undone, attempts.most) == (1, 1)


async def test_a_second_cancellation_does_not_cut_short_what_is_undone(attempts, ask, work):
    attempts.undoing.clear()
    (only,) = ask(1)
    await turns()
    for _ in range(2):
        only.cancel()
        await turns()
    assert only.cancelled() and attempts.now == 1 and len(work) == 1
    attempts.undoing.set()
    async with asyncio.timeout(5):
        await work.join()
    assert attempts.undone == 1


async def test_what_is_to_go_on_does_so_when_nobody_waits(work, attempts):
    flight = SingleFlight("the test", go_on=True)
    task = asyncio.create_task(flight.get(work, attempts))
    await turns()
    task.cancel()
    await turns()
    assert task.cancelled() and attempts.now == 1
    later = asyncio.create_task(flight.get(work, attempts))
    await turns()
    attempts.go.set()
    assert await later == 1 and attempts.undone == 0


@pytest.mark.parametrize("keep", [True, False])
async def test_a_failure_is_shared_and_the_next_one_tries_again(work, attempts, keep):
    flight = SingleFlight("the test", keep=keep)
    attempts.error = ValueError("broken")
    tasks = [asyncio.create_task(flight.get(work, attempts)) for _ in range(5)]
    await turns()
    attempts.go.set()
    assert set(await asyncio.gather(*tasks, return_exceptions=True)) == {attempts.error} and attempts.begun == 1
    attempts.error = None
    assert await flight.get(work, attempts) == 2


async def test_who_is_told_of_a_failure_may_try_again_at_once(flight, work, attempts):
    attempts.error = ValueError("broken")
    attempts.go.set()

    async def twice() -> int:
        try:
            return await flight.get(work, attempts)
        except ValueError:
            attempts.error = None
            return await flight.get(work, attempts)

    assert await asyncio.gather(twice(), twice()) == [2, 2]


async def test_those_who_wait_hear_of_an_owner_that_is_closed(flight, attempts, ask, work):
    attempts.undoing.clear()
    *tasks, cancelled = ask(4)
    await turns()
    closing = asyncio.create_task(work.aclose())
    await turns()
    cancelled.cancel()
    late = ask(1)
    await turns()
    assert not closing.done() and attempts.now == 1
    attempts.undoing.set()
    async with asyncio.timeout(5):
        await closing
    for task in tasks + late:
        with pytest.raises(BrokenOff, match="the test was broken off") as caught:
            await task
        assert isinstance(caught.value, InfraError) and not caught.value.retryable and caught.value.hint
    assert (await asyncio.gather(cancelled, return_exceptions=True)) and cancelled.cancelled(), "that one was cancelled"
    with pytest.raises(BrokenOff):
        await flight.get(work, attempts)
    assert (attempts.begun, attempts.undone) == (1, 1)


async def test_nobody_begins_anew_while_the_owner_is_being_closed(attempts, ask, work):
    attempts.undoing.clear()
    (alone,) = ask(1)
    await turns()
    alone.cancel()
    await turns()
    (waiting,) = ask(1)
    await turns()
    closing = asyncio.create_task(work.aclose())
    await turns()
    attempts.undoing.set()
    async with asyncio.timeout(5):
        await closing
    with pytest.raises(BrokenOff):
        await waiting
    assert attempts.begun == 1


async def test_an_owner_that_is_closed_before_the_attempt_has_made_a_step(flight, attempts, ask, work):
    (task,) = ask(1)
    await asyncio.sleep(0)  # it has asked, and the attempt is not running yet
    await work.aclose()
    with pytest.raises(BrokenOff):
        await task
    attempts.go.set()
    assert await flight.get(other := TaskSet(), attempts) == 1, "nothing of it is left"
    assert len(other) == 0


@pytest.mark.parametrize("seed", range(20))
async def test_callers_cancelled_at_random_moments_spoil_no_shared_attempt(flight, work, seed):
    chance = random.Random(seed)
    now, most, served = 0, 0, []

    async def attempt() -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        try:
            await turns(chance.randrange(6))
            if chance.random() < 0.3:
                raise ValueError("broken")
            return 1
        finally:
            try:
                await turns(chance.randrange(3))
            finally:
                now -= 1

    tasks = []
    for _ in range(60):
        tasks.append(asyncio.create_task(flight.get(work, attempt)))
        if chance.random() < 0.5:
            chance.choice(tasks).cancel()
        await turns(chance.randrange(3))
    async with asyncio.timeout(10):
        served = await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 1 and now == 0 and len(work) == 0
    assert {type(each) for each in served} == {int, ValueError, asyncio.CancelledError}


async def test_what_is_done_alongside_ends_with_the_block():
    ended = []

    async def work() -> str:
        try:
            await turns(3)
            return "done"
        finally:
            ended.append(True)

    async with alongside(work()) as doing:
        assert await doing == "done"
    with pytest.raises(ValueError, match="of the block"):
        async with alongside(work()) as doing:
            await turns(1)
            raise ValueError("of the block")
    assert doing.cancelled() and len(ended) == 2


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


@pytest.mark.parametrize("daemon", [False, True], ids=["", "begun by a daemon thread"])
@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(3)", "raise LookupError", "os.kill(os.getpid(), 2)"])
def test_it_ends_with_the_program(ending: str, daemon: bool) -> None:
    program = f"""
    import asyncio, os, threading, time
    from hermes_core.aio import LoopThread

    async def close():
        await asyncio.sleep(0.1)
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.05) for _ in range(5)))
        print("closed")

    creator = threading.Thread(target=LoopThread, args=("test", close), daemon={daemon})
    creator.start()
    creator.join()
    {ending}
    time.sleep(0.2)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=30)
    assert done.stdout == "closed\n"
    assert "never" not in done.stderr


async def test_clean_up_completes_however_often_its_caller_is_cancelled():
    done = []

    async def clean_up() -> None:
        await asyncio.sleep(0.1)
        done.append(True)

    caller = asyncio.create_task(complete(clean_up()))
    for _ in range(3):
        await turns()
        caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done == [True]


async def test_clean_up_gives_its_outcome_or_error():
    async def fail() -> None:
        raise OSError("no")

    assert await complete(asyncio.sleep(0, 3)) == 3
    with pytest.raises(OSError, match="no"):
        await complete(fail())


async def test_the_first_error_of_things_done_together_is_raised_as_it_is() -> None:
    ended = []

    async def last() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("mine") from KeyError("its cause")

    with pytest.raises(ValueError, match="mine") as raised:
        async with together() as tasks:
            tasks.create_task(last())
            tasks.create_task(fail())
            await asyncio.sleep(60)
    assert isinstance(raised.value.__cause__, KeyError)
    assert ended
    with pytest.raises(ValueError, match="the block's"):
        async with together():
            raise ValueError("the block's")
    async with together() as tasks:
        done = tasks.create_task(asyncio.sleep(0, "done"))
    assert done.result() == "done"


async def test_things_done_together_are_cancelled_together() -> None:
    async def work() -> None:
        async with together() as tasks:
            tasks.create_task(asyncio.sleep(60))

    running = asyncio.create_task(work())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


class Failing:
    """Fails some times, and then returns how often it was called."""

    def __init__(self, failures: int, asked: float | None = 0.0) -> None:
        self.failures, self.asked, self.calls = failures, asked, 0

    async def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.failures:
            raise OSError(f"failure {self.calls}")
        return self.calls

    def pause_asked(self, error: Exception) -> float | None:
        return self.asked


async def test_a_call_is_repeated_until_it_succeeds() -> None:
    call = Failing(3)
    assert await repeat_call(call, call.pause_asked, patience_s=10, first_pause_s=0.001) == 4


async def test_a_call_is_not_repeated_if_that_does_not_help() -> None:
    call = Failing(3, asked=None)
    with pytest.raises(OSError, match="failure 1"):
        await repeat_call(call, call.pause_asked, patience_s=10)


async def test_a_call_is_repeated_no_longer_than_patience_allows() -> None:
    call = Failing(1000)
    with pytest.raises(OSError, match="failure") as caught:
        await repeat_call(call, call.pause_asked, patience_s=0.05, first_pause_s=0.01, longest_pause_s=0.01)
    assert str(caught.value) == f"failure {call.calls}" and 2 <= call.calls <= 12


async def test_a_pause_that_is_asked_for_is_waited_out() -> None:
    call = Failing(1, asked=0.2)
    began = asyncio.get_running_loop().time()
    assert await repeat_call(call, call.pause_asked, patience_s=10, first_pause_s=0.001) == 2
    assert asyncio.get_running_loop().time() - began >= 0.2


async def test_a_pause_beyond_patience_is_not_begun() -> None:
    call = Failing(1, asked=60.0)
    with pytest.raises(OSError, match="failure 1"):
        await repeat_call(call, call.pause_asked, patience_s=1)
