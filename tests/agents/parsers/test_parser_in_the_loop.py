"""How parsers are found by name, added by plugins, and what the agent loop makes of what they found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from hermes_core.agents.loop import HermesAgentLoop
from hermes_core.agents.parsers.base import ParsedCall, ParsedText
from hermes_core.agents.replies import ModelReply
from hermes_core.errors import PluginError, UnknownNameError
from hermes_core.plugins.hookspecs import hookimpl
from hermes_core.runtime import Runtime


class TextServer:
    """A server whose model writes text: it reads the calls itself and gives the loop a `ModelReply`."""

    def __init__(self, parser: Any, tools: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> None:
        self.parser, self.tools, self.texts, self.turn = parser, tools, texts, 0

    async def chat_completion(self, **_: Any) -> ModelReply:
        parsed = self.parser.parse(self.texts[self.turn], self.tools)
        self.turn += 1
        calls = parsed.tool_calls(self.turn)
        return ModelReply(parsed.content, calls, parsed.reasoning, None, "stop", 0, 0)


async def test_what_could_not_be_read_is_told_to_the_model_and_counted(tools: Any) -> None:
    texts = [
        '<think>hm</think><tool_call>{"name": "terminal", "arguments": {"command": "ls"}}</tool_call>'
        '<tool_call>{"name": "terminal", "arguments": {"command": }}</tool_call>'
        "<tool_call>what?</tool_call>"
        '<tool_call>{"name": "terminal", "arguments": {"command": "a\nb"}}</tool_call>',
        "Done.",
    ]
    made: list[Any] = []

    async def handler(name: str, arguments: Mapping[str, Any], task_id: str) -> str:
        made.append((name, arguments))
        return "{}"

    server = TextServer(Runtime(load_entry_points=False).parser("hermes"), tools, texts)
    loop = HermesAgentLoop(server, tools, {"terminal"}, tool_handler=handler)
    result = await loop.run([{"role": "user", "content": "go"}])
    assert made == [("terminal", {"command": "ls"}), ("terminal", {"command": "a\nb"})]
    assert (result.tool_calls_attempted, result.tool_calls_executed_ok, result.tool_calls_exec_error) == (4, 2, 2)
    assert result.tool_calls_schema_valid == 1  # the one with a raw line break in a string is not
    assert [error.tool_name for error in result.tool_errors] == ["terminal", ""]
    told = [json.loads(message["content"]) for message in result.messages if message["role"] == "tool"]
    assert "not valid JSON" in told[1]["error"]
    assert "not a JSON object" in told[2]["error"]
    assert all("again" in told[index]["error"] for index in (1, 2))
    assert result.reasoning_per_turn == ["hm", None]
    assert result.finished_naturally


def test_an_unknown_parser_is_refused_with_the_nearest_name() -> None:
    runtime = Runtime(load_entry_points=False)
    with pytest.raises(UnknownNameError, match=r"unknown parser 'hermess' \(did you mean 'hermes'\?"):
        runtime.parser("hermess")
    with pytest.raises(UnknownNameError, match="did you mean 'qwen3_coder'"):
        runtime.parser("qwen3-coder")


class ShoutingParser:
    """`CALL name` lines."""

    name = "shouting"

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedText:
        names = [line.removeprefix("CALL ") for line in text.splitlines() if line.startswith("CALL ")]
        return ParsedText("", calls=tuple(ParsedCall(name, {}) for name in names))


class Plugin:
    @hookimpl
    def hermes_register_parsers(self, registry: Any) -> None:
        registry.add("shouting", ShoutingParser, aliases=("loud",))
        registry.add("wrong", lambda: object())


def test_a_plugin_adds_a_parser() -> None:
    runtime = Runtime(load_entry_points=False, plugins=[Plugin()])
    assert [call.name for call in runtime.parser("loud").parse("CALL ls", ()).calls] == ["ls"]
    with pytest.raises(PluginError, match=r"parser 'wrong' of .* which is not a Parser"):
        runtime.parser("wrong")
