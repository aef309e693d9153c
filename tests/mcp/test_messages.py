"""Messages out of bytes: lines however they are cut, within bounds, and only what was asked for."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mcp_types")

from hermes_core.mcp.messages import MAX_PARTS, MAX_UNASKED, MAX_UNASKED_BYTES, Flooded, Inbox, Lines


@given(st.binary(max_size=300).map(lambda data: data.replace(b"\0", b"\n")), st.lists(st.integers(0, 300), max_size=9))
def test_lines_however_the_stream_is_cut(data: bytes, cuts: list[int]) -> None:
    lines, found = Lines(), []
    for begin, end in pairwise([0, *sorted(cuts), len(data) + 300]):
        found += lines.feed(data[begin:end])
    assert found == data.split(b"\n")[:-1]


@pytest.mark.parametrize("sizes", [[101], [50, 51], [1] * 101])
def test_a_line_without_an_end(sizes: list[int]) -> None:
    lines = Lines(100)
    assert lines.feed(b"x" * 100 + b"\n" + b"") == [b"x" * 100]
    with pytest.raises(Flooded, match="more than 100 bytes"):
        for size in sizes:
            lines.feed(b"x" * size)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=9),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner),
    )
)
def test_any_json_is_a_message_or_left_out(value: object) -> None:
    assert Inbox().feed(json.dumps(value).encode() + b"\n") == []


@given(st.binary(max_size=200))
def test_any_bytes_are_no_message(data: bytes) -> None:
    Inbox().feed(data + b"\n")


def test_what_is_kept_and_what_is_not() -> None:
    inbox = Inbox()
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
    inbox = Inbox()
    inbox.feed(b"\n" * MAX_UNASKED)
    with pytest.raises(Flooded, match="nobody asked for"):
        inbox.feed(b"\n")
    inbox = Inbox()
    with pytest.raises(Flooded, match="nobody asked for"):
        for _ in range(MAX_UNASKED_BYTES // (1 << 20) + 1):
            inbox.feed(b"x" * ((1 << 20) - 1) + b"\n")
    inbox.allow()
    inbox.feed(b"\n" * MAX_UNASKED)
