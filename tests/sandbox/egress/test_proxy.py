"""The proxy with real clients and real servers, without a slot."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest

from hermes_core.sandbox.egress.addresses import Address
from hermes_core.sandbox.egress.hosts import HostRules
from hermes_core.sandbox.egress.proxy import Bounds, EgressProxy
from hermes_core.sandbox.egress.traffic import MAX_NAMED, OTHERS, PhaseTraffic
from tests.sandbox.egress.servers import hello, listening, serving


class Names:
    """A resolver in which each name has the addresses that a test gives it, one list a look-up."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self.answers = {name.replace("_", "."): lists for name, lists in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, name: str, port: int) -> Iterable[Address]:
        self.asked.append(name)
        lists = self.answers.get(name)
        if not lists:
            raise OSError(-2, "Name or service not known")
        return [ip_address(each) for each in (lists.pop(0) if len(lists) > 1 else lists[0])]


def client(port: int, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(proxy=f"http://127.0.0.1:{port}", trust_env=False, timeout=20, **options)


async def test_plain_http_goes_to_the_allowed_host_alone() -> None:
    traffic, names = PhaseTraffic(), Names(allowed_test=[["127.0.0.1"]], denied_test=[["127.0.0.1"]])
    async with serving(hello) as server:
        rules = HostRules([f"allowed.test:{server}", f"127.0.0.1:{server}"])
        async with listening(EgressProxy([rules], traffic, resolve=names)) as port, client(port) as http:
            for body in (b"", b"x" * 300_000):
                answer = await http.post(f"http://allowed.test:{server}/a?b=c", content=body)
                assert (answer.status_code, answer.headers["x-seen"]) == (200, "yes")
                assert answer.content == b"POST /a?b=c HTTP/1.1\n" + body
            assert (await http.head(f"http://denied.test:{server}/")).status_code == 403
            assert (await http.head(f"http://allowed.test:{server}/")).status_code == 200
            refused = await http.get(f"http://denied.test:{server}/")
            assert refused.status_code == 403
            assert refused.text == f"hermes-rl: denied.test:{server} is not in allowed_hosts\n"
    assert names.asked == ["allowed.test"] * 3  # a refused name is not even looked up
    assert traffic.reached == {f"allowed.test:{server}": 3}
    assert traffic.refused == {f"denied.test:{server}": 2}
    assert traffic.bytes_sent > 300_000 < traffic.bytes_received


async def test_headers_for_the_proxy_stay_with_it() -> None:
    heads: list[bytes] = []

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.0 204 No\r\nX: y\r\n\r\n")

    async with serving(keep) as server:
        rules = HostRules([f"127.0.0.1:{server}"])
        async with listening(EgressProxy([rules], PhaseTraffic())) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"GET http://127.0.0.1:%d HTTP/1.1\r\nHost: elsewhere.test\r\nProxy-Authorization: secret\r\n"
                b"Connection: x-private\r\nX-Private: 1\r\nUpgrade: h2c\r\nX-Mine: 2\r\n\r\n" % server
            )
            assert (await reader.readline()).startswith(b"HTTP/1.1 204")
            writer.close()
    lines = heads[0].lower().split(b"\r\n")
    assert lines[0] == b"get / http/1.1"
    assert b"host: 127.0.0.1:%d" % server in lines
    assert b"x-mine: 2" in lines
    assert not any(b"secret" in line or b"private" in line or b"upgrade" in line or b"else" in line for line in lines)


async def test_tls_is_passed_on_and_its_server_name_checked(certificate: Path) -> None:
    traffic, names = PhaseTraffic(), Names(allowed_test=[["127.0.0.1"]])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    trust = ssl.create_default_context(cafile=str(certificate))
    errors: list[BaseException] = []
    async with serving(hello, context) as server:
        rules = HostRules([f"allowed.test:{server}", f"127.0.0.1:{server}"], ["denied.test"])
        async with listening(EgressProxy([rules], traffic, resolve=names), errors) as port:
            async with client(port, verify=trust) as http:
                answer = await http.get(f"https://allowed.test:{server}/")
                assert answer.text == "GET / HTTP/1.1\n"
                with pytest.raises(httpx.ProxyError, match="not in allowed_hosts"):
                    await http.get(f"https://other.test:{server}/")
            # Domain fronting: the tunnel is to the allowed name, TLS asks for the denied one behind it.
            for front in ("allowed.test", "127.0.0.1"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"CONNECT %b:%d HTTP/1.1\r\nHost: x\r\n\r\n" % (front.encode(), server))
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
                with pytest.raises(ConnectionError):
                    await writer.start_tls(trust, server_hostname="denied.test")
                writer.close()
    assert traffic.refused == {
        f"other.test:{server}": 1,
        f"denied.test behind allowed.test:{server}": 1,
        f"denied.test behind 127.0.0.1:{server}": 1,
    }
    assert all("denied.test" in str(error) for error in errors)
    assert len(errors) == 2


