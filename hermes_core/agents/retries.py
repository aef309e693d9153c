"""Sending a request to a model server again when that can help: how often, after what wait, and what is said then."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import TypeVar

from hermes_core.agents.base import AgentSettings
from hermes_core.agents.failures import as_model_error, may_pass, status_of
from hermes_core.errors import ModelError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_WAIT_S = 0.5


async def persist(
    ask: Callable[[], Awaitable[T]], settings: AgentSettings, explain: Callable[[Exception, int], Exception]
) -> T:
    """What `ask` gives, tried again up to `max_retries` times after a failure that may pass.

    Raises:
        Whatever `explain(failure, attempts)` gives for the last failure.
    """
    attempt = 0
    while True:
        attempt += 1
        try:
            return await ask()
        except Exception as error:
            if attempt > settings.max_retries or not may_pass(error):
                raise explain(error, attempt) from error
            wait = min(settings.max_retry_wait_s, _asked_wait(error) or _backoff(attempt))
            logger.info("model endpoint: attempt %d failed (%s), again in %.1f s", attempt, _brief(error), wait)
        await asyncio.sleep(wait)


def explained(error: Exception, settings: AgentSettings, *, endpoint: str, model: str, attempts: int) -> ModelError:
    """The `ModelError` for a failed request, without the key, which some endpoints repeat when they refuse it."""
    failure = as_model_error(error, endpoint=endpoint, model=model, attempts=attempts)
    key = settings.api_key.get_secret_value() if settings.api_key else ""
    if key:
        failure.message = failure.message.replace(key, "***")
        failure.args = (failure.message,)
    return failure


def is_loopback(url: str | None) -> bool:
    """Whether the URL is of a server on this host."""
    return url is not None and re.match(r"https?://(localhost|127\.[\d.]+|\[::1\])([:/]|$)", url) is not None


def _asked_wait(error: Exception) -> float | None:
    """Seconds that the endpoint asks to wait before the next attempt, if it does."""
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
    """Seconds to wait after the given attempt: doubling, spread so that rollouts do not return all at once."""
    return _FIRST_WAIT_S * float(2 ** min(attempt - 1, 10)) * random.uniform(0.75, 1.25)


def _brief(error: Exception) -> str:
    status = status_of(error)
    return f"HTTP {status}" if status is not None else type(error).__name__
