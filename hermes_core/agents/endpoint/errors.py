"""The errors of a model server: their meaning for other requests, and the `ModelError` that says what to do."""

from __future__ import annotations

import json
import re
from typing import Any, Self
from urllib.parse import urlsplit

from hermes_core.errors import ModelError

_TRANSIENT_STATUS = frozenset({408, 409, 425, 429})
_ABOUT_THE_REQUEST = frozenset({400, 413, 422})
_NOT_ABOUT_LENGTH = frozenset({401, 403, 404, 408, 429})
_TOO_LONG = re.compile(
    r"context[ _-]?(length|window|size|limit)|maximum (context|prompt|supported sequence)|reduce the length"
    r"|\b(input|prompt|text|tokens?)\b[^.!]{0,60}\btoo (long|large|many)|too many (input |prompt )?tokens"
    r"|longer than the|\btokens?\b[^.!]{0,60}\b(exceed|must be (<|less|no more))"
    r"|exceed\w*\b[^.!]{0,40}(token|prompt|max\w* length)"
    r"|(input|prompt)\w*\b[^.!]{0,40}\b(exceed|must have less than|should be \[)|max_(model_len|seq_len|input_len)"
    r"|tokens > \d+ maximum|max size: \d+ tokens|tokens_limit_reached|only supports up to"
    r"|超长|过长|超过\S{0,20}(长度|限制)",
    re.IGNORECASE,
)
"""Matches providers' messages about a conversation that no longer fits. `tests/agents/test_too_long.py` has these
messages."""
_TOO_LARGE = re.compile(r"request (is )?too large", re.IGNORECASE)
_LIMIT_AND_SIZE = re.compile(r"\blimit:? *(\d[\d,]*).*?\brequested:? *(\d[\d,]*)", re.IGNORECASE)
"""Matches the messages of OpenAI, Groq and others about a rate limit: `on tokens per min (TPM): Limit 30000, Requested
31538`, or, if waiting helps, `Limit 30000, Used 29000, Requested 1200`."""

_NO_QUOTA = re.compile(r"credit balance is too low|reached your specified (API|workspace) usage limits", re.IGNORECASE)


class ContextLengthExceeded(ModelError):
    """The conversation no longer fits the model's context. This ends a rollout, but is not a failure."""


class ConversationRefused(ModelError):
    """The endpoint refused the request because of its content. If the model's own messages are the reason, the rollout
    ends."""


class RequestTooLarge(ModelError):
    """The request has more tokens than the endpoint accepts in a minute, so it would be refused at any time."""


class EndpointDown(ModelError):
    """The endpoint answers no request, or refuses every one. This ends the run, because every other rollout would fail,
    too."""


class NoSignOfLife(TimeoutError):
    """The endpoint answered no request for a long time, not even a small one."""


class BadCompletion(ModelError):
    """The endpoint answered with something that is not a chat completion."""


class ResponseTooLarge(ModelError):
    """The endpoint's answer is larger than allowed. The rest of it was not read."""


class HttpRefusal(Exception):
    """An answer of an endpoint that is an error, with the attributes that this module reads.

    Args:
        status: the answer's HTTP status; for an error inside an answer with status 200, the status that fits the error.
        body: the answer's JSON value, or its text.
        response: anything with `headers`.
    """

    def __init__(self, status: int, body: Any, response: Any = None) -> None:
        super().__init__((body if isinstance(body, str) else json.dumps(body))[:2000])
        self.status_code = status
        self.body = body
        self.response = response
        error = body.get("error", body) if isinstance(body, dict) else None
        self.code, self.type = (error.get(key) if isinstance(error, dict) else None for key in ("code", "type"))

    @classmethod
    def of(cls, status: int, content: bytes, response: Any) -> Self:
        """Return the refusal with this body."""
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            body = content[:2000].decode("utf-8", "replace")
        return cls(status, body, response)


