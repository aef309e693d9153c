"""Chat completions come in many shapes; the loop must see one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from hermes_core.agents.endpoint.errors import BadCompletion
from hermes_core.agents.replies import decode_arguments, read_reply, sayable
from hermes_core.errors import ModelError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
json_objects = st.dictionaries(st.text(), json_values, max_size=5)


def completion(message: dict, finish_reason: str = "stop", **more) -> dict:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], **more}


def call(arguments, name="echo", identifier="call_1") -> dict:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


@given(json_objects)
def test_arguments_come_through_as_they_are(arguments):
    assert decode_arguments(arguments) == (arguments, None, False)
    assert decode_arguments(json.dumps(arguments)) == (arguments, None, False)


@given(json_objects)
def test_arguments_encoded_twice_are_decoded_and_counted_as_a_repair(arguments):
    assert decode_arguments(json.dumps(json.dumps(arguments))) == (arguments, None, True)


@given(st.text() | json_values)
def test_reading_arguments_never_raises_and_gives_arguments_or_an_error(raw):
    arguments, error, repaired = decode_arguments(raw)
    assert (arguments is None) != (error is None)
    assert isinstance(repaired, bool)
    if error is not None:
        assert repaired


@pytest.mark.parametrize("nothing", [None, "", "  \n"])
def test_no_arguments_are_an_empty_object(nothing):
    assert decode_arguments(nothing) == ({}, None, False)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ('{"a": ', "not valid JSON"),
        ("[1, 2]", "not a list"),
        ("3", "not a number"),
        ("true", "not a boolean"),
        ('{"a": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        (json.dumps(json.dumps(json.dumps("{}"))), "not a string"),
    ],
)
def test_arguments_that_cannot_be_read_say_why(raw, says):
    arguments, error, _ = decode_arguments(raw)
    assert arguments is None
    assert says in error


def test_a_raw_line_break_in_a_string_is_repaired():
    assert decode_arguments('{"command": "a\nb"}') == ({"command": "a\nb"}, None, True)


@pytest.mark.parametrize("as_object", [True, False])
def test_sdk_objects_and_dicts_read_alike(as_object):
    raw = completion(
        {"content": "hm", "reasoning_content": "think", "tool_calls": [call('{"n": 1}')]},
        "tool_calls",
        usage={"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
    )
    reply = read_reply(ChatCompletion.model_validate(raw) if as_object else raw, turn=1)
    assert (reply.content, reply.reasoning, reply.finish_reason) == ("hm", "think", "tool_calls")
    assert (reply.prompt_tokens, reply.completion_tokens) == (7, 2)
    [only] = reply.calls
    assert (only.id, only.name, dict(only.arguments), only.error, only.repaired) == (
        "call_1",
        "echo",
        {"n": 1},
        None,
        False,
    )
    assert reply.as_message() == {
        "role": "assistant",
        "content": "hm",
        "reasoning_content": "think",
        "tool_calls": [call('{"n": 1}')],
    }


def test_calls_as_dicts_on_an_sdk_object_and_arguments_as_a_dict():
    whole = ChatCompletion.model_validate(completion({"content": None}))
    whole.choices[0].message.tool_calls = [call({"n": 1})]  # as Atropos's managed server attaches them
    reply = read_reply(whole, turn=1)
    assert dict(reply.calls[0].arguments) == {"n": 1}
    assert reply.as_message()["tool_calls"][0]["function"]["arguments"] == '{"n": 1}'
    assert reply.as_message()["content"] == ""


def test_missing_and_repeated_ids_are_replaced_and_others_kept():
    calls = [call("{}", identifier=i) for i in (None, "", "functions.echo:0", "functions.echo:0", 7)]
    ids = [c.id for c in read_reply(completion({"tool_calls": calls}), turn=3).calls]
    assert ids == ["call_3_0", "call_3_1", "functions.echo:0", "call_3_3", "call_3_4"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_content": "a", "reasoning": "b"}, "a"),
        ({"reasoning_content": "", "reasoning": "b"}, "b"),
        ({"reasoning_details": [{"type": "x", "text": "c"}, {"type": "y", "data": "…"}, {"text": "d"}]}, "c\nd"),
        ({"reasoning_details": "odd"}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("as_object", [True, False])
def test_reasoning_is_found_wherever_it_is(fields, expected, as_object):
    raw = completion({"content": "x", **fields})
    reply = read_reply(ChatCompletion.model_validate(raw) if as_object else raw, turn=1)
    assert reply.reasoning == expected
    assert reply.as_message().get("reasoning_content") == expected
    assert reply.as_message().get("reasoning_details") == fields.get("reasoning_details")


def test_content_in_parts_is_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert read_reply(completion({"content": parts}), turn=1).content == "ab"


def test_only_the_last_call_of_a_cut_answer_can_be_cut():
    cut = [call('{"n": 1', identifier="a"), call('{"n": 2', identifier="b")]
    first, last = read_reply(completion({"tool_calls": cut}, "length"), turn=1).calls
    assert "not valid JSON" in first.error
    assert "cut off" in last.error
    assert last.arguments is None
    whole = read_reply(completion({"tool_calls": [call('{"n": 2}')]}, "length"), turn=1).calls[0]
    assert dict(whole.arguments) == {"n": 2}
    empty = read_reply(completion({"tool_calls": [call("")]}, "length"), turn=1).calls[0]
    assert "cut off" in empty.error


@pytest.mark.parametrize(
    "garbage",
    [None, "<html>", {}, {"choices": []}, {"choices": None}, {"choices": "ab"}, {"choices": [{}]}, [], 3],
)
def test_what_is_no_completion_is_refused(garbage):
    with pytest.raises(BadCompletion, match="not a chat completion"):
        read_reply(garbage, turn=1)


def test_the_refusal_quotes_the_error_in_the_body():
    with pytest.raises(ModelError, match="upstream is down"):
        read_reply({"error": {"message": "upstream is down", "code": 502}}, turn=1)


@pytest.mark.parametrize("odd", [{"tool_calls": "x"}, {"tool_calls": [None]}, {"tool_calls": [{"function": 3}]}])
def test_odd_tool_calls_never_raise(odd):
    for one in read_reply(completion(odd), turn=1).calls:
        assert one.name == ""


@given(st.text(alphabet=st.characters(exclude_categories=[])))
def test_text_is_made_sayable_and_otherwise_left_alone(text):
    def refused(character):
        code = ord(character)
        return (
            code == 0
            or 0x7F <= code < 0xA0
            or 0xD800 <= code < 0xE000
            or 0xFDD0 <= code < 0xFDF0
            or code % 65536 > 65533
        )

    assert sayable(text) == "".join("\ufffd" if refused(character) else character for character in text)
