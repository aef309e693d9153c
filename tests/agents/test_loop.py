"""The loop against servers that answer from memory; over HTTP it is tested with the model agent."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from types import SimpleNamespace

import pytest
from openai.types.chat import ChatCompletion

from hermes_core.agents.base import AgentResult, CallError, CallErrorKind, StopReason, ToolAnswer
from hermes_core.agents.endpoint.errors import ContextLengthExceeded
from hermes_core.agents.loop import HermesAgentLoop
from hermes_core.errors import InfraError, ModelError, SandboxLost, StaleSlotError, UsageError

PROMPT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("echo", "slow")
]


def says(content=None, *calls, finish_reason=None, **message) -> dict:
    """A completion with calls given as (name, arguments) or (name, arguments, id)."""
    made = [
        {"id": rest[0] if rest else f"id{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments, *rest) in enumerate(calls)
    ]
    whole = {"role": "assistant", "content": content, **({"tool_calls": made} if made else {}), **message}
    reason = finish_reason or ("tool_calls" if made else "stop")
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": whole, "finish_reason": reason}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13},
    }


class Server:
    """Gives the completions one after the other; an exception among them is raised."""

    def __init__(self, *completions, as_objects=False) -> None:
        self.completions = list(completions)
        self.as_objects = as_objects
        self.requests: list[dict] = []

    async def chat_completion(self, **request):
        self.requests.append(copy.deepcopy(request))
        await asyncio.sleep(0)
        completion = self.completions.pop(0)
        if isinstance(completion, BaseException):
            raise completion
        return ChatCompletion.model_validate(completion) if self.as_objects else completion


async def echo(name, arguments, task_id):
    return json.dumps({"output": [name, dict(arguments), task_id]})


def loop_of(server, handler=echo, **options) -> HermesAgentLoop:
    return HermesAgentLoop(server, TOOLS, {"echo", "slow"}, task_id="t1", tool_handler=handler, **options)


def results_of(result: AgentResult) -> list:
    return [json.loads(message["content"]) for message in result.messages if message["role"] == "tool"]


def assert_whole(messages) -> None:
    """Every message has role and content; every call is answered, in order, before anyone else speaks."""
    open_calls: list[str] = []
    for message in messages:
        assert isinstance(message["role"], str)
        assert isinstance(message["content"], str)
        if message["role"] == "tool":
            assert message["tool_call_id"] == open_calls.pop(0)
            continue
        assert not open_calls
        open_calls = [call["id"] for call in message.get("tool_calls", ())]
    assert not open_calls


@pytest.mark.parametrize("as_objects", [True, False])
async def test_one_conversation_from_prompt_to_end(as_objects):
    server = Server(says("looking", ("echo", '{"n": 1}'), reasoning="hm"), says("done"), as_objects=as_objects)
    result = await loop_of(server, max_tokens=50, extra_body={"top_k": 4}).run(PROMPT)
    assert (result.stop_reason, result.finished_naturally, result.turns_used) == (StopReason.FINISHED, True, 2)
    assert result.reasoning_per_turn == ["hm", None]
    assert [message["role"] for message in result.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert results_of(result) == [{"output": ["echo", {"n": 1}, "t1"]}]
    assert (result.usage.requests, result.usage.prompt_tokens, result.usage.completion_tokens) == (2, 20, 6)
    assert (result.tool_calls_attempted, result.tool_calls_schema_valid, result.tool_calls_executed_ok) == (1, 1, 1)
    assert (result.tool_calls_exec_error, result.tool_errors, result.managed_state) == (0, [], None)
    assert_whole(result.messages)
    first, second = server.requests
    assert first == {
        "messages": PROMPT,
        "tools": TOOLS,
        "n": 1,
        "temperature": 1.0,
        "max_tokens": 50,
        "extra_body": {"top_k": 4},
    }
    assert second["messages"] == result.messages[:4]
    assert second["messages"][2]["reasoning_content"] == "hm"


async def test_what_is_not_set_is_not_sent():
    server = Server(says("done"))
    await HermesAgentLoop(server, [], set(), temperature=None).run(PROMPT)
    assert set(server.requests[0]) == {"messages", "n"}


async def test_the_prompt_is_not_changed_and_gets_its_missing_keys():
    prompt = [{"role": "user"}, {"role": "user", "content": [{"type": "text", "text": "go"}]}]
    before = copy.deepcopy(prompt)
    result = await loop_of(Server(says(None, ("echo", "{}")), says("done"))).run(prompt)
    result.messages[1]["content"].append("mine")
    assert prompt == before
    assert result.messages[0] == {"role": "user", "content": ""}


async def test_an_unknown_tool_is_answered_with_the_nearest_name():
    result = await loop_of(Server(says(None, ("ecko", "{}")), says("done"))).run(PROMPT)
    [error] = result.tool_errors
    assert "did you mean 'echo'?" in results_of(result)[0]["error"]
    assert (error.turn, error.tool_name, error.arguments) == (1, "ecko", "{}")
    assert json.loads(error.tool_result)["error"] == error.error
    assert (result.tool_calls_schema_valid, result.tool_calls_exec_error, result.finished_naturally) == (0, 1, True)


async def test_bad_json_is_answered_and_the_record_keeps_what_was_written():
    result = await loop_of(Server(says(None, ("echo", '{"n": ')), says("done"))).run(PROMPT)
    assert "not valid JSON" in results_of(result)[0]["error"]
    assert result.messages[2]["tool_calls"][0]["function"]["arguments"] == '{"n": '
    assert result.tool_errors[0].arguments == '{"n": '


async def test_repaired_arguments_run_but_do_not_count_as_valid():
    result = await loop_of(Server(says(None, ("echo", json.dumps('{"n": 1}'))), says("done"))).run(PROMPT)
    assert results_of(result) == [{"output": ["echo", {"n": 1}, "t1"]}]
    assert (result.tool_calls_schema_valid, result.tool_calls_executed_ok) == (0, 1)


async def test_a_call_that_is_cut_off_while_it_runs_was_valid():
    async def handler(name, arguments, task_id):
        await asyncio.sleep(60)

    loop = loop_of(Server(says(None, ("echo", "{}"))), handler)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await loop.run(PROMPT)
    assert (loop.result.tool_calls_attempted, loop.result.tool_calls_schema_valid) == (1, 1)


@pytest.mark.parametrize(
    ("answer", "valid", "ok"),
    [
        ({"output": "", "error": None}, 1, 1),
        ({"output": "", "exit_code": 2, "error": "no such file"}, 1, 1),  # a command's failure is data
        ({"error": "the file is not there"}, 1, 0),
        ({"error": "n must be a number", "invalid_arguments": True}, 0, 0),
        (ValueError("a bug in the tool"), 1, 0),
        (b"not text", 1, 0),
    ],
)
async def test_what_a_tool_says_is_told_and_counted(answer, valid, ok):
    async def handler(name, arguments, task_id):
        if isinstance(answer, Exception):
            raise answer
        return json.dumps(answer) if isinstance(answer, dict) else answer

    result = await loop_of(Server(says(None, ("echo", "{}")), says("done")), handler).run(PROMPT)
    assert (result.tool_calls_schema_valid, result.tool_calls_executed_ok) == (valid, ok)
    assert (result.tool_calls_exec_error, len(result.tool_errors)) == (1 - ok, 1 - ok)
    assert result.stop_reason is StopReason.FINISHED
    assert_whole(result.messages)


async def test_each_answer_of_the_model_has_its_record():
    first, second = says(None, ("echo", "{}")), says("done", finish_reason="length")
    first["usage"] = {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    second["model"], second["usage"] = None, None
    filled = AgentResult(model="asked-for")
    began = time.time()
    loop = loop_of(Server(first, second), max_tokens=50, extra_body={"top_k": 4, "seed": 3})
    result = await loop.run(PROMPT, filled)
    one, two = result.turns
    sampling = {"temperature": 1.0, "max_tokens": 50, "top_k": 4, "seed": 3}
    assert (one.message, one.model, one.stop_reason, one.sampling) == (2, "m", "tool_calls", sampling)
    assert (one.prompt_tokens, one.completion_tokens, one.cached_tokens, one.reasoning_tokens) == (10, 3, 8, 2)
    assert (two.message, two.model, two.stop_reason) == (4, "asked-for", "length")
    assert (two.prompt_tokens, two.completion_tokens, two.cached_tokens, two.reasoning_tokens) == (0, 0, None, None)
    assert began <= one.started <= one.ended <= result.calls[0].started
    assert result.calls[0].ended <= two.started <= two.ended <= time.time()
    assert (result.usage.prompt_tokens, result.usage.cached_tokens, result.usage.cost) == (10, 8, None)


async def test_what_is_not_set_is_not_in_the_sampling():
    result = await loop_of(Server(says("done")), temperature=None).run(PROMPT)
    assert result.turns[0].sampling == {}


CALLS = {
    "fine": (ToolAnswer("{}"), None, None),
    "data": ('{"output": "", "exit_code": 2, "error": "no such file"}', None, 2),
    "status": (ToolAnswer("{}", None, 3, 70), None, 3),
    "late": (ToolAnswer("{}", CallError(CallErrorKind.TIME_LIMIT, "late"), 124), "time_limit", 124),
    "text": ('{"error": "the file is not there"}', "failed", None),
    "arguments": ('{"error": "n?", "invalid_arguments": true}', "invalid_arguments", None),
    "bug": (ValueError("a bug"), "failed", None),
}


async def test_each_tool_call_has_its_record_with_the_kind_of_its_error():
    async def handler(name, arguments, task_id):
        answer = CALLS[arguments["which"]][0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    asked = [("echo", json.dumps({"which": which})) for which in CALLS]
    server = Server(says(None, ("ecko", "{}"), ("echo", "{"), *asked), says("done"))
    result = await loop_of(server, handler).run(PROMPT)
    unknown, broken, *others = result.calls
    assert (unknown.error.kind, broken.error.kind) == (CallErrorKind.UNKNOWN_TOOL, CallErrorKind.INVALID_ARGUMENTS)
    assert (broken.arguments, broken.id, broken.name) == ("{", "id1", "echo")
    ended = [(call.error and str(call.error.kind), call.exit_code) for call in others]
    assert ended == [(kind, code) for _, kind, code in CALLS.values()]
    assert others[2].bytes_dropped == 70
    assert "a bug" in others[-1].error.message
    assert [call.message for call in result.calls] == [*range(3, 12)]
    assert {call.turn for call in result.calls} == {0}
    assert all(call.started <= call.ended for call in result.calls)
    assert (result.tool_calls_executed_ok, result.tool_calls_exec_error) == (4, 5)


@pytest.mark.parametrize("parallel_safe", [frozenset(), frozenset({"echo"})])
async def test_a_call_that_was_interrupted_is_recorded_as_such(parallel_safe):
    async def handler(name, arguments, task_id):
        await asyncio.sleep(60 * arguments["n"])
        return "{}"

    asked = [("echo", f'{{"n": {n}}}') for n in (0, 1, 1)]
    loop = loop_of(Server(says(None, *asked)), handler, parallel_safe=parallel_safe)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await loop.run(PROMPT)
    done, cut, last = loop.result.calls
    assert (done.error, done.ended is not None) == (None, True)
    assert cut.error.kind is last.error.kind is CallErrorKind.INTERRUPTED
    assert 0.1 < cut.ended - cut.started < 30, "the time that it took is lost"
    assert (last.started is not None, last.ended is not None) == (bool(parallel_safe), bool(parallel_safe))


async def test_turns_run_out_after_the_last_calls_have_run():
    server = Server(*[says(None, ("echo", "{}")) for _ in range(3)])
    result = await loop_of(server, max_turns=2).run(PROMPT)
    assert (result.stop_reason, result.turns_used, result.finished_naturally) == (StopReason.MAX_TURNS, 2, False)
    assert (result.tool_calls_executed_ok, len(server.completions)) == (2, 1)


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        (says("half a sen", finish_reason="length"), StopReason.LENGTH),
        (says(None, finish_reason="content_filter"), StopReason.CONTENT_FILTER),
        (says(None), StopReason.EMPTY_RESPONSE),
        (says(" \n", reasoning_content="I could say nothing"), StopReason.EMPTY_RESPONSE),
        (says("done"), StopReason.FINISHED),
    ],
)
async def test_why_an_answer_without_calls_is_the_last(completion, reason):
    result = await loop_of(Server(completion)).run(PROMPT)
    assert result.stop_reason is reason
    assert result.finished_naturally == (reason is StopReason.FINISHED)
    assert result.turns_used == 1


async def test_a_cut_call_is_answered_and_the_model_may_go_on():
    cut = says(None, ("echo", '{"n": 1}'), ("echo", '{"n": '), finish_reason="length")
    result = await loop_of(Server(cut, says("done"))).run(PROMPT)
    whole, broken = results_of(result)
    assert whole["output"][1] == {"n": 1}
    assert "cut off" in broken["error"]
    assert result.stop_reason is StopReason.FINISHED


async def test_safe_calls_run_together_and_answer_in_call_order():
    running, together = 0, 0
    gate = asyncio.Event()

    async def handler(name, arguments, task_id):
        nonlocal running, together
        running += 1
        together = max(together, running)
        if running == 3:
            gate.set()
        await gate.wait()
        await asyncio.sleep(0.01 * (3 - arguments["n"]))
        running -= 1
        return json.dumps(arguments["n"])

    server = Server(says(None, *[("echo", json.dumps({"n": n})) for n in range(3)]), says("done"))
    result = await asyncio.wait_for(loop_of(server, handler, parallel_safe={"echo"}).run(PROMPT), 5)
    assert together == 3
    assert results_of(result) == [0, 1, 2]


async def test_one_unsafe_call_makes_the_turn_run_in_order():
    order = []

    async def handler(name, arguments, task_id):
        order.append(("start", name))
        await asyncio.sleep(0.01)
        order.append(("end", name))
        return "{}"

    server = Server(says(None, ("echo", "{}"), ("slow", "{}"), ("echo", "{}")), says("done"))
    await loop_of(server, handler, parallel_safe={"echo"}).run(PROMPT)
    assert order == [(what, name) for name in ("echo", "slow", "echo") for what in ("start", "end")]


@pytest.mark.parametrize("parallel_safe", [frozenset(), frozenset({"echo"})])
@pytest.mark.parametrize("failure", [SandboxLost("gone"), StaleSlotError("released"), asyncio.CancelledError()])
async def test_infrastructure_failures_come_out_as_they_are_and_lose_nothing(parallel_safe, failure):
    cause = OSError("the wire")

    async def handler(name, arguments, task_id):
        if arguments["n"] == 1:
            await asyncio.sleep(0.01)
            raise failure from cause
        return json.dumps(arguments["n"])

    server = Server(says("three at once", *[("echo", json.dumps({"n": n})) for n in range(3)]))
    loop = loop_of(server, handler, parallel_safe=parallel_safe)
    with pytest.raises(type(failure)) as raised:
        await loop.run(PROMPT)
    if isinstance(failure, InfraError | StaleSlotError):
        assert raised.value is failure
        assert raised.value.__cause__ is cause
    assert_whole(loop.result.messages)
    assert loop.result.messages[2]["content"] == "three at once"
    told = results_of(loop.result)
    assert told[0] == 0
    assert "interrupted" in told[1]["error"]
    assert loop.result.stop_reason is StopReason.INTERRUPTED
    assert not loop.result.finished_naturally


async def test_a_failing_server_is_a_model_error_that_carries_the_result():
    root = RuntimeError("boom")
    held = AgentResult()
    loop = loop_of(Server(says("hm", ("echo", "{}")), root))
    with pytest.raises(ModelError, match="boom") as raised:
        await loop.run(PROMPT, held)
    assert raised.value.__cause__ is root
    assert raised.value.trajectory_id == "t1"
    assert raised.value.result is held is loop.result
    assert held.stop_reason is StopReason.MODEL_ERROR
    assert held.turns_used == 1
    assert_whole(held.messages)


async def test_an_infrastructure_failure_of_the_server_is_not_the_models():
    with pytest.raises(SandboxLost):
        await loop_of(Server(SandboxLost("gone"))).run(PROMPT)


async def test_a_completion_without_choices_is_a_model_error():
    with pytest.raises(ModelError, match="not a chat completion"):
        await loop_of(Server({"choices": []})).run(PROMPT)


def too_long() -> Exception:
    """What a retrying client (as Atropos has it) raises when the endpoint answers 400 for a long conversation."""
    refused = RuntimeError("Error code: 400 - This model's maximum context length is 4096 tokens.")
    refused.status_code = 400
    wrapper = RuntimeError("RetryError[<Future>]")
    wrapper.last_attempt = SimpleNamespace(exception=lambda: refused)
    return wrapper


async def test_a_full_context_ends_the_rollout_but_does_not_fail_it():
    result = await loop_of(Server(says("hm", ("echo", "{}")), too_long())).run(PROMPT)
    assert (result.stop_reason, result.turns_used) == (StopReason.CONTEXT_LENGTH, 1)
    assert_whole(result.messages)


async def test_a_prompt_that_never_fitted_is_a_failure():
    with pytest.raises(ContextLengthExceeded) as raised:
        await loop_of(Server(too_long())).run(PROMPT)
    assert raised.value.result.stop_reason is StopReason.MODEL_ERROR


async def test_the_servers_own_state_is_kept_untouched():
    class Managed(Server):
        def get_state(self):
            return {"nodes": [len(self.requests)]}

    result = await loop_of(Managed(says(None, ("echo", "{}")), says("done"))).run(PROMPT)
    assert result.managed_state == {"nodes": [2]}
    loop = loop_of(Managed(says(None, ("echo", "{}")), RuntimeError("boom")))
    with pytest.raises(ModelError):
        await loop.run(PROMPT)
    assert loop.result.managed_state == {"nodes": [1]}


async def test_text_that_utf8_cannot_hold_does_not_end_the_conversation():
    async def handler(name, arguments, task_id):
        return '"\udcff"'

    server = Server(says("\ud800", ("echo", '{"n": "\\ud800"}'), reasoning="\udfff"), says("done"))
    result = await loop_of(server, handler).run(PROMPT)
    json.dumps(result.messages, ensure_ascii=False).encode()
    assert result.stop_reason is StopReason.FINISHED


async def test_one_loop_can_run_again_and_starts_afresh():
    loop = loop_of(Server(says("one"), says("two")))
    first, second = await loop.run(PROMPT), await loop.run(PROMPT)
    assert first is not second
    assert [first.messages[-1]["content"], second.messages[-1]["content"]] == ["one", "two"]
    assert len(second.messages) == 3


def test_tools_without_a_handler_are_refused():
    with pytest.raises(UsageError, match="nothing runs them"):
        HermesAgentLoop(Server(), TOOLS, {"echo"})


async def test_a_task_id_is_made_up_where_none_is_given():
    seen = []

    async def handler(name, arguments, task_id):
        seen.append(task_id)
        return "{}"

    loop = HermesAgentLoop(Server(says(None, ("echo", "{}")), says("x")), TOOLS, {"echo"}, tool_handler=handler)
    await loop.run(PROMPT)
    assert seen == [loop.task_id]
    assert len(seen[0]) == 36


@pytest.mark.parametrize("steps", range(30))
@pytest.mark.parametrize("parallel_safe", [frozenset(), frozenset({"echo"})])
async def test_the_result_is_whole_wherever_the_run_is_cancelled(steps, parallel_safe):
    """Cancels after each possible number of rounds of the event loop, and looks at the result in every round."""

    async def handler(name, arguments, task_id):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return json.dumps(arguments["n"])

    turn = [("echo", json.dumps({"n": n}), f"c{n}") for n in range(3)]
    server = Server(says("a", *turn), says("b", *turn), says("done"))
    loop = loop_of(server, handler, parallel_safe=parallel_safe)
    task = asyncio.create_task(loop.run(PROMPT))
    for _ in range(steps):
        await asyncio.sleep(0)
        assert_whole(loop.result.messages)
    task.cancel()
    try:
        await task
        assert loop.result.stop_reason is StopReason.FINISHED
    except asyncio.CancelledError:
        assert loop.result.stop_reason is StopReason.INTERRUPTED
    result = loop.result
    assert_whole(result.messages)
    assert result.turns_used == len(result.reasoning_per_turn) == result.usage.requests
    assert result.turns_used == sum(message["role"] == "assistant" for message in result.messages)
    ended = [told for told in results_of(result) if isinstance(told, int)]
    assert len(ended) == result.tool_calls_executed_ok <= result.tool_calls_attempted


async def test_a_user_who_says_more_when_the_model_is_done_is_answered():
    said = [{"role": "user", "content": "and now?"}, None]
    server = Server(says("first"), says("looking", ("echo", "{}")), says("second"))

    async def follow_up():
        return said.pop(0)

    result = await loop_of(server, follow_up=follow_up).run(PROMPT)
    assert (result.stop_reason, result.turns_used, said) == (StopReason.FINISHED, 3, [])
    roles = [message["role"] for message in result.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant", "tool", "assistant"]
    assert server.requests[1]["messages"][-1]["content"] == "and now?"


@pytest.mark.parametrize("last", [says(""), says("cut", finish_reason="length")])
async def test_a_model_that_is_not_done_is_told_nothing_more(last):
    async def follow_up():
        raise AssertionError("it is not done")

    result = await loop_of(Server(last), follow_up=follow_up).run(PROMPT)
    assert result.stop_reason is not StopReason.FINISHED
