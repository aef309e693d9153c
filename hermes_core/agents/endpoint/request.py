"""Sends requests to a model server when its limits allow it, and retries temporary failures."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar
from weakref import WeakValueDictionary

from hermes_core.agents.endpoint.circuit import MIN_FAILURES, CircuitBreaker
from hermes_core.agents.endpoint.errors import (
    BadCompletion,
    ContextLengthExceeded,
    EndpointDown,
    as_model_error,
    is_fatal,
    is_transient,
    is_unanswered,
    public_url,
    short_reason,
    status_of,
)
from hermes_core.agents.endpoint.headers import read_retry_after
from hermes_core.agents.endpoint.limiter import Permit, RateLimiter
from hermes_core.agents.endpoint.liveness import LivenessProbe
from hermes_core.agents.endpoint.settings import EndpointSettings
from hermes_core.errors import ModelError
from hermes_core.settings import Redactor

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 5.0
"""Seconds to wait after the first attempt, and the maximum. The time doubles with each attempt, unless the server asks
for more."""


class ServerState:
    """The state of one model server, as this process knows it: its circuit breaker, its limits and its liveness."""

    def __init__(self, url: str) -> None:
        name, changed = public_url(url), asyncio.Event()
        self.circuit = CircuitBreaker(name, changed)
        self.limiter = RateLimiter(self.circuit, changed)
        self.liveness = LivenessProbe(name, self.circuit)


_states: WeakValueDictionary[tuple[int, str, str, str], ServerState] = WeakValueDictionary()


def state_of(url: str, key: str, model: str) -> ServerState:
    """Return the state of this server. All callers with the same URL, key and model on this event loop share one state,
    because servers have limits for each key and model."""
    return _states.setdefault((id(asyncio.get_running_loop()), url, key, model), ServerState(url))


class Endpoint:
    """One model server, with the settings of one caller. All callers share its `ServerState`.

    A temporary failure is retried for as long as the patience lasts. After some failures in a row, the circuit is
    half-open: one request at a time tests whether the server works again, and all others wait for the outcome. If the
    server still fails when the patience ends, the circuit opens, and all requests fail with `EndpointDown`, because
    every other rollout would fail, too.

    Args:
        settings: the patience, the limits, and the key, which no message repeats.
        url: the server's URL.
        model: the model's name.
        probe: sends a request that the server can answer at once; see `LivenessProbe`.
    """

    def __init__(
        self, settings: EndpointSettings, url: str, model: str, probe: Callable[[], Awaitable[object]]
    ) -> None:
        self.url = url
        self._settings = settings
        self._model = model
        self._probe = probe
        self._key = settings.api_key.get_secret_value() if settings.api_key else ""

    @cached_property
    def state(self) -> ServerState:
        """The state of the server that this process shares. Only for use on the event loop that sends the requests."""
        state = state_of(self.url, self._key, self._model)
        state.limiter.set_limit("requests", self._settings.requests_per_minute)
        state.limiter.set_limit("tokens", self._settings.tokens_per_minute)
        return state

    @property
    def circuit(self) -> CircuitBreaker:
        """The circuit breaker, which knows whether the server works."""
        return self.state.circuit

    def learn_limits(self, headers: Mapping[str, str]) -> None:
        """Take over the rate limits that the headers of an answer report."""
        self.state.limiter.learn(headers)

    async def ask(
        self,
        request: Callable[[], Awaitable[T]],
        *,
        proves: bool = True,
        tokens: Callable[[T], int] = lambda answer: 0,
        patience_s: float = math.inf,
    ) -> T:
        """Return the result of `request`, which is sent in its turn, and retried after a temporary failure.

        Args:
            proves: whether an answer shows that the server accepts the key and the model.
            tokens: returns the number of tokens of the answer and its prompt; 0 if it is not known.
            patience_s: replaces `endpoint_patience_s` if it is shorter.

        Raises:
            ModelError: the request failed permanently, or for too long.
            EndpointDown: every other request fails too.
        """
        limiter, liveness, settings = self.state.limiter, self.state.liveness, self._settings
        attempts = _Attempts(min(patience_s, settings.endpoint_patience_s))
        known, asked, sent = self.circuit.error, time.monotonic(), None
        try:
            while True:
                async with limiter.turn(settings.max_retry_wait_s, known) as permit:
                    sent = permit.sent_at
                    try:
                        async with liveness.watch(self._probe, attempts.patience_s, settings.request_timeout_s):
                            answer = await request()
                    except Exception as error:
                        sent = None
                        delay = self._handle(error, permit, attempts)
                    else:
                        self._record_success(permit, tokens(answer), proves)
                        return answer
                await asyncio.sleep(delay)
        finally:
            record_wait((sent or time.monotonic()) - asked)

    def _record_success(self, permit: Permit, tokens: int, proves: bool) -> None:
        self.state.limiter.record_success(permit, tokens)
        self.state.liveness.record_answer()
        self.circuit.record_success(proves=proves)

    def _handle(self, error: Exception, permit: Permit, attempts: _Attempts) -> float:
        """Record a failure. Return the seconds after which the request gets in line again.

        Raises:
            ModelError: the request is not retried.
        """
        circuit, proven = self.circuit, self.circuit.proven
        attempts.record_failure()
        if not is_unanswered(error):
            self.state.liveness.record_answer()
        failure = self._explain(error, attempts.count)
        transient = is_transient(error, proven=proven)
        if isinstance(failure, BadCompletion) and not proven and attempts.count >= MIN_FAILURES:
            transient = False  # a server that never gave a valid answer is no server of this kind
        fatal = not transient and is_fatal(error, proven=proven)
        if isinstance(failure, ContextLengthExceeded) or (proven and not transient and not fatal):
            self._record_success(permit, 0, proves=True)  # only this request is wrong
            raise failure from error
        self._record_failure(error, failure, attempts.patience_s)
        if transient:
            limited = status_of(error) == 429
            if limited:
                self.state.limiter.record_refusal(permit)
            delay = self._retry_delay(error, attempts, for_all=limited or not circuit.closed)
            if delay is not None:
                return delay
        if fatal or not circuit.closed:
            down = EndpointDown(failure.message, hint=failure.hint)
            circuit.open(down)
            failure = down.twin()  # a copy for one rollout, which adds its id
        raise failure from error

    def _retry_delay(self, error: Exception, attempts: _Attempts, *, for_all: bool) -> float | None:
        """Return the seconds after which the request gets in line again; None if it is not retried any more.

        Args:
            for_all: whether the server fails all requests. Then the whole line waits, and the patience counts from the
                server's first failure, also for requests that were made later.
        """
        settings, circuit = self._settings, self.circuit
        failing_s = time.monotonic() - (circuit.failing_since if for_all else attempts.failing_since)
        too_many = settings.max_retries is not None and attempts.count > settings.max_retries
        if too_many or failing_s >= attempts.patience_s:
            return None
        number = attempts.count if circuit.closed else circuit.failures - MIN_FAILURES + 1
        delay = min(settings.max_retry_wait_s, _read_retry_after(error, _backoff(number)))
        logger.info(
            "model endpoint: attempt %d failed (%s), again in %.1f s", attempts.count, short_reason(error), delay
        )
        if not for_all:
            return delay
        self.state.limiter.hold(delay)
        return 0.0

    def _record_failure(self, error: Exception, failure: ModelError, patience_s: float) -> None:
        if self.circuit.record_failure(self.state.limiter.in_flight):
            logger.warning(
                "the model endpoint %s fails (%s): one request at a time is sent to it until it answers; it is given "
                "up after %g s; %s",
                *(public_url(self.url), short_reason(error), patience_s, failure.hint),
            )

    def _explain(self, error: Exception, attempts: int) -> ModelError:
        """Return the `ModelError` for a failure, without the key, which some servers repeat in their refusal."""
        failure = as_model_error(error, endpoint=self.url, model=self._model, attempts=attempts)
        if self._key:
            failure.message = Redactor({"API key": self._key})(failure.message)
            failure.args = (failure.message,)
        elif status_of(error) in (401, 403):
            failure.hint = f"{failure.hint}; none was sent: {self._settings.key_variable} is not set"
        return failure


@dataclass
class _Attempts:
    """The attempts at one request."""

    patience_s: float
    count: int = 0
    failing_since: float = 0.0

    def record_failure(self) -> None:
        """Count a failed attempt."""
        self.count += 1
        self.failing_since = self.failing_since or time.monotonic()


def _read_retry_after(error: Exception, default: float) -> float:
    """Return the seconds to wait that the server's answer asks for; `default` if it names no time.

    Args:
        error: the client's exception, which has the answer as `response`.
    """
    delay = read_retry_after(getattr(getattr(error, "response", None), "headers", None) or {})
    return default if delay is None else delay


def _backoff(attempt: int) -> float:
    """Return the seconds to wait after an attempt. They double each time, and have a random part, so that the rollouts
    do not all come back at once."""
    doubled = _MIN_BACKOFF_S * 2.0 ** min(attempt - 1, 10)
    return min(_MAX_BACKOFF_S, doubled) * random.uniform(0.75, 1.25)


_waits: ContextVar[list[float]] = ContextVar("_waits")


@contextmanager
def count_waits() -> Iterator[list[float]]:
    """Yield a list to which each wait of a request in the block for its server is added, in seconds: for the server's
    limits, while the server fails other requests, and in failed attempts."""
    waits: list[float] = []
    token = _waits.set(waits)
    try:
        yield waits
    finally:
        _waits.reset(token)


def record_wait(seconds: float) -> None:
    """Add to the waits of the enclosing block of `count_waits`, if there is one."""
    if (waits := _waits.get(None)) is not None:
        waits.append(seconds)
