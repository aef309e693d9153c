"""Output cut to its head and tail: bounds, counts and whole characters, for any bytes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_core.tools.base import CallContext
from hermes_core.tools.limits import OUTPUT_BYTES, OUTPUT_CHARS, cut_output, time_limit

NOTICE = re.compile(r"\n\n\[\.\.\. (\d+) (characters|bytes) omitted[^\]]*\]\n\n")

texts = st.builds(lambda parts: "".join(p * n for p, n in parts), st.lists(st.tuples(st.text(), st.integers(0, 60))))


@given(texts, st.integers(200, 1000))
def test_text_within_the_limit_is_untouched_and_longer_text_never_exceeds_it(text: str, limit: int) -> None:
    shown, dropped = cut_output(text.encode(), limit=limit)
    assert len(shown) <= limit
    assert (dropped > 0) == (len(text) > limit)
    if not dropped:
        assert shown == text
        return
    notice = next(NOTICE.finditer(shown))
    head, tail = shown[: notice.start()], shown[notice.end() :]
    assert text.startswith(head) and text.endswith(tail)
    assert int(notice[1]) == len(text) - len(head) - len(tail)
    assert dropped == len(text.encode()) - len(head.encode()) - len(tail.encode())
    assert len(shown) >= limit - 12  # no more is left out than must be, but for the digits of the count


@given(st.binary(max_size=3000), st.integers(200, 400))
def test_any_bytes_become_text_that_utf8_can_carry(data: bytes, limit: int) -> None:
    shown, _ = cut_output(data, limit=limit)
    assert len(shown) <= limit
    assert shown.encode().decode() == shown


@given(st.integers(0, 3), st.integers(0, 10_000))
def test_what_was_left_out_before_is_counted_too(shift: int, missing: int) -> None:
    half = ("x" * shift + "€" * 600).encode()
    total = 2 * len(half) + missing
    shown, dropped = cut_output(half + b"[notice]" + half, total, limit=500)
    assert dropped and "[notice]" not in shown
    notice = NOTICE.search(shown)
    assert notice
    kept = len(shown[: notice.start()].encode()) + len(shown[notice.end() :].encode())
    if missing > len(b"[notice]"):
        assert notice[2] == "bytes" and int(notice[1]) == dropped == total - kept


def test_the_slot_s_own_notice_can_never_show() -> None:
    half = OUTPUT_BYTES // 2
    assert half >= 4 * 0.6 * OUTPUT_CHARS


@pytest.mark.parametrize(
    ("limit", "asked", "holds"), [(None, None, 180), (30, None, 30), (30, 10, 10), (30, 100, 30), (None, 9999, 9999)]
)
def test_time_limits(limit: float | None, asked: float | None, holds: float) -> None:
    seconds, note = time_limit(CallContext(timeout_s=limit), asked)
    assert seconds == holds
    assert (note is not None) == (asked is not None and asked > holds)
