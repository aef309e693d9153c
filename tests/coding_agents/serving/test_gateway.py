"""What a gateway promises of a slot's calls: whose settings count, what a retry gets, bounds, failures, the record."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hermes_agents.serving.bounds import Bounds

from hermes_core.agents.base import StopReason
from hermes_core.agents.endpoint.errors import (
    BadCompletion,
    ContextLengthExceeded,
    ConversationRefused,
    EndpointDown,
    RequestTooLarge,
)
from hermes_core.agents.endpoint.prices import TokenPrices
from hermes_core.agents.endpoint.request import record_wait
from hermes_core.agents.replies import ModelReply
from hermes_core.errors import ModelError, UsageError
from tests.coding_agents.serving.slot import TASK, Answer, Slot, call, reply, slot, task_of

BEGIN = [{"role": "user", "content": TASK}]
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
LS = call("bash", '{"command": "ls"}', "srv_1")


class Agent:
    """A program of the slot that speaks Chat Completions."""

    def __init__(self, one: Slot, client: httpx.AsyncClient) -> None:
        self.one = one
        self.client = client
        self.messages: list[dict[str, Any]] = list(BEGIN)

    async def post(self, **body: Any) -> httpx.Response:
        given = {"model": "any", "messages": self.messages, "tools": TOOLS, **body}
        return await self.client.post("/v1/chat/completions", json=given)

    async def ask(self, **body: Any) -> dict[str, Any]:
        answer = await self.post(**body)
        assert answer.status_code == 200, answer.text
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message

    async def work(self, result: str = "ok") -> dict[str, Any]:
        """Take one turn, and answer its calls."""
        message = await self.ask()
        calls = message.get("tool_calls", [])
        told = [{"role": "tool", "tool_call_id": each["id"], "content": result} for each in calls]
        self.messages = [*self.messages, message, *told]
        return message


@asynccontextmanager
async def agent(*answers: Answer, **options: Any) -> AsyncIterator[Agent]:
    async with slot(*answers, **options) as one, client_of(one) as client:
        yield Agent(one, client)


def client_of(one: Slot) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {one.gateway.key}"}
    return httpx.AsyncClient(base_url=one.url, headers=headers, timeout=30, verify=False)


def gate() -> tuple[asyncio.Event, asyncio.Event, Any]:
    """Return an answer of the model that waits, when it has begun to, and what lets it go on."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def answer(_: Any) -> ModelReply:
        begun.set()
        await go.wait()
        return reply("Done.")

    return begun, go, answer


async def test_the_runs_settings_count_and_not_the_agents() -> None:
    settings = {"temperature": 0.7, "max_tokens": 100, "seed": 1, "extra_body": {"top_k": 5}}
    async with agent(reply("Done."), **settings) as one:
        await one.ask(temperature=0, n=8, logit_bias={"1": 100}, stop=["x"], max_tokens=1_000, tool_choice="required")
        await one.ask(max_tokens=10, tool_choice="none", messages=[{"role": "user", "content": "Another."}])
        first, second = one.one.model.requests
    log, _ = one.one.gateway.log
    seed = first["extra_body"].pop("seed")
    assert first == {
        **{"messages": BEGIN, "tools": TOOLS, "n": 1, "temperature": 0.7, "max_tokens": 100},
        "extra_body": {"top_k": 5},
    }
    assert (second["max_tokens"], second["tool_choice"], second["extra_body"]["seed"]) == (10, "none", seed)
    asked = {"temperature": "0", "n": "8", "logit_bias": "{'1': 100}", "stop": "['x']", "max_tokens": "1000"}
    assert log.overridden == {**asked, "tool_choice": "'required'"}
    sampling = {"temperature": 0.7, "max_tokens": 100, "top_k": 5, "seed": seed}
    assert one.one.task.result.turns[0].sampling == sampling


async def test_tools_that_a_provider_would_run_are_dropped_and_recorded() -> None:
    async with agent(reply("Done.")) as one:
        await one.ask(tools=[{"type": "web_search"}, *TOOLS])
    assert one.one.model.requests[0]["tools"] == TOOLS
    assert one.one.gateway.log[0].dropped_tools == ["web_search"]


@pytest.mark.parametrize(("asked", "given"), [(10, 10), (131_072, None)])
async def test_without_a_limit_of_ours_the_agents_counts_unless_it_only_names_its_models(
    asked: int, given: int | None
) -> None:
    async with agent(reply("Done.")) as one:
        await one.ask(max_tokens=asked)
    assert one.one.model.requests[0].get("max_tokens") == given


