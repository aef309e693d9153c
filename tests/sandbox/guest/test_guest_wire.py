"""Frames: any split of the bytes gives the same ones, and anything else is refused."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_core.sandbox.guest import wire

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v, max_size=3), max_leaves=5
)
FRAMES = st.lists(
    st.tuples(st.dictionaries(st.text(max_size=8), VALUES, max_size=4), st.binary(max_size=300)), max_size=5
)


@given(FRAMES, st.lists(st.integers(1, 40), max_size=60))
def test_any_split_gives_the_same_frames(frames, sizes):
    stream = b"".join(wire.encode(header, data) for header, data in frames)
    decoder, found, start = wire.Decoder(), [], 0
    for size in sizes:
        found += decoder.feed(stream[start : start + size])
        start += size
    found += decoder.feed(stream[start:])
    assert found == frames


@given(st.binary(min_size=4, max_size=400))
def test_garbage_is_refused_or_waited_for(data):
    """Never anything but frames or FrameError, and no more is held than what came."""
    decoder = wire.Decoder()
    try:
        for header, _ in decoder.feed(data):
            assert isinstance(header, dict)
    except wire.FrameError:
        return
    assert len(decoder._buffer) <= len(data)


@pytest.mark.parametrize("text", [b"hello", b"SSH-2.0-OpenSSH", b"Traceback (most recent", b"\xff" * 8])
def test_words_are_refused_at_once(text):
    with pytest.raises(wire.FrameError):
        wire.Decoder().feed(text)


@pytest.mark.parametrize("header", [b"[]", b"1", b"null", b"{", b"\xff\xff", b"{}x", b"[" * 100_000, b""])
def test_headers_that_are_no_objects(header):
    with pytest.raises(wire.FrameError):
        wire.Decoder().feed(struct.pack(">II", len(header), 0) + header)


def test_sizes_are_bounded_both_ways():
    for sizes in ((wire.MAX_HEADER + 1, 0), (2, wire.MAX_DATA + 1)):
        with pytest.raises(wire.FrameError):
            wire.Decoder().feed(struct.pack(">II", *sizes))
    with pytest.raises(wire.FrameError):
        wire.encode({}, bytes(wire.MAX_DATA + 1))
    with pytest.raises(wire.FrameError):
        wire.encode({"x": "x" * wire.MAX_HEADER})
    largest = wire.encode({"x": 1}, bytes(wire.MAX_DATA))
    assert wire.Decoder().feed(largest) == [({"x": 1}, bytes(wire.MAX_DATA))]


def test_words_of_any_kind_survive():
    header = {"text": "€\n\0", "lone": "\udcff"}
    assert wire.Decoder().feed(wire.encode(header)) == [(json.loads(json.dumps(header)), b"")]
