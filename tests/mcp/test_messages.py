"""Messages out of bytes: lines however they are cut, within bounds, and only what was asked for."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mcp_types")

from hermes_core.mcp.messages import MAX_PARTS, MAX_UNASKED, MAX_UNASKED_BYTES, MessageInbox
from hermes_core.sandbox.programs import Flooded


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=9),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner),
    )
)
def test_any_json_is_a_message_or_left_out(value: object) -> None:
    assert MessageInbox().feed(json.dumps(value).encode() + b"\n") == []


@given(st.binary(max_size=200))
def test_any_bytes_are_no_message(data: bytes) -> None:
    MessageInbox().feed(data + b"\n")


def test_what_is_kept_and_what_is_not() -> None:
    inbox = MessageInbox()
    note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {}}
    parts = {"content": [{"type": "text", "text": "x"}] * 3000}
    lines = [
        b"Welcome!",
        b"",
        json.dumps(note).encode(),
        json.dumps({"jsonrpc": "2.0", "id": 1, "result": parts}).encode(),
    ]
    (message,) = inbox.feed(b"\r\n".join(lines) + b"\n")
    assert inbox.junk == "Welcome!"
    assert len(message.result["content"]) == MAX_PARTS + 1  # type: ignore[union-attr]


def test_a_flood_of_lines_and_of_bytes() -> None:
    inbox = MessageInbox()
    inbox.feed(b"\n" * MAX_UNASKED)
    with pytest.raises(Flooded, match="nobody asked for"):
        inbox.feed(b"\n")
    inbox = MessageInbox()
    with pytest.raises(Flooded, match="nobody asked for"):
        for _ in range(MAX_UNASKED_BYTES // (1 << 20) + 1):
            inbox.feed(b"x" * ((1 << 20) - 1) + b"\n")
    inbox.allow()
    inbox.feed(b"\n" * MAX_UNASKED)
