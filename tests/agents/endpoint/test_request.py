"""Requests to one endpoint: retries, the circuit breaker, and the check at the start of a run."""

import asyncio
import itertools
import time
from functools import partial

import pytest
from hermes_testing.scripted_server import Fault, Reply, ScriptedServer

from hermes_core.agents.endpoint.circuit import CircuitState
from hermes_core.agents.endpoint.errors import ConversationRefused, EndpointDown, RequestTooLarge
from hermes_core.agents.endpoint.request import count_waits, state_of
from hermes_core.errors import ModelError
from tests.agents.endpoint.client import HELLO, ask, client_of, warnings_in

open_client = partial(client_of, endpoint_patience_s=30, max_retry_wait_s=0.05)
DONE = [Reply("done")]
WAIT = {"Retry-After": "60"}


class Switchable:
    """A server's script: it answers, or meets everybody with `fault`."""

    def __init__(self, fault=None):
        self.fault, self.now, self.most = fault, 0, 0

    async def __call__(self, request):
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1
        return self.fault or Reply("done")


@pytest.mark.few(2)
@pytest.mark.parametrize("fault", [Fault(503), Fault(404), Fault(401), Fault(429)], ids=lambda fault: str(fault.status))
async def test_while_the_circuit_is_half_open_one_request_at_a_time_tests_the_server(fault, caplog):
    script = Switchable()
    async with ScriptedServer(script) as server, open_client(server) as client:
        assert await ask(client) == "done"  # so a refusal, too, is one that passes
        script.fault, script.most = fault, 0
        asking = [asyncio.create_task(ask(client)) for _ in range(3)]
        while client.endpoint.circuit.closed:
            await asyncio.sleep(0.01)
        began, script.most = server.request_count, 0
        asking += [asyncio.create_task(ask(client)) for _ in range(30)]
        await asyncio.sleep(0.5)
        assert script.most == 1, "the others wait"
        assert server.request_count - began < 20
        script.fault = None
        assert await asyncio.gather(*asking) == ["done"] * 33
    failing, working = warnings_in(caplog)
    assert "given up after 30 s" in failing and "answers again" in working


async def test_an_open_circuit_fails_all_waiting_requests_and_a_later_one_tests_the_server_once():
    script = Switchable()
    async with ScriptedServer(script) as server, open_client(server, endpoint_patience_s=0.4) as client:
        assert await ask(client) == "done"
        script.fault = Fault(503, "reloading")
        errors = await asyncio.gather(*(ask(client) for _ in range(20)))
        assert all(isinstance(error, EndpointDown) and "reloading" in str(error) for error in errors)
        assert len({id(error) for error in errors}) == 20, "each has its own to write its ids into"
        for number, error in enumerate(errors):
            error.trajectory_id = f"{number}"
        assert client.endpoint.circuit.error.trajectory_id is None, "and nobody's id is told to another"
        assert client.endpoint.circuit.state is CircuitState.OPEN
        asked = server.request_count
        assert isinstance(await ask(client), EndpointDown)
        assert server.request_count == asked + 1
        script.fault = None
        assert (await ask(client), client.endpoint.circuit.closed) == ("done", True)


@pytest.mark.parametrize(
    ("fault", "words"),
    [(Fault(503), "(HTTP 503)"), (Fault(delay_s=60), "(no answer in time)"), (Fault(cut=True), "(no connection)")],
)
async def test_the_warning_names_the_kind_of_failure(fault, words, caplog):
    script = Switchable()
    async with (
        ScriptedServer(script) as server,
        open_client(server, endpoint_patience_s=0.5, request_timeout_s=0.1 if fault.delay_s else 10) as client,
    ):
        script.fault = fault
        await asyncio.gather(*(ask(client) for _ in range(3)))
    assert any(words in text for text in warnings_in(caplog))


async def test_a_refused_request_does_not_count_as_a_failure_of_the_endpoint():
    script = Switchable()
    async with ScriptedServer(script) as server, open_client(server) as client:
        assert await ask(client) == "done"
        script.fault = Fault(400, "not this")
        errors = [await ask(client) for _ in range(10)]
        assert {type(error) for error in errors} == {ConversationRefused}
        assert (client.endpoint.circuit.closed, server.request_count) == (True, 11)


