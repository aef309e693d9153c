"""Bounded output: head, tail, counts, and characters kept whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hermes_core.sandbox.linux.output import HeadTail, Rolling, join_capture, trim_end, trim_start


@given(st.lists(st.binary(max_size=20)), st.integers(0, 40))
def test_head_tail_keeps_the_ends_and_counts_everything(pieces, limit):
    capture = HeadTail(limit)
    for piece in pieces:
        capture.feed(piece)
    whole = b"".join(pieces)
    assert capture.total == len(whole)
    assert capture.truncated == (len(whole) > limit)
    if not capture.truncated:
        assert capture.value() == whole
    else:
        head, tail = whole[: limit // 2], whole[len(whole) - (limit - limit // 2) :]
        assert capture.value() == join_capture(head, tail, len(whole))


@given(st.text(min_size=1), st.data())
def test_characters_are_never_cut_in_two(text, data):
    raw = text.encode()
    at = data.draw(st.integers(0, len(raw)))
    head, tail = trim_end(raw[:at]), trim_start(raw[at:])
    assert text.startswith(head.decode()) and text.endswith(tail.decode())
    assert len(raw) - len(head) - len(tail) <= 4


@given(st.binary(min_size=1))
def test_bytes_that_are_no_text_lose_at_most_one_characters_worth(raw):
    assert len(raw) - len(trim_end(raw)) <= 3
    assert len(raw) - len(trim_start(raw)) <= 3


def test_memory_stays_bounded_with_tiny_pieces():
    capture = HeadTail(1000)
    for number in range(20_000):
        capture.feed(b"%d" % (number % 10))
    assert len(capture._tail._data) <= 1000
    assert capture.value().endswith(b"789")
    assert b"bytes omitted" in capture.value()


@given(st.lists(st.binary(max_size=30)), st.integers(1, 40), st.integers(-5, 300), st.integers(0, 50))
def test_rolling_reads_by_offset(pieces, limit, offset, count):
    rolling = Rolling(limit)
    for piece in pieces:
        rolling.feed(piece)
    whole = b"".join(pieces)
    data, begin = rolling.read(offset, count)
    assert begin == min(max(offset, 0, len(whole) - limit), len(whole))
    assert data == whole[begin : begin + count]
    assert rolling.total == len(whole)
