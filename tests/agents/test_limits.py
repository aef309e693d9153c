"""Rate limits: what headers say, how long a request waits, and what a lie costs; against a real server."""

import asyncio
import email.utils
import itertools
import time
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from hermes_core.agents.base import AgentSettings
from hermes_core.agents.limits import LONGEST_S, Budget, Said, asked_wait, said_limits, seconds_until
from hermes_core.agents.model import OpenAIServer
from hermes_core.agents.traffic import counted_waits, traffic_to
from hermes_core.testing.scripted_server import Fault, Reply, ScriptedServer

HELLO = [{"role": "user", "content": "hello"}]


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
def test_seconds_are_read_in_every_form_and_nonsense_is_not_believed(text, seconds):
    assert seconds_until(text) == (None if seconds is None else pytest.approx(seconds))


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
def test_a_moment_is_read_as_the_seconds_until_then(write):
    assert seconds_until(write(in_seconds(30))) == pytest.approx(30, abs=2)
    assert seconds_until(write(in_seconds(-30))) == 0


def test_milliseconds_are_more_exact_than_seconds():
    assert asked_wait(httpx.Headers({"Retry-After-Ms": "1500", "Retry-After": "60"})) == 1.5
    assert asked_wait(httpx.Headers({"Retry-After-Ms": "nan", "Retry-After": "60"})) == 60
    assert asked_wait(httpx.Headers({})) is None


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
            [Said("requests", 60, 59, 1), Said("tokens", 150000, 149984, 360)],
        ),
        (
            {
                "anthropic-ratelimit-requests-limit": "50",
                "anthropic-ratelimit-requests-remaining": "0",
                "anthropic-ratelimit-requests-reset": "2000-01-01T00:00:00Z",
            },
            [Said("requests", 50, 0, 0)],
        ),
        ({"X-RateLimit-Limit": "20", "X-RateLimit-Remaining": "7"}, [Said("requests", 20, 7, None)]),
        (
            {"RateLimit-Limit": "20, 20;w=60", "RateLimit-Remaining": "7", "RateLimit-Reset": "9"},
            [Said("requests", 20, 7, 9)],
        ),
        ({"X-RateLimit-Limit": "20", "X-RateLimit-Remaining": "30"}, [Said("requests", 20, 20, None)]),
        ({"X-RateLimit-Limit": "0", "X-RateLimit-Remaining": "0"}, []),
        ({"X-RateLimit-Limit": "nan", "X-RateLimit-Remaining": "1"}, []),
        ({"X-RateLimit-Limit": "20", "X-RateLimit-Remaining": "-4"}, []),
        ({"X-RateLimit-Remaining": "4"}, []),
    ],
)
def test_the_limits_of_every_style_are_read(headers, said):
    assert list(said_limits(httpx.Headers(headers))) == said


def test_what_was_used_comes_back_at_the_rate_that_the_server_says():
    budget = Budget.full(60)
    budget.learn(Said("requests", 60, 0, 30))
    assert budget.wait_s(1) == pytest.approx(0.5, abs=0.05)
    assert budget.wait_s(60) == pytest.approx(30, abs=0.1)
    assert budget.wait_s(1000) == pytest.approx(30, abs=0.1), "never more than all of it"


def test_the_lower_count_of_ours_and_theirs_is_the_one_that_counts():
    budget = Budget.full(60)
    for _ in range(60):
        budget.take(1)
    budget.learn(Said("requests", 60, 40, 20))
    assert budget.wait_s(1) > 0.5, "most of ours are still on their way"
    other = Budget.full(60)
    other.learn(Said("requests", 60, 0, 60))
    assert other.wait_s(1) > 0.5, "another process used it up"


def opened(server, **fields):
    return OpenAIServer(AgentSettings(**{"model": "scripted", "base_url": server.base_url, **fields}))


class Limited:
    """A server's script with a limit that works like OpenAI's: so many requests, which come back at a rate."""

    def __init__(self, limit, per_s, tell=True):
        self.limit, self.per_s, self.tell = limit, per_s, tell
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
            return Reply("done", headers=headers if self.tell else {})
        self.refused += 1
        return Fault(429, "slow down", headers=headers if self.tell else {})


async def ask_all(server, count, **fields):
    """Let so many ask at once, and return the seconds and the answers."""
    endpoint = opened(server, **fields)
    began = time.monotonic()
    answers = await asyncio.gather(*(endpoint.chat_completion(messages=HELLO) for _ in range(count)))
    await endpoint.aclose()
    return time.monotonic() - began, [answer.choices[0].message.content for answer in answers]


async def test_a_limit_that_the_server_names_is_kept_by_all_who_ask():
    limited = Limited(10, per_s=20)
    async with ScriptedServer(limited) as server:
        first = opened(server)
        await first.chat_completion(messages=HELLO)
        seconds, answers = await ask_all(server, 50)
        assert traffic_to(server.base_url, "", "scripted") is first.endpoint.traffic
        await first.aclose()
    assert answers == ["done"] * 50
    assert limited.refused <= 15, "40 if each finds the limit by itself"
    assert 1.5 < seconds < 10, "41 at 20 per second"


async def test_a_server_that_only_refuses_too_many_gets_fewer_at_a_time():
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
        seconds, answers = await ask_all(server, 60, max_retry_wait_s=0.1)
    assert answers == ["done"] * 60
    assert most > 1
    assert refused < 150, "without learning, each round refuses all but four"
    assert seconds < 20


async def test_a_limit_of_requests_is_kept_without_a_word_of_the_server():
    async with ScriptedServer([Reply("done", usage=(90, 10))]) as server:
        seconds, _ = await ask_all(server, 63, requests_per_minute=60)
    assert 1.5 < seconds < 20, "three have to come back at 1 per second"


