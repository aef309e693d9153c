"""Assertions that pytest lacks: waiting with a time limit, and expecting an error of a command by its code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from hermes_core import CommandError

T = TypeVar("T")


class NotDone(AssertionError):
    """Something took longer than its time limit; the message names both."""


async def until(condition: Callable[[], Awaitable[object]], limit_s: float, otherwise: str) -> None:
    """Wait until the condition holds.

    Raises:
        AssertionError: the condition did not hold within the limit; the message is `otherwise`.
    """
    deadline = time.monotonic() + limit_s
    while not await condition():
        assert time.monotonic() <= deadline, f"{otherwise} (waited {limit_s:g} s)"
        await asyncio.sleep(0.05)


async def within(limit_s: float, attempt: Awaitable[T], what: str = "") -> T:
    """Return the result of the attempt, which is cancelled after the limit.

    Raises:
        NotDone: the attempt took longer; the message names `what`.
    """
    try:
        async with asyncio.timeout(limit_s) as clock:
            return await attempt
    except TimeoutError as error:
        if not clock.expired():
            raise
        raise NotDone(f"{what}: not done within {limit_s:g} s".removeprefix(": ")) from error


async def expect_refusal(attempt: Awaitable[object], *codes: str) -> None:
    """Check that a command or a file operation is refused: by a `CommandError` that has one of these codes."""
    with pytest.raises(CommandError) as raised:
        await attempt
    assert raised.value.code in codes, raised.value
