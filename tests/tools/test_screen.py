"""Screens: what a person would see after some bytes, and that any bytes can be shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_core.sandbox.commands import WindowSize
from hermes_core.tools.screen import as_seen, render

SIZE = WindowSize(5, 20)


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", ()),
        (b"one\r\ntwo", ("one", "two")),
        (b"10%\r50%\r100%", ("100%",)),
        (b"a\x1b[3;5Hb", ("a", "", "    b")),
        (b"gone\x1b[2J\x1b[Hnew", ("new",)),
        (b"\x1b[1;31mred\x1b[0m", ("red",)),
        ("wide 日本 €".encode(), ("wide 日本 €",)),
        (b"\xff\xfe", ("\ufffd\ufffd",)),
        (b"\x1b[?4m\x1b[>4;2mvim", ("vim",)),
        (b"\x1b]0;title\x07text", ("text",)),
        (b"\x1b#8" * 300_000 + b"text", ("text",)),  # a test picture each, which took the driver an hour
        (b"\n".join(b"%d\r" % n for n in range(9)), ("4", "5", "6", "7", "8")),
    ],
)
def test_what_is_seen(data: bytes, lines: tuple[str, ...]) -> None:
    assert render(data, SIZE).lines == lines


def test_a_full_screen_program_leaves_the_screen_as_it_was() -> None:
    during = b"before\x1b[?1049h\x1b[Heditor"
    assert render(during, SIZE).lines == ("editor",)
    assert render(during + b"\x1b[?1049l!", SIZE).lines == ("before!",)


def test_the_cursor() -> None:
    screen = render(b"\x1b[2;4Hx", SIZE)
    assert (screen.row, screen.column, screen.text) == (1, 4, "\n   x")


_PIECES = st.one_of(
    st.binary(max_size=20),
    st.from_regex(rb"\x1b\[[?>]?[0-9;]{0,8}[@-~]", fullmatch=True),
    st.sampled_from(
        [b"\x1b[?1049h", b"\x1b[?47l", b"\x1b[?3h", b"\x1b[?3l", b"\x1bc", b"\x1b#8", b"\x1b[99999999999d"]
    ),
    st.text(max_size=5).map(lambda text: text.encode("utf-8", "ignore")),
)


@settings(max_examples=2 * settings.default.max_examples)
@given(st.lists(_PIECES, max_size=30))
def test_any_bytes_can_be_shown(pieces: list[bytes]) -> None:
    screen = render(b"".join(pieces), SIZE)
    assert len(screen.lines) <= SIZE.rows


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ("plain\n text\t\n", "plain\n text\t\n"),
        ("  0%\r 50%\r100%\ndone\r\n", "100%\ndone\n"),
        ("long text\rshort\x1b[K\n", "short\n"),
        ("12345\r\x1b[2Kx", "x"),
        ("abc\b\bX", "aXc"),
        ("\x1b[1;31mred\x1b[0m \x1b]0;title\x07text\x1b(B", "red text"),
        ("a\x1b", "a"),
    ],
)
def test_output_as_it_is_seen(written: str, seen: str) -> None:
    assert as_seen(written) == seen


@given(st.text(alphabet="ab\r\b\x1b[]mK2;\n\x07é"))
def test_nothing_is_left_that_moves_the_cursor(text: str) -> None:
    assert not set(as_seen(text)) & set("\r\b\x1b")
