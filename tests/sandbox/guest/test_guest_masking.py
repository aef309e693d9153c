"""Secrets that only the sandbox knows: what commands write shows none of them, and no offset moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_core.sandbox.commands import WindowSize
from hermes_core.sandbox.guest.masking import SHORTEST, Mask, values_of

TOKEN = "token-of-the-sandbox"
STARS = "*" * len(TOKEN)

pieces = st.lists(
    st.sampled_from([b"token-of", b"token-of-the-sandbox", b"-the-sandbox", b"t", b"to", b"ken", b"x", b"\n"])
)


@given(pieces, st.lists(st.integers(0, 40)))
def test_however_a_stream_is_cut(pieces, cuts):
    """The same as masking all of it at once, without a byte more or less."""
    stream = b"".join(pieces)
    mask = Mask((TOKEN.encode(),))
    out, at = b"", 0
    for cut in [*cuts, len(stream)]:
        out += mask.feed(stream[at : at + cut])
        at += cut
    out += mask.rest()
    assert out == stream.replace(TOKEN.encode(), STARS.encode())
    assert not mask.holds


@given(st.binary(max_size=60), st.binary(min_size=SHORTEST, max_size=20), st.integers(0, 60))
def test_no_byte_is_lost_or_doubled(stream, value, cut):
    mask = Mask((value,))
    assert len(mask.feed(stream[:cut]) + mask.feed(stream[cut:]) + mask.rest()) == len(stream)


def test_only_what_may_begin_a_value_waits():
    mask = Mask((TOKEN.encode(),))
    assert mask.feed(b"all of mine") == b"all of mine"
    assert mask.feed(b"and a tok") == b"and a "
    assert mask.feed(b"en of mine") == b"token of mine"


def test_the_lines_of_a_value_are_values_and_short_ones_are_none():
    found = values_of(["KEY", "SHORT", "ABSENT"], {b"KEY": b"-----BEGIN-----\nabcdefgh\nshort\n", b"SHORT": b"1234567"})
    assert found == (b"-----BEGIN-----\nabcdefgh\nshort", b"-----BEGIN-----", b"abcdefgh")
    assert b"".join(Mask(found).feed(line) for line in (b"abcdefgh\n", b"short\n")) == b"********\nshort\n"


async def test_commands_see_it_and_do_not_show_it(rigged, level):
    async with rigged(level, inherit=("TOKEN",), secrets=("TOKEN",)) as rig:
        slot = await rig.slot()
        result = await slot.run('echo "[$TOKEN]"; echo $TOKEN >&2; printf %s ${TOKEN%box}; echo -n ${#TOKEN}')
        assert result.stdout.decode() == f"[{STARS}]\n{TOKEN[:-3]}20"
        assert result.stderr.decode() == STARS + "\n"
        slowly = 'printf %s "${TOKEN%box}"; sleep 0.02; echo box'
        assert (await slot.run(slowly)).stdout.decode() == STARS + "\n"
        await slot.run("echo $TOKEN > kept")
        assert (await slot.read_file("kept")).data.decode() == TOKEN + "\n", "a file is data, and may be written back"


@pytest.mark.parametrize("pty", [None, WindowSize(24, 80)], ids=["pipes", "pty"])
async def test_background_processes_do_not_show_it(rigged, pty):
    async with rigged("shared", inherit=("TOKEN",), secrets=("TOKEN",)) as rig:
        slot = await rig.slot()
        process = await slot.start("stty -echo 2>/dev/null; echo $TOKEN; echo -n tok; read word; echo $word", pty=pty)
        seen = b""
        while not seen.endswith(b"tok"):  # shown before long, though a secret begins so
            chunk = await slot.log(process.process_id, offset=len(seen), wait_s=20)
            assert chunk.data, seen
            seen += chunk.data
        assert seen.split() == [STARS.encode(), b"tok"]
        await slot.write(process.process_id, TOKEN.encode() + b"\n")
        while (chunk := await slot.log(process.process_id, wait_s=0)).running:
            pass
        assert chunk.data.split() == [STARS.encode(), b"tok" + STARS.encode()]


async def test_what_is_not_named_is_not_seen(rigged, level):
    async with rigged(level) as rig:
        assert (await (await rig.slot()).run("echo [$TOKEN]")).stdout == b"[]\n"
