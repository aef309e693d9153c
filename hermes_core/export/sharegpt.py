"""Rows in the form that Hermes Agent's batch runner writes: ShareGPT conversations with tool calls in XML tags."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hermes_core.agents.base import Message, StopReason
from hermes_core.export.selection import Selection
from hermes_core.export.tables import JSON, Columns, TableRow
from hermes_core.records.conversation import calls_in, calls_of
from hermes_core.records.plain_text import arguments_of, moment, parse_container, text_of
from hermes_core.records.record import Record

COLUMNS: Columns = {
    "prompt_index": "int",
    "conversations": [{"from": "string", "value": "string"}],
    "metadata": {"batch_num": "int", "timestamp": "string", "model": "string"},
    "completed": "bool",
    "partial": "bool",
    "api_calls": "int",
    "toolsets_used": ["string"],
    "tool_stats": JSON,
    "tool_error_counts": JSON,
}

_SYSTEM = (
    "You are a function calling AI model. You are provided with function signatures within <tools> </tools> XML tags. "
    "You may call one or more functions to assist with the user query. If available tools are not relevant in "
    "assisting with user query, just respond in natural conversational language. Don't make assumptions about what "
    "values to plug into functions. After calling & executing the functions, you will be provided with function "
    "results within <tool_response> </tool_response> XML tags. Here are the available tools:\n"
    "<tools>\n{tools}\n</tools>\n"
    "For each function call return a JSON object, with the following pydantic model json schema for each:\n"
    "{{'title': 'FunctionCall', 'type': 'object', 'properties': {{'name': {{'title': 'Name', 'type': 'string'}}, "
    "'arguments': {{'title': 'Arguments', 'type': 'object'}}}}, 'required': ['name', 'arguments']}}\n"
    "Each function call should be enclosed within <tool_call> </tool_call> XML tags.\n"
    "Example:\n<tool_call>\n{{'name': <function-name>,'arguments': <args-dict>}}\n</tool_call>"
)
"""The system message of every row. The conversation's own system message is left out, as by the batch runner."""

_NO_THOUGHT = "<think>\n</think>\n"


def sharegpt_rows(selection: Selection, record: Record) -> Iterator[TableRow]:
    """Yield the row of a rollout. The counts of tools have the same keys in every row."""
    stats = {tool: {"count": 0, "success": 0, "failure": 0} for tool in selection.tools}
    for call in calls_of(record):
        stats[call.name]["count"] += 1
        stats[call.name]["success" if call.error is None else "failure"] += 1
    yield {
        "prompt_index": selection.items[record.item_id],
        "conversations": conversation(record),
        "metadata": {
            "batch_num": 0,
            "timestamp": None if record.ended is None else moment(record.ended),
            "model": _model(record),
        },
        "completed": record.stop_reason == StopReason.FINISHED,
        "partial": False,
        "api_calls": len(record.turns) or sum(message["role"] == "assistant" for message in record.messages),
        "toolsets_used": _toolsets(record),
        "tool_stats": stats,
        "tool_error_counts": {tool: counts["failure"] for tool, counts in stats.items()},
    }


def _model(record: Record) -> str | None:
    return record.model or next((turn.model for turn in record.turns), None)


def _toolsets(record: Record) -> list[str]:
    named = record.item.get("toolsets", ())
    return [str(name) for name in named] if isinstance(named, Sequence) and not isinstance(named, str) else []


def conversation(record: Record) -> list[dict[str, str]]:
    """Return the conversation: a system message with the tools, then `human`, `gpt` and `tool` in turn."""
    messages, rows = record.messages, [{"from": "system", "value": _SYSTEM.format(tools=_signatures(record))}]
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        if message["role"] == "user":
            rows.append({"from": "human", "value": text_of(message["content"])})
        elif message["role"] == "assistant":
            rows.append({"from": "gpt", "value": _answer(message)})
            results: list[str] = []
            while place < len(messages) and messages[place]["role"] == "tool":
                results.append(_result(messages[place], _name(message, len(results))))
                place += 1
            if results:
                rows.append({"from": "tool", "value": "\n".join(results)})
    return rows


def _signatures(record: Record) -> str:
    functions = [schema["function"] for schema in record.tool_schemas]
    signatures = [
        {
            "name": function["name"],
            "description": function.get("description", ""),
            "parameters": function.get("parameters", {}),
            "required": None,
        }
        for function in functions
    ]
    return json.dumps(signatures, ensure_ascii=False)


def _answer(message: Message) -> str:
    """Return an answer's thoughts, text and calls as one text, which always begins with (possibly empty) thoughts."""
    reasoning, text = text_of(message.get("reasoning_content")), text_of(message["content"])
    answer = f"<think>\n{reasoning}\n</think>\n" if reasoning.strip() else ""
    text = text.replace("<REASONING_SCRATCHPAD>", "<think>").replace("</REASONING_SCRATCHPAD>", "</think>")
    calls = calls_in(message)
    if not calls:
        answer += text
    elif text.strip():
        answer += f"{text}\n"
    answer += "".join(f"<tool_call>\n{_call(call)}\n</tool_call>\n" for call in calls)
    if "<think>" not in answer:
        answer = _NO_THOUGHT + answer
    return answer.rstrip() if calls else answer.strip()


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    named = {"name": function["name"], "arguments": arguments_of(function["arguments"]) or {}}
    return json.dumps(named, ensure_ascii=False)


def _name(answer: Message, number: int) -> str:
    calls = calls_in(answer)
    return str(calls[number]["function"]["name"]) if number < len(calls) else "unknown"


def _result(message: Message, name: str) -> str:
    text = text_of(message["content"])
    value = parse_container(text)
    content = text if value is None else value
    result = {"tool_call_id": message.get("tool_call_id", ""), "name": name, "content": content}
    return f"<tool_response>\n{json.dumps(result, ensure_ascii=False)}\n</tool_response>"
