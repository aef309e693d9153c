"""Servers that the driver runs or reaches: programs with one owner, and URLs over both transports."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from hermes_core.errors import ConfigError, ErrorKind, InfraError
from hermes_core.mcp.opening import check_servers, open_servers
from hermes_core.mcp.servers import McpServer
from hermes_core.sandbox.commands import ExecutionResult
from hermes_core.tools.base import CallContext
from hermes_core.tools.registry import ToolRegistry
from tests.mcp.mcp_servers import HERE, odd, real

Call = Callable[..., Awaitable[ExecutionResult]]


@asynccontextmanager
async def opened(**servers: McpServer) -> AsyncIterator[Call]:
    async with open_servers(servers, None) as open_:
        named = {tool.name: tool for tool in open_.tools}

        async def call(name: str, timeout_s: float = 30, **arguments: Any) -> ExecutionResult:
            return await ToolRegistry().call(named[name], CallContext(timeout_s=timeout_s), arguments)

        yield call


def alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def test_a_program_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_DRIVER", "x")
    async with opened(real=real(where="driver", cwd=str(tmp_path), env={"WORD": "w"})) as call:
        about = json.loads((await call("real__about")).output)
        assert about["cwd"] == str(tmp_path) and about["word"] == "w" and alive(about["pid"])
        environ = Path(f"/proc/{about['pid']}/environ").read_bytes()
        assert b"SECRET_OF_THE_DRIVER" not in environ and b"PATH=" in environ
    assert not alive(about["pid"])


@pytest.mark.full
@pytest.mark.parametrize("how", ["child", "daemon", "ignores-the-end"])
async def test_a_program_ends_with_all_that_it_started(how: str) -> None:
    async with opened(odd=odd(how, where="driver")) as call:
        text = (await call("odd__t")).output
    for pid in text.split() if how != "ignores-the-end" else ():
        for _ in range(100):  # a kill takes a moment
            if alive(int(pid)):
                await asyncio.sleep(0.1)
        assert not alive(int(pid))


BROKEN = {
    "die": "status 3, and wrote: out of ideas",
    "flood-junk": "nobody asked for",
    "endless-line": "more than 4194304 bytes",
}


@pytest.mark.full
@pytest.mark.loop_stall(0.2)
@pytest.mark.parametrize("how", BROKEN)
async def test_a_program_that_breaks_is_an_error_for_the_model(how: str, loop_lag: None) -> None:
    async with opened(odd=odd(how, where="driver")) as call:
        broken = await call("odd__t", text="x")
    assert BROKEN[how] in broken.error and broken.error_kind is ErrorKind.COMMAND


@pytest.mark.full
async def test_a_cancelled_start_leaves_no_program(tmp_path: Path) -> None:
    mark = str(tmp_path)
    server = McpServer(command=sys.executable, args=("-c", "import time; time.sleep(3600)", mark), where="driver")

    async def work() -> None:
        async with opened(a=server, b=server):
            pytest.fail("it was opened")

    for after_s in (0.0, 0.01, 0.3):
        task = asyncio.create_task(work())
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not [line for line in _command_lines() if mark in line]


def _command_lines() -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(entry.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
    return found


UNUSABLE = {
    "no program": (McpServer(command="no-such-program", where="driver"), "'no-such-program' can't be started"),
    "ends": (odd("exits", where="driver"), "no licence"),
    "lies": (odd("several", where="driver"), "200 tools"),
    "a pattern": (odd("deep-pattern", where="driver"), "nested too deeply, or a pattern in them is"),
    "nobody there": (McpServer(url="http://127.0.0.1:9/mcp"), "can't be used"),
    "nobody there, SSE": (McpServer(url="http://127.0.0.1:9/sse", transport="sse"), "can't be used"),
}


@pytest.mark.parametrize("case", UNUSABLE)
async def test_a_server_of_the_run_is_checked_at_the_start(case: str) -> None:
    server, said = UNUSABLE[case]
    with pytest.raises(ConfigError) as caught:
        await check_servers({"web": server, "slot": odd("exits")})
    assert "'web'" in caught.value.message and said in caught.value.message and caught.value.hint
    with pytest.raises(InfraError):
        async with opened(web=server):
            pytest.fail("it was opened")


@asynccontextmanager
async def served(transport: str) -> AsyncIterator[str]:
    """A real server on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "real_server.py"), transport, str(port), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        for _ in range(600):
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                await writer.wait_closed()
                break
            await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{port}/{'sse' if transport == 'sse' else 'mcp'}"
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


@pytest.mark.full
@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
async def test_a_server_at_a_url(transport: Any) -> None:
    async with served(transport) as url, opened(web=McpServer(url=url, transport=transport)) as call:
        assert (await call("web__add", a=2, b=3)).output == "5"
        assert "for a reason" in (await call("web__fail", why="for a reason")).error
        late = await call("web__wait", timeout_s=1, seconds=30)
        assert late.error_kind is ErrorKind.TIMEOUT
        assert (await call("web__add", a=1)).output == "2"
        await call("web__leave", timeout_s=10)
        gone = await call("web__add", timeout_s=10, a=1)
        assert not gone.success and gone.error_kind in (ErrorKind.COMMAND, ErrorKind.TIMEOUT)


@asynccontextmanager
async def answering(head: str, pieces: Iterable[bytes] = ()) -> AsyncIterator[tuple[str, list[bytes]]]:
    """An HTTP server that gives every request this answer. Yields its URL, and what it was sent and has sent."""
    said: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            said.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(f"HTTP/1.1 {head}\r\nConnection: close\r\n\r\n".encode())
            for piece in pieces:
                said.append(piece)
                writer.write(piece)
                await writer.drain()
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp", said


async def test_headers_are_sent_and_a_refusal_is_said() -> None:
    async with answering("401 Unauthorized") as (url, said):
        with pytest.raises(ConfigError, match="401"):
            await check_servers({"web": McpServer(url=url, headers={"Authorization": "Bearer k"})})
    assert b"authorization: bearer k" in said[0].lower()


ANSWERS = {
    "long": ("200 OK\r\nContent-Type: application/json", 400),
    "packed": ("200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip", 400),
    "one long event": ("200 OK\r\nContent-Type: text/event-stream", 400),
    "a page": ("200 OK\r\nContent-Type: text/html", 1),
}


@pytest.mark.parametrize("case", ANSWERS)
async def test_an_answer_over_http_is_bounded(case: str) -> None:
    head, pieces = ANSWERS[case]
    async with answering(head, [b"x" * 100_000] * pieces) as (url, said):
        with pytest.raises(ConfigError, match="can't be used"):
            await check_servers({"web": McpServer(url=url)})
        assert sum(map(len, said)) < 30_000_000
