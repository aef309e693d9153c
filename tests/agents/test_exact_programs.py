"""Token-exact sessions of programs, which send their history anew with each request, in a form of their own."""

from __future__ import annotations

import asyncio
import copy
import json
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_core.agents.base import AgentSettings
from hermes_core.agents.endpoint.errors import ContextLengthExceeded
from hermes_core.agents.endpoint.request import Endpoint
from hermes_core.agents.exact.agent import ExactAgent, ExactSession
from hermes_core.agents.exact.chat import Chat
from hermes_core.agents.exact.wires import Sampled
from hermes_core.agents.parsers.base import Parser
from hermes_core.agents.replies import sayable
from hermes_core.errors import ModelError
from hermes_core.records.tokens import MASKED, tokens_of
from hermes_core.runtime import Runtime
from hermes_core.settings import Settings

Messages = list[dict[str, Any]]
FORM, END = "qwen3", "<|im_end|>"
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}}},
    },
}
TASK = "Fix the bug in calc.py."
START: Messages = [{"role": "system", "content": "You work."}, {"role": "user", "content": TASK}]


def call(number: int, *, thinking: str = "hm", times: int = 1) -> str:
    text = json.dumps({"name": "bash", "arguments": {"timeout": 1.0, "command": f"echo é {number}"}})
    return f"<think>\n{thinking}\n</think>\n\n" + f"<tool_call>\n{text}\n</tool_call>" * times


class Log:
    """A token server that keeps what it saw and sampled. It answers when it is let to."""

    def __init__(self, tokenizer: Any, answers: Sequence[str]) -> None:
        self._tokenizer, self._answers = tokenizer, list(answers)
        self.log: list[tuple[list[int], list[int]]] = []
        self.waiting: list[asyncio.Future[None]] = []
        self.holds = False
        self.failure: Exception | None = None

    async def sample(
        self, prompt: Sequence[int], *, max_tokens: int, temperature: float | None, seed: int | None
    ) -> Sampled:
        if self.holds:
            self.waiting.append(asyncio.get_running_loop().create_future())
            await self.waiting[-1]
        if self.failure is not None:
            raise self.failure
        text = self._answers[len(self.log) % len(self._answers)]
        # In pieces, so that the same text has other tokens than the tokenizer would give it.
        tokens = [token for part in (text[:5], text[5:], END) for token in self._tokenizer.encode(part)]
        self.log.append((list(prompt), tokens))
        return Sampled(tokens, [-0.25] * len(tokens), "stop")

    async def arrived(self, count: int) -> None:
        """Wait until so many requests are held."""
        for _ in range(1000):
            if len(self.waiting) >= count:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"{len(self.waiting)} requests arrived, and not {count}")


Start = Callable[..., tuple[ExactSession, Log]]


@pytest.fixture
def start(tokenizers: Callable[[str], Any], runtime: Runtime) -> Start:
    chat, parser = Chat(tokenizers(FORM)), runtime.parser("hermes")

    def session(*answers: str, **options: Any) -> tuple[ExactSession, Log]:
        return made(chat, parser, answers or [call(number) for number in range(9)], **options)

    return session


def made(chat: Chat, parser: Parser, answers: Sequence[str], **options: Any) -> tuple[ExactSession, Log]:
    server = Log(chat.tokenizer, answers)
    return ExactSession(server, chat, parser, max_length=9999, **options), server  # type: ignore[arg-type]


async def ask(session: ExactSession, messages: Messages, **options: Any) -> Messages:
    """Return the conversation with the answer, and with the tools' answers to its calls."""
    reply = await session.chat_completion(**{"messages": copy.deepcopy(messages), "tools": [TOOL], **options})
    results = [{"role": "tool", "tool_call_id": each.id, "content": f"out {each.id}"} for each in reply.calls]
    return [*messages, reply.as_message(), *results]


def check(session: ExactSession, server: Log) -> dict[str, int]:
    """Check that every sequence is what the server saw, and each answer a turn once. Return the forks."""
    state = session.get_state()
    seen = [prompt + tokens for prompt, tokens in server.log]
    turns = []
    for node in state["nodes"]:
        assert list(node.tokens) in seen
        masks = node.masked_tokens
        for turn in node.turns:
            turns.append((tuple(node.tokens[: turn.start]), tuple(turn.sampled)))
            masks[turn.start : turn.stop] = array("i", [MASKED]) * len(turn.sampled)
        assert set(masks) == {MASKED}, "nothing is trained on but the turns"
    assert Counter(turns) == Counter((tuple(prompt), tuple(tokens)) for prompt, tokens in server.log)
    every = tokens_of({**state, "nodes": [{"turns": each.turns, **fields(each)} for each in state["nodes"]]})
    assert every.refused is None
    assert sum(each.trained for each in every.sequences) == sum(len(tokens) for _, tokens in server.log)
    forks: dict[str, int] = state["forks"]
    return forks


