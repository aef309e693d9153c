"""An emulator of E2B: the calls of its API and of its daemon `envd` that the SDK makes for our backend.

Sandboxes are namespaces of this host. The calls to `envd` are served by the server code in the SDK, which is generated
from E2B's own description of the protocol. `python -m tests.e2b.emulator FOLDER` prints the port; it ends at the end of
its standard input. `POST /_faults` sets faults, and `GET /_calls/KIND` lists the calls of one kind.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import sys
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvicorn
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process import process_pb as pb
from e2b.envd.process.process_connect import ProcessASGIApplication
from hermes_modal_emulator.machines import NamespaceMachine
from protobuf import Oneof

KEY = "e2b_emulator"
CHUNK = 32 << 10
QUEUED = 64
LONGEST_S = 3600
BIN = "/home/user/bin"
PATH = f"{BIN}:/usr/local/bin:/usr/bin:/bin"
"""Without the directories of this host's own `reboot`: a sandbox's is `REBOOT`."""
REBOOTED = "/home/user/rebooted"
REBOOT = (
    f"rm -f {REBOOTED}; mkdir -p {BIN}; printf '#!/bin/sh\\n: >{REBOOTED}\\n' >{BIN}/reboot; chmod 755 {BIN}/reboot"
)

Scope = dict[str, Any]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Event = pb.ProcessEvent


@dataclass
class CallFault:
    """What happens to the next calls of one kind: a status instead of an answer, no answer, or a cut after bytes."""

    call: str
    status: int = 0
    message: str = "injected"
    headers: dict[str, str] = field(default_factory=dict)
    lose_answer: bool = False
    cut_after: int = 0
    delay_s: float = 0.0
    times: int = 1


class EmulatedProcess:
    """A program in a sandbox, as `envd` treats it: its output waits for listeners, and is dropped if there are none."""

    def __init__(self, child: asyncio.subprocess.Process, tag: str) -> None:
        self.child, self.tag = child, tag
        self.listeners: list[asyncio.Queue[Oneof | None]] = []
        self.input_lock = asyncio.Lock()
        self.tasks = [asyncio.create_task(self._run())]

    async def _run(self) -> None:
        await asyncio.gather(self._pump("stdout", self.child.stdout), self._pump("stderr", self.child.stderr))
        code = await self.child.wait()
        if self.child.stdin is not None:
            self.child.stdin.close()
        if code < 0:
            end = Event.EndEvent(exit_code=-1, exited=False, status="signal: killed")
        else:
            end = Event.EndEvent(exit_code=code, exited=True, status=f"exit status {code}")
        await self._tell(Oneof("end", end))
        await self._tell(None)

    async def _pump(self, name: str, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while piece := await stream.read(CHUNK):
            await self._tell(Oneof("data", Event.DataEvent(output=Oneof(name, piece))))

    async def _tell(self, event: Oneof | None) -> None:
        for listener in [*self.listeners]:
            while listener in self.listeners:
                try:
                    listener.put_nowait(event)
                    break
                except asyncio.QueueFull:
                    await asyncio.sleep(0.005)

    async def events(self) -> AsyncIterator[Event]:
        queue: asyncio.Queue[Oneof | None] = asyncio.Queue(QUEUED)
        self.listeners.append(queue)
        try:
            yield Event(event=Oneof("start", Event.StartEvent(pid=self.child.pid)))
            while (event := await queue.get()) is not None:
                yield Event(event=event)
        finally:
            self.listeners.remove(queue)

    async def kill(self) -> None:
        """Kill the program itself, which is the child that `nsenter` makes."""
        children = Path(f"/proc/{self.child.pid}/task/{self.child.pid}/children")
        while self.child.returncode is None:
            for pid in children.read_text().split():
                os.kill(int(pid), 9)
                return
            await asyncio.sleep(0.01)


@dataclass
class EmulatedVm:
    """A sandbox: its machine, its programs, and what the API says about it."""

    sandbox_id: str
    asked: dict[str, Any]
    machine: NamespaceMachine
    started: float
    ends: float
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    state: str = "running"
    processes: dict[str, EmulatedProcess] = field(default_factory=dict)
    serving: set[asyncio.Task[None]] = field(default_factory=set)

    def about(self) -> dict[str, Any]:
        """Return what the API says about it."""
        return {
            "templateID": self.asked["templateID"],
            "sandboxID": self.sandbox_id,
            "clientID": "emulator",
            "startedAt": datetime.fromtimestamp(self.started, UTC).isoformat(),
            "endAt": datetime.fromtimestamp(self.ends, UTC).isoformat(),
            "cpuCount": 2,
            "memoryMB": 512,
            "diskSizeMB": 1024,
            "envdVersion": "0.6.13",
            "metadata": self.asked.get("metadata", {}),
            "state": self.state,
        }


class ApiRefusal(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message


class EmulatedAccount:
    """The account: its sandboxes, the calls so far, and the faults to come."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sandboxes: dict[str, EmulatedVm] = {}
        self.calls: list[dict[str, Any]] = []
        self.faults: list[CallFault] = []
        self.settings: dict[str, Any] = {"page": 100}
        self.envd = ProcessASGIApplication(Envd(self), read_max_bytes=None)

    # --- the API ----------------------------------------------------------------------------------------------------

    async def create(self, asked: dict[str, Any]) -> dict[str, Any]:
        template = str(asked["templateID"])
        if template not in ("base", "python"):
            raise ApiRefusal(404, f"template '{template}' not found")
        sandbox_id = f"i{secrets.token_hex(10)}"
        network = asked.get("allow_internet_access", True)
        machine = NamespaceMachine(
            self.folder / sandbox_id, snapshot=None, volumes={}, network=network, workdir="/home/user"
        )
        await machine.start()
        making = await asyncio.create_subprocess_exec(*machine.argv(["/bin/sh", "-ec", REBOOT], "/"))
        assert await making.wait() == 0
        now = time.time()
        sandbox = EmulatedVm(sandbox_id, asked, machine, now, now + min(asked["timeout"], LONGEST_S))
        self.sandboxes[sandbox_id] = sandbox
        return sandbox.about() | {"envdAccessToken": sandbox.token}

    def get(self, sandbox_id: str) -> EmulatedVm:
        if sandbox_id not in self.sandboxes:
            raise ApiRefusal(404, f"sandbox {sandbox_id} not found")
        return self.sandboxes[sandbox_id]

    def list(self, query: dict[str, str]) -> tuple[list[dict[str, Any]], str]:
        wanted = {
            urllib.parse.unquote(key): urllib.parse.unquote(value)
            for key, value in urllib.parse.parse_qsl(query.get("metadata", ""))
        }
        states = query.get("state", "running,paused").split(",")
        found = [
            each.about()
            for each in sorted(self.sandboxes.values(), key=lambda each: (-each.started, each.sandbox_id))
            if each.state in states and wanted.items() <= each.asked.get("metadata", {}).items()
        ]
        begin, page = int(query.get("nextToken", 0)), min(self.settings["page"], int(query.get("limit", 100)))
        after = str(begin + page) if begin + page < len(found) else ""
        return found[begin : begin + page], after

    async def end(self, sandbox: EmulatedVm) -> None:
        """End a sandbox, which is no longer listed from now on."""
        self.sandboxes.pop(sandbox.sandbox_id, None)
        for serving in sandbox.serving:
            serving.cancel()
        await sandbox.machine.stop()

    async def watch(self) -> None:
        """End sandboxes whose time is over, and those that have rebooted."""
        while True:
            await asyncio.sleep(0.1)
            for sandbox in [*self.sandboxes.values()]:
                rebooted = Path(f"/proc/{sandbox.machine._init}/root{REBOOTED}")
                if time.time() >= sandbox.ends or await asyncio.to_thread(rebooted.exists):
                    await self.end(sandbox)

    async def route(self, method: str, path: str, query: dict[str, str], body: bytes, headers: dict[str, str]) -> Any:
        """Return the status, the body and the further headers of an answer of the API."""
        if headers.get("x-api-key") != KEY:
            raise ApiRefusal(401, "Invalid API key")
        asked = json.loads(body) if body else {}
        match method, [part for part in path.split("/") if part]:
            case "POST", ["sandboxes"]:
                return 201, await self.create(asked), {}
            case "GET", ["v2", "sandboxes"]:
                found, after = self.list(query)
                return 200, found, {"x-next-token": after} if after else {}
            case "GET", ["sandboxes", sandbox_id]:
                sandbox = self.get(sandbox_id)
                return 200, sandbox.about() | {"envdAccessToken": sandbox.token}, {}
            case "DELETE", ["sandboxes", sandbox_id]:
                await self.end(self.get(sandbox_id))
                return 204, None, {}
            case "POST", ["sandboxes", sandbox_id, "timeout"]:
                sandbox = self.get(sandbox_id)
                sandbox.ends = min(time.time() + asked["timeout"], sandbox.started + LONGEST_S)
                return 204, None, {}
            case _:
                raise ApiRefusal(404, "404 page not found")

    async def control(self, method: str, path: str, body: bytes) -> Any:
        """Return the answer to a test's own call."""
        match method, path:
            case "POST", "/_faults":
                self.faults.append(CallFault(**json.loads(body)))
            case "POST", "/_settings":
                self.settings |= json.loads(body)
            case "POST", "/_pause":
                self.get(json.loads(body)["sandbox_id"]).state = "paused"
            case "POST", "/_reset":
                self.faults.clear()
                self.settings = {"page": 100}
            case "GET", _:
                kind = path.removeprefix("/_calls/")
                return [each for each in self.calls if each["call"] == kind][-1000:]
        return None

    # --- ASGI -------------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"]
        headers = {key.decode().lower(): value.decode() for key, value in scope["headers"]}
        if path.startswith("/_"):
            await _answer(send, 200, await self.control(method, path, await _body(receive)))
            return
        call = path.removeprefix("/process.Process/") if path.startswith("/process") else _kind(method, path)
        fault = next((each for each in self.faults if each.call == call), None)
        if fault is not None:
            fault.times -= 1
            if fault.times <= 0:
                self.faults.remove(fault)
            await asyncio.sleep(fault.delay_s)
            if fault.status:
                self.calls.append({"call": call, "status": fault.status})
                await _answer(send, fault.status, {"code": fault.status, "message": fault.message}, fault.headers)
                return
            send = _tampered(send, fault)
        if path.startswith("/process") or path == "/health":
            self.calls.append({"call": call})
            await self._envd_call(scope, receive, send, headers)
            return
        body = await _body(receive)
        query = dict(urllib.parse.parse_qsl(scope["query_string"].decode()))
        try:
            status, answer, more = await self.route(method, path, query, body, headers)
        except ApiRefusal as refusal:
            status, more = refusal.status, {}
            answer = {"code": status, "message": refusal.message} if refusal.message else None
        self.calls.append({"call": call, "status": status, "asked": json.loads(body) if body else {}, "path": path})
        await _answer(send, status, answer, more)

    async def _envd_call(self, scope: Scope, receive: Any, send: Send, headers: dict[str, str]) -> None:
        sandbox = self.sandboxes.get(headers.get("e2b-sandbox-id", ""))
        if sandbox is None or sandbox.state != "running":
            await _answer(send, 502, {"code": 502, "message": "The sandbox was not found"})
        elif headers.get("x-access-token") != sandbox.token:
            await _answer(send, 401, {"code": "unauthenticated", "message": "unauthorized access"})
        elif scope["path"] == "/health":
            await _answer(send, 204, None)
        else:
            await self._serve_envd(sandbox, scope, receive, send)

    async def _serve_envd(self, sandbox: EmulatedVm, scope: Scope, receive: Any, send: Send) -> None:
        """Serve a call to `envd`, until it ends, the client is gone or the sandbox ends, which cuts the connection."""
        request = {"type": "http.request", "body": await _body(receive), "more_body": False}
        serving = asyncio.create_task(self.envd(scope, _replay(request), send))
        sandbox.serving.add(serving)
        serving.add_done_callback(sandbox.serving.discard)
        leaving = asyncio.create_task(receive())
        await asyncio.wait([serving, leaving], return_when=asyncio.FIRST_COMPLETED)
        gone = leaving.done()
        leaving.cancel()
        serving.cancel()
        await asyncio.wait([serving])
        if serving.cancelled() and not gone:
            raise _Cut
        if not serving.cancelled():
            serving.result()


