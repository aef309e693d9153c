"""Reads conversations of hermes-agent's batch runner as records: the reverse of the export format `sharegpt`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hermes_core import CallRecord, DatasetError, Record, TurnRecord, UsageError

_BATCH = re.compile(r"batch_\d+\.jsonl")
_TOOLS = re.compile(r"<tools>\n(.*)\n</tools>")
_THOUGHT = re.compile(r"<think>\n(.*?)\n?</think>\n?", re.DOTALL)
# Calls and responses have their JSON in one line. This distinguishes them from the same tags in an answer's text.
_CALL = re.compile(r'^<tool_call>\n(\{"name": .*\})\n</tool_call>\n?', re.MULTILINE)
_RESPONSE = re.compile(r'^<tool_response>\n(\{"tool_call_id": .*\})\n</tool_response>$', re.MULTILINE)

Message = dict[str, Any]


def read_batch_run(folder: Path) -> Iterator[Record]:
    """Yield the record of each conversation of the batch runner.

    Args:
        folder: the folder of a run, or one file of rows.

    Raises:
        UsageError: there is no such run.
        DatasetError: a line is no row of the batch runner.
    """
    files = [folder] if folder.is_file() else sorted(path for path in folder.glob("*.jsonl") if _BATCH.match(path.name))
    if not files:
        raise UsageError(f"{folder} has no batch_*.jsonl", hint="name a folder `data/RUN` of the batch runner")
    name = folder.stem if folder.is_file() else folder.name
    for path in files:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield _record(name, json.loads(line), blake2b(line.encode(), digest_size=16).hexdigest())
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise DatasetError(
                        f"{path}:{number} is no row of the batch runner: {error!r}",
                        hint="name a folder `data/RUN` of it",
                    ) from error


def _record(run: str, row: Mapping[str, Any], trajectory_id: str) -> Record:
    metadata = row.get("metadata") or {}
    item_id = f"{run}-{row['prompt_index']}"
    written = metadata.get("timestamp")
    system, *said = row["conversations"]
    messages = [message for part in _parts(said) for message in part]
    turns, calls = _turns(messages, metadata.get("model"))
    return Record(
        trajectory_id=trajectory_id,
        environment="hermes-agent",
        item_id=item_id,
        group=item_id,
        rollout_index=0,
        agent="hermes-agent",
        backend="hermes-agent",
        model=metadata.get("model"),
        item={"toolsets": row.get("toolsets_used") or []},
        ended=datetime.fromisoformat(written).timestamp() if written else None,
        messages=messages,
        turns=tuple(turns),
        calls=tuple(calls),
        tool_schemas=tuple(_schemas(system["value"])),
        stop_reason="finished" if row.get("completed") else "max_turns",
    )


def _turns(messages: list[Message], model: str | None) -> tuple[list[TurnRecord], list[CallRecord]]:
    """Return the records of the answers and of the calls in a conversation. Calls without a result are left out."""
    turns: list[TurnRecord] = []
    calls: list[CallRecord] = []
    places = {message["tool_call_id"]: place for place, message in enumerate(messages) if message["role"] == "tool"}
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for call in message.get("tool_calls", ()):
            if call["id"] in places:
                function = call["function"]
                calls.append(
                    CallRecord(len(turns), places[call["id"]], call["id"], function["name"], function["arguments"])
                )
        turns.append(TurnRecord(place, model))
    return turns, calls


def _schemas(system: str) -> Iterator[dict[str, Any]]:
    listed = _TOOLS.search(system)
    for tool in json.loads(listed[1]) if listed else []:
        yield {"type": "function", "function": {key: tool[key] for key in ("name", "description", "parameters")}}


def _parts(said: list[Mapping[str, str]]) -> Iterator[list[Message]]:
    """Yield the messages of each part of a conversation: a question, or an answer with the results of its calls."""
    place = 0
    while place < len(said):
        part, place = said[place], place + 1
        if part["from"] == "human":
            yield [{"role": "user", "content": part["value"]}]
        elif part["from"] == "gpt":
            results = []
            if place < len(said) and said[place]["from"] == "tool":
                results, place = [json.loads(each) for each in _RESPONSE.findall(said[place]["value"])], place + 1
            yield [_answer(part["value"], [result["tool_call_id"] for result in results]), *map(_result, results)]
        else:
            raise ValueError(f"a part from {part['from']!r}")


def _answer(text: str, ids: list[str]) -> Message:
    message: Message = {"role": "assistant"}
    if (thought := _THOUGHT.match(text)) is not None:
        text = text[thought.end() :]
        if thought[1].strip():
            message["reasoning_content"] = thought[1]
    calls = [json.loads(call) for call in _CALL.findall(f"{text}\n")]
    if calls:
        text = _CALL.sub("", f"{text}\n").rstrip("\n")
        message["tool_calls"] = [
            {
                "id": ids[number] if number < len(ids) else f"call-{number}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
            }
            for number, call in enumerate(calls)
        ]
    return {**message, "content": text}


def _result(result: Mapping[str, Any]) -> Message:
    content = result["content"]
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": result["tool_call_id"], "name": result["name"], "content": text}
