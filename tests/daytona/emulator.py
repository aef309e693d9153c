"""An emulator of Daytona: the calls of its API that the backend makes, and its SSH gateway. As a program, it serves.

It is written from Daytona's documentation, its published client, and the source of its daemon and gateways (June 2026).
Sandboxes are real namespaces, whose process 1 ends on TERM, as Daytona's daemon does. Like the gateway, it forwards no
standard error. `tests/live` holds what is guessed here against Daytona itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh
from aiohttp import web
from asyncssh.process import SSHServerProcess
from hermes_modal_emulator.machines import BASE_ENV, MachineError, NamespaceMachine, namespaces_missing

KEY = "dtn_emulator"
KEPT_STDERR = 2 << 20
"""Bytes of standard error that the gateway takes, and never sends on, before the program has to wait."""


class DaemonMachine(NamespaceMachine):
    """A machine that ends when process 1 gets TERM, as a container whose main process is Daytona's daemon."""

    ends_on_term = True

    def _script(self) -> str:
        before, loop, after = super()._script().replace("wait $!", "wait $! || :").rpartition("while :")
        return f"{before}trap 'exit 0' TERM\n{loop}{after}" if self.ends_on_term else before + loop + after

    async def wait(self) -> None:
        assert self._holder is not None
        await self._holder.wait()


@dataclass
class Box:
    """One sandbox."""

    request: dict[str, Any]
    machine: DaemonMachine
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    state: str = "creating"
    error: str | None = None
    created: float = field(default_factory=time.time)
    active: float = field(default_factory=time.time)

    def describe(self) -> dict[str, Any]:
        """Return its description, as the API gives it."""
        given, ttl = self.request, self.request.get("ttlMinutes")
        return {
            "id": self.id,
            "organizationId": "org",
            "name": given.get("name") or self.id,
            "user": given.get("user") or "root",
            "env": given.get("env") or {},
            "labels": given.get("labels") or {},
            "public": False,
            "networkBlockAll": bool(given.get("networkBlockAll")),
            "kvm": False,
            "target": given.get("target") or "us",
            "cpu": given.get("cpu") or 1,
            "gpu": given.get("gpu") or 0,
            "memory": given.get("memory") or 1,
            "disk": given.get("disk") or 3,
            "state": self.state,
            "errorReason": self.error,
            "createdAt": _iso(self.created),
            "autoStopInterval": given.get("autoStopInterval", 15),
            "autoDeleteInterval": given.get("autoDeleteInterval", -1),
            "autoDestroyAt": _iso(self.created + ttl * 60) if ttl else None,
            "toolboxProxyUrl": "http://127.0.0.1:1/toolbox",
        }


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


