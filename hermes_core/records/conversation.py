"""Reads texts, reasoning, tool calls and token counts from recorded conversations, for the formats of exports."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from hermes_core.agents.base import CallError, CallErrorKind, CallRecord, Message
from hermes_core.agents.compaction import contexts
from hermes_core.records.plain_text import parse_container, text_of
from hermes_core.records.record import Record


def reasoning_of(message: Message) -> str:
    """Return the reasoning that came with an answer, apart from its text; empty if there is none."""
    return text_of(message.get("reasoning_content")).strip()


def has_reasoning(record: Record) -> bool:
    """Return whether any answer has reasoning, apart from its text or within it."""
    return any(
        reasoning_of(message) or "<think>" in text_of(message["content"])
        for message in record.messages
        if message["role"] == "assistant"
    )


def calls_in(message: Message) -> list[dict[str, Any]]:
    """Return the tool calls of a message, each with the keys of the OpenAI form and no others."""
    return [_call(call, call.get("function") or {}) for call in message.get("tool_calls") or ()]


def _call(call: Mapping[str, Any], function: Mapping[str, Any]) -> dict[str, Any]:
    written = {"name": function.get("name", ""), "arguments": text_of(function.get("arguments", "{}"))}
    return {"id": str(call.get("id", "")), "type": "function", "function": written}


def conversations(record: Record) -> list[list[Message]]:
    """Return the conversations as the model saw them: the whole one, or several if the agent went on from summaries."""
    summaries = [turn.message for turn in record.turns if turn.compacted]
    parts = [[record.messages[index] for index in part] for part in contexts(record.messages, summaries)]
    return [part for part in parts if prompt_length(part) < len(part)]


def prompt_length(messages: Sequence[Message]) -> int:
    """Return the number of messages before the model's first answer."""
    return next((place for place, each in enumerate(messages) if each["role"] == "assistant"), len(messages))


def token_count(record: Record) -> int | None:
    """Return the length of the whole conversation in tokens; None if it is not known.

    This is the length of the longest exact sequence, or else the endpoint's token count for the last answer.
    """
    if record.sequences:
        return max(len(sequence.tokens) for sequence in record.sequences)
    if not record.turns:
        return None
    last = record.turns[-1]
    return (last.prompt_tokens + last.completion_tokens) or None


def calls_of(record: Record) -> Sequence[CallRecord]:
    """Return the model's tool calls. For a record of version 1, which keeps none, they are read from the messages."""
    return record.calls or tuple(_calls_in_messages(record.messages))


def _calls_in_messages(messages: Sequence[Message]) -> Iterator[CallRecord]:
    turn = -1
    open_calls: dict[str, Mapping[str, Any]] = {}
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            turn += 1
            open_calls = {call["id"]: call["function"] for call in calls_in(message)}
        elif message["role"] == "tool" and (function := open_calls.get(message.get("tool_call_id", ""))):
            yield CallRecord(
                turn=turn,
                message=place,
                id=message["tool_call_id"],
                name=function["name"],
                arguments=function["arguments"],
                error=_error_in(text_of(message["content"])),
            )


def _error_in(answer: str) -> CallError | None:
    """Return the error that a tool's answer reports, or None. An answer with an exit code reports none: its command
    ran."""
    value = parse_container(answer)
    if not isinstance(value, dict) or not value.get("error") or value.get("exit_code") is not None:
        return None
    return CallError(CallErrorKind.FAILED, str(value["error"]))


def digest(messages: Sequence[Message]) -> bytes:
    """Return 16 bytes that are equal for equal conversations. The ids of calls, which servers draw, do not matter."""
    forms = [
        [
            message["role"],
            text_of(message["content"]),
            reasoning_of(message),
            [[call["function"]["name"], call["function"]["arguments"]] for call in calls_in(message)],
        ]
        for message in messages
    ]
    return blake2b(json.dumps(forms).encode(), digest_size=16).digest()
