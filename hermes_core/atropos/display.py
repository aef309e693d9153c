"""Conversations for people: as text for rollout tables, and as a page that shows tool calls and their results."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

REASONING_SHOWN, ARGUMENTS_SHOWN, RESULT_SHOWN = 300, 200, 500
"""Maximum number of characters in rollout tables."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
details { border: 1px solid #ddd; border-radius: 6px; margin: .6rem 0; padding: .4rem .8rem }
summary { cursor: pointer } pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0 }
.role { font-size: .75rem; text-transform: uppercase; letter-spacing: .05em; color: #777; margin-top: .8rem }
.call { background: #eef4ff; padding: .4rem .6rem; border-radius: 4px }
.result { background: #f6f6f6; padding: .4rem .6rem; border-radius: 4px }
.thought { color: #777; font-style: italic } .good { color: #17803d } .bad { color: #b42318 }
"""


def trajectory_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation in the form of Atropos' rollout tables, long parts cut."""
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


def write_page(groups: Path, page: Path, title: str) -> None:
    """Write one HTML page for a JSONL file of groups. The page loads nothing from elsewhere.

    Raises:
        OSError: a file can't be read or written.
    """
    with groups.open(encoding="utf-8") as lines, page.open("w", encoding="utf-8") as out:
        out.write(f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>")
        out.write(f"<h1>{html.escape(title)}</h1>")
        for number, line in enumerate(lines, 1):
            if line.strip():
                _write_group(out, number, json.loads(line))


def _write_group(out: Any, number: int, group: Mapping[str, Any]) -> None:
    about = group.get("group_overrides") or {}
    out.write(f"<h2>Group {number}: {html.escape(str(about.get('item_id', '')))}</h2>")
    for score, messages in zip(group["scores"], group.get("messages") or (), strict=False):
        kind = "good" if score > 0 else "bad"
        turns = sum(message.get("role") == "assistant" for message in messages)
        out.write(f"<details><summary><b class={kind}>{score:g}</b>, {turns} turns</summary>")
        for message in messages:
            _write_message(out, message)
        out.write("</details>")


def _write_message(out: Any, message: Mapping[str, Any]) -> None:
    role = str(message.get("role", "unknown"))
    out.write(f"<div class=role>{html.escape(role)}</div>")
    if message.get("reasoning_content"):
        out.write(f"<pre class=thought>{html.escape(str(message['reasoning_content']))}</pre>")
    if content := _content(message):
        out.write(f"<pre class={'result' if role == 'tool' else 'said'}>{html.escape(content)}</pre>")
    for name, arguments in _calls(message):
        out.write(f"<pre class=call><b>{html.escape(name)}</b> {html.escape(arguments)}</pre>")
