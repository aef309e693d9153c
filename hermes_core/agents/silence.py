"""Notices that a model server no longer answers anything, long before the time limit of a request has passed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from hermes_core.agents.failures import NoSignOfLife, is_timeout, says_nothing
from hermes_core.agents.traffic import Traffic
from hermes_core.aio import alongside

logger = logging.getLogger(__name__)

QUIET_S = 60.0
"""Seconds without any answer after which a server is asked for a sign of life."""

SIGN_S = 15.0
"""Time limit of a sign of life, and the time between two looks at whether there was one."""


@dataclass(frozen=True)
class Listener:
    """Asks one server for a sign of life while nobody gets an answer from it.

    A server that gives one may only be slow, so its requests go on. A server that gives none for as long as the
    patience lasts is dead, and its requests are broken off.
    """

    traffic: Traffic
    name: str
    """The server's name, for messages."""
    sign: Callable[[], Awaitable[object]]
    """Asks for something that the server can answer at once. Any answer is a sign of life, also a refusal."""
    request_timeout_s: float
    """The time limit of a request, for messages."""

    @asynccontextmanager
    async def listening(self, patience_s: float) -> AsyncIterator[None]:
        """Listen while a request is under way in the block.

        Raises:
            NoSignOfLife: the server was silent for `patience_s`.
        """
        limit = asyncio.timeout(None)
        self.traffic.asked()
        try:
            async with limit, alongside(self._listen(limit, patience_s)):
                yield
        except TimeoutError as error:
            if limit.expired():
                raise NoSignOfLife from error
            raise
        except BaseException as error:
            if not is_timeout(error):  # refused, not reached, or cancelled: the server does not work on an answer
                self.traffic.owes_answer = False
            raise

    async def _listen(self, limit: asyncio.Timeout, patience_s: float) -> None:
        traffic = self.traffic
        while True:
            quiet_s = time.monotonic() - traffic.quiet_since
            if not traffic.silent and quiet_s < QUIET_S:
                await asyncio.sleep(QUIET_S - quiet_s)
            elif traffic.silent and time.monotonic() - traffic.failing_since >= patience_s:
                limit.reschedule(asyncio.get_running_loop().time())
                return
            else:
                if not traffic.asked_for_sign:
                    await self._ask(patience_s)
                await asyncio.sleep(SIGN_S)

    async def _ask(self, patience_s: float) -> None:
        """Ask for a sign of life, while all other listeners to this server wait for it."""
        traffic, name = self.traffic, self.name
        traffic.asked_for_sign = True
        try:
            async with asyncio.timeout(SIGN_S):
                await self.sign()
            alive = True
        except Exception as error:
            alive = not says_nothing(error)
        finally:
            traffic.asked_for_sign = False
        if not alive and not traffic.silent:
            logger.warning(
                "the model endpoint %s is silent: no request was answered for %g s, and neither was one for its "
                "models; it is given up after %g s more; check that the server runs, and the network",
                *(name, QUIET_S, patience_s),
            )
            traffic.falls_silent()
        elif alive and traffic.silent:
            logger.warning("the model endpoint %s answers again", name)
            traffic.speaks()
        elif alive and not traffic.called_slow:
            traffic.called_slow = True
            logger.warning(
                "the model endpoint %s has answered no request for %g s, but it still lists its models: it is slow, or "
                "its model hangs; a request is repeated after %g s (request_timeout_s)",
                *(name, QUIET_S, self.request_timeout_s),
            )
        if alive:
            traffic.heard()
