"""A conversation that outgrows its context goes on from a summary: what the model sees, what is kept, its limits."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import pytest

from hermes_core.agents.base import AgentResult, CallErrorKind, StopReason
from hermes_core.agents.compaction import CONTINUED, REQUEST, contexts, continue_from
from hermes_core.agents.endpoint.errors import ContextLengthExceeded
from hermes_core.agents.loop import HermesAgentLoop
from hermes_core.agents.model import ModelAgent, ModelSettings
from hermes_core.errors import ConfigError, ModelError

PROMPT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]
TOOL = {"type": "function", "function": {"name": "echo", "parameters": {"type": "object"}}}
LIMIT = 100


class Server:
    """Gives replies one after the other; an exception among them is raised."""

    def __init__(self, *replies: Mapping[str, Any] | Exception) -> None:
        self.replies = list(replies)
        self.asked: list[list[dict[str, Any]]] = []

    async def chat_completion(self, *, messages: Any, **_: Any) -> Any:
        self.asked.append(copy.deepcopy(messages))
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


def says(text: str, *calls: str, tokens: tuple[int, int] = (10, 3)) -> dict[str, Any]:
    """Return a completion with the calls of `echo` that have these ids, and its prompt's and its own tokens."""
    made = [{"id": each, "type": "function", "function": {"name": "echo", "arguments": "{}"}} for each in calls]
    message = {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    return {"choices": [{"message": message, "finish_reason": "tool_calls" if made else "stop"}], "usage": usage}


def too_long() -> ContextLengthExceeded:
    return ContextLengthExceeded("too long", hint="be brief")


async def talk(server: Server, *, answer: str = "{}", **options: Any) -> AgentResult:
    async def handler(name: str, arguments: Any, task_id: str) -> str:
        return answer

    given = {"compact_at": LIMIT, "tool_handler": handler, **options}
    return await HermesAgentLoop(server, [TOOL], {"echo"}, **given).run(PROMPT)


def is_whole(messages: list[dict[str, Any]]) -> bool:
    """Return whether each call is answered before anybody else speaks."""
    open_calls: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if not open_calls or message["tool_call_id"] != open_calls.pop(0):
                return False
        elif open_calls:
            return False
        else:
            open_calls = [call["id"] for call in message.get("tool_calls", ())]
    return not open_calls


async def test_a_full_conversation_goes_on_from_the_model_s_summary() -> None:
    server = Server(
        says("I look", "a", "b"),
        says("I look again", "c", tokens=(60, 40)),
        says("It is in x.py"),
        says("I fix it", "d"),
        says("done"),
    )
    result = await talk(server)
    assert (result.stop_reason, result.turns_used) == (StopReason.FINISHED, 5)
    assert [turn.compacted for turn in result.turns] == [False, False, True, False, False]
    request, begun = server.asked[2], server.asked[3]
    assert request == [*server.asked[1], *result.messages[5:7], {"role": "user", "content": REQUEST}]
    assert begun == [PROMPT[0], {"role": "user", "content": f"go\n\n{CONTINUED}\n\nIt is in x.py"}]
    assert server.asked[4] == [*begun, *result.messages[10:12]]
    assert all(map(is_whole, [*server.asked, result.messages]))
    roles = [message["role"] for message in result.messages]
    assert roles == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "tool", "user", "assistant", "user"),
        *("assistant", "tool", "assistant"),
    ]
    assert result.messages[8]["content"] == "It is in x.py"
    seen = contexts(result.messages, [turn.message for turn in result.turns if turn.compacted])
    assert [[result.messages[index] for index in part] for part in seen] == [
        [*request, result.messages[8]],
        [*server.asked[4], result.messages[12]],
    ]


async def test_what_tools_answered_since_the_last_answer_counts() -> None:
    server = Server(says("", "a"), says("sum"), says("done"))
    result = await talk(server, answer=json.dumps({"output": "x" * 3 * LIMIT}))
    assert [turn.compacted for turn in result.turns] == [False, True, False]
    assert "x" * 3 * LIMIT in server.asked[1][3]["content"], "it fits, so the summary is of it, too"


async def test_without_the_setting_a_conversation_ends_where_its_context_does() -> None:
    result = await talk(Server(says("", "a", tokens=(60, 50)), too_long()), compact_at=None)
    assert result.stop_reason is StopReason.CONTEXT_LENGTH
    assert [turn.compacted for turn in result.turns] == [False]


@pytest.mark.parametrize("refused", [1, 2])
async def test_answers_that_do_not_fit_are_left_out(refused: int) -> None:
    """Refused is the next turn, or the request for a summary as well, if it was time for one."""
    tokens = (10, 3) if refused == 1 else (60, 50)
    server = Server(says("", "a", "b", tokens=tokens), too_long(), says("sum"), says("done"))
    answer = json.dumps({"output": "long " * 50})
    result = await talk(server, answer=answer, compact_at=10_000 if refused == 1 else LIMIT)
    assert result.stop_reason is StopReason.FINISHED
    assert [turn.compacted for turn in result.turns] == [False, True, False]
    assert server.asked[1][3]["content"] == answer
    for told in (server.asked[2][3], server.asked[2][4], result.messages[3]):
        assert "this answer of 264 characters was left out" in json.loads(told["content"])["error"]
    assert [(call.error, call.bytes_dropped) for call in result.calls] == [(None, 264), (None, 264)]
    assert is_whole(server.asked[2])


