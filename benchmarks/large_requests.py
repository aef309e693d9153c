"""A program in a slot sends requests as large as they may be: how late the driver's event loop is meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from hermes_agents.program import CommandAgent, CommandSettings

from benchmarks.agent_programs import LEVEL, endpoint
from benchmarks.host import NOT_GRANTED, acquire_all, local_backend
from benchmarks.measure import Row, Rows, percentile
from hermes_core.agents.base import AgentSlot, AgentTask
from hermes_core.sandbox.commands import SlotCommands

NAME = "large_requests"
TASK = "Send them."
SIZE, TIMES = 15 << 20, 4
INTERVAL_S = 0.002

PROGRAM = """
import http.client, json, os, sys, urllib.parse
url, key = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]
size, times, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def post(body):
    there = http.client.HTTPConnection(url.hostname, url.port)
    there.request("POST", url.path + "/chat/completions", body, {"authorization": "Bearer " + key})
    there.getresponse().read()
    there.close()

def body(*texts, **more):
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": "m", "messages": messages, **more}, ensure_ascii=False, separators=(",", ":")).encode()

schema = {"enum": list(range(900000))}
post(body(sys.stdin.read()))
large = {
    "nothing": body("x"),
    "one text": body("It is so. " * (size // 10)),
    "Greek": body("\\u03b1" * (size // 2)),
    "escapes": body("x").replace(b'"x"', b'"' + b"\\\\u03b1" * (size // 6) + b'"'),
    "short messages": body(*["x"] * min(300000, size // 35)),
    "a schema": body("x", tools=[{"type": "function", "function": {"name": "a", "parameters": schema}}]),
    "arguments": body("x").replace(b'"x"}', b'"x"},{"role":"assistant","tool_calls":[{"function":{"name":"a",'
        b'"arguments":' + json.dumps(json.dumps(schema)).encode() + b"}}]}"),
}[kind]
for number in range(times):
    post(large[:-1] + b',"user":"%d"}' % number)
"""
KINDS = ("nothing", "one text", "Greek", "escapes", "short messages", "a schema", "arguments")


async def rows(quick: bool) -> Rows:
    """For each kind of request, the 99th percentile of how late the loop is, and the most."""
    async with local_backend(LEVEL, 1) as backend, endpoint(turns=0) as url:
        if backend is None:
            yield Row(NAME, "event loop lag", None, None, "ms", None, (NOT_GRANTED,))
            return
        [slot] = await acquire_all(backend, 1)
        for kind in KINDS[:2] if quick else KINDS:
            lags = await sent(backend.commands(slot), url, kind)
            p99, longest = (share * 1e3 for share in (percentile(lags, 0.99), max(lags)))
            notes = (f"{TIMES} requests, {len(lags)} looks, {longest:.0f} ms at most",)
            yield Row(NAME, f"event loop lag, p99: {kind}", p99, None, "ms", None, notes)


async def sent(commands: SlotCommands, url: str, kind: str) -> Sequence[float]:
    """Have the program send its requests, and return how late the loop was each time that it was looked at. Other
    threads of the process count, so this is what a clock shows."""
    command = f"python3 -c {shlex.quote(PROGRAM)} {SIZE} {TIMES} {shlex.quote(kind)}"
    settings = {"command": command, "model": "scripted", "base_url": url, "api_key": "none", "max_turns": 100}

    async def nothing(*_: object) -> Any:
        raise AssertionError

    task = AgentTask("t", [{"role": "user", "content": TASK}], [], nothing, nothing, slot=AgentSlot(commands, nothing))
    async with contextlib.aclosing(CommandAgent(CommandSettings.model_validate(settings))) as agent, lags() as found:
        result = await agent.run(task)
    assert result.program is not None
    assert result.program["exit_code"] == 0, result.program
    return found


@contextlib.asynccontextmanager
async def lags() -> AsyncIterator[list[float]]:
    """Give how late the running loop is, again and again."""
    found: list[float] = []

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(INTERVAL_S)
            found.append(time.perf_counter() - began - INTERVAL_S)

    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch())
        try:
            yield found
        finally:
            watcher.cancel()
