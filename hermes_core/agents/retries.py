"""The shared state of a model server: which requests are retried, when the server is paused, and when it is given
up."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from email.utils import parsedate_to_datetime
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
    status_of,
)
from hermes_core.errors import ModelError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_WAIT_S = 0.5

PAUSE_AFTER = 3
"""Number of failures in a row, of any requests, after which only one request at a time is sent to a server."""

PROBE_EVERY_S = 5.0
"""Maximum seconds between two such requests, unless the server asks for more."""

SPARED_S = 60.0
"""Seconds for which a server that was given up is not chosen if there is another."""


class Endpoint:
    """One model server, shared by all the rollouts that use it.

    A temporary failure is retried for as long as the patience lasts. After some failures in a row the server is paused:
    one request at a time tests whether it works again, and all others wait for the outcome. If that request is given
    up, so are the waiting ones, with `EndpointDown`, because every other rollout would fail too.

    Args:
        settings: `endpoint_patience_s`, `max_retries`, `max_retry_wait_s`, and the key, which no message repeats.
        url: the server's URL, for messages.
        model: the model's name, for messages.
    """

    def __init__(self, settings: AgentSettings, url: str, model: str) -> None:
        self.url = url
        self._settings = settings
        self._model = model
        self._answered = False
        """Whether it ever answered. A server that once accepted the key and the model will accept them again."""
        self._failures = 0
        self._failing_since = self._tried = 0.0
        self._free = asyncio.Event()
        """Cleared while one request tries a paused server."""
        self._free.set()
        self._given_up: EndpointDown | None = None

    @property
    def paused(self) -> bool:
        """Return whether it is failing, so that one request at a time is sent to it."""
        return self._failures >= PAUSE_AFTER

    @property
    def down(self) -> bool:
        """Return whether it was given up, and has not answered since."""
        return self._given_up is not None

    @property
    def spared(self) -> bool:
        """Return whether to prefer another server, if there is one."""
        return self.paused and not (self.down and time.monotonic() - self._tried > SPARED_S)

    async def ask(self, request: Callable[[], Awaitable[T]], *, proves: bool = True) -> T:
        """Return the result of `request`, which is retried after a temporary failure.

        Args:
            proves: whether an answer shows that the server accepts the key and the model.

        Raises:
            ModelError: it failed permanently, or for too long.
            EndpointDown: every other request fails too.
        """
        attempts = 0
        first_failure: float | None = None
        while True:
            async with self._turn():
                try:
                    answer = await request()
                except Exception as error:
                    attempts += 1
                    first_failure = first_failure or time.monotonic()
                    wait = self._wait_after(error, attempts, first_failure)
                    # Keep the turn: requests that wait for this one wait for its next attempt.
                    logger.info("model endpoint: attempt %d failed (%s), again in %.1f s", attempts, brief(error), wait)
                    await asyncio.sleep(wait)
                else:
                    self._well(answered=proves)
                    return answer

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait while another request tests a paused server. Raise `EndpointDown` if that request gave it up."""
        while not self._free.is_set():
            await self._free.wait()
            if self._given_up is not None:
                raise self._given_up.twin() from self._given_up
        alone = self.paused
        if alone:
            self._free.clear()
        try:
            yield
        finally:
            if alone:
                self._free.set()

    def _wait_after(self, error: Exception, attempts: int, first_failure: float) -> float:
        """Return the seconds until the next attempt.

        Raises:
            ModelError: there is none.
        """
        failure = explained(error, self._settings, endpoint=self.url, model=self._model, attempts=attempts)
        passing = may_pass(error) or (self._answered and refuses_now(error))
        if isinstance(failure, BadCompletion) and not self._answered and attempts >= PAUSE_AFTER:
            passing = False  # it never gave a valid answer: it is not a server of that kind
        for_all = not passing and refuses_all(error, answered=self._answered)
        if isinstance(failure, ContextLengthExceeded) or (self._answered and not passing and not for_all):
            self._well(answered=True)  # only that request is wrong
            raise failure from error
        self._ill(error, failure)
        if passing and not self._out_of_patience(attempts, first_failure):
            longest = self._settings.max_retry_wait_s
            soon = min(_backoff(attempts), PROBE_EVERY_S) if self.paused else _backoff(attempts)
            return min(longest, _asked_wait(error) or soon)
        if self.paused or for_all:
            self._given_up = EndpointDown(failure.message, hint=failure.hint)
            failure = self._given_up.twin()  # a copy for one rollout, which adds its id
            self._failures = max(self._failures, PAUSE_AFTER)
        raise failure from error

    def _out_of_patience(self, attempts: int, first_failure: float) -> bool:
        most, patience = self._settings.max_retries, self._settings.endpoint_patience_s
        # A request that began while the server was failing has no patience of its own.
        since = min(first_failure, self._failing_since) if self.paused else first_failure
        return (most is not None and attempts > most) or time.monotonic() - since >= patience

    def _well(self, *, answered: bool) -> None:
        """Note that the server answers."""
        if self.paused:
            logger.warning("the model endpoint %s answers again", self._shown)
        self._answered = self._answered or answered
        self._failures, self._given_up = 0, None
        self._free.set()

    def _ill(self, error: Exception, failure: ModelError) -> None:
        """Note that the server failed."""
        self._tried = time.monotonic()
        if not self._failures:
            self._failing_since = self._tried
        self._failures += 1
        if self._failures == PAUSE_AFTER:
            logger.warning(
                "the model endpoint %s fails (%s): one request at a time is sent to it until it answers; it is given "
                "up after %g s (endpoint_patience_s); %s",
                *(self._shown, brief(error), self._settings.endpoint_patience_s, failure.hint),
            )

    @property
    def _shown(self) -> str:
        return public_url(self.url)


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
        failure.message = failure.message.replace(key, "***")
        failure.args = (failure.message,)
    elif status_of(root_failure(error)) in (401, 403):
        failure.hint = f"{failure.hint}; none was sent: OPENAI_API_KEY is not set"
    return failure


def is_loopback(url: str | None) -> bool:
    """Return whether the URL is that of a server on this host."""
    return url is not None and re.match(r"https?://(localhost|127\.[\d.]+|\[::1\])([:/]|$)", url) is not None


def _asked_wait(error: Exception) -> float | None:
    """Return the seconds that the endpoint asks to wait before the next attempt, if it does."""
    headers: Mapping[str, str] = getattr(getattr(error, "response", None), "headers", None) or {}
    try:
        if "retry-after-ms" in headers:
            return max(0.0, float(headers["retry-after-ms"]) / 1000)
        value = headers.get("retry-after", "")
        if value.strip() and not value.strip()[0].isdigit():
            return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
        return float(value) if value else None
    except ValueError:
        return None


def _backoff(attempt: int) -> float:
    """Return the seconds to wait after the given attempt: doubling, and spread so that rollouts do not return all at
    once."""
    return _FIRST_WAIT_S * float(2 ** min(attempt - 1, 10)) * random.uniform(0.75, 1.25)
