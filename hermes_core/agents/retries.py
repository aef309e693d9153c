"""Which requests to a model server are retried, when, and for how long."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from hermes_core.agents.base import AgentSettings
from hermes_core.agents.failures import (
    BadCompletion,
    ContextLengthExceeded,
    EndpointDown,
    as_model_error,
    brief,
    may_pass,
    public_url,
    refuses_all,
    refuses_now,
    root_failure,
    says_nothing,
    status_of,
)
from hermes_core.agents.limits import asked_wait
from hermes_core.agents.silence import Listener
from hermes_core.agents.traffic import PAUSE_AFTER, Place, Traffic, count_wait, traffic_to
from hermes_core.errors import ModelError
from hermes_core.settings import Redactor

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_WAIT_S, _LONGEST_BACKOFF_S = 0.5, 5.0
"""Seconds between two attempts, unless the server asks for more: they double from the first to the last one."""

SPARED_S = 60.0
"""Seconds for which a server that was given up is not chosen if there is another."""


class Endpoint:
    """One model server, with what one caller wants of it. All callers share its `Traffic`.

    A temporary failure is retried for as long as the patience lasts. After some failures in a row the server is paused:
    one request at a time tests whether it works again, and all others wait for the outcome. If there is none for as
    long as the patience lasts, all of them fail with `EndpointDown`, because every other rollout would fail too.

    Args:
        settings: the patience, the limits, and the key, which no message repeats.
        url: the server's URL.
        model: the model's name.
        sign: asks for a sign of life; see `Listener`.
    """

    def __init__(self, settings: AgentSettings, url: str, model: str, sign: Callable[[], Awaitable[object]]) -> None:
        self.url = url
        self._sign = sign
        self._settings = settings
        self._model = model

    @cached_property
    def traffic(self) -> Traffic:
        """The requests of this process to the server."""
        key = self._settings.api_key.get_secret_value() if self._settings.api_key else ""
        traffic = traffic_to(self.url, key, self._model)
        traffic.limit("requests", self._settings.requests_per_minute)
        traffic.limit("tokens", self._settings.tokens_per_minute)
        return traffic

    @cached_property
    def _listener(self) -> Listener:
        return Listener(self.traffic, public_url(self.url), self._sign, self._settings.request_timeout_s)

    @property
    def paused(self) -> bool:
        """Return whether it is failing, so that one request at a time is sent to it."""
        return self.traffic.paused

    @property
    def down(self) -> bool:
        """Return whether it was given up, and has not answered since."""
        return self.traffic.given_up is not None

    @property
    def spared(self) -> bool:
        """Return whether to prefer another server, if there is one."""
        return self.paused and not (self.down and time.monotonic() - self.traffic.failed_at > SPARED_S)

    async def ask(
        self,
        request: Callable[[], Awaitable[T]],
        *,
        proves: bool = True,
        tokens: Callable[[T], int] = lambda answer: 0,
        patience_s: float = math.inf,
    ) -> T:
        """Return the result of `request`, which is sent when it is its turn, and retried after a temporary failure.

        Args:
            proves: whether an answer shows that the server accepts the key and the model.
            tokens: returns how many tokens the answer and its prompt have; 0 is not known.
            patience_s: replaces `endpoint_patience_s` if it is shorter.

        Raises:
            ModelError: it failed permanently, or for too long.
            EndpointDown: every other request fails too.
        """
        traffic, longest_s = self.traffic, self._settings.max_retry_wait_s
        patience = _Patience(min(patience_s, self._settings.endpoint_patience_s), self._settings.max_retries)
        given_up, asked, sent = traffic.given_up, time.monotonic(), None
        try:
            while True:
                async with traffic.turn(longest_s, given_up) as place:
                    sent = place.began
                    try:
                        async with self._listener.listening(patience.seconds):
                            answer = await request()
                    except Exception as error:
                        sent = None
                        wait = self._wait_after(error, place, patience)
                    else:
                        self._works(place, tokens(answer), proves)
                        return answer
                await asyncio.sleep(wait)
        finally:
            count_wait((sent or time.monotonic()) - asked)

    def _wait_after(self, error: Exception, place: Place, patience: _Patience) -> float:
        """Return the seconds after which the request may get in line again. If the server fails everybody, that is now,
        and the whole line waits.

        Raises:
            ModelError: there is none.
        """
        traffic = self.traffic
        patience.attempts += 1
        if not says_nothing(error):
            traffic.heard()
        failure = explained(error, self._settings, endpoint=self.url, model=self._model, attempts=patience.attempts)
        passing = may_pass(error) or (traffic.answered and refuses_now(error))
        if isinstance(failure, BadCompletion) and not traffic.answered and patience.attempts >= PAUSE_AFTER:
            passing = False  # it never gave a valid answer: it is not a server of that kind
        for_all = not passing and refuses_all(error, answered=traffic.answered)
        if isinstance(failure, ContextLengthExceeded) or (traffic.answered and not passing and not for_all):
            self._works(place, 0, proves=True)  # only that request is wrong
            raise failure from error
        self._fails(error, failure, patience)
        limited = passing and status_of(error) == 429
        if limited:
            traffic.too_many(place)
        # While the server answers nobody, its patience counts: a request that begins then has none of its own.
        shared = limited or traffic.paused
        if passing and not patience.ends(since=traffic.failing_since if shared else None):
            soon = _backoff(traffic.failures - PAUSE_AFTER + 1 if traffic.paused else patience.attempts)
            asked = asked_wait(_headers(error))
            wait = min(self._settings.max_retry_wait_s, soon if asked is None else asked)
            logger.info(
                "model endpoint: attempt %d failed (%s), again in %.1f s", patience.attempts, brief(error), wait
            )
            if not shared:
                return wait
            traffic.hold(wait)
            return 0.0
        if traffic.paused or for_all:
            traffic.give_up(EndpointDown(failure.message, hint=failure.hint))
            assert traffic.given_up is not None
            failure = traffic.given_up.twin()  # a copy for one rollout, which adds its id
        raise failure from error

    def _works(self, place: Place, tokens: int, proves: bool) -> None:
        """Note that the server answers."""
        if self.traffic.paused:
            logger.warning("the model endpoint %s answers again", public_url(self.url))
        self.traffic.works(place, tokens=tokens, proves=proves)

    def _fails(self, error: Exception, failure: ModelError, patience: _Patience) -> None:
        """Note that the server failed."""
        paused = self.traffic.paused
        self.traffic.fails()
        if self.traffic.paused and not paused:
            logger.warning(
                "the model endpoint %s fails (%s): one request at a time is sent to it until it answers; it is given "
                "up after %g s; %s",
                *(public_url(self.url), brief(error), patience.seconds, failure.hint),
            )


@dataclass
class _Patience:
    """How long one request is repeated."""

    seconds: float
    most: int | None
    """Maximum number of retries; None is no limit."""
    attempts: int = 0
    first_failure: float | None = None

    def ends(self, since: float | None) -> bool:
        """Return whether the request is given up. `since` is the moment from which the time counts; None is its own
        first failure."""
        now = time.monotonic()
        self.first_failure = self.first_failure or now
        began = self.first_failure if since is None else since
        return (self.most is not None and self.attempts > self.most) or now - began >= self.seconds


class Choice:
    """Several equal servers. Each user stays on the least busy one that works."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = endpoints
        self._busy = [0] * len(endpoints)

    @contextmanager
    def one(self) -> Iterator[int]:
        """Yield the index of the server to use while the block runs.

        Raises:
            EndpointDown: the block raised it, and all servers are down. If not all are, another `ModelError` is raised
                instead.
        """
        chosen = min(range(len(self._busy)), key=lambda each: (self._endpoints[each].spared, self._busy[each]))
        self._busy[chosen] += 1
        try:
            yield chosen
        except EndpointDown as error:
            if all(endpoint.down for endpoint in self._endpoints):
                raise
            failure = ModelError(error.message, hint=error.hint, trajectory_id=error.trajectory_id)
            failure.result = error.result
            raise failure from error
        finally:
            self._busy[chosen] -= 1