def root_failure(error: BaseException) -> BaseException:
    """Return the failure that a retrying client gave up on, from inside the wrapper that it raised."""
    for _ in range(5):
        attempt = getattr(error, "last_attempt", None)
        error = (attempt is not None and attempt.exception()) or error
    return error


def is_timeout(error: BaseException) -> bool:
    """Return whether the error says that no answer came in time."""
    return isinstance(error, TimeoutError) or "Timeout" in type(error).__name__


def is_unanswered(error: BaseException) -> bool:
    """Return whether the request got no answer at all, not even a refusal."""
    return status_of(error) is None and (is_timeout(error) or _is_connection_failure(error))


def is_transient(error: BaseException, *, proven: bool) -> bool:
    """Return whether sending the same request again can help.

    Args:
        proven: whether the server once accepted the key and the model. If such a server refuses them now, it restarts,
            or its gateway does not reach it, and it will accept them again.
    """
    status = status_of(error)
    if status is None:
        return isinstance(error, BadCompletion | ValueError) or _is_connection_failure(error)
    permanent = _has_no_quota(error) or _exceeds_limit(status, _message(error)) or _exceeds_context(status, error)
    return ((status in _TRANSIENT_STATUS or status >= 500) and not permanent) or (proven and status in (401, 404))


def is_fatal(error: BaseException, *, proven: bool) -> bool:
    """Return whether the endpoint will refuse every request in the same way, until a person changes something."""
    return _has_no_quota(error) or (not proven and status_of(error) in (401, 403, 404))


def as_model_error(error: BaseException, *, endpoint: str = "", model: str = "", attempts: int = 1) -> ModelError:
    """Return the `ModelError` for an exception of a client: what went wrong, and what to do next.

    This function reads only status codes and attributes of the exception, so that it works for any client and loads no
    SDK. A `ModelError` is returned unchanged, except that the number of attempts is added.
    """
    error = root_failure(error)
    tries = f" after {attempts} attempts" if attempts > 1 else ""
    if isinstance(error, ModelError):
        counted = error.twin() if tries else error
        counted.message += tries
        return counted
    status, place = status_of(error), f"the model endpoint {public_url(endpoint)}" if endpoint else "the model endpoint"
    if status is not None:
        return _for_status(status, error, place, model, tries)
    kind = ModelError
    if isinstance(error, NoSignOfLife):
        message = f"{place} answers nothing{tries}, not even a request for its models"
        hint = "check that the server runs, and the network; if it may be away for longer, raise endpoint_patience_s"
    elif is_timeout(error):
        message = f"{place} did not answer in time{tries}"
        hint = "lower the concurrency or the number of tokens asked for, or raise request_timeout_s"
    elif _is_connection_failure(error):
        message = f"{place} could not be reached or broke off{tries}: {_innermost(error)}"
        hint = "check that the server runs and that the base URL (host, port, /v1) is right"
    elif isinstance(error, ValueError):
        kind, message = BadCompletion, f"{place} answered with something that is not JSON{tries}: {_short(error)}"
        hint = "check that the base URL is that of an OpenAI-compatible API; it usually ends in /v1"
    else:
        message = f"asking {place} failed{tries}: {type(error).__name__}: {_short(error)}"
        hint = "look at the cause below: endpoints are not known to fail in this way"
    return kind(message, hint=hint)


def short_reason(error: BaseException) -> str:
    """Return what went wrong, in a few words."""
    if (status := status_of(error)) is not None:
        return f"HTTP {status}"
    if is_timeout(error):
        return "no answer in time"
    if _is_connection_failure(error):
        return "no connection"
    if isinstance(error, ValueError):
        return "no JSON"
    if isinstance(error, BadCompletion):
        return "no completion in the answer"
    return type(error).__name__


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the endpoint's answer; None if the endpoint did not answer."""
    status = getattr(error, "status_code", None)
    return status if isinstance(status, int) else None


