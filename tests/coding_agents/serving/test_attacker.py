"""The model's own shell calls the gateway as it likes: nobody else is disturbed, and nothing grows without bound."""

from __future__ import annotations

import asyncio
import json
import resource
import threading
from contextlib import AsyncExitStack, suppress
from typing import Any

import httpx
import pytest
from hermes_agents.serving import gateway
from hermes_agents.serving.bounds import Bounds
from hermes_agents.serving.http import HttpLimits
from hermes_agents.serving.requests import read_request

from hermes_core.agents.base import StopReason
from tests.coding_agents.serving.slot import Slot, reply, slot
from tests.coding_agents.serving.test_gateway import BEGIN, LS, Agent, agent, client_of

Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def opened(one: Slot) -> Opened:
    host, _, port = one.url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


def head(one: Slot, length: int | None, key: str | None = None) -> bytes:
    named = f"Authorization: Bearer {one.gateway.key if key is None else key}"
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{named}\r\n{framing}\r\n\r\n".encode()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def test_a_thousand_connections_are_closed_beyond_the_bound() -> None:
    bounds = Bounds(connections=32)
    async with agent(reply("Done."), bounds=bounds) as victim, slot(reply("Done."), bounds=bounds) as attacked:
        connections = [await opened(attacked) for _ in range(1000)]
        closed = [asyncio.create_task(reader.read()) for reader, _ in connections]
        while sum(task.done() for task in closed) < 1000 - 32:
            await asyncio.sleep(0.01)
        assert attacked.gateway.counts["connections_refused"] == 1000 - 32
        assert (await victim.ask())["content"] == "Done."  # another slot's agent
        for task in closed:
            task.cancel()
        for _, writer in connections:
            writer.close()
        async with client_of(attacked) as client:  # and its own, once they are gone
            answer = None
            while answer is None:
                with suppress(httpx.TransportError):
                    answer = await Agent(attacked, client).ask()
            assert answer["content"] == "Done."


@pytest.mark.parametrize("named", [True, False], ids=["content-length", "chunked"])
@pytest.mark.parametrize("key", [None, "wrong"], ids=["key", "wrong key"])
async def test_a_body_of_a_gigabyte_is_not_read(named: bool, key: str | None) -> None:
    bounds = Bounds(http=HttpLimits(body_bytes=1 << 20))
    async with agent(reply("Done."), bounds=bounds) as one:
        before = peak()
        reader, writer = await opened(one.one)
        answer = asyncio.create_task(reader.readline())
        writer.write(head(one.one, 1 << 30 if named else None, key))
        piece, sent = b"x" * (1 << 20), 0
        while not answer.done():
            writer.write(piece if named else b"100000\r\n" + piece + b"\r\n")
            await writer.drain()
            sent += len(piece)
        assert (b" 401 " if key else b" 413 ") in await answer
        writer.close()
        assert (await one.ask())["content"] == "Done."
    assert sent < 1 << 29
    assert peak() - before < 64 << 20
    assert len(one.one.model.requests) == 1


async def test_who_sends_too_much_can_still_read_why_it_is_refused() -> None:
    async with agent(reply("Done."), bounds=Bounds(http=HttpLimits(body_bytes=1 << 20))) as one:
        answer = await one.client.post("/v1/chat/completions", content=b"x" * (16 << 20))
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")


async def test_slow_bodies_end_in_time_and_leave_nothing() -> None:
    bounds = Bounds(http=HttpLimits(request_s=0.2))
    async with agent(reply("Done."), bounds=bounds) as one, AsyncExitStack() as stack:
        readers = []
        for _ in range(20):
            reader, writer = await opened(one.one)
            stack.callback(writer.close)
            writer.write(head(one.one, 1000) + b"{")
            readers.append(reader)
        assert (await one.ask())["content"] == "Done."
        answers = await asyncio.gather(*(reader.read() for reader in readers))
    assert all(b"400 " in answer.split(b"\r\n")[0] or b"408 " in answer.split(b"\r\n")[0] for answer in answers)
    assert one.one.gateway._room.held == 0


async def test_the_same_question_is_sampled_once_however_often_it_is_asked() -> None:
    async with agent(reply("", LS), reply("Another."), bounds=Bounds(calls=40)) as one:
        answers = await asyncio.gather(*(one.post() for _ in range(50)))
    assert len(one.one.model.requests) == 1
    assert sorted(each.status_code for each in answers) == [200] * 40 + [400] * 10
    assert len({each.text for each in answers if each.status_code == 200}) == 1


