"""A liveness probe: finds out that a model server no longer answers, long before a request reaches its time limit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from hermes_core.agents.endpoint.circuit import CircuitBreaker
from hermes_core.agents.endpoint.errors import NoSignOfLife, is_timeout, is_unanswered
from hermes_core.aio import alongside

logger = logging.getLogger(__name__)

QUIET_S = 60.0
"""Seconds without any answer after which a server is probed."""

PROBE_S = 15.0
"""Time limit of a probe in seconds, and the pause between two probes."""


class LivenessProbe:
    """Probes a server that has answered no request for `QUIET_S`, with a request that it can answer at once.

    A server that answers the probe may only be slow, so its requests go on. A server that does not answer the probe is
    silent, and its circuit becomes half-open. If it is still silent after `patience_s` (see `watch`), it is dead, and
    its requests fail.

    Args:
        name: the server's name, for messages.
        circuit: the circuit breaker, which records when the server is silent.
    """

    def __init__(self, name: str, circuit: CircuitBreaker) -> None:
        self._name = name
        self._circuit = circuit
        self._quiet_since = 0.0
        """When the server last gave any answer, including a refusal; before the first answer, when it was first
        asked."""
        self._unanswered = False
        """Whether a request is in flight, or reached its time limit, since the last answer."""
        self._silent = False
        """Whether the server answered neither requests nor the last probe."""
        self._probing = False
        self._called_slow = False

    def record_answer(self) -> None:
        """Note that the server gave an answer, which may be a refusal."""
        self._quiet_since, self._unanswered, self._silent = time.monotonic(), False, False

    @asynccontextmanager
    async def watch(
        self, probe: Callable[[], Awaitable[object]], patience_s: float, request_timeout_s: float
    ) -> AsyncIterator[None]:
        """Watch the server while a request is in flight in the block.

        Args:
            probe: sends a request that the server can answer at once. Any answer, even a refusal, is a sign of life.
            patience_s: maximum number of seconds for which the server may be silent.
            request_timeout_s: time limit of the request in the block, for messages.

        Raises:
            NoSignOfLife: the server was silent for longer than `patience_s`.
        """
        if not self._unanswered:
            self._quiet_since, self._unanswered = time.monotonic(), True
        limit = asyncio.timeout(None)
        probing = partial(self._probe, probe, patience_s, request_timeout_s)
        try:
            async with limit, alongside(self._watch(limit, patience_s, probing)):
                yield
        except BaseException as error:
            if isinstance(error, TimeoutError) and limit.expired():
                raise NoSignOfLife from error
            if not is_timeout(error):  # refused, not connected or cancelled: the server owes no answer
                self._unanswered = False
            raise

    async def _watch(self, limit: asyncio.Timeout, patience_s: float, probe: Callable[[], Awaitable[None]]) -> None:
        while True:
            now = time.monotonic()
            if self._silent and now - self._circuit.failing_since >= patience_s:
                limit.reschedule(asyncio.get_running_loop().time())
                return
            if not self._silent and now - self._quiet_since < QUIET_S:
                await asyncio.sleep(self._quiet_since + QUIET_S - now)
                continue
            if not self._probing:  # one probe is enough for all requests
                await probe()
            await asyncio.sleep(PROBE_S)

    async def _probe(self, send: Callable[[], Awaitable[object]], patience_s: float, request_timeout_s: float) -> None:
        self._probing, alive = True, True
        try:
            async with asyncio.timeout(PROBE_S):
                await send()
        except Exception as error:
            alive = not is_unanswered(error)
        finally:
            self._probing = False
        if alive:
            if self._silent:
                self._circuit.record_success(proves=False)
            elif not self._called_slow:
                self._called_slow = True
                logger.warning(
                    "the model endpoint %s has answered no request for %g s, but it still lists its models: it is "
                    "slow, or its model hangs; a request is repeated after %g s (request_timeout_s)",
                    *(self._name, QUIET_S, request_timeout_s),
                )
            self.record_answer()
        elif not self._silent:
            self._silent = True
            logger.warning(
                "the model endpoint %s is silent: no request was answered for %g s, and neither was one for its "
                "models; it is given up after %g s more; check that the server runs, and the network",
                *(self._name, QUIET_S, patience_s),
            )
            self._circuit.record_silence()
