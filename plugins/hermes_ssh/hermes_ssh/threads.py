"""Awaits blocking calls in threads, and undoes calls whose caller was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from hermes_core import begin_thread, call_in

T = TypeVar("T")


async def in_thread(call: Callable[[], T], undo: Callable[[T], object]) -> T:
    """Return the result of `call`, which runs in a daemon thread. A cancelled caller does not wait for `call`: `undo`
    gets the result later, in a thread of its own."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            value = call()
        except Exception as error:
            call_in(loop, _fail, outcome, error)
            return
        if not call_in(loop, give, value):
            undo(value)

    def give(value: T) -> None:
        if outcome.done():
            take_back(value)
        else:
            outcome.set_result(value)

    def take_back(value: T) -> None:
        begin_thread(lambda: undo(value), "ssh-undo")

    begin_thread(run, "ssh-call")
    try:
        return await outcome
    except asyncio.CancelledError:
        if outcome.done() and not outcome.cancelled() and outcome.exception() is None:
            take_back(outcome.result())
        raise


def _fail(outcome: asyncio.Future[T], error: Exception) -> None:
    if not outcome.done():
        outcome.set_exception(error)