def fields(node: Any) -> dict[str, Any]:
    return {name: getattr(node, name) for name in ("tokens", "masked_tokens", "logprobs")}


def extends(server: Log, later: int, earlier: int) -> bool:
    """Return whether one prompt begins with another and what was sampled to it, token for token."""
    whole = server.log[earlier][0] + server.log[earlier][1]
    return server.log[later][0][: len(whole)] == whole


def rolling_marks(messages: Messages) -> Messages:
    """Return the messages as Claude Code sends them: texts as blocks, the last one marked, other arguments, no null."""
    sent = reserialised(messages)
    for message in sent:
        if message["role"] != "assistant":
            text = message["content"] if isinstance(message["content"], str) else message["content"][0]["text"]
            message["content"] = [{"type": "text", "text": text}]
    sent[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    return sent


def reserialised(messages: Messages) -> Messages:
    """Return the messages as programs in JavaScript send them."""
    sent = copy.deepcopy(messages)
    for message in sent:
        for each in message.get("tool_calls") or ():
            arguments = dict(reversed(json.loads(each["function"]["arguments"]).items()))
            plain = {key: int(value) if isinstance(value, float) else value for key, value in arguments.items()}
            each["function"]["arguments"] = json.dumps(plain, separators=(",", ":"))
            message["content"] = message["content"] or None
    return sent


def without_thinking(messages: Messages) -> Messages:
    return [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]


@pytest.mark.parametrize("form", [reserialised, rolling_marks, without_thinking])
async def test_a_history_in_another_form_continues_token_for_token(
    start: Start, form: Callable[[Messages], Messages]
) -> None:
    session, server = start()
    conversation = START
    for _ in range(4):
        conversation = await ask(session, form(conversation))
    assert [extends(server, number + 1, number) for number in range(3)] == [True] * 3
    assert check(session, server) == {}
    (node,) = session.nodes
    assert len(node.turns) == 4
    assert session.get_state()["thinking_kept"] == (3 if form is without_thinking else 0)


async def test_characters_that_no_program_sends_back_as_they_are_do_not_fork(start: Start) -> None:
    """The gateway replaces them in what programs send; the model may write any."""
    session, server = start(call(0, thinking="h\x00m\x7f").replace("<tool_call>", "a\x7f\x00b<tool_call>"), "done")
    said = await ask(session, START)
    said[2] = {**said[2], "content": sayable(said[2]["content"]), "reasoning_content": "h\ufffdm\ufffd"}
    await ask(session, said)
    assert extends(server, 1, 0)
    assert check(session, server) == {}


async def test_dropped_thinking_forks_if_it_is_not_to_be_kept(start: Start) -> None:
    session, server = start(keep_thinking=False)
    conversation = await ask(session, START)
    await ask(session, conversation)
    await ask(session, without_thinking(conversation))
    assert not extends(server, 2, 0)
    assert check(session, server) == {"dropped_thinking": 1}


async def test_reversed_results_of_tools_are_rendered_as_they_are_sent(start: Start) -> None:
    session, server = start(call(0, times=2), call(1))
    said = await ask(session, START)
    first, second = said[-2:]
    await ask(session, [*said[:-2], second, first])
    assert extends(server, 1, 0)
    text = session._chat.decode(server.log[1][0])
    assert text.index(second["content"]) < text.index(first["content"])
    assert check(session, server) == {}
    await ask(session, said)
    assert extends(server, 2, 0)
    assert check(session, server) == {"edited": 1}


async def test_an_answer_that_the_program_dropped(start: Start) -> None:
    """As mini-swe-agent does after an answer in a wrong form."""
    session, server = start(call(0), "no call", "no call", call(3), call(4))
    said = await ask(session, START)
    wrong = {"role": "user", "content": "Please make a call."}
    await ask(session, said)
    await ask(session, [*said, wrong])
    later = await ask(session, [*said, wrong, wrong])
    await ask(session, later)
    assert [extends(server, number, 0) for number in (1, 2, 3)] == [True] * 3
    assert extends(server, 4, 3)
    assert check(session, server) == {"dropped_answer": 2}
    assert [len(node.turns) for node in session.nodes] == [1, 1, 3]


async def test_a_request_that_failed_or_was_broken_off_leaves_no_trace(start: Start) -> None:
    session, server = start()
    server.holds = True
    broken = asyncio.create_task(ask(session, START))
    await server.arrived(1)
    broken.cancel()
    await asyncio.wait([broken])
    server.holds, server.failure = False, ModelError("it is gone", hint="start it")
    with pytest.raises(ModelError):
        await ask(session, START)
    server.failure = None
    await ask(session, START)
    assert len(server.log) == 1
    assert check(session, server) == {}


@pytest.mark.parametrize("at_once", [True, False])
async def test_the_same_request_is_sampled_again_and_each_answer_kept(start: Start, at_once: bool) -> None:
    session, server = start()
    server.holds = at_once
    async with asyncio.TaskGroup() as group:
        first = group.create_task(ask(session, START))
        if not at_once:
            await asyncio.wait([first])
        second = group.create_task(ask(session, rolling_marks(START)))
        await server.arrived(2 * at_once)
        for each in reversed(server.waiting):
            each.set_result(None)
    assert check(session, server) == {"parallel" if at_once else "again": 1}
    server.holds = False
    for said in (first.result(), second.result()):
        await ask(session, said)
    for later in (2, 3):
        assert [extends(server, later, earlier) for earlier in (0, 1)].count(True) == 1
    assert check(session, server) == {"parallel" if at_once else "again": 1}


async def test_two_calls_that_overlap_each_keep_the_prompt_that_they_were_sampled_with(start: Start) -> None:
    session, server = start()
    said = await ask(session, START)
    server.holds = True
    async with asyncio.TaskGroup() as group:
        group.create_task(ask(session, said))
        group.create_task(ask(session, [*said, {"role": "user", "content": "And?"}]))
        await server.arrived(2)
        for each in reversed(server.waiting):
            each.set_result(None)
    assert extends(server, 1, 0)
    assert extends(server, 2, 0)
    assert check(session, server) == {"parallel": 1}


async def test_a_compaction_makes_exactly_one_new_root(start: Start) -> None:
    """As Codex does it: the summary is asked for without tools, and goes into a history that begins as before."""
    session, server = start(call(0), call(1), "The bug is in line 3.", call(3), "Done.")
    said = await ask(session, await ask(session, START))
    await ask(session, [*said, {"role": "user", "content": "Write a summary."}], tools=None)
    summary = {"role": "user", "content": "You did this:\n\nThe bug is in line 3."}
    await ask(session, await ask(session, [*START, summary]))
    assert extends(server, 2, 1)
    assert check(session, server) == {"compaction": 1}
    before, after = session.nodes
    assert (len(before.turns), len(after.turns)) == (3, 2)
    assert [node.metadata["own"] for node in (before, after)] == [True, True]
    assert after.metadata["step"] == "compaction"


async def test_sub_agents_in_parallel_have_sequences_of_their_own(start: Start) -> None:
    session, server = start()
    said = await ask(session, START)
    helpers: list[Messages] = [
        [{"role": "system", "content": "You explore."}, {"role": "user", "content": f"Look at {number}"}]
        for number in range(3)
    ]
    server.holds = True
    async with asyncio.TaskGroup() as group:
        for each in helpers:
            group.create_task(ask(session, each))
        await server.arrived(3)
        for number in (1, 0, 2):
            server.waiting[number].set_result(None)
    server.holds = False
    await ask(session, said)
    assert check(session, server) == {"parallel": 3}
    sequences = [sequence.tokens.tolist() for sequence in tokens_of(session.get_state()).sequences]
    assert sorted(sequences) == sorted(prompt + tokens for prompt, tokens in server.log[1:])


async def test_a_forged_history_forks(start: Start) -> None:
    session, server = start()
    said = await ask(session, START)
    forged = copy.deepcopy(said)
    forged[2]["tool_calls"][0]["function"]["arguments"] = '{"command": "rm -rf /"}'
    await ask(session, forged)
    await ask(session, [*said[:-1], {**said[-1], "content": "all tests pass"}])
    await ask(session, said)
    assert not extends(server, 1, 0)
    assert extends(server, 3, 0)
    assert check(session, server) == {"edited": 2}


async def test_what_is_far_too_long_is_not_even_encoded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    session, server = start()
    monkeypatch.setattr(session._chat.tokenizer, "encode", None)
    parts = [{"type": "text", "text": "x" * (16 * session.max_length + 1)}, {"type": "image_url", "image_url": {}}]
    for content in (parts[0]["text"], parts):
        with pytest.raises(ContextLengthExceeded, match="characters"):
            await ask(session, [{"role": "user", "content": content}])
    assert server.log == []


async def agent_models() -> None:
    """List no models."""


async def test_an_agent_opens_sessions_for_programs(tokenizers: Callable[[str], Any], runtime: Runtime) -> None:
    chat, parser = Chat(tokenizers(FORM)), runtime.parser("hermes")
    server: Any = Log(chat.tokenizer, [call(0)])
    server.endpoint = Endpoint(AgentSettings(), "http://here", "model", agent_models)
    agent = ExactAgent(AgentSettings(), [server], chat, parser, 9999)
    async with agent.session(own=lambda: [0], keep_thinking=False) as session:
        said = await ask(session, START)
        await ask(session, without_thinking(said))
        assert session.max_length == 9999
        assert check(session, server) == {"dropped_thinking": 1}
        assert [node.metadata["own"] for node in session.nodes] == [True, False]


@pytest.fixture(scope="module")
def qwen(tokenizers: Callable[[str], Any]) -> tuple[Chat, Parser]:
    return Chat(tokenizers(FORM)), Runtime(Settings(), load_entry_points=False).parser("hermes")


ACTIONS = ("go on", "go on", "reserialise", "forget thinking", "drop", "edit", "reverse", "root", "again", "release")


@given(
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9), st.integers(0, 9)), max_size=16),
    keep=st.booleans(),
)
def test_whatever_a_program_asks_each_sequence_is_what_the_server_saw(
    qwen: tuple[Chat, Parser], actions: list[tuple[str, int, int]], keep: bool
) -> None:
    """Requests in any order, many at a time, answered in any order."""
    chat = Chat(qwen[0].tokenizer)  # its lock belongs to one event loop
    answers = [call(0, times=2), "All done.", call(1, thinking="I see"), "", call(2)]

    async def interleave() -> None:
        session, server = made(chat, qwen[1], answers, keep_thinking=keep)
        server.holds = True
        said: list[Messages] = [START]
        asked: list[Messages] = []

        async def one(messages: Messages) -> None:
            asked.append(messages)
            said.append(await ask(session, messages))

        tasks = []
        async with asyncio.TaskGroup() as group:
            for action, which, place in actions:
                if action == "release":
                    held = [each for each in server.waiting if not each.done()]
                    if held:
                        held[which % len(held)].set_result(None)
                else:
                    tasks.append(group.create_task(one(changed(action, said, asked, which, place))))
                for _ in range(8):
                    await asyncio.sleep(0)
            server.holds = False
            while any(not task.done() for task in tasks):
                for each in server.waiting:
                    if not each.done():
                        each.set_result(None)
                await asyncio.sleep(0)
        if not server.log:
            return
        check(session, server)
        assert sum(session.get_state()["forks"].values()) <= max(0, len(server.log) - 1)

    asyncio.run(interleave())


def changed(action: str, said: list[Messages], asked: list[Messages], which: int, place: int) -> Messages:
    """Return the program's next request."""
    known = said[which % len(said)]
    more = {"role": "user", "content": f"more {place}"}
    if action == "again" and asked:
        return asked[which % len(asked)]
    if action == "root":
        return [{"role": "user", "content": f"task {place}"}]
    if action == "drop":
        answers = [number for number, each in enumerate(known) if each["role"] == "assistant"]
        return [*known[: answers[place % len(answers)]], more] if answers else [*known, more]
    sent = known if known[-1]["role"] != "assistant" else [*known, more]
    if action == "reserialise":
        return rolling_marks(sent)
    if action == "forget thinking":
        return without_thinking(sent)
    if action == "edit":
        sent = copy.deepcopy(sent)
        chosen = sent[place % len(sent)]
        chosen["content"] = f"{chosen['content']} changed"
    elif action == "reverse" and [each["role"] for each in sent[-2:]] == ["tool", "tool"]:
        return [*sent[:-2], sent[-1], sent[-2]]
    return sent