class Cloud:
    """All sandboxes, the planned faults, and a count of requests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boxes: dict[str, Box] = {}
        self.tokens: dict[str, str] = {}
        self.faults: list[dict[str, Any]] = []
        self.requests: dict[str, int] = {}
        self.cuts: list[int] = []
        """Cut the connection of a session after so many bytes, for each number once."""
        self.ends_on_term = True
        self.key = KEY
        self.other_key = False
        """Whether the API names another key of the gateway than it has."""
        self.lose_status = False
        self.minute_s = 60.0
        self.gateway_port = 0
        self.host_key = asyncssh.generate_private_key("ssh-ed25519")
        self.connections: set[Any] = set()
        self.work: set[asyncio.Task[None]] = set()

    def spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.work.add(task)
        task.add_done_callback(self.work.discard)

    def find(self, name: str) -> Box | None:
        by_name = (box for box in self.boxes.values() if box.request.get("name") == name)
        return self.boxes.get(name) or next(by_name, None)

    async def begin(self, box: Box) -> None:
        """Start a sandbox, and keep its state until it is gone."""
        image = (box.request.get("buildInfo") or {}).get("dockerfileContent", "")
        if ":missing" in image:
            box.state, box.error = "build_failed", f"manifest unknown: {image.strip()}"
            return
        try:
            await box.machine.start()
        except (MachineError, OSError) as error:
            box.state, box.error = "error", str(error)
            return
        if box.state == "creating":
            box.state = "started"
        watching = asyncio.create_task(self._stop_when_idle(box))
        await box.machine.wait()
        watching.cancel()
        if box.state != "destroying":
            box.state = "stopped"
            if box.request.get("autoDeleteInterval") == 0:
                await self.destroy(box)

    async def _stop_when_idle(self, box: Box) -> None:
        while True:
            await asyncio.sleep(self.minute_s / 20)
            limit, ttl = box.request.get("autoStopInterval", 15), box.request.get("ttlMinutes")
            idle = time.time() - box.active > limit * self.minute_s > 0
            if idle or (ttl and time.time() - box.created > ttl * self.minute_s):
                await box.machine.stop()

    async def destroy(self, box: Box) -> None:
        if box.state == "destroying":
            return
        box.state = "destroying"
        await box.machine.stop()
        self.boxes.pop(box.id, None)


def _answer(value: Any, status: int = 200) -> web.Response:
    return web.json_response(value, status=status)


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    body = {"statusCode": status, "message": message, "error": "Error"}
    return web.json_response(body, status=status, headers=headers)


class Api:
    """The HTTP API, and below /emulator the calls of the tests."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.app = web.Application(middlewares=[self._watch])
        self.app.add_routes(
            [
                web.get("/api/config", self.config),
                web.post("/api/sandbox", self.create_sandbox),
                web.get("/api/sandbox", self.list_sandboxes),
                web.get("/api/sandbox/{id}", self.get_sandbox),
                web.delete("/api/sandbox/{id}", self.delete_sandbox),
                web.post("/api/sandbox/{id}/last-activity", self.update_last_activity),
                web.post("/api/sandbox/{id}/ssh-access", self.create_ssh_access),
                web.post("/emulator/{call}", self.control),
            ]
        )

    @web.middleware
    async def _watch(self, request: web.Request, handler: Any) -> web.StreamResponse:
        name = handler.__name__
        if name == "control":
            return await handler(request)
        self.cloud.requests[name] = self.cloud.requests.get(name, 0) + 1
        fault = next((each for each in self.cloud.faults if each["call"] == name and each["times"] > 0), None)
        if fault is not None:
            fault["times"] -= 1
            await asyncio.sleep(fault.get("delay_s", 0))
            if status := fault.get("status"):
                return _error(status, "a planned fault", fault.get("headers"))
        if name != "config" and request.headers.get("Authorization") != f"Bearer {self.cloud.key}":
            return _error(401, "Invalid credentials")
        answer = await handler(request)
        if fault is not None and fault.get("lose_answer") and request.transport is not None:
            request.transport.abort()
        return answer

    async def config(self, request: web.Request) -> web.Response:
        key = asyncssh.generate_private_key("ssh-ed25519") if self.cloud.other_key else self.cloud.host_key
        return _answer(
            {
                "version": "emulator",
                "oidc": {"issuer": "x", "clientId": "x", "audience": "x", "provider": "x"},
                "linkedAccountsEnabled": False,
                "announcements": {},
                "proxyTemplateUrl": "x",
                "proxyToolboxUrl": "x",
                "defaultSnapshot": "x",
                "dashboardUrl": "x",
                "maxAutoArchiveInterval": 1,
                "maintananceMode": False,
                "environment": "emulator",
                "sshGatewayHost": "127.0.0.1",
                "sshGatewayPort": self.cloud.gateway_port,
                "sshGatewayHostKeys": [key.export_public_key("openssh").decode().strip()],
            }
        )

    async def create_sandbox(self, request: web.Request) -> web.Response:
        given = await request.json()
        if self.cloud.find(given.get("name", "")):
            return _error(409, f"Sandbox with name {given['name']} already exists")
        if ":refused" in (given.get("snapshot") or ""):
            return _error(400, "Snapshot not found. Did you add it through the Daytona Dashboard?")
        blocked = bool(given.get("networkBlockAll"))
        base = self.cloud.folder / uuid.uuid4().hex
        box = Box(given, DaemonMachine(base, snapshot=None, volumes={}, network=not blocked, workdir=""))
        box.machine.ends_on_term = self.cloud.ends_on_term
        self.cloud.boxes[box.id] = box
        self.cloud.spawn(self.cloud.begin(box))
        return _answer(box.describe())

    async def list_sandboxes(self, request: web.Request) -> web.Response:
        wanted = json.loads(request.query.get("labels", "{}")).items()
        found = [box for box in self.cloud.boxes.values() if wanted <= (box.request.get("labels") or {}).items()]
        at, limit = int(request.query.get("cursor", 0)), min(int(request.query.get("limit", 100)), 5)
        page, rest = found[at : at + limit], found[at + limit :]
        return _answer({"items": [box.describe() for box in page], "nextCursor": str(at + limit) if rest else None})

    async def get_sandbox(self, request: web.Request) -> web.Response:
        box = self.cloud.find(request.match_info["id"])
        return _error(404, "Sandbox not found") if box is None else _answer(box.describe())

    async def delete_sandbox(self, request: web.Request) -> web.Response:
        box = self.cloud.find(request.match_info["id"])
        if box is None:
            return _error(404, "Sandbox not found")
        if box.state == "creating":
            return _error(409, "Sandbox state change in progress")
        if box.state in ("build_failed", "error"):
            self.cloud.boxes.pop(box.id)
        else:
            self.cloud.spawn(self.cloud.destroy(box))
        return _answer(box.describe() | {"state": "destroying"})

    async def update_last_activity(self, request: web.Request) -> web.Response:
        box = self.cloud.find(request.match_info["id"])
        if box is None:
            return _error(404, "Sandbox not found")
        box.active = time.time()
        return web.Response(status=201)

    async def create_ssh_access(self, request: web.Request) -> web.Response:
        box = self.cloud.find(request.match_info["id"])
        if box is None:
            return _error(404, "Sandbox not found")
        token, now = uuid.uuid4().hex, time.time()
        self.cloud.tokens[token] = box.id
        ends = now + 60 * float(request.query.get("expiresInMinutes", 60))
        dates = {"createdAt": _iso(now), "updatedAt": _iso(now), "expiresAt": _iso(ends)}
        command = f"ssh -p {self.cloud.gateway_port} {token}@127.0.0.1"
        return _answer({"id": token, "sandboxId": box.id, "token": token, "sshCommand": command, **dates})

    async def control(self, request: web.Request) -> web.Response:
        given, call = await request.json(), request.match_info["call"]
        if call == "set":
            for name, value in given.items():
                setattr(self.cloud, name, value)
        elif call == "stop":
            await self.cloud.boxes[given["id"]].machine.stop()
        elif call == "cut":
            for connection in tuple(self.cloud.connections):
                connection.abort()
        boxes = [box.describe() for box in self.cloud.boxes.values()]
        return _answer({"requests": self.cloud.requests, "sandboxes": boxes})


