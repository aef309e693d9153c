"""A server that stops answering: what only is slow goes on, and what is dead is given up long before its requests."""

import asyncio
import logging
import time

import pytest

from hermes_core.agents import silence
from hermes_core.agents.base import AgentSettings
from hermes_core.agents.failures import EndpointDown
from hermes_core.agents.model import OpenAIServer
from hermes_core.errors import ModelError
from hermes_core.testing.scripted_server import Fault, Reply, ScriptedServer

HANGS = Fault(delay_s=60)


class Mute(ScriptedServer):
    """Answers nothing while it is mute, or lists its models only."""

    def __init__(self):
        super().__init__(lambda request: Reply("done"))
        self.mute = self.lists_models = False
        self.signs = 0

    async def _respond(self, method, path, headers, body):
        self.signs += method == "GET"
        if self.mute and not (method == "GET" and self.lists_models):
            return HANGS, 200, b""
        return await super()._respond(method, path, headers, body)


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(silence, "QUIET_S", 0.3)
    monkeypatch.setattr(silence, "SIGN_S", 0.1)


def opened(server, **fields):
    return OpenAIServer(AgentSettings(model="scripted", base_url=server.base_url, endpoint_patience_s=1, **fields))


async def ask(endpoint, **body):
    try:
        return (await endpoint.chat_completion(messages=[{"role": "user", "content": "hello"}], **body)).choices[0]
    except ModelError as error:
        return error


def warned(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_a_server_without_a_sign_of_life_is_given_up_long_before_the_requests_time_limit(caplog):
    async with Mute() as server:
        endpoint = opened(server, request_timeout_s=60)
        assert (await ask(endpoint)).message.content == "done"
        server.mute, began = True, time.monotonic()
        errors = await asyncio.gather(*(ask(endpoint) for _ in range(20)))
        took = time.monotonic() - began
        await endpoint.aclose()
    assert all(isinstance(error, EndpointDown) and "answers nothing" in str(error) for error in errors)
    assert 1 < took < 8
    assert server.signs < 30, "one asks for all"
    assert ["is silent" in text for text in warned(caplog)] == [True]


async def test_a_slow_server_that_gives_signs_of_life_is_waited_for(caplog):
    async with Mute() as server:
        endpoint = opened(server, request_timeout_s=4)
        server.mute = server.lists_models = True
        asking = [asyncio.create_task(ask(endpoint)) for _ in range(3)]
        await asyncio.sleep(2.5)
        assert not any(each.done() for each in asking)
        assert not endpoint.endpoint.paused
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await endpoint.aclose()
    *_, text = warned(caplog)  # on a busy machine, a list of models may come too late once, which is told before
    assert "still lists its models" in text
    assert "repeated after 4 s" in text


async def test_a_model_that_hangs_is_named_also_if_requests_end_sooner(caplog):
    async with Mute() as server:
        endpoint = opened(server, request_timeout_s=0.2)
        server.mute = server.lists_models = True
        error = await ask(endpoint, max_tokens=9)  # without it, a late answer is requested again in short
        await endpoint.aclose()
    assert "did not answer in time" in str(error)
    [slow] = [text for text in warned(caplog) if "is silent" in text or "lists its models" in text]
    assert "still lists its models" in slow


async def test_a_server_that_is_gone_is_not_called_silent(caplog):
    async with Mute() as server:
        endpoint = opened(server)
        assert (await ask(endpoint)).message.content == "done"
    errors = await asyncio.gather(*(ask(endpoint) for _ in range(4)))
    await endpoint.aclose()
    assert all("could not be reached" in str(error) for error in errors)
    [text] = warned(caplog)
    assert "fails (no connection)" in text


async def test_a_server_that_was_idle_is_not_called_slow(caplog):
    async with Mute() as server:
        endpoint = opened(server, request_timeout_s=4)
        server.mute = server.lists_models = True
        asking = asyncio.create_task(ask(endpoint))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.sleep(0.4)
        server.mute = False
        assert (await ask(endpoint)).message.content == "done"
        await endpoint.aclose()
    assert warned(caplog) == []


async def test_a_server_that_speaks_again_is_not_held_to_its_silence(caplog):
    async with Mute() as server:
        endpoint = opened(server, request_timeout_s=2)
        server.mute = True
        asking = [asyncio.create_task(ask(endpoint)) for _ in range(3)]
        while not endpoint.endpoint.paused:
            await asyncio.sleep(0.02)
        server.mute = False
        while endpoint.endpoint.paused:
            await asyncio.sleep(0.02)
        assert (await ask(endpoint)).message.content == "done"
        answers = await asyncio.gather(*asking)  # those that were sent before are lost, and repeated
        await endpoint.aclose()
    assert [answer.message.content for answer in answers] == ["done"] * 3
    silent, again, *_ = warned(caplog)
    assert ("is silent" in silent, "answers again" in again) == (True, True)