async def test_the_agents_conversation_is_its_result() -> None:
    price = {"ours": TokenPrices(prompt=1.0, completion=2.0)}
    async with agent(reply("I look.", LS, thinking="Hm."), reply("Done."), prices=price) as one:
        await one.work("calc.py")
        assert one.one.gateway.stop_reason is StopReason.INTERRUPTED
        await one.work()
    result = one.one.task.result
    assert [message["content"] for message in result.messages] == [TASK, "I look.", "calc.py", "Done."]
    assert (result.model, result.turns_used, result.reasoning_per_turn) == ("ours", 2, ["Hm.", None])
    assert (result.usage.requests, result.usage.prompt_tokens, result.usage.cached_tokens) == (2, 200, 60)
    assert result.usage.cost == pytest.approx(2 * (100 * 1.0 + 20 * 2.0) / 1e6, rel=0.5)
    assert [(each.id, each.name, each.error) for each in result.calls] == [("srv_1", "bash", None)]
    assert one.one.gateway.stop_reason is StopReason.FINISHED
    assert [each.place for each in one.one.gateway.log] == ["root", "continues"]


async def test_the_server_sees_its_own_ids_of_calls_and_the_agent_others() -> None:
    async with agent(reply("", LS), reply("Done.")) as one:
        message = await one.work()
        await one.work()
    assert message["tool_calls"][0]["id"] != "srv_1"
    _, answer, told = one.one.model.requests[1]["messages"]
    assert (answer["tool_calls"][0]["id"], told["tool_call_id"]) == ("srv_1", "srv_1")


def rewritten(message: dict[str, Any], **calls_anew: Any) -> dict[str, Any]:
    """An answer as an agent sends it back that writes its calls anew: their arguments by their names."""
    calls = [
        {**each, "function": {"name": name, "arguments": json.dumps(arguments)}}
        for each, (name, arguments) in zip(message["tool_calls"], calls_anew.items(), strict=True)
    ]
    return {**message, "tool_calls": calls}


EDIT = call("edit", '{"path": "/data/a.py", "all": "true", "new": "x \\n", "more": [{"a": 1}], "none": null}', "srv_1")
BROKEN = call("bash", '{"command": ', "srv_2")
UNKNOWN = call("no_such_tool", '{"a": 1}', "srv_3")
SAME = {"path": "a.py", "all": True, "new": "x\n", "more": [{"a": 1, "b": False}], "left_out": 5}


@pytest.mark.parametrize("order", [1, -1])
async def test_what_agents_make_of_their_calls_is_undone(order: int) -> None:
    """They fill in what was left out and leave out how a text begins, change types, white space and the order, and
    replace what is no JSON and whole calls of no tool."""
    made = (EDIT, BROKEN, UNKNOWN)
    async with agent(reply("", *made), reply("Done.")) as one:
        message = rewritten(await one.ask(), edit=SAME, bash={}, invalid={"error": "There is no such tool."})
        calls = message["tool_calls"][::order]
        results = [{"role": "tool", "tool_call_id": each["id"], "content": each["function"]["name"]} for each in calls]
        await one.ask(messages=[*BEGIN, {**message, "tool_calls": calls}, *results])
    _, answer, *told = one.one.model.requests[1]["messages"]
    assert answer["tool_calls"] == [each.as_message_part() for each in made]
    assert [(each["tool_call_id"], each["content"]) for each in told] == [
        *(("srv_1", "edit"), ("srv_2", "bash"), ("srv_3", "invalid"))
    ]
    assert [each.place for each in one.one.gateway.log] == ["root", "continues"]


@pytest.mark.parametrize(
    "other",
    [
        {**SAME, "path": "b.py"},
        {**SAME, "path": ""},
        {**SAME, "path": "/data"},
        {key: value for key, value in SAME.items() if key != "path"},
        {**SAME, "more": [{"a": 1}, {"a": 1}]},
        {**SAME, "more": [{}]},
        [],
    ],
)
async def test_a_call_that_says_something_else_is_another(other: Any) -> None:
    async with agent(reply("", EDIT), reply("Done.")) as one:
        await one.ask(messages=[*BEGIN, rewritten(await one.ask(), edit=other)])
    [sent] = one.one.model.requests[1]["messages"][1]["tool_calls"]
    assert sent == {"id": "srv_1", "type": "function", "function": {"name": "edit", "arguments": json.dumps(other)}}
    assert [each.place for each in one.one.gateway.log] == ["root", "fork"]


