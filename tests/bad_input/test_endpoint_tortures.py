"""An endpoint that misbehaves in every way that we know, before `hermes-rl rollout`: never a reward, never the agent's
time, an end in a known time, and words that say what is wrong. docs/reference/endpoints.md has the table.

The times are short here; tests/stress/test_endpoint_tortures.py has real ones.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hermes_testing.scripted_server import Answer, Fault, Reply, ScriptedServer, call

FOR_GOOD = 3600.0
AGENT_S = 3.0
"""The agent's time limit. All troubles that pass last longer, or need longer in sum."""

PATIENCE_S = 2.0
REQUEST_S = 1.0
ITEMS = 6


@dataclass(frozen=True)
class Torture:
    """What is wrong, for how long, and what has to come of it."""

    fault: Fault | None = None
    """The answer of the failing server; None: nobody listens."""
    seconds: float = 4.5
    share: int = 1
    """Of this many requests, one meets the fault."""
    drip_s: tuple[float, float] = (0.0, 0.0)
    """Seconds between two lines of the headers, and between two pieces of the body."""
    request_s: float = REQUEST_S
    says: tuple[str, ...] = ()
    waited: bool = True
    """Whether the records tell of waits."""
    deadline_s: float = 30.0

    @property
    def lasts(self) -> bool:
        return self.seconds == FOR_GOOD


def lie(value: str) -> Torture:
    return Torture(Fault(429, "slow down", headers={"Retry-After": value}), says=("HTTP 429",))


TORTURES = {
    "hung for a while": Torture(Fault(delay_s=FOR_GOOD), says=("no answer in time", "answers again")),
    "429 for a while": Torture(Fault(429, headers={"Retry-After": "1"}), says=("HTTP 429", "answers again")),
    "401 for a while": Torture(Fault(401, "reloading"), says=("HTTP 401", "answers again")),
    "404 for a while": Torture(Fault(404, "reloading"), says=("HTTP 404", "answers again")),
    "500 in half of the answers": Torture(Fault(500, "oops"), FOR_GOOD - 1, share=2),
    "dead for a while": Torture(None, says=("no connection", "answers again")),
    "slow headers": Torture(drip_s=(0.25, 0), request_s=30, waited=False),
    "slow bytes": Torture(drip_s=(0, 0.3), request_s=30, waited=False),
    "bytes without end": Torture(Fault(body=b" " * 100_000), drip_s=(0, 0.05), says=("no answer in time",)),
    "a Retry-After below zero": lie("-5"),
    "a Retry-After of a year": lie("31536000"),
    "a Retry-After that is no number": lie("nan"),
    "dead for good": Torture(None, FOR_GOOD, says=("could not be reached or broke off", "check that the server runs")),
    "hung for good": Torture(Fault(delay_s=FOR_GOOD), FOR_GOOD, says=("did not answer in time",)),
    "404 for good": Torture(Fault(404, "gone"), FOR_GOOD, says=("HTTP 404", "check that the base URL is whole")),
    "503 for good": Torture(Fault(503, "reloading"), FOR_GOOD, says=("HTTP 503", "look at the server's own log")),
}

ALWAYS = {
    "429 for a while",
    "500 in half of the answers",
    "dead for good",
}
"""Those of the ordinary suite; the others are the same promises again."""


