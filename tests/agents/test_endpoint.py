"""One endpoint and many who ask it: what is tried again, when it is spared and given up, and what is checked."""

import asyncio
import logging
import time

import pytest

from hermes_core.agents.base import AgentSettings
from hermes_core.agents.failures import ConversationRefused, EndpointDown, RequestTooLarge
from hermes_core.agents.model import OpenAIServer
from hermes_core.errors import ModelError
from hermes_core.testing.scripted_server import Fault, Reply, ScriptedServer

HELLO = [{"role": "user", "content": "hello"}]
DONE = [Reply("done")]
WAIT = {"Retry-After": "60"}


class Sick:
    """A server's script: it answers, or meets everybody with `fault`."""

    def __init__(self, fault=None):
        self.fault, self.now, self.most = fault, 0, 0

    async def __call__(self, request):
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1
        return self.fault or Reply("done")


def opened(server, **fields):
    given = {"model": "scripted", "base_url": server.base_url, "endpoint_patience_s": 30, "max_retry_wait_s": 0.05}
    return OpenAIServer(AgentSettings(**{**given, **fields}))


async def ask(endpoint):
    """What it answers, or the error."""
    try:
        return (await endpoint.chat_completion(messages=HELLO)).choices[0].message.content
    except ModelError as error:
        return error


@pytest.mark.few(2)
@pytest.mark.parametrize("fault", [Fault(503), Fault(404), Fault(401), Fault(429)], ids=lambda fault: str(fault.status))
async def test_trouble_that_passes_is_waited_for_by_one_request_at_a_time(fault, caplog):
    sick = Sick()
    async with ScriptedServer(sick) as server:
        endpoint = opened(server)
        assert await ask(endpoint) == "done"  # so a refusal, too, is one that passes
        sick.fault, sick.most = fault, 0
        asking = [asyncio.create_task(ask(endpoint)) for _ in range(3)]
        while not endpoint.endpoint.paused:
            await asyncio.sleep(0.01)
        began, sick.most = server.request_count, 0
        asking += [asyncio.create_task(ask(endpoint)) for _ in range(30)]
        await asyncio.sleep(0.5)
        assert sick.most == 1, "the others wait"
        assert server.request_count - began < 20
        sick.fault = None
        assert await asyncio.gather(*asking) == ["done"] * 33
        await endpoint.aclose()
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert ["given up after 30 s" in line for line in warned] == [True, False]
    assert "answers again" in warned[1]


async def test_after_patience_all_who_wait_are_told_and_the_next_one_tries_once():
    sick = Sick()
    async with ScriptedServer(sick) as server:
        endpoint = opened(server, endpoint_patience_s=0.4)
        assert await ask(endpoint) == "done"
        sick.fault = Fault(503, "reloading")
        errors = await asyncio.gather(*(ask(endpoint) for _ in range(20)))
        assert all(isinstance(error, EndpointDown) and "reloading" in str(error) for error in errors)
        assert len({id(error) for error in errors}) == 20, "each has its own to write its ids into"
        for number, error in enumerate(errors):
            error.trajectory_id = f"{number}"
        assert endpoint.endpoint.traffic.given_up.trajectory_id is None, "and nobody's id is told to another"
        assert endpoint.endpoint.down
        asked = server.request_count
        assert isinstance(await ask(endpoint), EndpointDown)
        assert server.request_count == asked + 1
        sick.fault = None
        assert (await ask(endpoint), endpoint.endpoint.down) == ("done", False)
        await endpoint.aclose()


@pytest.mark.parametrize(
    ("fault", "words"),
    [(Fault(503), "(HTTP 503)"), (Fault(delay_s=60), "(no answer in time)"), (Fault(cut=True), "(no connection)")],
)
async def test_the_warning_says_in_words_what_fails(fault, words, caplog):
    sick = Sick()
    async with ScriptedServer(sick) as server:
        endpoint = opened(server, endpoint_patience_s=0.5, request_timeout_s=0.1 if fault.delay_s else 10)
        sick.fault = fault
        await asyncio.gather(*(ask(endpoint) for _ in range(3)))
        await endpoint.aclose()
    assert any(words in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)