async def test_a_request_above_the_limit_per_minute_fails_alone_without_slowing_others():
    script = Switchable()
    async with ScriptedServer(script) as server, open_client(server) as client:
        assert await ask(client) == "done"
        script.fault = Fault(429, "Request too large on tokens per min: Limit 30000, Requested 31538", headers=WAIT)
        errors = await asyncio.gather(*(ask(client) for _ in range(10)))
        assert {type(error) for error in errors} == {RequestTooLarge}
        script.fault, began = None, time.monotonic()
        assert await asyncio.gather(*(ask(client) for _ in range(10))) == ["done"] * 10
        assert (client.endpoint.circuit.closed, server.request_count) == (True, 21)
        assert time.monotonic() - began < 30


async def test_an_endpoint_that_refused_its_first_three_requests_is_given_up():
    async with ScriptedServer(Switchable(Fault(400, "no tools here"))) as server, open_client(server) as client:
        errors = [await ask(client) for _ in range(3)]
    assert [isinstance(error, EndpointDown) for error in errors] == [False, False, True]


async def test_a_cancelled_test_request_is_followed_by_another():
    script = Switchable()
    async with ScriptedServer(script) as server, open_client(server) as client:
        script.fault = Fault(503)
        asking = [asyncio.create_task(ask(client)) for _ in range(6)]
        while client.endpoint.circuit.closed:
            await asyncio.sleep(0.01)
        for task in asking[:5]:
            task.cancel()
        script.fault = None
        assert await asking[5] == "done"


@pytest.mark.parametrize("faults", [[], [Fault(503)], [Fault(body=b"nonsense")] * 2])
async def test_the_check_sends_no_completion_if_the_model_is_listed(faults):
    async with ScriptedServer(DONE, faults=faults) as server, open_client(server) as client:
        await client.check()
    assert server.request_count == 0


async def test_the_check_finds_a_wrong_key_and_a_wrong_model():
    async with ScriptedServer(DONE, api_key="the right one", models=("scripted-large", "other")) as server:
        for key, says in (("wrong", "refused the API key"), ("the right one", "did you mean 'scripted-large'")):
            began = time.monotonic()
            async with open_client(server, api_key=key) as client:
                with pytest.raises(EndpointDown, match=says):
                    await client.check()
            assert time.monotonic() - began < 10, "patience is for what passes"


async def test_the_check_accepts_unlisted_models_and_servers_without_a_list():
    class Aliases(ScriptedServer):
        async def _respond(self, method, path, headers, body):
            if method == "GET":
                return Fault(501), 501, b"no GET here"
            return await super()._respond(method, path, headers, body)

    async with ScriptedServer(DONE, models=("scripted",)) as server:
        server.models = ("scripted", "listed")
        async with open_client(server) as client:
            await client.check()
    async with Aliases(DONE) as server, open_client(server) as client:
        await client.check()
        assert server.request_count == 0


class Public(ScriptedServer):
    """A server that lists its models for any key, as OpenRouter does."""

    async def _respond(self, method, path, headers, body):
        if method == "GET":
            headers = {**headers, "authorization": f"Bearer {self.api_key}"}
        return await super()._respond(method, path, headers, body)


async def test_the_check_finds_a_wrong_key_although_the_models_are_listed_for_any_key():
    async with Public(DONE, api_key="the right one") as server:
        async with open_client(server, api_key="wrong") as client:
            with pytest.raises(EndpointDown, match="refused the API key"):
                await client.check()
        async with open_client(server, api_key="the right one") as client:
            await client.check()
        assert server.requests[-1]["max_tokens"] == 1


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
async def test_the_check_of_something_else_than_an_endpoint_ends_within_its_patience(kind, says):
    async with (
        (kind or ScriptedServer)(DONE) as server,
        open_client(server, check_patience_s=0.5, endpoint_patience_s=300, max_retry_wait_s=60) as client,
    ):
        if kind is None:
            await server.__aexit__(None, None, None)
        began = time.monotonic()
        with pytest.raises(ModelError, match=says) as raised:
            await client.check()
        assert raised.value.hint
        assert time.monotonic() - began < 30


