"""Decides whether the agent or we are to blame if a step with the agent's work fails.

An agent that could get its rollout discarded would learn to do so, and an agent must not lose a reward because of us.
So after two failures the step is tried with an untouched tree: if this succeeds, the agent's work is the cause. This
comes last, unlike in core's `attribution`, because the work may fill the disk, and is removed first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from hermes_core import CommandError, Disturbed, HermesError, InfraError, SetupFailed

T = TypeVar("T")

STEP_TIMEOUT_S = 300.0
"""Time limit of a step in seconds."""

CHECKOUT_CODES = ("too_large", "not_found", "not_a_directory", "permission")
"""Codes of errors with the agent's checkout that only the agent can have caused. They need no second attempt."""
WORK_CODES = (*CHECKOUT_CODES, "work")
"""Codes of errors with the checkout or the rest of the agent's work that only the agent can have caused."""


class OperationRefused(HermesError):
    """An operation of `trees.py` could not be done, for the reason `code`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Unattributed(HermesError):
    """A step failed, because of the agent's work or because of us."""


async def blame_agent_or_infra(
    what: str,
    *,
    with_work: Callable[[], Awaitable[T]],
    with_untouched_tree: Callable[[], Awaitable[object]],
    clear_for_retry: Callable[[], Awaitable[None]],
    clear_for_untouched_tree: Callable[[], Awaitable[None]],
) -> T:
    """Return the result of a step with the agent's work. After a failure, the step is tried a second time.

    Args:
        what: the failure of the step in words, for messages: `the work can't be taken`.
        with_untouched_tree: the same step with the tree that agents start from. It is tried after two failures.
        clear_for_retry, clear_for_untouched_tree: remove files, as a full disk may be the reason of a failure.

    Raises:
        OperationRefused: the agent is to blame: the step fails only with the agent's work, or the error's code says so.
        InfraError: we are to blame: the step fails with an untouched tree, too.
    """
    with contextlib.suppress(_Unattributed):
        return await _attempt(with_work)
    await _clear(clear_for_retry)
    try:
        return await _attempt(with_work)
    except _Unattributed as error:
        failure = error
    await _clear(clear_for_untouched_tree)
    try:
        await _attempt(with_untouched_tree)
    except (_Unattributed, OperationRefused) as error:
        raise InfraError(f"{what}, and nor can an untouched tree: {error}; {failure.message}") from failure
    raise OperationRefused("work", f"{what}, while an untouched tree can: {failure.message}") from failure


async def _attempt(step: Callable[[], Awaitable[T]]) -> T:
    """Return the result of a step.

    Raises:
        OperationRefused: the agent alone can have caused the failure.
        _Unattributed: the step failed for any other reason.
    """
    try:
        async with asyncio.timeout(STEP_TIMEOUT_S):
            return await step()
    except OperationRefused as refused:
        if refused.code in WORK_CODES:
            raise
        raise _Unattributed(refused.message) from refused
    except (CommandError, SetupFailed, Disturbed) as error:
        raise _Unattributed(error.message) from error
    except TimeoutError as error:
        raise _Unattributed(f"no end after {STEP_TIMEOUT_S:g} s") from error


async def _clear(remove_files: Callable[[], Awaitable[None]]) -> None:
    """Remove files as far as that is possible; the next attempt shows whether it was enough."""
    with contextlib.suppress(CommandError, TimeoutError):
        async with asyncio.timeout(STEP_TIMEOUT_S):
            await remove_files()
