"""Reading requests: each dialect into one form, leniently, and what we wrote as what it was."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hermes_agents.serving.anthropic import AnthropicDialect
from hermes_agents.serving.chat import ChatDialect
from hermes_agents.serving.dialects import BadRequest, Dialect, ModelRequest, RequestRefusal, WrittenAnswer
from hermes_agents.serving.gemini import GeminiDialect
from hermes_agents.serving.responses import ResponsesDialect
from hypothesis import given
from hypothesis import strategies as st

from hermes_core.agents.canonical import canonical
from hermes_core.agents.replies import ModelReply
from tests.coding_agents.serving.slot import call, reply

CHAT, RESPONSES, ANTHROPIC, GEMINI = ChatDialect(), ResponsesDialect(), AnthropicDialect(), GeminiDialect()
DIALECTS: list[Dialect] = [CHAT, RESPONSES, ANTHROPIC, GEMINI]
every_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.name)

KEYS = ["messages", "input", "system", "instructions", "role", "content", "type", "text", "tools", "tool_calls"]
KEYS += ["output", "function", "name", "arguments", "parameters", "input_schema", "tool_use_id", "call_id", "thinking"]
KEYS += ["contents", "parts", "systemInstruction", "system_instruction", "functionCall", "functionResponse", "response"]
KEYS += ["args", "thought", "inlineData", "mimeType", "functionDeclarations", "generationConfig", "toolConfig", "error"]
KEYS += ["summary", "source", "data", "url", "image_url", "format", "definition", "stream", "max_tokens", "is_error"]
WORDS = [
    *("user", "assistant", "system", "developer", "tool", "function", "message", "reasoning", "text", "image", "auto"),
    *("tool_use", "tool_result", "thinking", "function_call", "function_call_output", "custom_tool_call", "namespace"),
    *("custom", "input_text", "output_text", "image_url", "document", "web_search", "none", "\ud800", ""),
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=20,
)


def again(dialect: Dialect, answer: WrittenAnswer, asked: ModelRequest) -> dict[str, Any]:
    """Return the request of an agent that sends an answer back as it got it."""
    whole = dialect.whole(answer, asked)
    begin = {"role": "user", "content": "Do it."}
    if dialect is CHAT:
        return {"messages": [begin, whole["choices"][0]["message"]]}
    if dialect is RESPONSES:
        return {"input": [begin, *whole["output"]]}
    if dialect is GEMINI:
        return {"contents": [{"role": "user", "parts": [{"text": "Do it."}]}, whole["candidates"][0]["content"]]}
    return {"messages": [begin, {"role": "assistant", "content": whole["content"]}]}


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cn", "Co"]), max_size=30)
ARGUMENTS = st.dictionaries(TEXT, TEXT | st.integers() | st.none(), max_size=3).map(json.dumps) | st.just('{"cut": "o')
REPLIES = st.builds(
    lambda content, calls, thinking: reply(
        content, *(call(*each, f"c{index}") for index, each in enumerate(calls)), thinking=thinking or None
    ),
    TEXT,
    st.lists(st.tuples(st.sampled_from(["bash", "mcp__read", "edit"]), ARGUMENTS), max_size=3),
    TEXT,
)


@every_dialect
@given(answered=REPLIES)
def test_an_answer_comes_back_as_what_it_was(dialect: Dialect, answered: ModelReply) -> None:
    answer = WrittenAnswer("a" * 24, 0, "ours", answered)
    read = dialect.read(again(dialect, answer, ModelRequest())).messages
    assert canonical(read[-1]) == canonical(answered.as_message())
    assert len(read) == 2
    ids = [each["id"] for each in read[-1].get("tool_calls", [])]
    assert ids == [answer.call_id(index) for index in range(len(answered.calls))]


@every_dialect
@given(body=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
def test_anything_can_be_read_or_is_refused(dialect: Dialect, body: dict[str, Any]) -> None:
    try:
        asked = dialect.read(body)
    except BadRequest:
        return
    for message in asked.messages:
        assert message["role"] and isinstance(message["content"], str | list)
        canonical(message)
    json.dumps([asked.messages, asked.tools])
    answer = WrittenAnswer("a", 0, "ours", reply("x", call("bash", "{}")))
    json.dumps(dialect.whole(answer, asked))
    assert dialect.stream(answer, asked)


@every_dialect
def test_a_refusal_is_an_error_of_the_dialect(dialect: Dialect) -> None:
    error = dialect.refusal(RequestRefusal("no"))["error"]
    assert error["message"] == "no"
    if dialect is GEMINI:
        assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
        assert json.loads(dialect.late_refusal(RequestRefusal("no"), ModelRequest())) == {
            "error": error
        }  # it is no event
    else:
        assert error["type"] == "invalid_request_error"
        assert dialect.late_refusal(RequestRefusal("no"), ModelRequest()).count(b"\n\n") == 1


def test_signs_of_life_are_such_that_each_agent_hears_them() -> None:
    assert CHAT.keep_alive(ModelRequest()).startswith(b": ")
    assert ANTHROPIC.keep_alive(ModelRequest()).startswith(b"event: ping\n")
    assert GEMINI.keep_alive(ModelRequest()) == b"\n"  # Google's libraries try to read comments
    asked = ModelRequest()  # Codex does not hear comments, and OpenAI's SDK wants one id in all of a stream
    assert RESPONSES.keep_alive(asked).startswith(b"event: response.created\n")
    answer = WrittenAnswer("a", 0, "ours", reply("Done."))
    for event in (RESPONSES.keep_alive(asked), RESPONSES.stream(answer, asked)):
        assert set(re.findall(rb"resp_\w+", event)) == {f"resp_{asked.id}".encode()}


TOOL = {"type": "object", "properties": {}}


def test_chat_is_read() -> None:
    asked = CHAT.read(
        {
            "model": "gpt-9",
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"a":1}'}}]},
                {"role": "tool", "tool_call_id": "c", "content": "done"},
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]},
            ],
            "tools": [{"type": "function", "function": {"name": "bash", "parameters": TOOL}}, {"type": "web_search"}],
            "temperature": 0, "n": 8, "logit_bias": {"1": 100}, "stop": ["x"], "max_completion_tokens": 10,
            "tool_choice": "required", "parallel_tool_calls": True, "stream_options": {"include_usage": False},
        }
    )  # fmt: skip
    assert [message["role"] for message in asked.messages] == ["system", "user", "assistant", "tool", "user"]
    assert asked.messages[1]["content"] == "a\nb"
    assert asked.messages[2]["reasoning_content"] == "Hm."
    assert asked.messages[4]["content"][0]["image_url"] == {"url": "data:image/png;base64,AA"}
    assert asked.settings.keys() == {"temperature", "n", "logit_bias", "stop", "tool_choice"}
    assert (asked.dropped, asked.max_tokens, asked.include_usage, asked.no_calls) == (["web_search"], 10, False, False)
    assert [tool["function"]["name"] for tool in asked.tools] == ["bash"]


def test_anthropic_is_read() -> None:
    asked = ANTHROPIC.read(
        {
            "model": "claude-haiku", "max_tokens": 32000, "stream": True, "metadata": {"user_id": "x"},
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1f"},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "Really."},
            ],
            "messages": [
                {"role": "user", "content": "Fix it."},
                {"role": "system", "content": [{"type": "text", "text": "Agents: none."}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "hermes_1"},
                    {"type": "tool_use", "id": "b", "name": "Bash", "input": {"command": "ls"}},
                    {"type": "tool_use", "id": "c", "name": "Bash", "input": {"__unparsedToolInput": {"raw": '{"a'}}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": "not JSON"},
                    {"type": "tool_result", "tool_use_id": "b", "content": [
                        {"type": "text", "text": "calc.py"},
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}]},
                    {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
                    {"type": "odd"}]},
            ],
            "tools": [{"name": "Bash", "input_schema": TOOL}, {"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "temperature": 1, "thinking": {"type": "enabled"}, "stop_sequences": ["x"],
        }
    )  # fmt: skip
    roles = ["system", "user", "system", "assistant", "tool", "tool", "user"]
    assert [message["role"] for message in asked.messages] == roles
    assert asked.messages[0]["content"] == "Be brief.\nReally."
    assert [each["function"]["arguments"] for each in asked.messages[3]["tool_calls"]] == ['{"command": "ls"}', '{"a']
    assert [message.get("tool_call_id") for message in asked.messages[4:6]] == ["c", "b"]
    assert asked.messages[5]["content"][1]["image_url"]["url"] == "data:image/png;base64,AA"
    assert asked.messages[6]["content"] == "Go on.\n[odd is not shown]"
    assert (asked.failed, asked.dropped, asked.unknown) == ({"c"}, ["web_search_20250305"], {"odd": 1})
    assert asked.settings.keys() == {"temperature", "thinking", "stop_sequences", "tool_choice"}


def test_gemini_is_read() -> None:
    asked = GEMINI.read(
        {
            "system_instruction": {"parts": [{"text": "Be brief."}, {"text": "Really."}]},
            "contents": [
                {"parts": [{"text": "Fix it."}, {"inline_data": {"mime_type": "image/png", "data": "AA"}}]},
                {"role": "model", "parts": [{"text": "Hm", "thought": True}, {"text": ".", "thought": True}]},
                {"role": "model", "parts": [
                    {"text": "I "}, {"text": "look."},
                    {"functionCall": {"id": "a", "name": "bash", "args": {"command": "ls"}}, "thoughtSignature": "AA"},
                    {"functionCall": {"name": "bash", "args": {"__unparsedToolInput": {"raw": '{"a'}}}},
                    {"functionCall": {"name": "read", "args": {}}}]},
                {"role": "user", "parts": [
                    {"functionResponse": {"id": "a", "name": "bash", "response": {"output": "calc.py"}}},
                    {"functionResponse": {"name": "read", "response": {"error": "no such file"}}},
                    {"functionResponse": {"name": "other", "response": {"output": 1, "code": 0}, "parts": [
                        {"inlineData": {"mimeType": "image/png", "data": "AA"}}]}},
                    {"text": "Go on."}, {"executableCode": {"code": "1"}}]},
                {"role": "model", "parts": [{"functionCall": {"name": "read"}}]},
                {"role": "function", "parts": [{"functionResponse": {"name": "read", "response": {"result": [1]}}}]},
            ],
            "tools": [
                {"functionDeclarations": [
                    {"name": "bash", "parametersJsonSchema": TOOL},
                    {"name": "read", "parameters": {"type": "OBJECT", "properties": {
                        "type": {"type": "STRING", "enum": ["OBJECT"]}, "path": {"anyOf": [{"type": "INTEGER"}]}}}}]},
                {"googleSearch": {}},
            ],
            "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
            "generationConfig": {"temperature": 1, "maxOutputTokens": 10, "thinkingConfig": {"includeThoughts": True}},
            "labels": {"a": "b"},
            "model": "gemini-9", "stream": "application/json",
        }
    )  # fmt: skip
    roles = ["system", "user", "assistant", "tool", "tool", "tool", "user", "assistant", "tool"]
    assert [message["role"] for message in asked.messages] == roles
    assert asked.messages[0]["content"] == "Be brief.\nReally."
    assert asked.messages[1]["content"][1]["image_url"]["url"] == "data:image/png;base64,AA"
    answer = asked.messages[2]
    assert (answer["reasoning_content"], answer["content"]) == ("Hm.", "I look.")
    assert [each["function"]["arguments"] for each in answer["tool_calls"]] == ['{"command": "ls"}', '{"a', "{}"]
    called = [each["id"] for each in answer["tool_calls"]]
    assert len({*called, asked.messages[7]["tool_calls"][0]["id"]}) == 4
    told = {message["tool_call_id"]: message["content"] for message in asked.messages[3:5]}
    assert told == {called[0]: "calc.py", called[2]: "no such file"}
    assert asked.messages[5]["content"][0]["text"] == '{"output": 1, "code": 0}'
    assert asked.messages[6]["content"] == "Go on.\n[executableCode is not shown]"
    assert asked.messages[8]["tool_call_id"] == asked.messages[7]["tool_calls"][0]["id"]
    assert asked.messages[8]["content"] == '{"result": [1]}'
    assert (asked.failed, asked.dropped, asked.unknown) == ({called[2]}, ["googleSearch"], {"executableCode": 1})
    assert (asked.model, asked.max_tokens, asked.stream) == ("gemini-9", 10, True)
    assert asked.settings.keys() == {"temperature", "thinkingConfig", "toolConfig"}
    read = asked.tools[1]["function"]["parameters"]
    assert read["properties"] == {
        "type": {"type": "string", "enum": ["OBJECT"]},
        "path": {"anyOf": [{"type": "integer"}]},
    }


@pytest.mark.parametrize("query", ["key=x&alt=sse", ""], ids=["events", "array"])
def test_an_answer_of_gemini_that_is_kept_as_it_was_streamed_is_what_it_was(query: str) -> None:
    """Programs may keep each part of a stream as a content of its own, without the ids of calls."""
    aim = GEMINI.aim("/models/m:streamGenerateContent", query)
    assert aim is not None
    asked = GEMINI.read({"contents": [{"parts": [{"text": "Do it."}]}], **aim.said})
    assert asked.stream
    said = reply("I look.\n" * 2000, call("bash", '{"a": 1}'), call("bash", "{}"), thinking="Hm. " * 3000)
    stream = GEMINI.stream(WrittenAnswer("a", 0, "ours", said), asked).decode()
    assert stream.startswith("data: " if query else "[")
    events = [json.loads(line[6:]) for line in stream.split("\n\n") if line] if query else json.loads(stream)
    assert len(events) > 5 and [event for event in events if "usageMetadata" in event] == events[-1:]
    contents = [event["candidates"][0]["content"] for event in events]
    for part in contents[-2]["parts"] + contents[-1]["parts"]:
        del part["functionCall"]["id"]
    results = [{"functionResponse": {"name": "bash", "response": {"output": each}}} for each in "12"]
    begin = {"parts": [{"text": "Do it."}]}
    read = GEMINI.read({"contents": [begin, *contents, {"role": "user", "parts": results}]}).messages
    assert [message["role"] for message in read] == ["user", "assistant", "tool", "tool"]
    assert canonical(read[1]) == canonical(said.as_message())
    assert [each["id"] for each in read[1]["tool_calls"]] == [message["tool_call_id"] for message in read[2:]]


def responses_request(**more: Any) -> dict[str, Any]:
    return {
        "model": "m", "store": False, "stream": True, "include": ["reasoning.encrypted_content"],
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "h_1"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "a", "name": "read", "namespace": "fs", "arguments": '{"p":1}'},
            {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "*** Begin"},
            {"type": "function_call_output", "call_id": "a", "output": "text"},
            {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "ok"}]},
            {"type": "function_call", "call_id": "c", "name": "bash", "arguments": "{}"},
        ],
        "tools": [
            {"type": "function", "name": "bash", "parameters": TOOL, "strict": False},
            {"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "read", "parameters": TOOL}]},
            {"type": "custom", "name": "patch", "description": "Patch.", "format": {"definition": "start: x"}},
            {"type": "web_search"}, {"type": "local_shell"}, {"type": "image_generation"},
        ],
        **more,
    }  # fmt: skip


def test_responses_are_read() -> None:
    asked = RESPONSES.read(responses_request(temperature=0, text={"format": {"type": "json_schema"}}))
    assert [message["role"] for message in asked.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    answer = asked.messages[2]
    assert (answer["reasoning_content"], answer["content"]) == ("Hm.", "I look.")
    assert [each["function"]["name"] for each in answer["tool_calls"]] == ["fs__read", "patch"]
    assert json.loads(answer["tool_calls"][1]["function"]["arguments"]) == {"input": "*** Begin"}
    assert [tool["function"]["name"] for tool in asked.tools] == ["bash", "fs__read", "patch"]
    assert "start: x" in asked.tools[2]["function"]["description"]
    assert asked.dropped == ["web_search", "local_shell", "image_generation"]
    assert asked.settings.keys() == {"temperature", "text"}


def test_tools_of_responses_are_called_in_their_own_forms() -> None:
    asked = RESPONSES.read(responses_request())
    said = reply("", call("fs__read", '{"p": 1}'), call("patch", '{"input": "*** Begin\\n"}'), call("patch", '{"input'))
    answer = WrittenAnswer("a", 0, "ours", said)
    items = RESPONSES.whole(answer, asked)["output"]
    assert [(item["type"], item["name"], item.get("namespace")) for item in items] == [
        ("function_call", "read", "fs"),
        ("custom_tool_call", "patch", None),
        ("function_call", "patch", None),
    ]
    assert items[1]["input"] == "*** Begin\n"
    assert items[2]["arguments"] == '{"input'
    read = RESPONSES.read({**responses_request(), "input": [{"role": "user", "content": "x"}, *items]}).messages[-1]
    assert canonical(read) == canonical(said.as_message())


def test_answers_that_follow_each_other_in_responses_stay_apart() -> None:
    call_item = {"type": "function_call", "call_id": "a", "name": "bash", "arguments": "{}"}
    message = {"type": "message", "role": "assistant", "content": "Done."}
    thinking = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    items = [{"role": "user", "content": "x"}, thinking, call_item, message, thinking, message]
    read = RESPONSES.read({"input": items}).messages
    assert [(each["content"], each.get("reasoning_content"), len(each.get("tool_calls", []))) for each in read[1:]] == [
        *[("", "Hm.", 1), ("Done.", None, 0), ("Done.", "Hm.", 0)]
    ]


@pytest.mark.parametrize("key", ["previous_response_id", "background"])
def test_what_would_have_to_be_stored_is_refused(key: str) -> None:
    with pytest.raises(BadRequest, match=key):
        RESPONSES.read(responses_request(**{key: "resp_1"}))


@every_dialect
@pytest.mark.parametrize(
    "body", [{}, {"messages": [], "input": [], "contents": []}, {"messages": "x", "input": {}, "contents": {}}], ids=str
)
def test_a_request_without_messages_is_refused(dialect: Dialect, body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        dialect.read(body)


def test_no_image_is_fetched_from_elsewhere() -> None:
    """That would be a way out of a slot without a network."""
    url = "http://example.com/?secret"
    chat = ChatDialect().read({"messages": [{"content": [{"type": "image_url", "image_url": {"url": url}}]}]})
    responses = ResponsesDialect().read({"input": [{"content": [{"type": "input_image", "image_url": url}]}]})
    source = {"type": "url", "url": url}
    messages = AnthropicDialect().read({"messages": [{"content": [{"type": "image", "source": source}]}]})
    file = {"fileData": {"fileUri": url, "mimeType": "image/png"}}
    contents = GeminiDialect().read({"contents": [{"parts": [file]}]})
    assert contents.messages == [{"role": "user", "content": "[fileData is not shown]"}]
    for asked in (chat, responses, messages):
        assert [message["content"] for message in asked.messages] == ["[image is not shown]"]
        assert asked.unknown == {"image": 1}
