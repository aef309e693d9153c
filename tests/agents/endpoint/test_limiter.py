"""The rate limiter: limits that are set or that the server reports, and answers 429, against a real server."""

import asyncio
import email.utils
import time

import pytest
from hermes_testing.scripted_server import Fault, Reply, ScriptedServer

from hermes_core.agents.endpoint.headers import ReportedLimit
from hermes_core.agents.endpoint.limiter import Bucket
from hermes_core.agents.endpoint.request import state_of
from tests.agents.endpoint.client import ask, client_of, warnings_in


def test_a_bucket_is_refilled_at_the_rate_that_the_server_reports():
    bucket = Bucket(60)
    bucket.learn(ReportedLimit("requests", 60, 0, 30))
    assert bucket.wait_s(1) == pytest.approx(0.5, abs=0.05)
    assert bucket.wait_s(60) == pytest.approx(30, abs=0.1)
    assert bucket.wait_s(1000) == pytest.approx(30, abs=0.1), "never more than all of it"


def test_the_lower_one_of_our_count_and_the_servers_counts():
    bucket = Bucket(60)
    for _ in range(60):
        bucket.take(1)
    bucket.learn(ReportedLimit("requests", 60, 40, 20))
    assert bucket.wait_s(1) > 0.5, "most of ours are still on their way"
    other = Bucket(60)
    other.learn(ReportedLimit("requests", 60, 0, 60))
    assert other.wait_s(1) > 0.5, "another process used it up"


class RequestLimit:
    """A server's script with a limit that works like OpenAI's: so many requests, which come back at a rate."""

    def __init__(self, limit, per_s):
        self.limit, self.per_s = limit, per_s
        self.left, self.at, self.refused = float(limit), time.monotonic(), 0

    def __call__(self, request):
        now = time.monotonic()
        self.left, self.at = min(self.limit, self.left + (now - self.at) * self.per_s), now
        allowed = self.left >= 1
        self.left -= allowed
        headers = {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(int(self.left)),
            "x-ratelimit-reset-requests": f"{(self.limit - self.left) / self.per_s:.3f}s",
        }
        if allowed:
            return Reply("done", headers=headers)
        self.refused += 1
        return Fault(429, "slow down", headers=headers)


async def ask_all(server, count, **fields):
    """Send so many requests at once, and return the seconds until all are answered."""
    async with client_of(server, **fields) as client:
        began = time.monotonic()
        assert await asyncio.gather(*(ask(client) for _ in range(count))) == ["done"] * count
    return time.monotonic() - began


async def test_all_clients_of_a_server_share_the_limit_that_it_reports():
    limit = RequestLimit(10, per_s=20)
    async with ScriptedServer(limit) as server, client_of(server) as first:
        assert await ask(first) == "done"
        seconds = await ask_all(server, 50)
        assert state_of(server.base_url, "", "scripted") is first.endpoint.state
    assert limit.refused <= 15, "40 if each finds the limit by itself"
    assert 1.5 < seconds < 10, "41 at 20 per second"


async def test_after_429_without_limits_fewer_requests_are_sent_at_a_time():
    busy = refused = most = 0

    async def script(request):
        nonlocal busy, refused, most
        if busy >= 4:
            refused += 1
            return Fault(429, "too many at a time")
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.05)
        busy -= 1
        return Reply("done")

    async with ScriptedServer(script) as server:
        seconds = await ask_all(server, 60, max_retry_wait_s=0.1)
    assert most > 1
    assert refused < 150, "without learning, each round refuses all but four"
    assert seconds < 20


async def test_a_set_limit_on_requests_is_kept_if_the_server_reports_none():
    async with ScriptedServer([Reply("done", usage=(90, 10))]) as server:
        seconds = await ask_all(server, 63, requests_per_minute=60)
    assert 1.5 < seconds < 20, "three have to come back at 1 per second"


async def test_a_set_limit_on_tokens_is_kept_if_the_server_reports_none():
    async with (
        ScriptedServer([Reply("done", usage=(900, 100))]) as server,
        client_of(server, tokens_per_minute=24000) as client,
    ):
        began = time.monotonic()
        for _ in range(25):
            assert await ask(client) == "done"
    assert 1.5 < time.monotonic() - began < 20, "25000 tokens, of which 1000 have to come back at 400 per second"


@pytest.mark.parametrize("form", ["seconds", "date", "milliseconds"])
async def test_the_retry_after_of_one_request_holds_all_requests(form):
    sent = []

    def script(request):
        sent.append(time.monotonic())
        if len(sent) > 1:
            return Reply("done")
        headers = {
            "seconds": {"Retry-After": "1"},
            "date": {"Retry-After": email.utils.formatdate(time.time() + 2, usegmt=True)},
            "milliseconds": {"Retry-After-Ms": "1000", "Retry-After": "60"},
        }
        return Fault(429, headers=headers[form])

    async with ScriptedServer(script) as server, client_of(server) as client:
        first = asyncio.create_task(ask(client))
        while not sent:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert await asyncio.gather(first, *(ask(client) for _ in range(5))) == ["done"] * 6
    assert 0.9 < sent[1] - sent[0] < 10
    assert len(sent) == 7


LIES = {
    "nothing left for a day": {"limit": "100", "remaining": "0", "reset": "24h"},
    "nothing left for ages": {"limit": "100", "remaining": "0", "reset": "9" * 300},
    "a limit of almost nothing": {"limit": "1e-300", "remaining": "0", "reset": "1s"},
    "a huge limit": {"limit": "1e308", "remaining": "1e308", "reset": "1e308"},
    "less than nothing": {"limit": "100", "remaining": "-100", "reset": "-1"},
    "no numbers": {"limit": "nan", "remaining": "inf", "reset": "never"},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("lie", LIES)
async def test_false_limits_in_headers_cost_one_wait_at_most(lie, caplog):
    headers = {
        f"x-ratelimit-{part}-{kind}": value for part, value in LIES[lie].items() for kind in ("requests", "tokens")
    }
    async with (
        ScriptedServer(lambda request: Reply("done", usage=(10, 10), headers=headers)) as server,
        client_of(server, max_retry_wait_s=1.0) as client,
    ):
        began = time.monotonic()
        for _ in range(20):
            assert await ask(client) == "done"
    assert time.monotonic() - began < 15
    assert sum("is ignored" in text for text in warnings_in(caplog)) <= 2


@pytest.mark.parametrize("asked", ["3600", "-5", "nan", "inf", "1e400", "9" * 400, "soon", "Wed, 99 Foo 2999 99:99:99"])
async def test_a_false_retry_after_waits_for_max_retry_wait_s_at_most(asked):
    async with ScriptedServer([Reply("done")], faults=[Fault(429, headers={"Retry-After": asked})] * 2) as server:
        seconds = await ask_all(server, 3, max_retry_wait_s=0.2)
    assert seconds < 20
