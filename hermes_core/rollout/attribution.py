"""Decides whether a verification gives no result because of the agent's work, by verifying an untouched environment.

An agent can often change everything in the environment in which its work is verified, and so break the verification. If
a rollout then had no reward instead of the reward 0, the agent could learn to break verifications.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from hermes_core.errors import Disturbed, HermesError, SetupFailed, VerifierError

T = TypeVar("T")

NO_RESULT = (VerifierError, SetupFailed, Disturbed)
"""The errors of a verification without a result. They don't tell whether the agent's work is at fault."""


class WorkAtFault(HermesError):
    """The verification gave no result because of the agent's work: the score is 0."""


async def attribute_failure(verify: Callable[[], Awaitable[T]], untouched: Callable[[], Awaitable[bool]]) -> T:
    """Return the result of a verification.

    If the verification fails, and an untouched environment can be verified, the verification is tried again, because a
    need such as the network may have been missing for a moment only. If it fails again, the work is the cause.

    Args:
        untouched: returns whether the verification gives a result in an environment where no agent has worked.

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