async def test_a_retry_while_the_first_call_is_sampled_gets_its_answer() -> None:
    begun, go, answer = gate()
    async with agent(answer) as one, asyncio.TaskGroup() as group:
        first = group.create_task(one.ask())
        await begun.wait()
        second = group.create_task(one.post(stream=True))
        while one.one.gateway.counts["calls"] < 2:
            await asyncio.sleep(0)
        go.set()
        message, stream = await first, await second
        assert message["content"] == "Done."
        assert '"content":"Done."' in stream.text
        assert len(one.one.model.requests) == 1
    assert {each.outcome for each in one.one.gateway.log} == {"answered", "replayed"}
    assert one.one.task.result.turns_used == 1


async def test_a_retry_after_a_lost_answer_gets_it_again() -> None:
    begun, go, answer = gate()
    async with agent(answer, reply("Another.")) as one:
        with pytest.raises(httpx.ReadTimeout):
            await one.client.post(
                "/v1/chat/completions", json={"messages": BEGIN, "tools": TOOLS}, timeout=httpx.Timeout(30, read=0.2)
            )
        assert begun.is_set()
        go.set()
        # An agent's retry may differ in what makes no difference.
        again = await one.ask(
            metadata={"try": 2}, messages=[{"role": "user", "content": [{"type": "text", "text": TASK}]}]
        )
        assert again["content"] == "Done."
        assert len(one.one.model.requests) == 1
        assert (await one.ask())["content"] == "Another."


async def test_the_same_messages_with_other_tools_are_another_call() -> None:
    others = [{"type": "function", "function": {"name": "sh", "parameters": {"type": "object"}}}]
    begun, go, answer = gate()
    async with agent(*[answer] * 3) as one, asyncio.TaskGroup() as group:
        asking = [group.create_task(one.post(tools=tools)) for tools in (TOOLS, others, [], TOOLS)]
        await begun.wait()
        while one.one.gateway.counts["calls"] < len(asking):
            await asyncio.sleep(0)
        go.set()
        assert {(await each).status_code for each in asking} == {200}
        asked = [request.get("tools") for request in one.one.model.requests]
        assert len(asked) == 3 and all(tools in asked for tools in (TOOLS, others, None))
        assert sorted(call.outcome for call in one.one.gateway.log) == [*(["answered"] * 3), "replayed"]


async def test_a_retry_of_a_stream_that_was_cut_gets_its_answer() -> None:
    begun, go, answer = gate()
    async with agent(answer, reply("Another."), bounds=Bounds(quiet_s=0.01, keep_alive_s=0.01)) as one:
        request = {"model": "any", "messages": BEGIN, "tools": TOOLS, "stream": True}
        async with one.client.stream("POST", "/v1/chat/completions", json=request):
            await begun.wait()
        while one.one.gateway._connections:  # until it is noticed that nobody reads the stream
            await asyncio.sleep(0.01)
        go.set()
        assert (await one.ask())["content"] == "Done."
        assert len(one.one.model.requests) == 1


async def test_a_request_whose_answer_arrived_is_sampled_anew() -> None:
    async with agent(reply("I look.", LS), reply("Done."), reply("Another."), reply("A third.")) as one:
        await one.work()
        await one.work()
        for content in ("Another.", "A third."):  # no conversation has gone on from the answer before the last
            assert (await one.ask(messages=BEGIN))["content"] == content
    assert [each.place for each in one.one.gateway.log] == ["root", "continues", "fork", "fork"]


