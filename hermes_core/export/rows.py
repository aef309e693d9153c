"""Rows for training: one for each conversation (`openai`, `trl`), sequence of tokens, or pair of rollouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hermes_core.agents.base import MASKED, Message
from hermes_core.export.selection import Candidate, ExportFilters, Selection, best_of_each
from hermes_core.export.tables import JSON, Columns, Kind, TableRow
from hermes_core.records.conversation import calls_in, conversations, prompt_length, reasoning_of
from hermes_core.records.jsonable import json_text, redact_value
from hermes_core.records.plain_text import arguments_of, text_of, what_differs
from hermes_core.records.record import Record

_ABOUT: Columns = {
    "trajectory_id": "string",
    "environment": "string",
    "item_id": "string",
    "group": "string",
    "rollout_index": "int",
    "agent": "string",
    "model": "string",
    "reward": "float",
    "stop_reason": "string",
    "failure": "string",
}


def _about(record: Record) -> dict[str, Any]:
    """Return the columns that identify a row's rollout, and those with its outcome."""
    return {name: getattr(record, name) for name in _ABOUT} | {"failure": record.failure and str(record.failure.kind)}


def _messages_with(arguments: Kind) -> Kind:
    function = {"name": "string", "arguments": arguments}
    return [
        {
            "role": "string",
            "content": "string",
            "reasoning_content": "string",
            "tool_calls": [{"id": "string", "type": "string", "function": function}],
            "tool_call_id": "string",
            "name": "string",
        }
    ]


def without_answer(record: Record) -> str | None:
    """Return the reason to leave out a rollout in which the model gave no answer; else None."""
    return None if prompt_length(record.messages) < len(record.messages) else "no answer"


# ---------------------------------------------------------------------- openai

OPENAI: Columns = {"messages": _messages_with("string"), "tools": JSON, **_ABOUT}


def openai_rows(selection: Selection, record: Record) -> Iterator[TableRow]:
    """Yield each conversation in the form of API requests: the arguments of a call are JSON text."""
    for messages in conversations(record):
        wire = [_wire(message) for message in messages]
        yield {"messages": wire, "tools": list(record.tool_schemas), **_about(record)}


_WIRE = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


def _wire(message: Message) -> Message:
    wire = {key: message[key] for key in _WIRE if key in message}
    return {**wire, "tool_calls": calls_in(message)} if "tool_calls" in wire else wire


# ---------------------------------------------------------------------- trl

TRL: Columns = {"messages": _messages_with(JSON), "tools": "string", **_ABOUT}


def trl_rows(selection: Selection, record: Record) -> Iterator[TableRow]:
    """Yield each conversation in the form for chat templates: the arguments of a call are an object, or text if the
    model did not write an object.

    `tools` is JSON text, because Arrow would give the schema of each tool the keys of all others.
    """
    for messages in conversations(record):
        rendered = [_for_template(message) for message in messages]
        yield {"messages": rendered, "tools": _tools(record), **_about(record)}


def _tools(record: Record) -> str | None:
    return json_text(list(record.tool_schemas)) if record.tool_schemas else None


def _for_template(message: Message) -> Message:
    row: Message = {"role": message["role"], "content": text_of(message["content"])}
    if reasoning := reasoning_of(message):
        row["reasoning_content"] = reasoning
    if calls := calls_in(message):
        row["tool_calls"] = [{**call, "function": _for_function(call["function"])} for call in calls]
    return {**row, **{key: message[key] for key in ("tool_call_id", "name") if key in message}}