async def test_what_is_one_requests_own_fault_is_no_trouble_of_the_endpoint():
    sick = Sick()
    async with ScriptedServer(sick) as server:
        endpoint = opened(server)
        assert await ask(endpoint) == "done"
        sick.fault = Fault(400, "not this")
        errors = [await ask(endpoint) for _ in range(10)]
        assert {type(error) for error in errors} == {ConversationRefused}
        assert (endpoint.endpoint.paused, server.request_count) == (False, 11)
        await endpoint.aclose()


async def test_a_request_above_the_limit_per_minute_fails_alone_and_slows_down_nobody():
    sick = Sick()
    async with ScriptedServer(sick) as server:
        endpoint = opened(server)
        assert await ask(endpoint) == "done"
        sick.fault = Fault(429, "Request too large on tokens per min: Limit 30000, Requested 31538", headers=WAIT)
        errors = await asyncio.gather(*(ask(endpoint) for _ in range(10)))
        assert {type(error) for error in errors} == {RequestTooLarge}
        sick.fault, began = None, time.monotonic()
        assert await asyncio.gather(*(ask(endpoint) for _ in range(10))) == ["done"] * 10
        assert (endpoint.endpoint.paused, server.request_count) == (False, 21)
        assert time.monotonic() - began < 5
        await endpoint.aclose()


async def test_an_endpoint_that_refused_everything_so_far_is_given_up():
    async with ScriptedServer(Sick(Fault(400, "no tools here"))) as server:
        endpoint = opened(server)
        errors = [await ask(endpoint) for _ in range(3)]
        await endpoint.aclose()
    assert [isinstance(error, EndpointDown) for error in errors] == [False, False, True]


async def test_who_tries_the_server_can_be_cancelled_and_another_goes_on():
    sick = Sick()
    async with ScriptedServer(sick) as server:
        endpoint = opened(server)
        sick.fault = Fault(503)
        asking = [asyncio.create_task(ask(endpoint)) for _ in range(6)]
        while not endpoint.endpoint.paused:
            await asyncio.sleep(0.01)
        for task in asking[:5]:
            task.cancel()
        sick.fault = None
        assert await asking[5] == "done"
        await endpoint.aclose()


@pytest.mark.parametrize("faults", [[], [Fault(503)], [Fault(body=b"nonsense")] * 2])
async def test_the_check_asks_a_known_model_nothing(faults):
    async with ScriptedServer(DONE, faults=faults) as server:
        endpoint = opened(server)
        await endpoint.check()
        await endpoint.aclose()
    assert server.request_count == 0


async def test_the_check_finds_a_wrong_key_and_a_wrong_model():
    async with ScriptedServer(DONE, api_key="the right one", models=("scripted-large", "other")) as server:
        for key, says in (("wrong", "refused the API key"), ("the right one", "did you mean 'scripted-large'")):
            endpoint = opened(server, api_key=key)
            began = time.monotonic()
            with pytest.raises(EndpointDown, match=says):
                await endpoint.check()
            assert time.monotonic() - began < 10, "patience is for what passes"
            await endpoint.aclose()


async def test_the_check_knows_models_by_other_names_and_servers_without_a_list():
    class Aliases(ScriptedServer):
        async def _respond(self, method, path, headers, body):
            if method == "GET":
                return Fault(501), 501, b"no GET here"
            return await super()._respond(method, path, headers, body)

    async with ScriptedServer(DONE, models=("scripted",)) as server:
        server.models = ("scripted", "listed")
        endpoint = opened(server)
        await endpoint.check()
        await endpoint.aclose()
    async with Aliases(DONE) as server:
        endpoint = opened(server)
        await endpoint.check()
        assert server.request_count == 0
        await endpoint.aclose()