class Envd:
    """The process service of `envd`, for all sandboxes: a header says which one is meant."""

    def __init__(self, emulator: EmulatedAccount) -> None:
        self.emulator = emulator

    def _sandbox(self, ctx: Any) -> EmulatedVm:
        return self.emulator.get(ctx.request_headers["e2b-sandbox-id"])

    def _process(self, request: Any, ctx: Any) -> EmulatedProcess:
        selector = request.process.selector
        process = self._sandbox(ctx).processes.get(selector.value)
        if process is None or process.tasks[0].done():
            raise ConnectError(Code.NOT_FOUND, f"process with tag {selector.value} not found")
        return process

    async def list(self, request: Any, ctx: Any) -> Any:
        running = [each for each in self._sandbox(ctx).processes.values() if not each.tasks[0].done()]
        return pb.ListResponse(processes=[pb.ProcessInfo(pid=each.child.pid, tag=each.tag) for each in running])

    async def start(self, request: Any, ctx: Any) -> AsyncIterator[Any]:
        if ctx.request_headers.get("authorization") != "Basic cm9vdDo=":
            raise ConnectError(Code.UNAUTHENTICATED, "no user specified")
        sandbox, wanted = self._sandbox(ctx), request.process
        wrapper = 'echo 100 >/proc/$$/oom_score_adj; exec nice -n 0 "$@"'
        argv = sandbox.machine.argv(["/bin/sh", "-c", wrapper, "--", wanted.cmd, *wanted.args], wanted.cwd or "/")
        own = {"PATH": PATH, "HOME": "/root", "USER": "root", "LOGNAME": "root", "E2B_SANDBOX": "true"}
        child = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE if request.stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=own | sandbox.asked.get("envVars", {}) | dict(wanted.envs),
            start_new_session=True,
        )
        process = sandbox.processes[request.tag] = EmulatedProcess(child, request.tag)
        async for event in process.events():
            yield pb.StartResponse(event=event)

    async def connect(self, request: Any, ctx: Any) -> AsyncIterator[Any]:
        async for event in self._process(request, ctx).events():
            yield pb.ConnectResponse(event=event)

    async def send_input(self, request: Any, ctx: Any) -> Any:
        process = self._process(request, ctx)
        async with process.input_lock:
            if process.child.stdin is None or process.child.stdin.is_closing():
                raise ConnectError(Code.INTERNAL, "stdin not enabled or closed")
            process.child.stdin.write(request.input.input.value)
            try:
                await process.child.stdin.drain()
            except OSError as error:
                raise ConnectError(Code.INTERNAL, f"error writing to stdin: {error}") from error
        return pb.SendInputResponse()

    async def close_stdin(self, request: Any, ctx: Any) -> Any:
        process = self._process(request, ctx)
        if process.child.stdin is not None:
            process.child.stdin.close()
        return pb.CloseStdinResponse()

    async def send_signal(self, request: Any, ctx: Any) -> Any:
        await self._process(request, ctx).kill()
        return pb.SendSignalResponse()

    async def update(self, request: Any, ctx: Any) -> Any:
        raise ConnectError(Code.UNIMPLEMENTED, "not emulated")

    async def stream_input(self, request: Any, ctx: Any) -> Any:
        raise ConnectError(Code.UNIMPLEMENTED, "not emulated")


