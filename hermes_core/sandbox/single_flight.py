"""Single-flight: one attempt for all who want its outcome, and no lock that is held for as long as it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from hermes_core.errors import InfraError
from hermes_core.sandbox.background import Background, cancel

T = TypeVar("T")


class BrokenOff(InfraError):
    """What was waited for was given up, as its owner was closed."""

    retryable = False


@dataclass(eq=False)
class _Attempt(Generic[T]):
    """One attempt, and how many wait for it."""

    task: asyncio.Task[T]
    waiting: int = 0
    given_up: bool = False
    """Whether the last of those waiting has left: it is being undone."""


class SingleFlight(Generic[T]):
    """At most one attempt at a time for each key, shared by all who ask.

    - Who asks while an attempt is under way waits for that one, and gets its outcome, or its error.
    - It belongs to all who wait, and not to the one who began it: that one may be cancelled, and the others are served.
    - It is cancelled when the last of them is. That one's cancellation lasts until the attempt has undone what it
      began, as if nobody else had ever been there; who asks meanwhile begins another one after that.
    - An attempt that failed is forgotten: who asks next begins another one.
    - When the owner's `Background` is closed, those who wait get `BrokenOff`, and so does who would begin another one.

    Args:
        what: what is attempted, for the error and for the names of the tasks.
        keep: give the outcome to all who ask later, too. Without, they begin another attempt.
        go_on: let an attempt that nobody waits for any more go on: for what is of use to whoever asks next.
    """

    def __init__(self, what: str, *, keep: bool = False, go_on: bool = False) -> None:
        self.kept: dict[Hashable, T] = {}
        """The outcomes that are kept, by key."""
        self._what = what
        self._keep = keep
        self._go_on = go_on
        self._attempts: dict[Hashable, _Attempt[T]] = {}

    async def get(self, work: Background, begin: Callable[[], Awaitable[T]], key: Hashable = None) -> T:
        """The outcome that is kept for this key, or that of the attempt under way, or of one that begins now.

        Args:
            work: the owner of an attempt that begins now.
            begin: makes the attempt. Called in a task of its own.
            key: tells apart what may be attempted at the same time; not needed where there is one thing only.

        Raises:
            BrokenOff: the owner was closed.
            Whatever the attempt raises: the same error for all who waited for it.
        """
        while key not in self.kept:
            attempt = self._attempts.get(key) or self._begin(work, begin, key)
            if not attempt.given_up:
                return await self._outcome(attempt)
            await asyncio.wait([attempt.task])
        return self.kept[key]

    def _begin(self, work: Background, begin: Callable[[], Awaitable[T]], key: Hashable) -> _Attempt[T]:
        if work.closing:
            raise self._broken_off()
        name = self._what if key is None else f"{self._what} {key}"
        attempt = self._attempts[key] = _Attempt(work.spawn(self._run(begin, key), name))
        # Not at the end of `_run`: a task that is cancelled before its first step never gets there.
        attempt.task.add_done_callback(lambda _: self._attempts.pop(key))
        return attempt

    async def _run(self, begin: Callable[[], Awaitable[T]], key: Hashable) -> T:
        outcome = await begin()
        if self._keep:
            self.kept[key] = outcome
        return outcome

    async def _outcome(self, attempt: _Attempt[T]) -> T:
        attempt.waiting += 1
        try:
            await asyncio.wait([attempt.task])  # never raises what the task does, so a cancellation here is our own
        except asyncio.CancelledError:
            if attempt.waiting == 1 and not self._go_on:
                attempt.given_up = True
                await cancel([attempt.task])
                await asyncio.wait([attempt.task])
            raise
        finally:
            attempt.waiting -= 1
        if attempt.task.cancelled():
            raise self._broken_off()
        return attempt.task.result()

    def _broken_off(self) -> BrokenOff:
        return BrokenOff(
            f"{self._what} was broken off, as its owner was closed",
            hint="use it inside the `async with` block that owns it",
        )