class Public(ScriptedServer):
    """A server that lists its models for any key, as OpenRouter does."""

    async def _respond(self, method, path, headers, body):
        if method == "GET":
            headers = {**headers, "authorization": f"Bearer {self.api_key}"}
        return await super()._respond(method, path, headers, body)


async def test_the_check_finds_a_wrong_key_of_a_server_that_lists_its_models_for_any():
    async with Public(DONE, api_key="the right one") as server:
        endpoint = opened(server, api_key="wrong")
        with pytest.raises(EndpointDown, match="refused the API key"):
            await endpoint.check()
        await endpoint.aclose()
        endpoint = opened(server, api_key="the right one")
        await endpoint.check()
        assert server.requests[-1]["max_tokens"] == 1
        await endpoint.aclose()


class WebSite(ScriptedServer):
    """A server that answers everything with a page."""

    async def _respond(self, method, path, headers, body):
        page = b"<html>Welcome</html>"
        return Fault(body=page, headers={"Content-Type": "text/html"}), 200, page


class Hung(ScriptedServer):
    """A server that takes requests and never answers."""

    async def _respond(self, method, path, headers, body):
        await asyncio.sleep(60)
        raise AssertionError


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "says"),
    [(WebSite, "not a chat completion"), (Hung, "did not answer in time"), (None, "could not be reached")],
)
async def test_the_check_ends_soon_for_what_is_no_endpoint(kind, says):
    async with (kind or ScriptedServer)(DONE) as server:
        endpoint = opened(server, check_patience_s=0.5, endpoint_patience_s=300, max_retry_wait_s=60)
        if kind is None:
            await server.__aexit__(None, None, None)
        began = time.monotonic()
        with pytest.raises(ModelError, match=says) as raised:
            await endpoint.check()
        assert raised.value.hint
        assert time.monotonic() - began < 8
        await endpoint.aclose()


class Slow:
    """A server's script: the first `late` requests without a length have no answer in time."""

    def __init__(self, late, short):
        self.late, self.short = late, short

    async def __call__(self, request):
        if "max_tokens" in request:
            return self.short
        self.late -= 1
        await asyncio.sleep(60 if self.late >= 0 else 0)
        return Reply("done")


CUT = Reply("and so on", finish_reason="length")


@pytest.mark.parametrize(
    ("late", "short", "given"),
    [
        pytest.param(2, CUT, ("and so on", "length"), id="no end: a short answer is the answer"),
        pytest.param(1, CUT, ("done", "stop"), id="the endpoint stood still for a while"),
        pytest.param(1, Reply("brief"), ("brief", "stop"), id="the short answer is whole"),
    ],
)
async def test_an_answer_that_is_late_is_asked_for_again_in_short(late, short, given):
    async with ScriptedServer(Slow(late, short)) as server:
        endpoint = opened(server, request_timeout_s=0.5)
        answer = await endpoint.chat_completion(messages=HELLO)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == given
        assert [request["messages"] for request in server.requests] == [HELLO] * server.request_count
        await endpoint.aclose()


async def test_an_endpoint_without_an_answer_is_no_answer_without_an_end():
    for short in (Fault(delay_s=60), Fault(400, "max_tokens is not known here"), Fault(503)):
        async with ScriptedServer(Slow(100, short)) as server:
            endpoint = opened(server, request_timeout_s=0.3, endpoint_patience_s=0)
            failure = await ask(endpoint)
            assert isinstance(failure, ModelError) and "in time" in str(failure)
            await endpoint.aclose()


async def test_with_a_length_of_its_own_a_late_answer_is_late():
    async with ScriptedServer(Sick(Fault(delay_s=60))) as server:
        endpoint = opened(server, request_timeout_s=0.3, endpoint_patience_s=0)
        for length in ({"max_tokens": 10}, {"extra_body": {"max_completion_tokens": 10}}):
            with pytest.raises(ModelError, match="in time"):
                await endpoint.chat_completion(messages=HELLO, **length)
        assert server.request_count == 2
        await endpoint.aclose()
