"""64 coding agents that are programs in slots, at once: what a model call through the channel costs the driver."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hermes_agents.program import CommandAgent, CommandSettings

from benchmarks.host import NOT_GRANTED, acquire_all, local_backend
from benchmarks.measure import Memory, Row, Rows, p50, percentile, span, take_turns, watch_stalls
from hermes_core.agents.base import AgentSlot, AgentTask
from hermes_core.sandbox.commands import SlotCommands

NAME = "agent_programs"
AT_ONCE, QUICK, TURNS = 64, 16, 10
LEVEL = "user"
TASK = "Look at the notes, and add a line to them until there are ten."
VERIFIERS = Path(__file__).resolve().parents[1] / ".venv-verifiers/bin/python"

PROGRAM = """
import http.client, json, os, subprocess, sys, urllib.parse
tool = {"type": "function", "function": {"name": "bash", "description": "Run a command. " + "How it is done. " * 60,
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}
others = [{"type": "function", "function": {"name": "tool_%d" % n, "description": "What it does. " * 100,
    "parameters": {"type": "object", "properties": {"p%d" % k: {"type": "string", "description": "What it is. " * 6}
    for k in range(8)}}}} for n in range(8)]
messages = [{"role": "system", "content": "You work in a Linux system, with care. " * 300},
    {"role": "user", "content": sys.argv[1]}]
url, stream = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ.get("STREAM") == "1"
there = http.client.HTTPConnection(url.hostname, url.port)
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
model = os.environ["OPENAI_MODEL"]

def ask():
    body = {"model": model, "messages": messages, "tools": [tool] + others, "stream": stream}
    there.request("POST", url.path + "/chat/completions", json.dumps(body), headers)
    response = there.getresponse()
    said = response.read().decode()
    assert response.status == 200, said
    if not stream:
        return json.loads(said)["choices"][0]["message"]
    message = {"role": "assistant", "content": "", "tool_calls": []}
    for line in said.split("\\n"):
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            message["content"] += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls") or ():
                if part.get("id"):
                    message["tool_calls"].append({"id": part["id"], "type": "function", "function":
                        {"name": part["function"]["name"], "arguments": ""}})
                message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"].get("arguments") or ""
    return message if message["tool_calls"] else {"role": "assistant", "content": message["content"]}

while True:
    message = ask()
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = done.stdout.decode() + "a line of some output\\n" * 20 + "[exit status %d]" % done.returncode
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
print(len(messages))
"""
"""The agent of examples/agent_program, with requests as those of coding agents: of 40 kB, streamed if STREAM=1, on one
connection."""

MESSAGES = 2 + 2 * TURNS + 1


@dataclass(frozen=True)
class Round:
    """What all rollouts of a round took together."""

    rollouts: int
    seconds: float
    cpu_s: float
    """The driver's processor time, without that of other processes."""
    memory: int
    """How far the driver's memory has grown at its peak."""
    lag_s: float
    """The 99th percentile of how late the event loop was for its own work."""

    @property
    def an_hour(self) -> float:
        """Rollouts."""
        return self.rollouts / self.seconds * 3600

    @property
    def call_ms(self) -> float:
        """The driver's processor time for a model call, with its share of all the rest."""
        return self.cpu_s / (self.rollouts * (TURNS + 1)) * 1e3

    @property
    def session_kb(self) -> float:
        """The driver's memory for a rollout."""
        return self.memory / self.rollouts / 1e3

    @property
    def lag_ms(self) -> float:
        """As `lag_s`."""
        return self.lag_s * 1e3


FIGURES: Sequence[tuple[str, str, Callable[[Round], float]]] = (
    ("rollouts an hour", "/h", lambda each: each.an_hour),
    ("driver's time of a call", "ms", lambda each: each.call_ms),
    ("driver's memory of a session", "KB", lambda each: each.session_kb),
    ("event loop lag, p99", "ms", lambda each: each.lag_ms),
)


async def rows(quick: bool) -> Rows:
    """Ours beside the same program in the same slots that asks the endpoint itself, and beside verifiers' server."""
    count = QUICK if quick else AT_ONCE
    about = f"{count} programs of {TURNS + 1} calls, {LEVEL}"
    async with local_backend(LEVEL, count) as backend, endpoint() as url:
        if backend is None:
            for figure, unit, _ in FIGURES:
                yield Row(NAME, f"{figure}, {about}", None, None, unit, None, (NOT_GRANTED,))
            return
        slots = [backend.commands(slot) for slot in await acquire_all(backend, count)]
        await _rollouts(slots[:1], url, stream=True)()  # what is imported then is not of the sessions
        gc.collect()
        gc.freeze()  # as a long run does
        ways = [measured(way, count) for way in (_rollouts(slots, url, stream=True), _direct(slots, url))]
        ours, direct = await take_turns(ways, 1 if quick else 5, warm_up=0)
        for row in _compared(about, "asks the endpoint itself", ours, direct):
            yield row
        if VERIFIERS.exists() and not quick:
            whole = measured(_rollouts(slots, url, stream=False), count)
            later, theirs = await take_turns([whole, lambda: _verifiers(url)], 3, warm_up=0)
            known = [replace(each, memory=ours[0].memory) for each in later]  # they get again what was given back
            for row in _compared(f"{about}, not streamed", "verifiers' interception", known, theirs):
                yield row
        gc.unfreeze()


def _compared(about: str, reference: str, ours: Sequence[Round], theirs: Sequence[Round]) -> list[Row]:
    found = []
    for figure, unit, value in FIGURES:
        mine, others = [value(each) for each in ours], [value(each) for each in theirs]
        # The first round's memory is what counts: the later ones get again what it has given back.
        pick = max if unit == "KB" else p50
        notes = (f"{span(mine, unit)}; reference: {reference}, {span(others, unit)}",)
        found.append(Row(NAME, f"{figure}, {about}", pick(mine), pick(others), unit, None, notes))
    return found


def measured(work: Callable[[], Awaitable[None]], rollouts: int) -> Callable[[], Awaitable[Round]]:
    """Return the same work, giving what it took."""

    async def taken() -> Round:
        gc.collect()
        memory = Memory([os.getpid()])
        began, worked = time.perf_counter(), time.process_time()
        async with watch_stalls() as stalls:
            await work()
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - worked
        return Round(rollouts, seconds, cpu_s, memory.growth(), percentile(stalls.lags_s, 0.99))

    return taken


def _rollouts(slots: Sequence[SlotCommands], url: str, *, stream: bool) -> Callable[[], Awaitable[None]]:
    """Return what runs the agent in all slots, its calls through the forward and the gateway."""
    command = f"python3 -c {shlex.quote(PROGRAM)} {{prompt}}"
    given = {"command": command, "model": "scripted", "base_url": url, "api_key": "none", "max_turns": 100}
    settings = CommandSettings.model_validate({**given, "variables": {"STREAM": str(int(stream))}})

    async def one(agent: CommandAgent, number: int, commands: SlotCommands) -> None:
        async def nothing(*_: object) -> Any:
            raise AssertionError

        slot = AgentSlot(commands, nothing)
        task = AgentTask(f"rollout-{number}", [{"role": "user", "content": TASK}], [], nothing, nothing, slot=slot)
        result = await agent.run(task)
        assert len(result.messages) == MESSAGES and result.turns_used == TURNS + 1, result.program

    async def work() -> None:
        async with contextlib.aclosing(CommandAgent(settings)) as agent, asyncio.TaskGroup() as group:
            for number, commands in enumerate(slots):
                group.create_task(one(agent, number, commands))

    return work


def _direct(slots: Sequence[SlotCommands], url: str) -> Callable[[], Awaitable[None]]:
    """Return what runs the program in all slots, and lets it ask the endpoint itself."""
    env = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "OPENAI_MODEL": "scripted", "STREAM": "1"}

    async def one(commands: SlotCommands) -> None:
        done = await commands.run(["python3", "-c", PROGRAM, TASK], env=env)
        assert done.text.strip() == str(MESSAGES), done.error_text

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            for commands in slots:
                group.create_task(one(commands))

    return work


async def _verifiers(url: str) -> Round:
    """Return the same of verifiers' interception server, with its subprocess runtime, in its own environment."""
    asked = [str(VERIFIERS), "-m", "benchmarks.verifiers_interception", url]
    process = await asyncio.create_subprocess_exec(*asked, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return Round(**json.loads(said.splitlines()[-1]))


@contextlib.asynccontextmanager
async def endpoint(turns: int = TURNS) -> AsyncIterator[str]:
    """The URL of an endpoint that answers at once, in a process of its own."""
    pipe = asyncio.subprocess.PIPE
    program = str(Path(__file__).with_name("chat_server.py"))
    process = await asyncio.create_subprocess_exec(sys.executable, program, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{turns}\n".encode())
        await process.stdin.drain()
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}/v1"
    finally:
        process.stdin.close()
        await process.wait()