async def test_a_stream_is_kept_alive_while_its_answer_is_sampled() -> None:
    begun, go, answer = gate()
    async with agent(answer, bounds=Bounds(quiet_s=0.01, keep_alive_s=0.01)) as one:
        request = {"messages": BEGIN, "stream": True}
        async with one.client.stream("POST", "/v1/chat/completions", json=request) as stream:
            assert begun.is_set()
            assert stream.headers["content-type"] == "text/event-stream"
            lines = stream.aiter_lines()
            assert [await anext(lines) for _ in range(4)] == [": keepalive", ""] * 2
            go.set()
            rest = [line async for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"


async def test_a_stream_that_has_begun_can_still_be_refused() -> None:
    begun, go, _ = gate()

    async def answer(_: Any) -> ModelReply:
        begun.set()
        await go.wait()
        raise ContextLengthExceeded("40000 tokens")

    async with agent(answer, bounds=Bounds(quiet_s=0.01)) as one:
        request = {"messages": BEGIN, "stream": True}
        async with one.client.stream("POST", "/v1/chat/completions", json=request) as stream:
            go.set()
            lines = [line async for line in stream.aiter_lines() if line.startswith("data: ")]
        assert json.loads(lines[0][6:])["error"]["code"] == "context_length_exceeded"
        again = await one.post(stream=True, tools=None)  # it is refused with a status now
        assert again.status_code == 400
        assert len(one.one.model.requests) == 1


TROUBLE = {
    "too long": (ContextLengthExceeded("x"), StopReason.CONTEXT_LENGTH),
    "refused": (ConversationRefused("x"), StopReason.REFUSED),
    "template": (UsageError("the chat template refuses it"), StopReason.REFUSED),
    "down": (EndpointDown("x"), None),
    "nonsense": (BadCompletion("x"), None),
    "unknown": (RuntimeError("x"), None),
    "time": (TimeoutError(), None),
}


@pytest.mark.parametrize("kind", TROUBLE)
async def test_trouble_ends_the_agent_with_one_call(kind: str) -> None:
    """What the model can bring about is the end of its conversation; the rest is no result at all."""
    error, end = TROUBLE[kind]
    async with agent(reply("", LS), error) as one:
        await one.work()
        answer = await one.post()
    gateway = one.one.gateway
    assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false")
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert gateway.last_call_failed
    assert gateway.log[-1].outcome == "failed"
    assert one.one.task.result.messages[-1]["content"] == "ok"  # what the call was answered with is not lost
    if end is not None:
        assert (gateway.failure, gateway.stop_reason) == (None, end)
    else:
        assert isinstance(gateway.failure, ModelError)
        assert gateway.failure.result is one.one.task.result
        assert gateway.stop_reason is StopReason.MODEL_ERROR


@pytest.mark.parametrize("kind", TROUBLE)
async def test_trouble_before_the_first_answer_is_a_failure(kind: str) -> None:
    async with agent(TROUBLE[kind][0]) as one:
        assert (await one.post()).status_code == 400
    assert isinstance(one.one.gateway.failure, ModelError)


async def test_an_agent_may_go_on_after_a_refusal() -> None:
    async with agent(reply("", LS), ContextLengthExceeded("x"), reply("Done.")) as one:
        await one.work()
        await one.post()
        assert one.one.gateway.last_call_failed
        one.messages[-1]["content"] = "shorter"
        await one.work()
    assert not one.one.gateway.last_call_failed
    assert one.one.gateway.stop_reason is StopReason.FINISHED


async def test_after_a_failure_nothing_more_is_asked() -> None:
    async with agent(EndpointDown("x"), reply("Done.")) as one:
        await one.post()
        answer = await one.post(messages=[*BEGIN, *BEGIN])
    assert (answer.status_code, len(one.one.model.requests)) == (400, 1)


@pytest.mark.parametrize("error", [RequestTooLarge("x"), ModelError("HTTP 500"), BadCompletion("x"), OSError("x")])
async def test_a_forged_call_that_fails_is_not_the_rollouts_failure(error: Exception) -> None:
    forged = [{"role": "user", "content": "x" * 1000}]
    async with agent(reply("", LS), error, ContextLengthExceeded("x"), reply("Done.")) as one:
        await one.work()
        assert (await one.post(messages=forged)).status_code == 400
        assert (await one.post(messages=[*forged, *forged])).status_code == 400
        await one.work()
    assert one.one.gateway.failure is None
    assert one.one.gateway.stop_reason is StopReason.FINISHED
    assert not one.one.gateway.last_call_failed


async def test_an_endpoint_that_is_down_is_a_failure_whoever_asks() -> None:
    async with agent(reply("", LS), EndpointDown("x")) as one:
        await one.work()
        await one.post(messages=[{"role": "user", "content": "forged"}])
    assert isinstance(one.one.gateway.failure, EndpointDown)


SCHEMAS = {
    "deep": '{"a":' * 200 + "1" + "}" * 200,
    "deep lists": '{"a":' + "[" * 2000 + "]" * 2000 + "}",
    "no number": '{"a": NaN}',
    "infinite": '{"a": -Infinity}',
    "too large": '{"a": 1e999}',
    "too many digits": '{"a": ' + "1" * 5000 + "}",
}
"""Schemas of tools that a client or an endpoint can't send or read."""


@pytest.mark.parametrize("schema", SCHEMAS)
async def test_what_could_break_whoever_passes_it_on_is_refused(schema: str) -> None:
    body = json.dumps({"model": "m", "messages": BEGIN, "tools": [{"function": {"name": "a", "parameters": "SCHEMA"}}]})
    async with agent(reply("", LS)) as one:
        answer = await one.client.post("/v1/chat/completions", content=body.replace('"SCHEMA"', SCHEMAS[schema]))
        assert (answer.status_code, len(one.one.model.requests)) == (400, 0)
        assert one.one.gateway.failure is None
        await one.work()


async def test_the_bound_on_calls_refuses_and_is_the_end() -> None:
    async with agent(reply("", LS), bounds=Bounds(calls=2)) as one:
        await one.work()
        await one.work()
        answer = await one.post()
    assert answer.status_code == 400
    assert "2 model calls" in answer.text
    assert one.one.gateway.stop_reason is StopReason.MAX_TURNS
    assert one.one.gateway.failure is None


async def test_the_bound_on_tokens_counts_all_conversations() -> None:
    async with agent(reply("", LS), bounds=Bounds(tokens=200)) as one:
        await one.work()
        await one.ask(messages=[{"role": "user", "content": "Another."}])
        assert (await one.post()).status_code == 400
    assert len(one.one.model.requests) == 2
    assert one.one.gateway.stop_reason is StopReason.MAX_TURNS


async def test_calls_wait_for_their_turn_up_to_a_bound() -> None:
    _, go, _ = gate()
    now = most = 0

    async def answer(_: Any) -> ModelReply:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await go.wait()
        now -= 1
        return reply("Done.")

    async with agent(answer, bounds=Bounds(concurrent=2, waiting=3)) as one:
        requests = [[{"role": "user", "content": str(number)}] for number in range(6)]
        tasks = [asyncio.create_task(one.post(messages=each)) for each in requests]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert [(await each).status_code for each in done] == [400]
        go.set()
        answers = await asyncio.gather(*tasks)
    assert sorted(each.status_code for each in answers) == [200] * 5 + [400]
    assert most == 2


async def test_requests_that_are_long_together_are_refused_while_they_are_answered() -> None:
    begun, go, answer = gate()
    async with agent(answer, reply("Later."), bounds=Bounds(open_bytes=2000)) as one:
        first, second = ([{"role": "user", "content": TASK + letter * 1500}] for letter in "ab")
        task = asyncio.create_task(one.post(messages=first))
        await begun.wait()
        refused = await one.post(messages=second)
        assert refused.status_code == 400 and "too long together" in refused.text
        go.set()
        assert (await task).status_code == 200
        assert (await one.post(messages=second)).status_code == 200


async def test_a_call_that_need_not_wait_is_never_refused() -> None:
    async with agent(reply("Done."), bounds=Bounds(waiting=0)) as one:
        assert (await one.ask())["content"] == "Done."


async def test_the_wait_for_the_model_is_measured_once_for_calls_that_overlap() -> None:
    waits: list[str] = []

    @asynccontextmanager
    async def waiting() -> AsyncIterator[None]:
        waits.append("begin")
        try:
            yield
        finally:
            waits.append("end")

    begun, go, answer = gate()
    async with agent(answer, task=task_of(waiting=waiting)) as one, asyncio.TaskGroup() as group:
        first = group.create_task(one.ask())
        await begun.wait()
        second = group.create_task(one.ask(messages=[{"role": "user", "content": "Another."}]))
        while len(one.one.model.requests) < 2:
            await asyncio.sleep(0)
        assert waits == ["begin"]
        go.set()
        await first
        await second
        await one.ask(messages=[{"role": "user", "content": "A third."}])
    assert waits == ["begin", "end"] * 2


async def test_a_wait_that_is_too_long_is_a_failure() -> None:
    @asynccontextmanager
    async def waiting() -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(0.05):
                yield
        except TimeoutError as error:
            raise ModelError("the model took too long") from error

    _, _, answer = gate()
    async with agent(answer, task=task_of(waiting=waiting)) as one:
        assert (await one.post()).status_code == 400
    assert "took too long" in str(one.one.gateway.failure)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("whose", ["its own", "forged"])
async def test_time_that_a_program_has_used_up_by_its_calls_is_its_end(whose: str, busy: bool) -> None:
    """Otherwise, it could get rid of a bad rollout by calls in the background. If it had to wait for its turn for most
    of the time, the endpoint is to blame."""

    @asynccontextmanager
    async def waiting() -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(0.2 if one.one.model.requests else None):
                yield
        except TimeoutError as error:
            raise ModelError("the model took too long") from error

    async def answer(_: Any) -> ModelReply:
        await asyncio.sleep(0.01)
        if busy:
            record_wait(10.0)
        await asyncio.Event().wait()
        raise AssertionError

    forged = [{"role": "user", "content": "forged"}]
    async with agent(reply("", LS), answer, reply("Done."), task=task_of(waiting=waiting)) as one:
        await one.work()
        refused = await one.post(**({} if whose == "its own" else {"messages": forged}))
        assert refused.status_code == 400
        gateway = one.one.gateway
        if busy and whose == "its own":
            assert "took too long" in str(gateway.failure)
            return
        assert (await one.post()).status_code == 400
        assert (gateway.failure, gateway.stop_reason) == (None, StopReason.TIME_LIMIT)
        assert len(one.one.model.requests) == 2


@pytest.mark.parametrize("key", ["", "wrong", "é"])
async def test_a_request_without_the_key_is_refused_and_not_counted(key: str) -> None:
    async with slot(reply("Done.")) as one, client_of(one) as client:
        headers = {"authorization": f"Bearer {key}".encode() if key else b""}
        answer = await client.post("/v1/chat/completions", json={"messages": BEGIN}, headers=headers)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (401, "false")
        assert (await client.head("/")).status_code == 200
    assert (one.gateway.counts["wrong_key"], one.gateway.log) == (1, [])


async def test_after_the_end_everything_is_refused_and_late_answers_are_dropped() -> None:
    begun, go, answer = gate()
    async with agent(answer) as one, asyncio.TaskGroup() as group:
        late = group.create_task(one.post())
        await begun.wait()
        await one.one.gateway.aclose()
        go.set()
        assert (await late).status_code == 400
        assert (await one.post()).status_code == 400
        assert (await one.client.get("/v1/models")).status_code == 400
    assert one.one.task.result.turns_used == 0
    assert len(one.one.model.requests) == 1


async def test_odd_paths_reach_the_same_place() -> None:
    async with agent(reply("Done.")) as one:
        for path in ("/v1/chat/completions/", "/chat/completions", "/v1/v1/chat/completions?beta=true"):
            assert (await one.client.post(path, json={"messages": BEGIN})).status_code == 200
        for method, path in (("GET", "/v1/chat/completions"), ("POST", "/v1/embeddings"), ("POST", "/api/show")):
            answer = await one.client.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"messages": 1}', b"[" * 100_000, b'{"a":"\\ud800"}'])
