"""Trajectories in Harbor's Agent Trajectory Interchange Format, version 1.8, with the exact tokens of each answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hermes_core.agents.base import MASKED, CallRecord, Message, TurnRecord
from hermes_core.records.conversation import calls_in, calls_of, reasoning_of
from hermes_core.records.plain_text import arguments_of, moment, text_of
from hermes_core.records.record import Record
from hermes_core.records.tokens import TokenSequence

VERSION = "ATIF-v1.8"


class AnswerTokens(NamedTuple):
    """The tokens of one answer."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]


def trajectory(record: Record) -> dict[str, Any]:
    """Return a rollout as one ATIF document. Data that the format has no field for is in `extra`."""
    usage, steps = record.usage, list(_steps(record))
    return {
        "schema_version": VERSION,
        "session_id": record.trajectory_id,
        "trajectory_id": record.trajectory_id,
        "agent": _agent(record),
        "steps": steps,
        "final_metrics": _present(
            total_prompt_tokens=usage.prompt_tokens or None,
            total_completion_tokens=usage.completion_tokens or None,
            total_cached_tokens=usage.cached_tokens or None,
            total_cost_usd=usage.cost,
            total_steps=len(steps),
        ),
        "extra": {
            "environment": record.environment,
            "item_id": record.item_id,
            "group": record.group,
            "rollout_index": record.rollout_index,
            "backend": record.backend,
            "reward": record.reward,
            "details": dict(record.details),
            "failure": record.failure and record.failure.to_json(),
            "stop_reason": record.stop_reason,
            "seed": record.seed,
            "versions": dict(record.versions),
        },
    }


def _agent(record: Record) -> dict[str, Any]:
    """Return the agent. A program has its own name and version, and its end and its requests in `extra`."""
    program = record.program or {}
    acp_name = str((program.get("acp") or {}).get("agent") or "")  # `NAME VERSION`, from the program itself
    name, _, version = acp_name.rpartition(" ") if " " in acp_name else (acp_name, "", "")
    ours = record.versions.get("hermes-rl", "unknown") if not program else "unknown"
    return _present(
        name=name or record.agent,
        version=version or record.versions.get(record.agent) or ours,
        model_name=record.model,
        tool_definitions=list(record.tool_schemas) or None,
        extra={key: value for key, value in program.items() if key != "output"} or None,
    )


def _present(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None, because the format allows no null in place of a missing field."""
    return {name: value for name, value in fields.items() if value is not None}


def _steps(record: Record) -> Iterator[dict[str, Any]]:
    turns = {turn.message: turn for turn in record.turns}
    calls = {call.message: call for call in calls_of(record)}
    sampled = _in_order(answers(record.sequences), record.turns)
    messages, times, number, answered = record.messages, record.message_times, 0, 0
    by_answer = sampled if len(sampled) == sum(message["role"] == "assistant" for message in messages) else []
    place = 0
    while place < len(messages):
        message, at = messages[place], times[place]
        number += 1
        step = {"step_id": number, **_present(timestamp=moment(at[0]) if at and at[0] is not None else None)}
        following = place + 1
        if message["role"] == "assistant":
            while following < len(messages) and messages[following]["role"] == "tool":
                following += 1
            tokens = by_answer[answered] if by_answer else None
            results = [(messages[index], calls.get(index)) for index in range(place + 1, following)]
            yield step | _agent_step(message, turns.get(place), tokens, results)
            answered += 1
        else:
            source = message["role"] if message["role"] in ("system", "user") else "system"
            yield step | {"source": source, "message": text_of(message["content"])}
        place = following


def _agent_step(
    message: Message,
    turn: TurnRecord | None,
    tokens: AnswerTokens | None,
    results: Sequence[tuple[Message, CallRecord | None]],
) -> dict[str, Any]:
    calls = calls_in(message)
    observed = {
        "results": [
            _present(
                source_call_id=answer.get("tool_call_id"), content=text_of(answer["content"]), extra=_call_extra(call)
            )
            for answer, call in results
        ]
    }
    return {
        "source": "agent",
        "message": text_of(message["content"]),
        **_present(
            model_name=turn.model if turn else None,
            reasoning_content=reasoning_of(message) or None,
            tool_calls=[_tool_call(call) for call in calls] or None,
            observation=observed if results else None,
            metrics=_metrics(turn, tokens) or None,
            extra=_turn_extra(turn) or None if turn else None,
        ),
    }


def _turn_extra(turn: TurnRecord) -> dict[str, Any]:
    return _present(
        stop_reason=turn.stop_reason, sampling=dict(turn.sampling) or None, compacted=turn.compacted or None
    )


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call. If the model's arguments are no JSON object, `arguments` is empty and their text is kept
    beside it."""
    arguments = arguments_of(call["function"]["arguments"])
    raw = {"extra": {"arguments": call["function"]["arguments"]}} if arguments is None else {}
    return {
        "tool_call_id": call["id"],
        "function_name": call["function"]["name"],
        "arguments": arguments or {},
        **raw,
    }


def _call_extra(call: CallRecord | None) -> dict[str, Any] | None:
    if call is None:
        return None
    seconds = round(call.ended - call.started, 6) if call.started is not None and call.ended is not None else None
    found = _present(
        seconds=seconds,
        error=call.error and call.error.to_json(),
        exit_code=call.exit_code,
        bytes_dropped=call.bytes_dropped or None,
    )
    return found or None


def _metrics(turn: TurnRecord | None, tokens: AnswerTokens | None) -> dict[str, Any]:
    counted = (
        _present(
            prompt_tokens=turn.prompt_tokens or None,
            completion_tokens=turn.completion_tokens or None,
            cached_tokens=turn.cached_tokens,
            cost_usd=turn.cost,
            extra={"reasoning_tokens": turn.reasoning_tokens} if turn.reasoning_tokens is not None else None,
        )
        if turn
        else {}
    )
    if tokens is None:
        return counted
    return counted | {
        "prompt_token_ids": tokens.prompt,
        "completion_token_ids": tokens.completion,
        "logprobs": tokens.logprobs,
    }


def _in_order(sampled: list[AnswerTokens], turns: Sequence[TurnRecord]) -> list[AnswerTokens]:
    """Return the answers in the order of the turns, matched by length. The order in the sequences differs if the agent
    left some answers behind."""
    left, found = [*sampled], []
    for turn in turns:
        lengths = (turn.prompt_tokens, turn.completion_tokens)
        place = next((n for n, each in enumerate(left) if (len(each.prompt), len(each.completion)) == lengths), None)
        if place is None:
            return sampled
        found.append(left.pop(place))
    return [*found, *left]


def answers(sequences: Sequence[TokenSequence]) -> list[AnswerTokens]:
    """Return the tokens of each answer: each unbroken run of tokens that the model wrote is one answer, because a token
    of the chat template is always between two answers."""
    found = []
    for sequence in sequences:
        begin = None
        for place, mask in enumerate([*sequence.masks, MASKED]):
            if mask != MASKED:
                begin = place if begin is None else begin
            elif begin is not None:
                tokens, logprobs = sequence.tokens, sequence.logprobs
                found.append(
                    AnswerTokens(tokens[:begin].tolist(), tokens[begin:place].tolist(), logprobs[begin:place].tolist())
                )
                begin = None
    return found
