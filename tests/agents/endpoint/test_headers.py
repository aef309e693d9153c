"""Rate limits and delays in the headers of answers, as the servers and gateways write them."""

import email.utils
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from hermes_core.agents.endpoint.headers import LONGEST_S, ReportedLimit, read_delay, read_limits, read_retry_after


def in_seconds(seconds):
    return datetime.now(UTC) + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("7", 7),
        ("1.5", 1.5),
        ("12ms", 0.012),
        ("1s", 1),
        ("6m0s", 360),
        ("1h2m3.5s", 3723.5),
        ("23h18m29.144s", 83909.144),
        ("9" * 30, LONGEST_S),
        ("1e300", LONGEST_S),
        ("60, 60;w=1", 60),
        (None, None),
        ("", None),
        ("-5", None),
        ("nan", None),
        ("inf", None),
        ("-inf", None),
        ("9" * 400, None),
        ("soon", None),
        ("5 minutes", None),
        ("²", None),
    ],
)
def test_a_delay_is_read_in_every_form_and_nonsense_is_ignored(text, seconds):
    assert read_delay(text) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    "write",
    [
        lambda moment: email.utils.format_datetime(moment, usegmt=True),
        lambda moment: moment.isoformat(),
        lambda moment: moment.isoformat().replace("+00:00", "Z"),
        lambda moment: str(moment.timestamp()),
        lambda moment: str(moment.timestamp() * 1000),
    ],
)
def test_a_time_is_read_as_the_seconds_until_then(write):
    assert read_delay(write(in_seconds(30))) == pytest.approx(30, abs=2)
    assert read_delay(write(in_seconds(-30))) == 0


def test_retry_after_ms_counts_before_retry_after():
    assert read_retry_after(httpx.Headers({"Retry-After-Ms": "1500", "Retry-After": "60"})) == 1.5
    assert read_retry_after(httpx.Headers({"Retry-After-Ms": "nan", "Retry-After": "60"})) == 60
    assert read_retry_after(httpx.Headers({})) is None


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        (
            {
                "x-ratelimit-limit-requests": "60",
                "x-ratelimit-remaining-requests": "59",
                "x-ratelimit-reset-requests": "1s",
                "x-ratelimit-limit-tokens": "150000",
                "x-ratelimit-remaining-tokens": "149984",
                "x-ratelimit-reset-tokens": "6m0s",
            },
            [ReportedLimit("requests", 60, 59, 1), ReportedLimit("tokens", 150000, 149984, 360)],
        ),
        (
            {
                "anthropic-ratelimit-requests-limit": "50",
                "anthropic-ratelimit-requests-remaining": "0",
                "anthropic-ratelimit-requests-reset": "2000-01-01T00:00:00Z",
            },
            [ReportedLimit("requests", 50, 0, 0)],
        ),
        ({"X-RateLimit-Limit": "20", "X-RateLimit-Remaining": "7"}, [ReportedLimit("requests", 20, 7, None)]),
        (
            {"RateLimit-Limit": "20, 20;w=60", "RateLimit-Remaining": "7", "RateLimit-Reset": "9"},
            [ReportedLimit("requests", 20, 7, 9)],
        ),
        ({"X-RateLimit-Limit": "20", "X-RateLimit-Remaining": "30"}, [ReportedLimit("requests", 20, 20, None)]),
        ({"X-RateLimit-Limit": "0", "X-RateLimit-Remaining": "0"}, []),
        ({"X-RateLimit-Limit": "nan", "X-RateLimit-Remaining": "1"}, []),
        ({"X-RateLimit-Limit": "20", "X-RateLimit-Remaining": "-4"}, []),
        ({"X-RateLimit-Remaining": "4"}, []),
    ],
)
def test_rate_limits_are_read_in_every_style(headers, said):
    assert list(read_limits(httpx.Headers(headers))) == said
