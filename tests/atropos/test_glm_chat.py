"""GLM's way to end an answer: with the token that opens the next message, which behind a call is a tool's."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from hermes_core.agents.exact.agent import ExactSession
from hermes_core.agents.exact.chat import Chat
from hermes_core.agents.exact.wires import Sampled
from hermes_core.agents.loop import HermesAgentLoop
from hermes_core.records.tokens import MASKED, tokens_of
from hermes_core.runtime import Runtime

ROLES = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")

TEMPLATE = r"""
{{- '[gMASK]<sop>' -}}
{%- if tools -%}
    {{- '<|system|>\n<tools>' -}}
    {%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
    {{- '\n</tools>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role in ('user', 'system') -%}
        {{- '<|' + message.role + '|>\n' + message.content -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<|assistant|>\n' + (message.content or '') -}}
        {%- for call in message.tool_calls or [] -%}
            {{- '\n' if message.content or not loop.first -}}
            {{- '<tool_call>' + call.function.name + gap -}}
            {%- for key, value in call.function.arguments.items() -%}
                {{- '<arg_key>' + key + '</arg_key>' + gap -}}
                {{- '<arg_value>' + (value if value is string else value | tojson) + '</arg_value>' + gap -}}
            {%- endfor -%}
            {{- '</tool_call>' -}}
        {%- endfor -%}
    {%- elif message.role == 'tool' -%}
        {{- '<|observation|>' if messages[loop.index0 - 1].role != 'tool' -}}
        {{- gap + '<tool_response>' + gap + message.content + gap + '</tool_response>' -}}
    {%- endif -%}
{%- endfor -%}
{{- '<|assistant|>\n' if add_generation_prompt -}}
"""
"""What GLM 4.5's says, in fewer words. No answer ends with a token of its own."""

GAPS = {"glm45": "\n", "glm47": ""}
"""What stands between the tags of a call; 4.5 writes each on its line."""


@pytest.fixture(params=sorted(GAPS))
def form(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def tokenizer(form: str, tokenizers: Callable[[str], Any]) -> Any:
    made = copy.deepcopy(tokenizers("chatml"))
    made.add_tokens(list(ROLES), special_tokens=True)
    made.eos_token = "<|endoftext|>"
    made.chat_template = f"{{%- set gap = {json.dumps(GAPS[form])} -%}}{TEMPLATE}"
    return made


class Samples:
    """Samples what it is told to."""

    def __init__(self, tokenizer: Any, *answers: str) -> None:
        self.given = [tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
        self.asked: list[list[int]] = []

    async def sample(self, prompt: list[int], *, max_tokens: int, temperature: float | None, **_: Any) -> Sampled:
        tokens = self.given[len(self.asked)]
        self.asked.append(list(prompt))
        return Sampled(tokens, [-0.5] * len(tokens), "stop")


def called(form: str, command: str) -> str:
    gap = GAPS[form]
    argument = f"<arg_key>command</arg_key>{gap}<arg_value>{command}</arg_value>"
    return gap.join(["<tool_call>terminal", argument, "</tool_call>"])


def test_a_template_that_ends_answers_with_the_next_message_is_taken(tokenizer: Any) -> None:
    Chat(tokenizer).check(tools=True)
    Chat(tokenizer).check(tools=False)


def test_what_follows_a_call_begins_with_the_tool_s_answer(tokenizer: Any, runtime: Runtime) -> None:
    call = {"id": "call00000", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "ls"}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": "one"},
        {"role": "user", "content": "on"},
    ]
    chat = Chat(tokenizer)
    after = chat.decode(chat.continuation(messages, 1, runtime.tools.schemas(["terminal"])).tokens)
    assert after.startswith("<|observation|>")
    assert "one" in after, "it does not begin only with the user's message"
    assert after.endswith("<|user|>\non<|assistant|>\n")


async def test_a_conversation_with_tools_is_one_sequence(form: str, tokenizer: Any, runtime: Runtime) -> None:
    # What the model samples last is the token that the next message begins with.
    server = Samples(
        tokenizer, f"{called(form, 'ls')}<|observation|>", f"{called(form, 'cat a')}<|observation|>", "done<|user|>"
    )
    session = ExactSession(server, Chat(tokenizer), runtime.parser(form), max_length=20_000)  # type: ignore[arg-type]
    commands = []

    async def handler(name: str, arguments: Any, task_id: str) -> str:
        commands.append(arguments["command"])
        return json.dumps({"output": f"of {arguments['command']}", "exit_code": 0})

    tools = runtime.tools.schemas(["terminal"])
    loop = HermesAgentLoop(session, tools, {"terminal"}, tool_handler=handler)
    result = await loop.run([{"role": "user", "content": "go"}])
    assert commands == ["ls", "cat a"]
    assert result.messages[-1]["content"] == "done"
    (node,) = session.nodes
    assert list(node.tokens) == server.asked[2] + server.given[2]
    trained = [token for token, mask in zip(node.tokens, node.masked_tokens, strict=True) if mask != MASKED]
    assert trained == [token for given in server.given for token in given]
    assert tokens_of(session.get_state()).refused is None
    messages = [dict(message) for message in result.messages[:-1]]
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["function"] = {**call["function"], "arguments": json.loads(call["function"]["arguments"])}
    rendered = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(server.asked[2]) == rendered, "keeping tokens changes nothing of what the model sees"
