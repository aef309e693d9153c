"""Lines of programs in a slot, however they are cut, and within bounds."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_core.sandbox.programs import Flooded, LineCutter


@given(st.binary(max_size=300).map(lambda data: data.replace(b"\0", b"\n")), st.lists(st.integers(0, 300), max_size=9))
def test_lines_however_the_stream_is_cut(data: bytes, cuts: list[int]) -> None:
    lines, found = LineCutter(1000), []
    for begin, end in pairwise([0, *sorted(cuts), len(data) + 300]):
        found += lines.feed(data[begin:end])
    assert found == data.split(b"\n")[:-1]


@pytest.mark.parametrize("sizes", [[101], [50, 51], [1] * 101])
def test_a_line_without_an_end(sizes: list[int]) -> None:
    lines = LineCutter(100)
    assert lines.feed(b"x" * 100 + b"\n" + b"") == [b"x" * 100]
    with pytest.raises(Flooded, match="more than 100 bytes"):
        for size in sizes:
            lines.feed(b"x" * size)