async def test_a_name_that_changes_its_address_leads_nowhere() -> None:
    """DNS rebinding: the address that was judged is the one that is connected to, and it is looked up once."""
    traffic = PhaseTraffic()
    names = Names(rebind_test=[["127.0.0.1"]], mixed_test=[["169.254.169.254", "10.0.0.1", "::1", "127.0.0.2"]])
    connected: list[bool] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(True)

    async with serving(note) as server:
        rules = HostRules([f"*:{server}"])
        async with listening(EgressProxy([rules], traffic, resolve=names)) as port, client(port) as http:
            for name in ("rebind.test", "mixed.test"):
                answer = await http.get(f"http://{name}:{server}/")
                assert (answer.status_code, "must be in allowed_hosts itself" in answer.text) == (403, True)
            answer = await http.get(f"http://127.0.0.1:{server}/")
            assert answer.status_code == 403
            answer = await http.get(f"http://unknown.test:{server}/")
            assert (answer.status_code, "Name or service not known" in answer.text) == (502, True)
    assert names.asked == ["rebind.test", "mixed.test", "unknown.test"]
    assert not connected
    assert traffic.failed == 1


@pytest.mark.parametrize(
    "request_line",
    [
        "GET / HTTP/1.1", "GET https://a.test/ HTTP/1.1", "GET ftp://a.test/ HTTP/1.1", "CONNECT a.test HTTP/1.1",
        "CONNECT a.test:0 HTTP/1.1", "CONNECT a.test:99999 HTTP/1.1", "CONNECT [::1 HTTP/1.1", "CONNECT :443 HTTP/1.1",
        "GET http:///x HTTP/1.1", "GET http://[::1/ HTTP/1.1", "GET http://a.test:x/ HTTP/1.1", "nonsense",
        "CONNECT 127.1:443 HTTP/1.1", "GET http://0x7f000001/ HTTP/1.1", "OPTIONS * HTTP/1.1",
        "GET http://a.test/ HTTP/1.1\r\nHost: b.test", "\x05\x01\x00",
    ],
)  # fmt: skip
async def test_odd_requests_get_an_answer(request_line: str) -> None:
    async with listening(EgressProxy([HostRules(["127.0.0.1"])], PhaseTraffic())) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_line.encode("latin-1") + b"\r\nHost: a.test\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 403")), answer
    assert b"hermes-rl: " in answer


async def test_smuggled_requests_are_refused() -> None:
    """Two lengths, or a body that hides a second request for another host."""
    seen: list[bytes] = []

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with serving(keep) as server:
        rules = HostRules([f"127.0.0.1:{server}"])
        async with listening(EgressProxy([rules], PhaseTraffic())) as port:
            url = b"POST http://127.0.0.1:%d/ HTTP/1.1\r\nHost: x\r\n" % server
            for head in (
                b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
                b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET http://denied.test/ HTTP/1.1\r\n"
                b"\r\n",
                b"Transfer-Encoding: xchunked\r\n\r\nabcd",
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(url + head)
                answer = await asyncio.wait_for(reader.read(), 10)
                writer.close()
                assert answer.count(b"HTTP/1.1 200") <= 1
                assert b"HTTP/1.1 4" in answer or b"HTTP/1.1 5" in answer or not seen
    assert not any(b"denied" in head for head in seen)


async def test_bounds_end_connections() -> None:
    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def tunnelled(handle: Any, bounds: Bounds, errors: list[BaseException]) -> int:
        """The number of bytes from a tunnel until it breaks."""
        async with serving(handle) as server:
            proxy = EgressProxy([HostRules([f"127.0.0.1:{server}"])], PhaseTraffic(), bounds)
            async with listening(proxy, errors) as port:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\nHost: x\r\n\r\n" % server)
                await reader.readuntil(b"\r\n\r\n")
                count = 0
                with contextlib.suppress(ConnectionError):
                    while data := await asyncio.wait_for(reader.read(65536), 20):
                        count += len(data)
                writer.close()
                return count

    errors: list[BaseException] = []
    assert await tunnelled(pour, Bounds(bytes_in_all=1_000_000), errors) <= 1_000_000
    assert await tunnelled(hang, Bounds(idle_s=0.2), errors) == 0
    assert ["more than 1000000 bytes" in str(errors[0]), "nothing moved" in str(errors[1])] == [True, True]
    async with listening(EgressProxy([HostRules(["a.test"])], PhaseTraffic(), Bounds(request_s=0.2))) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET http://a.test/")  # a request that never ends
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.write(b"x" * 1000)
        writer.close()


async def test_a_server_that_breaks_off_is_an_error() -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"GET /nothing" not in head:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
            await writer.drain()

    async with serving(half) as server:
        rules = HostRules([f"127.0.0.1:{server}"])
        async with listening(EgressProxy([rules], PhaseTraffic())) as port, client(port) as http:
            assert (await http.get(f"http://127.0.0.1:{server}/nothing")).status_code == 502
            with pytest.raises(httpx.HTTPError):
                await http.get(f"http://127.0.0.1:{server}/half")


async def test_what_programs_ask_for_is_counted_without_growing() -> None:
    traffic = PhaseTraffic()
    async with listening(EgressProxy([HostRules(["a.test"])], traffic)) as port, client(port) as http:
        for number in range(MAX_NAMED + 20):
            await http.get(f"http://{'x' * 50}{number}.test/")
    assert len(traffic.refused) == MAX_NAMED + 1
    assert traffic.refused[OTHERS] == 20
    assert sum(traffic.refused.values()) == MAX_NAMED + 20


async def test_bytes_sent_with_the_request_for_a_tunnel_are_not_lost() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())

    async with (
        serving(echo) as server,
        listening(EgressProxy([HostRules([f"127.0.0.1:{server}"])], PhaseTraffic())) as port,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\nHost: x\r\n\r\nearly" % server)
        await asyncio.sleep(0.2)
        writer.write(b" and late")
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert answer.endswith(b"\r\n\r\nearly and late")