def _replay(request: dict[str, Any]) -> Callable[[], Awaitable[dict[str, Any]]]:
    """Return a `receive` that gives a request that was read already, and then nothing more."""
    given = False

    async def replay() -> dict[str, Any]:
        nonlocal given
        if given:
            await asyncio.Event().wait()
        given = True
        return request

    return replay


class _Cut(Exception):
    """Makes the server close the connection in the middle of an answer."""


def _tampered(send: Send, fault: CallFault) -> Send:
    """Return a `send` that loses the answer, or cuts the connection after some bytes."""
    sent = 0

    async def tampered(message: dict[str, Any]) -> None:
        nonlocal sent
        if fault.lose_answer and message["type"] == "http.response.start":
            length = [(b"content-length", b"1000000"), (b"content-type", b"application/json")]
            await send(message | {"headers": length})
            await send({"type": "http.response.body", "body": b"{", "more_body": True})
            raise _Cut
        if fault.cut_after and sent >= fault.cut_after:
            raise _Cut
        sent += len(message.get("body", b""))
        await send(message)

    return tampered


def _kind(method: str, path: str) -> str:
    parts = [part for part in path.split("/") if part and part != "v2"]
    names = {"POST": "create", "GET": "list"} if len(parts) == 1 else {"GET": "get", "DELETE": "kill"}
    return parts[2] if len(parts) > 2 else names.get(method, method)


async def _body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _answer(send: Send, status: int, answer: Any, headers: dict[str, str] | None = None) -> None:
    body = b"" if answer is None else json.dumps(answer).encode()
    lines = {"content-type": "application/json", **(headers or {})}
    if status != 204:
        lines["content-length"] = str(len(body))
    encoded = [(key.encode(), value.encode()) for key, value in lines.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


async def _serve(folder: Path) -> None:
    emulator = EmulatedAccount(folder)
    config = uvicorn.Config(emulator, host="127.0.0.1", port=0, log_level="critical", lifespan="off", access_log=False)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    watching = asyncio.create_task(emulator.watch())
    while not server.started:
        await asyncio.sleep(0.02)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    watching.cancel()
    for sandbox in [*emulator.sandboxes.values()]:
        await emulator.end(sandbox)
    server.should_exit = server.force_exit = True
    await asyncio.wait([serving], timeout=5)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