def public_url(url: str) -> str:
    """Return the URL without the user and password in it."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def _for_status(status: int, error: BaseException, place: str, model: str, tries: str) -> ModelError:
    reason, kind = _message(error), ModelError
    if _exceeds_context(status, error):
        return context_exceeded(model, reason)
    if _exceeds_limit(status, reason):
        kind, problem = RequestTooLarge, "takes no request of this size, however long one waits"
        hint = "lower max_tokens or max_turns, shorten tool results, or have the limit on tokens per minute raised"
    elif _has_no_quota(error):
        problem = "has no quota left for this key"
        hint = "top up the account or use another key; waiting does not help"
    elif status in (401, 403):
        problem = "refused the API key"
        hint = "set a key that is valid for this endpoint and may use this model"
    elif status == 404:
        problem = f"does not know the model {model!r}, or has no such API there"
        hint = (
            "ask it for its models (GET …/models), and check that the base URL is whole: that of an OpenAI-compatible "
            "endpoint usually ends in /v1"
        )
    elif status == 429:
        problem, hint = f"still limits the rate{tries}", "lower the concurrency, or raise endpoint_patience_s"
    elif status >= 500 or status in _TRANSIENT_STATUS:
        problem, hint = f"failed{tries}", "look at the server's own log"
    else:
        kind = ConversationRefused if status in _ABOUT_THE_REQUEST else ModelError
        problem = "refused the request"
        hint = "check that the model takes tools and the sampling parameters that are set"
    return kind(f"{place} {problem} (HTTP {status}): {reason}", hint=hint)


def is_about_context(message: str) -> bool:
    """Return whether a server's message says that the conversation no longer fits."""
    return _TOO_LONG.search(message) is not None


def context_exceeded(model: str, message: str) -> ContextLengthExceeded:
    """Return the error for a conversation that no longer fits, with the server's message."""
    return ContextLengthExceeded(
        f"the conversation no longer fits the context of model {model!r}: {message}",
        hint="allow fewer turns or shorter tool results, or use a model with a longer context",
    )


def _exceeds_context(status: int, error: BaseException) -> bool:
    """Return whether this refusal says that the conversation no longer fits, in its message, code or type."""
    # The body is not searched, because it may repeat the request.
    words = f"{_message(error)} {getattr(error, 'code', '')} {getattr(error, 'type', '')}"
    return status not in _NOT_ABOUT_LENGTH and is_about_context(words)


def _exceeds_limit(status: int, message: str) -> bool:
    """Return whether the endpoint refused a request that is by itself larger than its limit on tokens per minute."""
    if status not in (413, 429):
        return False
    if numbers := _LIMIT_AND_SIZE.search(message):
        limit, size = (int(number.replace(",", "")) for number in numbers.groups())
        return size > limit
    return status == 429 and _TOO_LARGE.search(message) is not None


def _message(error: BaseException) -> str:
    """Return the server's own message about the failure."""
    body = getattr(error, "body", None)
    inner = body.get("error", body) if isinstance(body, dict) else body
    message: Any = inner.get("message", inner) if isinstance(inner, dict) else inner
    return _short(message if message else error)


def _has_no_quota(error: BaseException) -> bool:
    """Return whether the account has no credit. Anthropic's status is 400 then, as if the request were wrong."""
    coded = getattr(error, "code", "") == "insufficient_quota" or getattr(error, "type", "") == "billing_error"
    return coded or (status_of(error) == 400 and _NO_QUOTA.search(_message(error)) is not None)


def _is_connection_failure(error: BaseException) -> bool:
    """Return whether the connection failed. Every HTTP client has its own error classes, so only the names of these
    classes are compared."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"OSError", "APIConnectionError", "TransportError", "ClientConnectionError"})


def _innermost(error: BaseException) -> str:
    """Return the cause of a client's error `Connection error.`, which itself names no reason."""
    reason = error
    while (cause := reason.__cause__ or reason.__context__) is not None:
        reason = cause
    return _short(reason) if str(reason) else type(reason).__name__


def _short(thing: object) -> str:
    text = " ".join(str(thing).split())
    return text if len(text) <= 300 else f"{text[:300]}…"
