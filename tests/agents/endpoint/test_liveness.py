"""The liveness probe: a slow server is waited for, and a dead one is given up long before requests time out."""

import asyncio
import time
from functools import partial

import pytest
from hermes_testing.scripted_server import Fault, Reply, ScriptedServer

from hermes_core.agents.endpoint import liveness
from hermes_core.agents.endpoint.errors import EndpointDown
from tests.agents.endpoint.client import ask, client_of, warnings_in

HANGS = Fault(delay_s=60)


class MuteServer(ScriptedServer):
    """Answers nothing while it is mute, or lists its models only."""

    def __init__(self):
        super().__init__(lambda request: Reply("done"))
        self.mute = self.lists_models = False
        self.probes = 0

    async def _respond(self, method, path, headers, body):
        self.probes += method == "GET"
        if self.mute and not (method == "GET" and self.lists_models):
            return HANGS, 200, b""
        return await super()._respond(method, path, headers, body)


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(liveness, "QUIET_S", 0.3)
    monkeypatch.setattr(liveness, "PROBE_S", 0.3)


open_client = partial(client_of, endpoint_patience_s=1)


async def test_a_server_that_answers_no_probe_is_given_up_long_before_requests_time_out(caplog):
    async with MuteServer() as server, open_client(server, request_timeout_s=60) as client:
        assert await ask(client) == "done"
        server.mute, began = True, time.monotonic()
        errors = await asyncio.gather(*(ask(client) for _ in range(20)))
        took = time.monotonic() - began
    assert all(isinstance(error, EndpointDown) and "answers nothing" in str(error) for error in errors)
    assert 1 < took < 30
    assert server.probes < 30, "one probe is enough for all requests"
    assert ["is silent" in text for text in warnings_in(caplog)] == [True]


async def test_a_slow_server_that_answers_probes_is_waited_for(caplog):
    async with MuteServer() as server, open_client(server, request_timeout_s=4) as client:
        server.mute = server.lists_models = True
        asking = [asyncio.create_task(ask(client)) for _ in range(3)]
        await asyncio.sleep(2.5)
        assert not any(each.done() for each in asking)
        assert client.endpoint.circuit.closed
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    *_, text = warnings_in(caplog)  # on a busy machine, a list of models may come too late once, which is told before
    assert "still lists its models" in text
    assert "repeated after 4 s" in text


async def test_a_hanging_model_is_reported_although_requests_time_out_before_the_probe(caplog):
    async with MuteServer() as server, open_client(server, request_timeout_s=0.2) as client:
        server.mute = server.lists_models = True
        error = await ask(client, max_tokens=9)  # without it, a late answer is requested again in short
    assert "did not answer in time" in str(error)
    [slow] = [text for text in warnings_in(caplog) if "is silent" in text or "lists its models" in text]
    assert "still lists its models" in slow


async def test_a_server_that_refuses_connections_is_not_reported_as_silent(caplog):
    server = MuteServer()
    async with server, open_client(server) as client:
        assert await ask(client) == "done"
        await server.__aexit__(None, None, None)
        errors = await asyncio.gather(*(ask(client) for _ in range(4)))
    assert all("could not be reached" in str(error) for error in errors)
    [text] = warnings_in(caplog)
    assert "fails (no connection)" in text


async def test_a_server_without_requests_is_not_reported_as_slow(caplog):
    async with MuteServer() as server, open_client(server, request_timeout_s=4) as client:
        server.mute = server.lists_models = True
        asking = asyncio.create_task(ask(client))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.sleep(0.4)
        server.mute = False
        assert await ask(client) == "done"
    assert warnings_in(caplog) == []


async def test_a_server_that_answers_a_probe_again_gets_the_lost_requests_again(caplog):
    async with MuteServer() as server, open_client(server, request_timeout_s=2) as client:
        server.mute = True
        asking = [asyncio.create_task(ask(client)) for _ in range(3)]
        while client.endpoint.circuit.closed:
            await asyncio.sleep(0.02)
        server.mute = False
        while not client.endpoint.circuit.closed:
            await asyncio.sleep(0.02)
        assert await ask(client) == "done"
        answers = await asyncio.gather(*asking)  # those that were sent before are lost, and repeated
    assert answers == ["done"] * 3
    silent, again, *_ = warnings_in(caplog)
    assert ("is silent" in silent, "answers again" in again) == (True, True)