async def test_changed_answers_and_forged_ids_fork() -> None:
    async with agent(reply("I look.", LS), reply("Forked."), reply("Done.")) as one:
        message = await one.work()
        changed: list[dict[str, Any]] = json.loads(json.dumps(one.messages))
        changed[1]["content"] = "I have fixed it."
        assert changed[1]["tool_calls"][0]["id"] == message["tool_calls"][0]["id"]
        await one.ask(messages=changed)
        await one.work()
    assert one.one.gateway.log[1].place == "fork"
    assert [each["content"] for each in one.one.task.result.messages[1:]] == ["I look.", "ok", "Done."]


async def test_what_is_kept_of_other_conversations_is_bounded() -> None:
    async with agent(reply("Done."), bounds=Bounds(kept_bytes=3000)) as one:
        statuses = [
            (await one.post(messages=[{"role": "user", "content": f"{number}" * 1000}])).status_code
            for number in range(5)
        ]
    assert statuses == [200, 200, 200, 400, 400]
    assert len(one.one.model.requests) == 3


async def test_nobody_waits_while_a_long_request_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a slot has one of them read at a time."""
    others, reading, most = threading.Event(), 0, 0

    def read(body: bytes, *more: Any) -> Any:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        assert len(body) < 1 << 18 or others.wait(20)
        reading -= 1
        return read_request(body, *more)

    monkeypatch.setattr(gateway, "read_request", read)
    long = [[{"role": "user", "content": letter * (1 << 19)}] for letter in "ab"]
    async with agent(reply("Done.")) as one, agent(reply("Done.")) as other, asyncio.TaskGroup() as group:
        tasks = [group.create_task(one.post(messages=each)) for each in long]
        while not reading:
            await asyncio.sleep(0.01)
        assert (await other.ask())["content"] == "Done."
        assert (await one.ask(messages=BEGIN))["content"] == "Done."
        assert one.one.gateway._room.held >= 1 << 19
        others.set()
        assert [(await task).status_code for task in tasks] == [200, 200]
        assert (most, one.one.gateway._room.held) == (2, 0)  # with a short one


async def test_all_that_is_read_is_bounded() -> None:
    async with agent(reply("Done."), bounds=Bounds(read_bytes=1000)) as one:
        told = [(await one.post(messages=[{"role": "user", "content": f"{n}" * 600}])).status_code for n in range(5)]
        assert told == [200, 200, 400, 400, 400]
        counted = await one.client.post("/v1/messages/count_tokens", json={"messages": BEGIN})
        assert counted.status_code == 400
    assert one.one.gateway.stop_reason is not StopReason.MODEL_ERROR


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x"}] * 20_000},
        {"messages": BEGIN, "tools": [{"function": {"name": "a", "parameters": {"a": [0] * 1_000_000}}}]},
    ],
    ids=["messages", "values"],
)
async def test_what_takes_long_to_read_is_refused(body: dict[str, Any]) -> None:
    async with agent(reply("Done.")) as one:
        assert (await one.client.post("/v1/chat/completions", json=body)).status_code == 413
        assert one.one.model.requests == []


@pytest.mark.parametrize("path", ["/v1/models", "/nowhere", "/v1/chat/completions"])
async def test_a_flood_of_requests_has_only_so_many_turns(path: str) -> None:
    """On one connection and on many, each of which is a turn as well."""
    clock = asyncio.get_running_loop().time
    async with agent(reply("Done."), bounds=Bounds(at_once=4, a_second=20.0)) as one:
        began = clock()
        for _ in range(10):
            await one.client.get(path)
        await asyncio.gather(*(one.client.get(path, headers={"connection": "close"}) for _ in range(5)))
    assert clock() - began >= (1 + 10 + 2 * 4 + 1 - 4) / 20.0


async def test_a_body_in_very_many_pieces_is_refused() -> None:
    async with agent(reply("Done.")) as one:
        reader, writer = await opened(one.one)
        writer.write(head(one.one, None) + b"1\r\nx\r\n" * 30_000)
        assert b" 413 " in await reader.readline()
        writer.close()
        assert (await one.ask())["content"] == "Done."


async def test_the_log_is_bounded() -> None:
    async with agent(reply("Done."), bounds=Bounds(calls=1)) as one:
        one.one.gateway.log.extend([one.one.gateway.log] * 4000)  # type: ignore[list-item]
        for _ in range(3):
            await one.post()
    assert len(one.one.gateway.log) == 4000
    assert one.one.gateway.counts["calls"] == 3
