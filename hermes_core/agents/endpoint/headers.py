"""Reads rate limits and times to wait from the headers of an answer."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

LONGEST_S = 86400.0
"""Longest time to wait, in seconds, that is taken from a header. No known server has a limit for more than a day."""

_NAMES = {
    "requests": (
        "x-ratelimit-{}-requests",  # OpenAI, and most others with its API
        "anthropic-ratelimit-requests-{}",
        "x-ratelimit-{}",  # gateways in front of vLLM
        "ratelimit-{}",
    ),
    "tokens": ("x-ratelimit-{}-tokens", "anthropic-ratelimit-tokens-{}"),
}
"""The headers of each kind of limit; `{}` is `limit`, `remaining` or `reset`. The first header that is present
counts."""

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|us|µs|ns|[dhms])")
_DURATION = re.compile(rf"(?:{_PART.pattern})+")
_EPOCH_S, _EPOCH_MS = 1e9, 1e12
"""A number from `_EPOCH_S` on is not a duration but a time in seconds since the epoch; from `_EPOCH_MS` on, in
milliseconds."""


@dataclass(frozen=True)
class ReportedLimit:
    """The numbers that one answer reports about one limit."""

    kind: str
    limit: float
    remaining: float
    reset_s: float | None
    """Seconds until the whole limit is available again; None if the server does not report this time."""


def read_limits(headers: Mapping[str, str]) -> Iterator[ReportedLimit]:
    """Yield the limits that the headers report. Impossible numbers are left out.

    Args:
        headers: a mapping that does not distinguish upper and lower case.
    """
    for kind, names in _NAMES.items():
        for name in names:
            limit, remaining = (_read_number(headers.get(name.format(part))) for part in ("limit", "remaining"))
            if limit and remaining is not None:
                yield ReportedLimit(kind, limit, min(remaining, limit), read_delay(headers.get(name.format("reset"))))
                break


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the server asks to wait before the next request; None if the headers name no valid
    time."""
    milliseconds = _read_number(headers.get("retry-after-ms"))
    return read_delay(headers.get("retry-after")) if milliseconds is None else min(LONGEST_S, milliseconds / 1000)


def read_delay(text: str | None) -> float | None:
    """Return the seconds until the time in a header, which is a number of seconds, a duration (`6m0s`), a time since
    the epoch, or a date; None if the text is nothing like this, or the result is negative."""
    text = (text or "").strip()
    number = _read_number(text)
    if number is not None:
        scale = 1000 if number >= _EPOCH_MS else 1
        seconds = number / scale - time.time() if number >= _EPOCH_S else number
    elif _DURATION.fullmatch(text):
        seconds = sum(float(amount) * _UNITS[unit] for amount, unit in _PART.findall(text))
    elif (date := _read_date(text)) is not None:
        seconds = date.timestamp() - time.time()
    else:
        return None
    return min(LONGEST_S, max(0.0, seconds))


def _read_number(text: str | None) -> float | None:
    """Return the number at the beginning of a header (100 in `100, 100;w=60`); None if there is no number, or it is
    infinite or negative."""
    try:
        number = float(re.split("[,;]", text or "")[0])
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _read_date(text: str) -> datetime | None:
    """Return the date in a header, in the form of HTTP or of RFC 3339. A date without a time zone is in UTC."""
    for read in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            date = read(text)
        except (ValueError, TypeError, OverflowError, IndexError):
            continue
        return date if date.tzinfo else date.replace(tzinfo=UTC)
    return None