class TorturedServer(ScriptedServer):
    """Has its trouble from the third chat request on."""

    def __init__(self, torture: Torture) -> None:
        super().__init__(self._chat)
        self.torture = torture
        self.until: float | None = None
        self._asked = itertools.count(1)
        self._deaths: list[asyncio.Task[None]] = []

    def _chat(self, request: dict[str, Any]) -> Reply:
        return (
            Reply("Done.") if len(request["messages"]) > 1 else Reply(tool_calls=[call("terminal", command="touch a")])
        )

    async def _respond(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[Answer, int, bytes]:
        answer = await super()._respond(method, path, headers, body)
        if method == "GET" or not self._in_trouble():
            return answer
        fault = self.torture.fault
        if fault is None:
            return Fault(delay_s=FOR_GOOD), 200, b""
        if fault.status == 200:
            return fault, 200, fault.body if fault.body is not None else answer[2]
        return fault, fault.status, json.dumps({"error": {"message": fault.message}}).encode()

    def _in_trouble(self) -> bool:
        number = next(self._asked)
        if number < 3 or (any(self.torture.drip_s) and self.torture.fault is None):
            return False
        if self.until is None:
            self.until = time.monotonic() + self.torture.seconds
            if self.torture.fault is None:
                self._deaths.append(asyncio.create_task(self._die()))
        return number % self.torture.share == 0 and time.monotonic() < self.until

    async def _die(self) -> None:
        self._port = int(self.base_url.rpartition(":")[2].removesuffix("/v1"))
        await self.__aexit__(None, None, None)
        await asyncio.sleep(self.torture.seconds)
        await self.__aenter__()

    async def heal(self) -> None:
        await self._end_deaths()
        self.torture, self.until = Torture(), 0.0
        if self._server is None:
            await self.__aenter__()

    async def aclose(self) -> None:
        await self._end_deaths()
        await self.__aexit__(None, None, None)

    async def _end_deaths(self) -> None:
        for death in self._deaths:
            death.cancel()
        await asyncio.gather(*self._deaths, return_exceptions=True)

    async def _send(self, writer: Any, status: int, payload: bytes, answer: Answer, *, keep: bool) -> bool:
        per_line, per_piece = self.torture.drip_s
        if (not per_line and not per_piece) or (answer is not self.torture.fault and self.torture.fault is not None):
            return await super()._send(writer, status, payload, answer, keep=keep)
        head = [f"HTTP/1.1 {status} OK", "Content-Type: application/json", f"Content-Length: {len(payload)}"]
        for line in (*head, "X-One: 1", "X-Two: 2", ""):
            writer.write(f"{line}\r\n".encode())
            await writer.drain()
            await asyncio.sleep(per_line)
        size = max(1, len(payload) // (10_000 if len(payload) > 10_000 else 8))
        for start in range(0, len(payload), size):
            writer.write(payload[start : start + size])
            await writer.drain()
            await asyncio.sleep(per_piece)
        return keep


@dataclass
class Threaded:
    """Servers in a thread of their own."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    servers: list[TorturedServer] = field(default_factory=list)

    def start(self, torture: Torture) -> TorturedServer:
        self.servers.append(TorturedServer(torture))
        self.run(self.servers[-1].__aenter__())
        return self.servers[-1]

    def run(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)


@pytest.fixture
def threaded() -> Iterator[Threaded]:
    made = Threaded()
    thread = threading.Thread(target=made.loop.run_forever)
    thread.start()
    yield made
    for server in made.servers:
        made.run(server.aclose())
    made.loop.call_soon_threadsafe(made.loop.stop)
    thread.join()
    made.loop.close()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full) for name in TORTURES]
)
def test_what_an_endpoint_does_is_never_a_reward_and_never_the_agents_time(
    hermes: Callable[..., Any], tasks: Any, records: Any, level: list[str], threaded: Threaded, name: str
) -> None:
    torture = TORTURES[name]
    server = threaded.start(torture)
    rows = [{"id": f"t{n}", "check": "test -f a"} for n in range(ITEMS)]
    patience = PATIENCE_S if torture.lasts else 60
    run = [
        *("rollout", "tasks", tasks(*rows), "--out", "out", "--concurrency", "3", *level),
        *("--model", "scripted", "--base-url", server.base_url, "--rollout-timeout", AGENT_S),
        *(f"--agent.request_timeout_s={torture.request_s}", "--agent.max_retry_wait_s=1"),
    ]
    began = time.monotonic()
    done = hermes(*run, f"--agent.endpoint_patience_s={patience}")
    took = time.monotonic() - began
    found = records()
    assert took < torture.deadline_s
    assert done.code == (3 if torture.lasts else 0), done.out + done.err
    assert all(words in done.out + done.err for words in torture.says), done.out + done.err
    done.has_no_noise()
    assert {record["reward"] for record in found} <= {1.0, None}
    assert {record["failure"]["kind"] for record in found if record["failure"]} <= {"model"}
    assert "time_limit" not in {record["stop_reason"] for record in found}
    if torture.waited:
        assert sum(record["waited_s"] for record in found) > 0.5
    if not torture.lasts:
        assert [record["reward"] for record in found] == [1.0] * ITEMS
        return
    assert len(found) <= 3 + 3, "no rollout is begun after it was given up"
    assert "stopped: no other rollout would do better" in done.out
    assert done.out.count("\n  model: ") == 1, "one line tells it for all rollouts"
    assert "--out out --resume" in done.out
    threaded.run(server.heal())
    done = hermes(*run, "--resume")
    assert (done.code, len(records())) == (0, ITEMS), done.out + done.err
    failed = [record for record in found if record["failure"]]
    assert len(records("out", "superseded.jsonl")) == len(failed) > 0


WRONG = {
    "key": (Fault(401, "no such key"), "refused the API key (HTTP 401)", "set a key that is valid"),
    "path": (Fault(404, "no such path"), "(HTTP 404)", "usually ends in /v1"),
    "host": (None, "could not be reached", "check that the server runs"),
    "page": (Fault(body=b"<html>Hello</html>"), "not JSON", "check that the base URL"),
    "silence": (Fault(delay_s=60), "did not answer in time", "raise request_timeout_s"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_from_the_start_is_one_error_before_the_first_sandbox(
    hermes: Callable[..., Any], tasks: Any, level: list[str], threaded: Threaded, name: str
) -> None:
    fault, says, advises = WRONG[name]

    class Wrong(TorturedServer):
        async def _respond(self, *request: Any) -> tuple[Answer, int, bytes]:
            body = fault.body or json.dumps({"error": {"message": fault.message}}).encode() if fault else b""
            return fault or Fault(), fault.status if fault else 200, body

    server = Wrong(Torture())
    threaded.servers.append(server)
    threaded.run(server.__aenter__())
    if fault is None:
        threaded.run(server.__aexit__(None, None, None))
    began = time.monotonic()
    done = hermes(
        *("rollout", "tasks", tasks(), "--model", "scripted", "--base-url", server.base_url, "--out", "out", *level),
        *("--agent.check_patience_s=0.5", "--agent.request_timeout_s=5"),
    )
    assert (done.code, done.sandboxes, done.out) == (3, 0, "")
    assert done.err.count(says) == 1
    assert time.monotonic() - began < 15
    done.says(says, advises)