class GatewayServer(asyncssh.SSHServer):
    """A connection to the gateway: the user's name is the token, which is all it takes."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud

    def connection_made(self, conn: Any) -> None:
        self._conn = conn
        self._cloud.connections.add(conn)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cloud.connections.discard(self._conn)

    def begin_auth(self, username: str) -> bool:
        self._box = self._cloud.boxes.get(self._cloud.tokens.get(username, ""))
        return self._box is None

    def session_requested(self) -> Any:
        if self._box is None or self._box.state != "started":
            return False
        box = self._box
        session = SSHServerProcess(lambda process: Session(self._cloud, box, process).serve(), None, 3, False)
        return self._conn.create_server_channel(encoding=None), session


class Session:
    """A session: a program, and the copying of its streams as the gateway and the daemon do it."""

    def __init__(self, cloud: Cloud, box: Box, process: Any) -> None:
        self._cloud, self._box, self._process = cloud, box, process

    async def serve(self) -> None:
        """Run the program until its streams have ended."""
        self._cloud.spawn(self._keep_active())
        argv = self._box.machine.argv(["/bin/sh", "-c", self._process.command], "/")
        env, pipe = BASE_ENV | (self._box.request.get("env") or {}), asyncio.subprocess.PIPE
        program = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True
        )
        copying = asyncio.create_task(self._copy_in(program))
        swallowing = asyncio.create_task(self._swallow(program))
        try:
            await self._copy_out(program)
            await swallowing
            status = await program.wait()
        except (OSError, asyncssh.Error):
            status = 1  # the client has gone; the program goes on
        finally:
            copying.cancel()
            swallowing.cancel()
            assert program.stdin is not None
            program.stdin.close()
        if self._cloud.lose_status:
            self._process.close()
        else:
            self._process.exit(status if status >= 0 else 1)

    async def _copy_in(self, program: asyncio.subprocess.Process) -> None:
        assert program.stdin is not None
        with contextlib.suppress(OSError, asyncssh.Error):
            while data := await self._process.stdin.read(1 << 15):
                program.stdin.write(data)
                await program.stdin.drain()
        program.stdin.close()

    async def _copy_out(self, program: asyncio.subprocess.Process) -> None:
        assert program.stdout is not None
        sent = 0
        while data := await program.stdout.read(1 << 15):
            sent += len(data)
            if self._cloud.cuts and sent > self._cloud.cuts[0]:
                del self._cloud.cuts[0]
                self._process.get_extra_info("connection").abort()
                return
            self._process.stdout.write(data)
            await self._process.stdout.drain()

    async def _swallow(self, program: asyncio.subprocess.Process) -> None:
        assert program.stderr is not None
        left = KEPT_STDERR
        while left > 0 and (data := await program.stderr.read(1 << 15)):
            left -= len(data)
        if left <= 0:
            await program.wait()

    async def _keep_active(self) -> None:
        while not self._process.is_closing():
            self._box.active = time.time()
            await asyncio.sleep(self._cloud.minute_s / 10)


async def serve(folder: Path) -> None:
    """Serve until standard input ends. Print the address in a line."""
    cloud = Cloud(folder)
    gateway = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_factory=lambda: GatewayServer(cloud),
        server_host_keys=[cloud.host_key],
    )
    cloud.gateway_port = gateway.get_port()
    runner = web.AppRunner(Api(cloud).app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    print(json.dumps({"url": f"http://127.0.0.1:{port}"}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for box in tuple(cloud.boxes.values()):
        await box.machine.stop()
    gateway.close()
    await runner.cleanup()


class DaytonaEmulator:
    """An emulator in a process of its own, for the tests."""

    def __enter__(self) -> DaytonaEmulator:
        self._folder = tempfile.TemporaryDirectory(prefix="daytona-emulator-")
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._folder.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.url = json.loads(line)["url"]
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead the backend here."""
        return {"DAYTONA_API_URL": f"{self.url}/api", "DAYTONA_API_KEY": KEY}

    def call(self, name: str, **given: Any) -> dict[str, Any]:
        """Make one of the calls below /emulator. Return what the emulator says of itself."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/emulator/{name}", json.dumps(given).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def reset(self) -> None:
        """Forget all faults."""
        self.call(
            "set",
            faults=[],
            requests={},
            cuts=[],
            lose_status=False,
            minute_s=60.0,
            key=KEY,
            other_key=False,
            ends_on_term=True,
        )

    @property
    def sandboxes(self) -> list[dict[str, Any]]:
        """All sandboxes, as the API describes them."""
        return self.call("state")["sandboxes"]

    def count(self, call: str) -> int:
        """How often a call of the API was made."""
        return self.call("state")["requests"].get(call, 0)

    def plan(self, call: str, *, times: int = 1, **fault: Any) -> None:
        """Let a call of the API fail: with a `status` and `headers`, after `delay_s`, or with `lose_answer`."""
        self.call("set", faults=[{"call": call, "times": times, **fault}])


def missing() -> str | None:
    """Return why sandboxes can't be had here; None if they can."""
    return None if os.geteuid() != 0 or (reason := namespaces_missing()) is None else reason


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(serve(Path(sys.argv[1])))
