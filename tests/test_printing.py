"""What is printed is shown, and nothing in it is obeyed by the terminal."""

import logging

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_core.cli.support import new_runtime
from hermes_core.printing import printable, say


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ünïcode 漢字\n\ttabs", "plain ünïcode 漢字\n\ttabs"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("all\rgone", "all\\x0dgone"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\u2066a\u2069", "\\u2066a\\u2069"),
        ("nul\0", "nul\\x00"),
    ],
)
def test_what_a_terminal_would_obey_is_written_out(text, shown):
    assert printable(text) == shown


@given(st.text())
def test_nothing_is_left_to_obey(text):
    assert all(sign.isprintable() or sign in "\n\t" or ord(sign) >= 0xA0 for sign in printable(text))


def test_lines_and_the_log_are_printed_so(capsys):
    say("out \x1b[31m")
    say("err \x1b[31m", err=True)
    new_runtime()
    logging.getLogger("hermes_core.x").warning("said \x1b[31m")
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert (out, err) == ("out \\x1b[31m\n", "err \\x1b[31m\nWARNING: said \\x1b[31m\n")


def test_wrong_use_is_printed_so(capsys):
    from hermes_core.cli.main import _Misuse

    with pytest.raises(click.ClickException):
        raise _Misuse("no such option \x1b[31m")
    _Misuse("no such option \x1b[31m").show()
    assert "\x1b" not in capsys.readouterr().err