async def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    async with agent(reply("Done.")) as one:
        answer = await one.client.post("/v1/chat/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert one.one.gateway.log[0].outcome == "refused"


async def test_what_no_endpoint_takes_is_not_passed_on() -> None:
    async with agent(reply("Done.")) as one:
        tool = {"type": "function", "function": {"name": "x", "parameters": {"k\udfff": "\ud801"}}}
        body = json.dumps({"messages": [{"role": "user", "content": "a\ud800\0b"}], "tools": [tool]})
        assert (await one.client.post("/v1/chat/completions", content=body)).status_code == 200
    (request,) = one.one.model.requests
    assert request["messages"][0]["content"] == "a\ufffd\ufffdb"
    assert request["tools"][0]["function"]["parameters"] == {"k\ufffd": "\ufffd"}


@pytest.mark.parametrize("escaped", [True, False])
async def test_each_character_that_no_endpoint_takes_is_replaced(escaped: bool) -> None:
    wrong = "\0\x7f\x80\x9f\ud800\udbff\udc00\udfff\ufdd0\ufdef\ufffe\uffff\U0001fffe\U0010ffff"
    right = "\xa0\ufdcf\ufdf0\ufffd", "\U0001f600", "\\u0000"
    expected = dict.fromkeys(wrong if escaped else wrong[1:], "\ufffd") | {text: text for text in right}
    async with agent(reply("Done.")) as one:
        for text, passed_on in expected.items():
            body = json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=escaped)
            await one.client.post("/v1/chat/completions", content=body.encode("utf-8", "surrogatepass"))
            assert one.one.model.requests[-1]["messages"][0]["content"] == passed_on, ascii(text)


async def test_a_body_of_too_many_values_is_refused() -> None:
    async with agent(reply("Done.")) as one:
        answer = await one.client.post("/v1/chat/completions", content=b"[" + b"0," * 1_100_000 + b"0]")
    assert answer.status_code == 413