async def test_a_limit_of_tokens_is_kept_without_a_word_of_the_server():
    async with ScriptedServer([Reply("done", usage=(900, 100))]) as server:
        endpoint = opened(server, tokens_per_minute=24000)
        began = time.monotonic()
        for _ in range(25):
            await endpoint.chat_completion(messages=HELLO)
        await endpoint.aclose()
    assert 1.5 < time.monotonic() - began < 20, "25000 tokens, of which 1000 have to come back at 400 per second"


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_what_one_is_asked_to_wait_all_wait(form):
    sent = []

    def script(request):
        sent.append(time.monotonic())
        if len(sent) > 1:
            return Reply("done")
        date = email.utils.formatdate(time.time() + 2, usegmt=True)
        return Fault(429, headers={"Retry-After": "1" if form == "seconds" else date})

    async with ScriptedServer(script) as server:
        endpoint = opened(server)
        first = asyncio.create_task(endpoint.chat_completion(messages=HELLO))
        while not sent:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        await asyncio.gather(first, *(endpoint.chat_completion(messages=HELLO) for _ in range(5)))
        await endpoint.aclose()
    assert sent[1] - sent[0] > 0.9
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
async def test_headers_that_lie_cost_one_wait_and_no_more(lie, caplog):
    headers = {
        f"x-ratelimit-{part}-{kind}": value for part, value in LIES[lie].items() for kind in ("requests", "tokens")
    }
    async with ScriptedServer(lambda request: Reply("done", usage=(10, 10), headers=headers)) as server:
        endpoint = opened(server, max_retry_wait_s=1.0)
        began = time.monotonic()
        for _ in range(20):
            await endpoint.chat_completion(messages=HELLO)
        await endpoint.aclose()
    assert time.monotonic() - began < 15
    assert sum("is ignored" in record.getMessage() for record in caplog.records) <= 2


@pytest.mark.parametrize("asked", ["-5", "nan", "inf", "1e400", "9" * 400, "soon", "Wed, 99 Foo 2999 99:99:99 GMT"])
async def test_a_retry_after_that_lies_is_no_longer_than_the_longest_wait(asked):
    async with ScriptedServer([Reply("done")], faults=[Fault(429, headers={"Retry-After": asked})] * 2) as server:
        seconds, _ = await ask_all(server, 3, max_retry_wait_s=0.2)
    assert seconds < 20


async def test_waits_are_counted_and_the_time_of_the_answer_is_not():
    faults = [Fault(503, delay_s=0.3), Fault(429, headers={"Retry-After": "0.4"})]
    async with ScriptedServer([Reply("done", delay_s=1.5)], faults=faults) as server:
        endpoint = opened(server)
        with counted_waits() as waits:
            await endpoint.chat_completion(messages=HELLO)
        assert 1.0 < waits.seconds < 2.4, "a failed attempt, its backoff, and what was asked for"
        with counted_waits() as none:
            await endpoint.chat_completion(messages=HELLO)
        assert none.seconds < 1.0
        await endpoint.aclose()


async def test_a_wait_that_is_cancelled_is_counted_and_lets_the_next_one_pass():
    async with ScriptedServer([Reply("done")]) as server:
        endpoint = opened(server)
        endpoint.endpoint.traffic.hold(0.5)
        with counted_waits() as waits:
            cancelled = [asyncio.create_task(endpoint.chat_completion(messages=HELLO)) for _ in range(3)]
            await asyncio.sleep(0.2)
            for task in cancelled:
                task.cancel()
            assert all(
                isinstance(each, asyncio.CancelledError)
                for each in await asyncio.gather(*cancelled, return_exceptions=True)
            )
        assert waits.seconds == pytest.approx(0.6, abs=0.2)
        await endpoint.chat_completion(messages=HELLO)
        assert server.request_count == 1
        await endpoint.aclose()


async def test_requests_that_hang_from_before_a_pause_do_not_keep_the_test_of_the_server_waiting():
    asked = itertools.count()

    async def script(request):
        number = next(asked)
        if number < 3:
            await asyncio.sleep(60)
        return Fault(503) if number < 20 else Reply("done")

    async with ScriptedServer(script) as server:
        endpoint = opened(server, max_retry_wait_s=0.02)
        hanging = [asyncio.create_task(endpoint.chat_completion(messages=HELLO)) for _ in range(3)]
        await asyncio.sleep(0.2)
        answers = await asyncio.wait_for(
            asyncio.gather(*(endpoint.chat_completion(messages=HELLO) for _ in range(3))), 10
        )
        assert len(answers) == 3
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        await endpoint.aclose()


async def test_half_of_the_answers_failing_does_not_pause_the_server():
    asked = itertools.count()

    async def script(request):
        await asyncio.sleep(0.01)
        return Fault(500) if next(asked) % 2 else Reply("done")

    async with ScriptedServer(script) as server:
        endpoint = opened(server, max_retry_wait_s=0.05)
        tasks = [asyncio.create_task(endpoint.chat_completion(messages=HELLO)) for _ in range(100)]
        paused = False
        while not all(task.done() for task in tasks):
            paused = paused or endpoint.endpoint.paused
            await asyncio.sleep(0.002)
        assert not paused
        await asyncio.gather(*tasks)
        await endpoint.aclose()


async def test_traffic_is_forgotten_with_the_last_who_uses_it():
    assert traffic_to("http://here", "key", "m") is not traffic_to("http://here", "other key", "m")
    kept = traffic_to("http://here", "key", "m")
    kept.failures = 7
    assert traffic_to("http://here", "key", "m").failures == 7
    del kept
    assert traffic_to("http://here", "key", "m").failures == 0
