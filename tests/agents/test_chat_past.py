"""What follows an answer may depend on everything before it: templates that look at the past get the past."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest

from hermes_core.agents.exact.chat import Chat

CHATML = files("hermes_testing.tiny_model").joinpath("templates", "chatml.jinja").read_text("utf-8")
RESULT = "'\\n<tool_response>\\n' + "
COUNTING = "{%- set seen = namespace(calls=0, results=0, task='') -%}\n{%- for message in messages -%}"
PASTS = {
    "calls are numbered through the conversation": "{{- '[' ~ seen.results ~ ' of ' ~ seen.calls ~ ']' -}}",
    "the position of a message": "{{- '[' ~ loop.index0 ~ ' of ' ~ messages | length ~ ']' -}}",
    "the number of answers before": "{{- messages[:loop.index0] | selectattr('role', 'equalto', 'assistant') | list"
    " | length -}}",
    "tens of results": "{{- 'many' if seen.results > 9 else '' -}}",
    "a long conversation": "{{- 'Be brief.' if messages | length > 20 else '' -}}",
    "the task is shown again": "{{- seen.task -}}",
    "the first words are shown again": "{{- messages[1].content if messages | length > 5 else '' -}}",
}
"""What a template writes before each result."""


def looking_at_the_past(what: str) -> str:
    """A template that counts as it goes, and writes this before each result."""
    remembers = (
        "{%- if message.role == 'tool' -%}{%- set seen.results = seen.results + 1 -%}"
        "{%- elif message.role == 'assistant' -%}{%- set seen.calls = seen.calls + message.tool_calls | length -%}"
        "{%- else -%}{%- set seen.task = message.content -%}{%- endif -%}"
    )
    whole = CHATML.replace("{%- for message in messages -%}", COUNTING + remembers)
    begin = whole.index("{{- " + RESULT)
    return whole[:begin] + what + whole[begin:]


def conversation(turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "count " * 40}]
    for turn in range(turns):
        calls = [
            {
                "id": f"call{turn:03}{number:02}",
                "type": "function",
                "function": {"name": "terminal", "arguments": json.dumps({"command": f"ls {turn} {number} " * 20})},
            }
            for number in range(1 + turn % 2)
        ]
        messages.append({"role": "assistant", "content": f"words of turn {turn} " * 10, "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": f"{call['id']} " * 30} for call in calls]
    return messages


@pytest.mark.parametrize("what", PASTS)
def test_a_template_that_looks_at_the_past_gets_the_past(what: str, tokenizers: Callable[[str], Any]) -> None:
    tokenizer = copy.deepcopy(tokenizers("chatml"))
    tokenizer.chat_template = looking_at_the_past(PASTS[what])
    chat = Chat(tokenizer)
    chat.check(tools=True)
    messages = conversation(9)
    for answered in (place for place, message in enumerate(messages) if message["role"] == "assistant"):
        since = answered + 1 + len(messages[answered]["tool_calls"])
        # All that the template writes behind this answer's last call, which it ends with a tag.
        whole = chat._render(messages[:since], [])
        last = json.dumps(json.loads(messages[answered]["tool_calls"][-1]["function"]["arguments"]))
        expected = whole.rpartition(last + "}\n</tool_call>")[2]
        assert chat.decode(chat.continuation(messages[:since], answered, []).tokens) == expected
