"""The name of the server in a real client's first message, whole, in pieces, and spoilt."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_core.sandbox.egress.tls import Incomplete, find_server_name


def hello(name: str | None, *, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> bytes:
    """What OpenSSL sends first."""
    context = ssl.create_default_context()
    context.check_hostname, context.maximum_version = False, newest
    sent = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=name).do_handshake()
    return sent.read()


def in_records(data: bytes, size: int) -> bytes:
    """The same message, divided into records of this size."""
    message = data[5:]
    parts = [message[start : start + size] for start in range(0, len(message), size)]
    return b"".join(data[:3] + len(part).to_bytes(2, "big") + part for part in parts)


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_the_name_is_found(newest: ssl.TLSVersion) -> None:
    assert find_server_name(hello("www.example.org", newest=newest)) == "www.example.org"
    assert find_server_name(hello(None, newest=newest)) is None


@given(st.data(), st.integers(1, 400))
def test_a_name_in_pieces_is_found_when_it_is_whole(data: st.DataObject, size: int) -> None:
    whole = in_records(hello("a.example.org"), size)
    assert find_server_name(whole + b"more") == "a.example.org"
    with pytest.raises(Incomplete):
        find_server_name(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.data())
def test_spoilt_messages_are_errors_and_nothing_else(data: st.DataObject) -> None:
    message = bytearray(hello("a.example.org"))
    for _ in range(data.draw(st.integers(1, 5))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        name = find_server_name(bytes(message))
    except (Incomplete, ValueError):
        return
    assert name is None or isinstance(name, str)


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x00\x00", b"\x16\x03\x01\x00\x04\x02\0\0\0", b"\x16\x03\x01\x00\x04\x01\xff\xff\xff"]
)
def test_messages_that_never_end_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        find_server_name(data)