def _for_function(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = arguments_of(function["arguments"])
    return {"name": function["name"], "arguments": function["arguments"] if arguments is None else arguments}


# ---------------------------------------------------------------------- tokens

TOKENS: Columns = {
    "input_ids": ["token"],
    "attention_mask": ["token"],
    "labels": ["token"],
    "logprobs": ["float"],
    "sequence": "int",
    **_ABOUT,
}


def token_rows(selection: Selection, record: Record) -> Iterator[TableRow]:
    """Yield the tokens that the model read and wrote, as the server recorded them: a row for each sequence.

    `labels` has -100 for every token that the model did not write; its logprob is 0.
    """
    for number, sequence in enumerate(record.sequences):
        masks = sequence.masks
        yield {
            "input_ids": sequence.tokens.tolist(),
            "attention_mask": [1] * len(sequence.tokens),
            "labels": masks.tolist(),
            "logprobs": [
                0.0 if mask == MASKED else logprob for mask, logprob in zip(masks, sequence.logprobs, strict=True)
            ],
            "sequence": number,
            **_about(record),
        }


def without_tokens(record: Record) -> str | None:
    """Return the reason to leave out a rollout without exact tokens; else None."""
    if record.sequences:
        return None
    return f"no exact tokens: {record.tokens_refused}" if record.tokens_refused else "no exact tokens"


# ---------------------------------------------------------------------- preference

_SIDE = _messages_with(JSON)
PREFERENCE: Columns = {
    "prompt": _SIDE,
    "chosen": _SIDE,
    "rejected": _SIDE,
    "tools": "string",
    "score_chosen": "float",
    "score_rejected": "float",
    "environment": "string",
    "item_id": "string",
    "group": "string",
    "chosen_id": "string",
    "rejected_id": "string",
}


def preference_rows(selection: Selection, better: Record, worse: Record) -> Iterator[TableRow]:
    """Yield the row of a pair. In the worse rollout, the names of its slot are replaced by those of the better one's:
    otherwise a model could recognize the worse rollout by names that are not in the prompt."""
    length = prompt_length(better.messages)
    rename = _renaming(worse.messages[:length], better.messages[:length])
    yield {
        "prompt": [_for_template(message) for message in better.messages[:length]],
        "chosen": [_for_template(message) for message in better.messages[length:]],
        "rejected": redact_value([_for_template(message) for message in worse.messages[length:]], rename),
        "tools": _tools(better),
        "score_chosen": better.reward,
        "score_rejected": worse.reward,
        "environment": better.environment,
        "item_id": better.item_id,
        "group": better.group,
        "chosen_id": better.trajectory_id,
        "rejected_id": worse.trajectory_id,
    }


def _renaming(theirs: Sequence[Message], ours: Sequence[Message]) -> Callable[[str], str]:
    """Return a function that replaces in a text, where two prompts differ, the names in `theirs` by those in `ours`."""
    found = [
        [name for message in prompt for name in what_differs(text_of(message["content"]))] for prompt in (theirs, ours)
    ]
    names = {their: our for their, our in zip(*found, strict=False) if their != our}
    if not names:
        return str
    pattern = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, names))})(?!\w)")
    return lambda text: pattern.sub(lambda place: names[place[1]], text)


def without_reward(record: Record) -> str | None:
    """Return the reason to leave a rollout without a reward out of pairs; else None."""
    return "no reward" if record.reward is None else without_answer(record)


def pair_up(selection: Selection, filters: ExportFilters) -> None:
    """Pair rollouts of one group with the same prompt and different rewards. Rollouts in no pair are left out.

    The highest reward is paired with the lowest, the next with the next, so each rollout is in at most one pair. The
    conditions for rewards apply to the chosen rollout, and the limit per item to the pairs.
    """
    groups: dict[tuple[str, bytes], list[Candidate]] = {}
    for candidate in selection.chosen:
        groups.setdefault((candidate.row.group, candidate.prompt), []).append(candidate)
    pairs = [pair for members in groups.values() for pair in _pairs_of(members)]
    pairs = [pair for pair in pairs if filters.refuse_reward(pair[0].row.reward) is None]
    if filters.per_item is not None:
        pairs = best_of_each(pairs, filters.per_item, lambda pair: pair[0].row)
    paired = {candidate.row.offset for pair in pairs for candidate in pair}
    selection.keep([candidate for candidate in selection.chosen if candidate.row.offset in paired], "in no pair")
    selection.pairs = pairs


def _pairs_of(members: list[Candidate]) -> Iterator[tuple[Candidate, Candidate]]:
    ordered = sorted(members, key=lambda candidate: -(candidate.row.reward or 0.0))
    for better, worse in zip(ordered[: len(ordered) // 2], reversed(ordered), strict=False):
        if better.row.reward != worse.row.reward and better.conversation != worse.conversation:
            yield better, worse
