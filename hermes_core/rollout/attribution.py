"""Decides why a verification gives no result: because of the agent's work, or not. An untouched environment tells.

An agent may own the environment in which its work is verified, and can break there whatever the verification needs. If
its rollouts then had no reward, it would learn to do so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from hermes_core.errors import Disturbed, HermesError, SetupFailed, VerifierError

T = TypeVar("T")

NO_RESULT = (VerifierError, SetupFailed, Disturbed)
"""The errors of a verification that gave no result, without knowing whose fault it is."""


class WorkAtFault(HermesError):
    """The verification gave no result because of the agent's work: the score is 0."""


async def attribute_failure(verify: Callable[[], Awaitable[T]], untouched: Callable[[], Awaitable[bool]]) -> T:
    """Return the result of a verification.

    If it fails, and an untouched environment can be verified, it is tried again: what it lacked may have been missing
    for a moment only, such as a network. If it fails again, the work is the cause.

    Args:
        untouched: returns whether the verification gives a result where no agent has worked.

    Raises:
        WorkAtFault: there is no result, because of the agent's work.
        VerifierError, SetupFailed, Disturbed: there is no result, and the work is not the cause.
    """
    try:
        return await verify()
    except NO_RESULT:
        if not await untouched():
            raise
    try:
        return await verify()
    except NO_RESULT as error:
        raise WorkAtFault(f"an untouched environment can be verified, and this one can't: {error.message}") from error
