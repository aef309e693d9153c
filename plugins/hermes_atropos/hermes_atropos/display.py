"""Formats conversations as text for the rollout tables of Atropos."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

REASONING_SHOWN, ARGUMENTS_SHOWN, RESULT_SHOWN = 300, 200, 500
"""Maximum number of characters of a part in rollout tables."""


def trajectory_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation in the form of Atropos' rollout tables. Long parts are cut."""
    return "\n\n".join(part for message in messages for part in _parts(message))


def _parts(message: Mapping[str, Any]) -> Iterator[str]:
    role, content = message.get("role", "unknown"), _content(message)
    if role == "tool":
        yield f"[TOOL RESULT] {_cut(content, RESULT_SHOWN)}"
        return
    if message.get("reasoning_content"):
        yield f"[ASSISTANT thinking]\n{_cut(message['reasoning_content'], REASONING_SHOWN)}"
    if content or role != "assistant":
        yield f"[{role.upper()}]\n{content}"
    for name, arguments in _calls(message):
        yield f"[TOOL CALL] {name}({_cut(arguments, ARGUMENTS_SHOWN)})"


def _calls(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for call in message.get("tool_calls") or ():
        yield call["function"]["name"], call["function"]["arguments"]


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "" if content is None else json.dumps(content)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