def explained(error: Exception, settings: AgentSettings, *, endpoint: str, model: str, attempts: int) -> ModelError:
    """Return the `ModelError` for a failed request, without the key, which some endpoints repeat when they refuse
    it."""
    failure = as_model_error(error, endpoint=endpoint, model=model, attempts=attempts)
    key = settings.api_key.get_secret_value() if settings.api_key else ""
    if key:
        failure.message = Redactor({"API key": key})(failure.message)
        failure.args = (failure.message,)
    elif status_of(root_failure(error)) in (401, 403):
        failure.hint = f"{failure.hint}; none was sent: {settings.key_variable} is not set"
    return failure


def is_loopback(url: str | None) -> bool:
    """Return whether the URL is that of a server on this host."""
    return url is not None and re.match(r"https?://(localhost|127\.[\d.]+|\[::1\])([:/]|$)", url) is not None


def _headers(error: Exception) -> Mapping[str, str]:
    """Return the headers of the answer that an exception stands for."""
    headers: Mapping[str, str] | None = getattr(getattr(error, "response", None), "headers", None)
    return headers or {}


def _backoff(attempt: int) -> float:
    """Return the seconds to wait after the given attempt: doubling, and spread so that rollouts do not return all at
    once."""
    doubled = _FIRST_WAIT_S * float(2 ** min(attempt - 1, 10))
    return min(_LONGEST_BACKOFF_S, doubled) * random.uniform(0.75, 1.25)