async def test_if_not_even_the_request_fits_the_conversation_ends() -> None:
    server = Server(says("", "a", tokens=(60, 50)), too_long(), too_long())
    result = await talk(server)
    assert (result.stop_reason, result.turns_used, len(server.asked)) == (StopReason.CONTEXT_LENGTH, 1, 3)
    assert [message["role"] for message in result.messages] == ["system", "user", "assistant", "tool"]


async def test_a_summary_that_makes_no_room_is_the_last_one() -> None:
    long = (LIMIT, 10)
    server = Server(says("", "a", tokens=(60, 50)), says("sum"), says("", "b", tokens=long), says("", "c"), too_long())
    result = await talk(server)
    assert result.stop_reason is StopReason.CONTEXT_LENGTH
    assert [turn.compacted for turn in result.turns] == [False, True, False, False]


async def test_a_prompt_that_is_too_long_itself_is_not_summarised() -> None:
    server = Server(says("", "a", tokens=(LIMIT, 3)), says("done", tokens=(2 * LIMIT, 1)))
    assert [turn.compacted for turn in (await talk(server)).turns] == [False, False]


async def test_each_context_can_be_summarised() -> None:
    turns = [says("", "a"), says("", "b", tokens=(60, 50)), says("sum")]
    server = Server(*turns, *turns, says("done"))
    result = await talk(server)
    assert [turn.compacted for turn in result.turns] == [False, False, True, False, False, True, False]
    begun = server.asked[6]
    assert [message["content"].count(CONTINUED) for message in begun] == [0, 1], "the new summary replaces the old one"


async def test_the_last_turn_is_not_spent_on_a_summary() -> None:
    server = Server(says("", "a", tokens=(60, 50)), says("done"))
    result = await talk(server, max_turns=2)
    assert (result.stop_reason, [turn.compacted for turn in result.turns]) == (StopReason.FINISHED, [False, False])
    result = await talk(Server(says("", "a", tokens=(60, 50)), says("sum"), says("", "b")), max_turns=3)
    assert (result.stop_reason, result.turns_used) == (StopReason.MAX_TURNS, 3)


async def test_a_call_in_a_summary_is_not_made() -> None:
    server = Server(says("", "a", tokens=(60, 50)), says("sum", "b"), says("done"))
    result = await talk(server)
    assert (result.tool_calls_executed_ok, result.tool_calls_exec_error) == (1, 1)
    (_, refused) = result.calls
    assert (refused.error and refused.error.kind, refused.turn) == (CallErrorKind.FAILED, 1)
    assert "no tool is called in a summary" in result.messages[refused.message]["content"]
    assert is_whole(result.messages)
    assert server.asked[2][1]["content"].endswith("sum")


async def test_without_a_summary_the_conversation_ends() -> None:
    result = await talk(Server(says("", "a", tokens=(60, 50)), says("  ", "b")))
    assert (result.stop_reason, result.turns_used) == (StopReason.CONTEXT_LENGTH, 2)
    assert not any(turn.compacted for turn in result.turns)
    assert is_whole(result.messages)


async def test_an_endpoint_that_fails_at_a_summary_is_a_failure_as_ever() -> None:
    server = Server(says("", "a", tokens=(60, 50)), ConnectionError("gone"))
    with pytest.raises(ModelError) as failure:
        await talk(server)
    assert failure.value.result is not None
    assert [message["role"] for message in failure.value.result.messages] == ["system", "user", "assistant", "tool"]


async def test_an_endpoint_that_counts_no_tokens_has_them_estimated() -> None:
    none = (0, 0)
    replies = [says("", each, tokens=none) for each in "abcdef"]
    server = Server(*replies[:2], says("sum", tokens=none), says("done", tokens=none))
    result = await talk(server, compact_at=130)
    assert [turn.compacted for turn in result.turns] == [False, False, True, False]


def test_a_task_and_a_summary_are_one_message() -> None:
    part = {"type": "text", "text": "go"}
    made = continue_from({"role": "user", "content": [part]}, "sum")
    assert made == {"role": "user", "content": [part, {"type": "text", "text": f"{CONTINUED}\n\nsum"}]}
    assert continue_from(None, "sum") == {"role": "user", "content": f"{CONTINUED}\n\nsum"}


def test_a_conversation_that_was_never_summarised_is_one_context() -> None:
    messages = [*PROMPT, {"role": "assistant", "content": "a"}]
    assert contexts(messages, []) == [[0, 1, 2]]
    assert contexts([], []) == [[]]


def test_a_share_needs_a_context_that_is_known() -> None:
    settings = ModelSettings(model="m", base_url="http://x/v1", compact_at=0.5)
    with pytest.raises(ConfigError, match=r"compact_at is 0.5, a share .*give a number of tokens"):
        ModelAgent(settings)
    with pytest.raises(ConfigError, match="a share of the context"):
        ModelAgent(settings, Server())
    ModelAgent(settings, Server(), context=1000)
    ModelAgent(ModelSettings(model="m", base_url="http://x/v1", compact_at=1000))


async def test_after_a_follow_up_that_is_the_task() -> None:
    said = [{"role": "user", "content": "now this"}, None]

    async def follow_up() -> Any:
        return said.pop(0)

    server = Server(says("done"), says("I look", "a", tokens=(60, 50)), says("a summary"), says("done"))
    await talk(server, follow_up=follow_up)
    assert server.asked[3] == [PROMPT[0], {"role": "user", "content": f"now this\n\n{CONTINUED}\n\na summary"}]
