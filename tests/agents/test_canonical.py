"""The canonical form of messages: the same for every way in which agents write one message, and for no other."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hermes_core.agents.canonical import canonical, canonical_arguments, digest

NUMBERS = st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text() | st.binary() | st.just(object()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["role", "content", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "function", "arguments", "name",
     "type", "text", "image_url", "url"]
)  # fmt: skip


def answer(arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reversed_keys(item) for key, item in reversed(value.items())}
    return [reversed_keys(item) for item in value] if isinstance(value, list) else value


def as_javascript(value: Any) -> Any:
    """Return the value as it is after a program in JavaScript has read and written it."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        short = float(value)
        return int(short) if short.is_integer() and abs(short) < 1e21 else short
    if isinstance(value, dict):
        return {key: as_javascript(item) for key, item in value.items()}
    return [as_javascript(item) for item in value] if isinstance(value, list) else value


@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans(), st.sampled_from([None, 2]))
def test_arguments_are_the_same_however_a_program_writes_them(
    value: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    rewritten = json.dumps(reversed_keys(as_javascript(value)), ensure_ascii=ascii_only, indent=indent)
    assert canonical(answer(rewritten)) == canonical(answer(json.dumps(value))) == canonical(answer(value))


@given(JSON, JSON)
def test_other_arguments_are_others(one: Any, other: Any) -> None:
    assume(json.dumps(as_javascript(one), sort_keys=True) != json.dumps(as_javascript(other), sort_keys=True))
    assume(one is not None and other is not None)
    assert canonical_arguments(json.dumps(one)) != canonical_arguments(json.dumps(other))


@pytest.mark.parametrize("cut", ['{"a": 1', '{"a": NaN}', "[" * 100_000, "1" * 10_000, '{"a": 1},'])
def test_arguments_that_are_not_json_are_kept_as_they_are(cut: str) -> None:
    assert canonical_arguments(cut) == f"!{cut}"
    assert canonical_arguments(cut) != canonical_arguments(json.dumps(cut))


@pytest.mark.parametrize("empty", [None, "", []])
def test_no_text_is_the_same_in_each_form(empty: Any) -> None:
    assert canonical({"role": "assistant", "content": empty}) == canonical({"role": "assistant"})


@given(st.text())
def test_what_agents_add_makes_no_difference(text: str) -> None:
    plain = canonical({"role": "user", "content": text})
    part = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    assert canonical({"role": "user", "content": [part], "id": "msg_1", "status": "completed"}) == plain
    assert canonical({"role": "user", "content": [text]}) == plain


@given(st.text(), st.text())
def test_texts_that_differ_are_others(one: str, other: str) -> None:
    assume(one != other)
    assert canonical({"role": "tool", "content": one}) != canonical({"role": "tool", "content": other})


def test_equal_outputs_of_two_calls_are_two_messages() -> None:
    said = {"role": "tool", "content": "ok"}
    assert canonical({**said, "tool_call_id": "a"}) != canonical({**said, "tool_call_id": "b"})


def test_thinking_is_part_of_it_and_can_be_left_out() -> None:
    thinking, dropped = canonical(answer({}, reasoning_content="Hm.")), canonical(answer({}))
    assert thinking != dropped
    assert thinking.without_thinking == dropped
    assert thinking == canonical(answer({}, reasoning="Hm.", reasoning_details=[{"text": "Hm."}]))


def test_images_count_by_what_they_are_and_where_they_stand() -> None:
    def shown(url: str, *, first: bool = False) -> dict[str, Any]:
        parts = [{"type": "text", "text": "Look."}, {"type": "image_url", "image_url": {"url": url, "detail": "low"}}]
        return {"role": "user", "content": parts[::-1] if first else parts}

    cat, dog = "data:image/png;base64,AAAA", "data:image/png;base64,BBBB"
    assert canonical(shown(cat)) == canonical(shown(cat))
    assert len({canonical(each) for each in (shown(cat), shown(dog), shown(cat, first=True))}) == 3
    assert cat not in repr(canonical(shown(cat)))


@given(st.dictionaries(KEYS, ANYTHING | st.lists(st.dictionaries(KEYS, ANYTHING, max_size=4), max_size=3), max_size=6))
def test_anything_has_a_canonical_form(message: dict[str, Any]) -> None:
    form = canonical(message)
    assert hash(form) == hash(canonical(message))
    assert digest([form], 1) == digest([canonical(message)], 1) != digest([form, form], 1)


def test_what_an_agent_can_not_be_told_makes_no_difference() -> None:
    """A model may write what no endpoint takes. Agents get, and send back, other characters for that."""

    def said(odd: str, argument: str) -> dict[str, Any]:
        function = {"name": "f", "arguments": json.dumps({"a": argument}, ensure_ascii=False)}
        calls = [{"id": "1", "type": "function", "function": function}]
        return {"role": "assistant", "content": f"a{odd}b", "reasoning_content": f"c{odd}", "tool_calls": calls}

    for odd in ("\x7f", "\x00", "\x85", "\ud800", "\ufffe"):
        assert canonical(said(odd, odd)) == canonical(said("\ufffd", "\ufffd")), repr(odd)
        cut = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": f"{{{odd}"}}]}
        told = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\ufffd"}}]}
        assert canonical(cut) == canonical(told)
