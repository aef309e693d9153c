"""A token-exact session behind the gateway: a program's requests, in its own dialect, continue token for token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from hermes_core.agents.serving.conversations import Conversations
from hermes_core.envs.tokens import tokens_of
from tests.agents.serving.slot import TASK, Slot, slot
from tests.agents.test_exact_programs import Start, check, extends, start

__all__ = ["start"]

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}}}


async def post(one: Slot, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {one.gateway.key}"}
    async with httpx.AsyncClient(base_url=one.url, headers=headers, timeout=30, verify=False) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


class Chat:
    """A program that speaks Chat Completions, and writes arguments as JavaScript does. It leaves thinking out."""

    thinks = False

    def __init__(self) -> None:
        self.messages: list[Any] = [{"role": "system", "content": "You work."}, {"role": "user", "content": TASK}]

    def body(self) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}]
        return {"model": "any", "messages": self.messages, "tools": tools}

    async def turn(self, one: Slot) -> None:
        message = (await post(one, "/v1/chat/completions", self.body()))["choices"][0]["message"]
        message = {"role": "assistant", "content": message["content"], "tool_calls": message["tool_calls"]}
        for each in message["tool_calls"]:
            arguments = json.loads(each["function"]["arguments"])
            each["function"]["arguments"] = json.dumps({**arguments, "timeout": 1}, separators=(",", ":"))
        results = [{"role": "tool", "tool_call_id": each["id"], "content": "ok"} for each in message["tool_calls"]]
        self.messages = [*self.messages, message, *results]


class Anthropic:
    """A program that speaks Anthropic Messages, whose mark for the cache moves with each request."""

    thinks = True

    def __init__(self) -> None:
        self.messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": TASK}]}]

    def body(self) -> dict[str, Any]:
        sent = json.loads(json.dumps(self.messages))
        sent[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        tools = [{"name": "bash", "input_schema": PARAMETERS}]
        system = [{"type": "text", "text": "You work.", "cache_control": {"type": "ephemeral"}}]
        return {"model": "any", "max_tokens": 1000, "system": system, "messages": sent, "tools": tools}

    async def turn(self, one: Slot) -> None:
        content = (await post(one, "/v1/messages", self.body()))["content"]
        calls = [part["id"] for part in content if part["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": each, "content": "ok"} for each in calls]
        said = {"role": "assistant", "content": content}
        self.messages = [*self.messages, said, {"role": "user", "content": results}]


@pytest.mark.parametrize("kind", [Chat, Anthropic])
async def test_each_request_of_a_program_continues(start: Start, kind: Callable[[], Chat | Anthropic]) -> None:
    session, server = start()
    program = kind()
    async with slot(model=session) as one:
        for _ in range(4):
            await program.turn(one)
    assert [extends(server, number + 1, number) for number in range(3)] == [True] * 3
    assert check(session, server) == {}
    state = one.task.result.managed_state
    assert state is not None
    assert state["thinking_kept"] == (0 if program.thinks else 3)
    tokens = tokens_of(state)
    assert tokens.only is not None
    assert tokens.only.tokens.tolist() == server.log[3][0] + server.log[3][1]
    assert one.task.result.turns_used == 4


async def test_a_retry_in_flight_and_after_a_lost_answer_samples_nothing(start: Start) -> None:
    session, server = start()
    program = Chat()
    async with slot(model=session) as one:
        answers = await asyncio.gather(*(post(one, "/v1/chat/completions", program.body()) for _ in range(3)))
        answers.append(await post(one, "/v1/chat/completions", program.body()))
        assert len({json.dumps(each["choices"], sort_keys=True) for each in answers}) == 1
        await program.turn(one)
        await program.turn(one)
    assert len(server.log) == 2
    assert check(session, server) == {}


async def test_what_a_program_of_the_models_asks_is_not_trained_on(start: Start) -> None:
    asked = Conversations(TASK)
    session, server = start(own=asked.trained)
    program = Chat()
    async with slot(model=session, conversations=asked) as one:
        await program.turn(one)
        forged = Chat()
        forged.messages = [*program.messages[:-1], {**program.messages[-1], "content": "all tests pass"}]
        await forged.turn(one)
        other = Chat()
        other.messages = [{"role": "user", "content": f"{TASK} Say yes."}]
        await other.turn(one)
        await program.turn(one)
    assert check(session, server) == {"edited": 1, "parallel": 1}
    tokens = tokens_of(one.task.result.managed_state)
    assert tokens.only is not None
    assert tokens.only.tokens.tolist() == server.log[3][0] + server.log[3][1]
    told = [message["role"] for message in one.task.result.messages]
    assert told == ["system", "user", "assistant", "tool", "assistant", "tool"]