class LateAnswers:
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
async def test_a_late_answer_is_requested_again_with_a_length(late, short, given):
    async with ScriptedServer(LateAnswers(late, short)) as server, open_client(server, request_timeout_s=0.5) as client:
        answer = await client.chat_completion(messages=HELLO)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == given
        assert [request["messages"] for request in server.requests] == [HELLO] * server.request_count


async def test_if_the_short_answer_fails_too_the_endpoint_is_at_fault():
    for short in (Fault(delay_s=60), Fault(400, "max_tokens is not known here"), Fault(503)):
        settings = {"request_timeout_s": 0.3, "endpoint_patience_s": 0}
        async with ScriptedServer(LateAnswers(100, short)) as server, open_client(server, **settings) as client:
            failure = await ask(client)
            assert isinstance(failure, ModelError) and "in time" in str(failure)


async def test_a_late_answer_with_a_set_length_is_not_requested_again_in_short():
    async with (
        ScriptedServer(Switchable(Fault(delay_s=60))) as server,
        open_client(server, request_timeout_s=0.3, endpoint_patience_s=0) as client,
    ):
        for length in ({"max_tokens": 10}, {"extra_body": {"max_completion_tokens": 10}}):
            with pytest.raises(ModelError, match="in time"):
                await client.chat_completion(messages=HELLO, **length)
        assert server.request_count == 2


async def test_counted_waits_leave_out_the_time_of_the_answer():
    faults = [Fault(503, delay_s=0.3), Fault(429, headers={"Retry-After": "0.4"})]
    async with ScriptedServer([Reply("done", delay_s=1.5)], faults=faults) as server, client_of(server) as client:
        with count_waits() as waits:
            assert await ask(client) == "done"
        assert 1.0 < sum(waits) < 2.4, "a failed attempt, its backoff, and what was asked for"
        with count_waits() as none:
            assert await ask(client) == "done"
        assert sum(none) < 1.0


async def test_a_cancelled_wait_is_counted_and_the_next_request_is_sent():
    async with ScriptedServer([Reply("done")]) as server, client_of(server) as client:
        client.endpoint.state.limiter.hold(0.5)
        with count_waits() as waits:
            began = asyncio.get_running_loop().time()
            cancelled = [asyncio.create_task(ask(client)) for _ in range(3)]
            await asyncio.sleep(0.2)
            for task in cancelled:
                task.cancel()
            assert all(
                isinstance(each, asyncio.CancelledError)
                for each in await asyncio.gather(*cancelled, return_exceptions=True)
            )
            waited_s = asyncio.get_running_loop().time() - began
        assert 0.3 <= sum(waits) <= 3 * waited_s
        assert (await ask(client), server.request_count) == ("done", 1)


async def test_requests_that_hang_from_an_earlier_generation_do_not_block_the_test_request():
    asked = itertools.count()

    async def script(request):
        number = next(asked)
        if number < 3:
            await asyncio.sleep(60)
        return Fault(503) if number < 20 else Reply("done")

    async with ScriptedServer(script) as server, client_of(server, max_retry_wait_s=0.02) as client:
        hanging = [asyncio.create_task(ask(client)) for _ in range(3)]
        await asyncio.sleep(0.2)
        assert await asyncio.wait_for(asyncio.gather(*(ask(client) for _ in range(3))), 10) == ["done"] * 3
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)


async def test_the_circuit_stays_closed_while_every_second_answer_fails():
    asked = itertools.count()

    async def script(request):
        await asyncio.sleep(0.01)
        return Fault(500) if next(asked) % 2 else Reply("done")

    async with ScriptedServer(script) as server, client_of(server, max_retry_wait_s=0.05) as client:
        tasks = [asyncio.create_task(ask(client)) for _ in range(100)]
        while not all(task.done() for task in tasks):
            assert client.endpoint.circuit.closed
            await asyncio.sleep(0.002)
        assert await asyncio.gather(*tasks) == ["done"] * 100


async def test_the_state_of_a_server_is_shared_and_forgotten_with_its_last_user():
    assert state_of("http://here", "key", "m") is not state_of("http://here", "other key", "m")
    kept = state_of("http://here", "key", "m")
    kept.circuit.record_failure()
    assert state_of("http://here", "key", "m").circuit.failures == 1
    del kept
    assert state_of("http://here", "key", "m").circuit.failures == 0
