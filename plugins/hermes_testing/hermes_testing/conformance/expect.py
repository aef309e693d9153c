"""What checks use to report that a promise is not kept, or that it does not apply to this backend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from hermes_core import CommandError

E = TypeVar("E", bound=Exception)

SHOWN = 300
"""Maximum number of characters of a value in a message."""


class CheckFailed(AssertionError):
    """The backend does not keep a promise; the message says which and how."""


class NotApplicable(Exception):
    """The check does not apply to this backend; the message says why."""


def expect(holds: object, otherwise: str) -> None:
    """Check that this holds.

    Raises:
        CheckFailed: it does not; the message is `otherwise`.
    """
    if not holds:
        raise CheckFailed(otherwise)


def same(got: Any, wanted: Any, what: str) -> None:
    """Check that both are equal.

    Raises:
        CheckFailed: they differ; the message names `what` and shows both, shortened.
    """
    if got != wanted:
        raise CheckFailed(f"{what}: got {_shown(got)}, not {_shown(wanted)}")


def _shown(value: Any) -> str:
    text = repr(value)
    size = f" ({len(value)} bytes)" if isinstance(value, bytes) else ""
    return (text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}") + size


async def raises(kind: type[E], attempt: Awaitable[Any], what: str) -> E:
    """Return the error of this kind that the attempt raises.

    Raises:
        CheckFailed: it raised none, or another one.
    """
    try:
        outcome = await attempt
    except kind as error:
        return error
    except Exception as error:
        raise CheckFailed(f"{what}: {type(error).__name__} instead of {kind.__name__}: {error}") from error
    raise CheckFailed(f"{what}: no {kind.__name__}, but {_shown(outcome)}")


async def refused(attempt: Awaitable[Any], what: str, *codes: str) -> None:
    """Check that a command or file operation is refused with a `CommandError` that has one of these codes.

    Raises:
        CheckFailed: it is not.
    """
    error = await raises(CommandError, attempt, what)
    expect(error.code in codes, f"{what}: code {error.code!r}, not {' or '.join(codes)}: {error}")


async def until(condition: Callable[[], Awaitable[object]], limit_s: float, otherwise: str) -> None:
    """Wait until the condition holds.

    Raises:
        CheckFailed: it did not hold within the limit; the message is `otherwise`.
    """
    deadline = time.monotonic() + limit_s
    while not await condition():
        if time.monotonic() > deadline:
            raise CheckFailed(f"{otherwise} (waited {limit_s:g} s)")
        await asyncio.sleep(0.05)


async def within(limit_s: float, attempt: Awaitable[Any], what: str) -> Any:
    """Return the result of the attempt, which is cancelled after the limit.

    Raises:
        CheckFailed: it took longer.
    """
    try:
        async with asyncio.timeout(limit_s) as clock:
            return await attempt
    except TimeoutError as error:
        if not clock.expired():
            raise
        raise CheckFailed(f"{what}: not done within {limit_s:g} s") from error
