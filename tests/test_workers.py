"""Threads for blocking calls: as many as are needed, and no more."""

from __future__ import annotations

import threading
import time

import pytest

from hermes_core.workers import Workers


def test_calls_run_at_the_same_time_up_to_the_limit() -> None:
    workers = Workers(4)
    meeting = threading.Barrier(4)
    assert sorted(call.result(10) for call in [workers.submit(meeting.wait, 10) for _ in range(8)]) == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]
    workers.shutdown()


def test_threads_are_used_again_and_errors_are_the_callers() -> None:
    workers = Workers(4)
    names = {workers.submit(threading.get_ident).result(10) for _ in range(20) if not time.sleep(0.005)}
    assert len(names) <= 2
    with pytest.raises(ZeroDivisionError):
        workers.submit(divmod, 1, 0).result(10)
    assert workers.submit(divmod, 7, 2).result(10) == (3, 1)
    workers.shutdown()


def test_what_was_asked_for_is_done_before_the_end_and_nothing_after() -> None:
    workers, done = Workers(2), []
    for number in range(6):
        workers.submit(lambda number=number: (time.sleep(0.02), done.append(number)))
    workers.shutdown()
    workers.shutdown()
    assert sorted(done) == list(range(6))
    with pytest.raises(RuntimeError, match="shut down"):
        workers.submit(int)


def test_a_cancelled_call_is_not_made() -> None:
    workers, held, done = Workers(1), threading.Event(), []
    workers.submit(held.wait, 10)
    waiting = workers.submit(done.append, 1)
    assert waiting.cancel()
    held.set()
    workers.shutdown()
    assert done == []
