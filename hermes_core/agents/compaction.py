"""Compaction: a conversation that outgrows its context goes on from a summary that its model writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from hermes_core.agents.base import AgentResult, CallError, CallErrorKind, Message, ToolAnswer, TurnRecord

REQUEST = """\
This conversation has become almost too long. Write a summary of it now, and call no tool. You will then go on with \
the task, and see nothing but the task and your summary. So write down what you have done, what you have found out, \
with the names of the files, commands and errors that matter, and what is left to do."""
"""The message that asks for a summary."""

CONTINUED = "You have worked on this before. This is the summary that you wrote of it, to go on from:"
"""The text between a task and the summary of the work on it."""

LEFT_OUT = "this answer of {characters} characters was left out, because it did not fit into the context: ask for less"
"""The text for the model in place of a tool's answer that is too long."""

CHARACTERS_PER_TOKEN = 3
"""Estimate for messages that the model was not sent yet. English text has four characters per token; code and logs have
fewer."""

_NO_CALLS = CallError(CallErrorKind.FAILED, "no tool is called in a summary")


class Context:
    """The part of a conversation that the model sees: all of it, or what follows its last summary.

    Args:
        result: keeps the whole conversation. At this time, it has only the prompt.
        compact_at: number of tokens from which the conversation is summarised; None if it never is.
    """

    def __init__(self, result: AgentResult, compact_at: int | None) -> None:
        self._result = result
        self._compact_at = compact_at
        last = result.messages[-1] if result.messages else None
        self._task = last if last is not None and last["role"] == "user" else None
        self._before = result.messages[:-1] if self._task is not None else [*result.messages]
        self._begin = 0

    def ask(self, message: Message) -> None:
        """Add the user's next message, which is the task from now on."""
        self._result.messages.append(message)
        self._task = message

    @property
    def messages(self) -> list[Message]:
        """Return the messages that the model sees."""
        seen = self._result.messages[self._begin :]
        return [*self._before, *seen] if self._begin else seen

    @property
    def can_shrink(self) -> bool:
        """Return whether a summary can make room: the model has answered since the last summary, and the messages that
        would stay before a new one are short."""
        turns = self._turns
        return self._compact_at is not None and bool(turns) and self._tokens_before(turns[0]) < self._compact_at

    @property
    def is_full(self) -> bool:
        """Return whether it is time for a summary."""
        if self._compact_at is None or not self.can_shrink:
            return False
        last = self._turns[-1]
        answer, since = self._result.messages[last.message], self._result.messages[last.message + 1 :]
        tokens = (
            self._tokens_before(last) + (last.completion_tokens or _estimate_tokens([answer])) + _estimate_tokens(since)
        )
        return tokens >= self._compact_at

    def leave_out_last_answers(self) -> None:
        """Replace long answers of tools in the last turn, which the model has not seen, by the note `LEFT_OUT`."""
        last = len(self._result.turns) - 1
        for number, call in enumerate(self._result.calls):
            message = self._result.messages[call.message]
            left_out = LEFT_OUT.format(characters=len(message["content"]))
            note = str(ToolAnswer.refusal(CallError(CallErrorKind.FAILED, left_out)))
            if call.turn == last and len(message["content"]) > len(note):
                dropped = call.bytes_dropped + len(message["content"].encode())
                self._result.calls[number] = replace(call, bytes_dropped=dropped)
                message["content"] = note

    def go_on_from(self, summary: str) -> None:
        """Add the message with which the conversation goes on: the task, and a summary of the work on it. Of earlier
        messages, the model then sees only those before the task."""
        self._begin = len(self._result.messages)
        self._result.messages.append(continue_from(self._task, summary))

    @property
    def _turns(self) -> list[TurnRecord]:
        """Return the answers that the model sees."""
        return [turn for turn in self._result.turns if turn.message >= self._begin]

    def _tokens_before(self, turn: TurnRecord) -> int:
        if turn.prompt_tokens:
            return turn.prompt_tokens
        return _estimate_tokens([*self._before, *self._result.messages[self._begin : turn.message]])


def continue_from(task: Message | None, summary: str) -> Message:
    """Return the message with the task and a summary of the work on it: one message, because many chat templates refuse
    two user messages in a row.

    Args:
        task: the last message of the prompt; None if it is not the user's.
    """
    note = f"{CONTINUED}\n\n{summary}"
    if task is None:
        return {"role": "user", "content": note}
    content = task["content"]
    if not isinstance(content, str):
        return {**task, "content": [*content, {"type": "text", "text": note}]}
    return {**task, "content": f"{content}\n\n{note}"}


def contexts(messages: Sequence[Message], summaries: Iterable[int]) -> list[list[int]]:
    """Return the contexts of a recorded conversation, each as the indexes of its messages. The first context reaches
    from the beginning to the first summary, and each other context from a summary to the next. A summary is the last
    message of its context. System messages after a summary replace the prompt's messages before the task.

    Args:
        summaries: the indexes of the answers that are summaries (`TurnRecord.compacted`).
    """
    roles = [message["role"] for message in messages]
    prompt = roles.index("assistant") if "assistant" in roles else len(roles)
    before = prompt - (roles[prompt - 1 : prompt] == ["user"])
    begins = [_after(roles, summary) for summary in summaries if "user" in roles[summary:]]
    edges = pairwise([0, *begins, len(roles)])
    kept = [range(before if begin and roles[begin] == "user" else 0) for begin in (0, *begins)]
    return [[*prompt, *range(begin, end)] for prompt, (begin, end) in zip(kept, edges, strict=True)]


def _after(roles: Sequence[str], summary: int) -> int:
    """Return the index of the message with which a conversation goes on after the message with index `summary`: the
    user's next message, or the first system message right before it."""
    begin = roles.index("user", summary)
    while roles[begin - 1] == "system":
        begin -= 1
    return begin


async def refuse_call(name: str, arguments: object, task_id: str) -> ToolAnswer:
    """Refuse a tool call that the model makes in a summary. This is a `ToolHandler`."""
    return ToolAnswer.refusal(_NO_CALLS)


def _estimate_tokens(messages: Sequence[Message]) -> int:
    """Return about how many tokens these messages have."""
    return sum(len(json.dumps(message, ensure_ascii=False)) for message in messages) // CHARACTERS_PER_TOKEN
