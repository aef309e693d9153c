"""HTTP/1.1 from programs that nobody trusts: whatever they send, the server answers or ends the connection, in time."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hermes_agents.serving.http import Exchange, HttpLimits, Room, serve_http
from hypothesis import given
from hypothesis import strategies as st

LIMITS = HttpLimits(body_bytes=1000, request_s=0.3, idle_s=0.3, write_s=0.3)


@dataclass(eq=False)
class Pieces:
    """A connection whose program sends these pieces, and then nothing more or its end."""

    pieces: list[bytes]
    ends: bool = True
    sent: bytearray = field(default_factory=bytearray)
    finished: bool = False
    takes: bool = True

    async def read(self, n: int = 65536) -> bytes:
        if self.pieces:
            first = self.pieces.pop(0)
            if len(first) > n:
                self.pieces.insert(0, first[n:])
            return first[:n]
        if self.ends or self.finished:
            return b""
        await asyncio.Event().wait()
        raise AssertionError

    async def write(self, data: bytes) -> None:
        if not self.takes:
            await asyncio.Event().wait()
        self.sent += data

    async def finish(self) -> None:
        self.finished = True


@dataclass
class Echo:
    """Answers each request with its body."""

    room: Room = field(default_factory=lambda: Room(1500))
    seen: list[tuple[str, str, bytes]] = field(default_factory=list)

    async def __call__(self, exchange: Exchange) -> None:
        async with exchange.body(self.room) as body:
            self.seen.append((exchange.method, exchange.path, body))
        await exchange.answer(200, body, {"content-type": "text/plain"})


async def served(*pieces: bytes, ends: bool = True, echo: Echo | None = None) -> tuple[bytes, Echo]:
    connection, echo = Pieces([each for each in pieces if each], ends), echo or Echo()
    async with asyncio.timeout(30):
        await serve_http(connection, echo, LIMITS)
    assert connection.finished
    assert echo.room.held == 0
    return bytes(connection.sent), echo


def post(body: bytes, *headers: str, path: str = "/x") -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


def statuses(sent: bytes) -> list[int]:
    return [int(part[:3]) for part in sent.split(b"HTTP/1.1 ")[1:]]


async def test_requests_on_one_connection_are_answered_one_after_the_other() -> None:
    sent, echo = await served(post(b"one"), post(b"two", path="/y?q=1%20"), b"GET /z HTTP/1.1\r\nHost: a\r\n\r\n")
    assert statuses(sent) == [200, 200, 200]
    assert echo.seen == [("POST", "/x", b"one"), ("POST", "/y", b"two"), ("GET", "/z", b"")]


async def test_requests_that_come_at_once_are_answered_in_order() -> None:
    sent, echo = await served(b"".join(post(str(number).encode()) for number in range(50)))
    assert statuses(sent) == [200] * 50
    assert [body for _, _, body in echo.seen] == [str(number).encode() for number in range(50)]


@given(st.integers(1, 40))
async def test_a_request_may_come_in_any_pieces(size: int) -> None:
    whole = post(b"a body") + post(b"another", "Connection: close")
    sent, echo = await served(*(whole[begin : begin + size] for begin in range(0, len(whole), size)))
    assert statuses(sent) == [200, 200]
    assert [body for _, _, body in echo.seen] == [b"a body", b"another"]


async def test_chunked_bodies_and_those_that_wait_to_be_asked_for_are_read() -> None:
    chunked = b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n3;x=y\r\ntwo\r\n0\r\n\r\n"
    sent, echo = await served(chunked, post(b"", "Expect: 100-continue").replace(b"Length: 0", b"Length: 5"), b"three")
    assert [body for _, _, body in echo.seen] == [b"onetwo", b"three"]
    assert statuses(sent) == [200, 100, 200]


async def test_head_is_answered_without_a_body() -> None:
    sent, _ = await served(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert sent.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(("encoding", "encode"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_compressed_bodies_are_read_up_to_the_limit(encoding: str, encode: object) -> None:
    assert callable(encode)
    sent, echo = await served(post(encode(b"plain"), f"Content-Encoding: {encoding}"))
    assert echo.seen[0][2] == b"plain"
    sent, echo = await served(post(encode(b"0" * 1_000_000)[:1000], f"Content-Encoding: {encoding}"))
    assert (statuses(sent), echo.seen) == ([413], [])
    sent, _ = await served(post(b"not at all", f"Content-Encoding: {encoding}"), post(b"x", "Content-Encoding: br"))
    assert statuses(sent)[0] == 400


@pytest.mark.parametrize(
    "pieces",
    [
        [post(b"x" * 1001)],
        [post(b"", "X: y").replace(b"Content-Length: 0", b"Content-Length: 1000000000000")],
        [b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", *[b"64\r\n" + b"x" * 100 + b"\r\n"] * 11],
    ],
    ids=["long", "named as endless", "endless"],
)
async def test_a_body_that_is_too_long_is_refused_and_not_read_on(pieces: Sequence[bytes]) -> None:
    sent, echo = await served(*pieces)
    assert (statuses(sent), echo.seen) == ([413], [])
    assert b"connection: close" in sent.lower()


async def test_all_connections_share_the_room_for_bodies() -> None:
    room = Room(1500)
    with room.part() as take:
        take(1000)
        connection = Pieces([post(b"x" * 600)])
        await serve_http(connection, Echo(room), LIMITS)
        assert statuses(bytes(connection.sent)) == [413]
        assert room.held == 1000
    assert room.held == 0


@pytest.mark.parametrize(
    "pieces", [[b"GET / HT"], [post(b"whole")[:-2]], [b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10]], ids=str
)
async def test_a_request_that_does_not_come_in_time_is_refused(pieces: Sequence[bytes]) -> None:
    sent, echo = await served(*pieces, ends=False)
    assert (statuses(sent), echo.seen) == ([408], [])


async def test_a_connection_without_a_request_is_closed_in_time() -> None:
    assert (await served(ends=False))[0] == b""
    assert statuses((await served(post(b"one"), ends=False))[0]) == [200]


async def test_a_program_that_does_not_read_its_answer_is_given_up() -> None:
    connection = Pieces([post(b"one")], takes=False)
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(30):
            await serve_http(connection, Echo(), LIMITS)


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\nHost: a\r\n" + b"x: y\r\n" * 20_000, b"x" * 200_000])
async def test_a_head_that_is_too_long_is_refused(head: bytes) -> None:
    sent, echo = await served(head)
    assert (statuses(sent), echo.seen) == ([431], [])


LINES = (
    *("GET / HTTP/1.1", "POST /v1/x HTTP/1.1", "HEAD * HTTP/1.0", "CONNECT a:1 HTTP/1.1", "Host: a", "", "0", "hello"),
    *("Content-Length: 5", "Content-Length: -1", "Content-Length: 5, 5", "Transfer-Encoding: chunked", "5", "0\r\n"),
    *(
        "Expect: 100-continue",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Connection: close",
        "Content-Encoding: gzip",
    ),
    *("Content-Encoding: gzip", "PRI * HTTP/2.0\r\n\r\nSM\r\n", "Host: a\r\n", "\n", "\0"),
)
WORDS = st.sampled_from(LINES).map(lambda line: f"{line}\r\n".encode())


@given(st.lists(WORDS | st.binary(max_size=30), max_size=14))
async def test_any_bytes_end_in_an_answer_or_the_end(pieces: list[bytes]) -> None:
    sent, _ = await served(*pieces)
    assert not sent or sent.startswith(b"HTTP/1.1 ")
