"""The emulator's process: both gRPC services on one port of loopback, and the calls of the owner."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpclib.server import Server
from modal._utils.grpc_utils import custom_detail_codec
from modal_proto import api_pb2 as pb

from hermes_modal_emulator.cloud import Cloud
from hermes_modal_emulator.commands import wait_for_exit
from hermes_modal_emulator.control_plane import ControlPlane
from hermes_modal_emulator.faults import RpcFault
from hermes_modal_emulator.machines import namespaces_missing
from hermes_modal_emulator.router import CommandRouter

MODES = ("auto", "namespaces", "plain")


class EmulatorServer:
    """Serves the SDK. Setting `stopped` ends `serve`."""

    def __init__(self, cloud: Cloud, port: int) -> None:
        self.cloud = cloud
        self._port = port
        self._server: Server | None = None
        self.stopped = asyncio.Event()

    async def start(self) -> None:
        """Begin to listen. Raises `OSError` if the port is taken."""
        server = Server([ControlPlane(self.cloud), CommandRouter(self.cloud)], status_details_codec=custom_detail_codec)
        await server.start("127.0.0.1", self._port)
        listening: Any = server._server
        self._port = listening.sockets[0].getsockname()[1]
        self.cloud.url = f"http://127.0.0.1:{self._port}"
        self._server = server

    async def close(self) -> None:
        """Cut every connection and stop listening. Sandboxes live on."""
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._server.wait_closed(), 2)
            self._server = None

    def environment(self) -> dict[str, str]:
        """Return the variables to set before `import modal`."""
        return {
            "MODAL_SERVER_URL": self.cloud.url,
            "MODAL_TOKEN_ID": "ak-emulator",
            "MODAL_TOKEN_SECRET": "as-emulator",
            "MODAL_CONFIG_PATH": str(self.cloud.folder / "none.toml"),
            "MODAL_DISABLE_API_PROXY": "1",
        }


class Control:
    """The calls that the owner's process may make, by method name."""

    def __init__(self, server: EmulatorServer) -> None:
        self._server = server
        self._cloud = server.cloud

    async def environment(self) -> dict[str, str]:
        return self._server.environment()

    async def mode(self) -> str:
        return "namespaces" if self._cloud.namespaces else "plain"

    async def fault(self, **fields: Any) -> None:
        self._cloud.faults.add(RpcFault(**fields))

    async def clear_faults(self) -> None:
        self._cloud.faults.clear()

    async def requests(self, since: int = 0, method: str | None = None) -> list[dict[str, Any]]:
        return self._cloud.requests.since(since, method)

    async def add_secret(self, name: str, values: dict[str, str]) -> None:
        self._cloud.add_secret(name, values)

    async def set(self, **options: Any) -> None:
        for name, value in options.items():
            getattr(self._cloud.options, name)
            setattr(self._cloud.options, name, value)

    async def sandboxes(self) -> list[dict[str, Any]]:
        return [
            {"id": each.id, "v2": each.v2, "running": each.result is None, "tags": each.tags, "created": each.created}
            for each in self._cloud.sandboxes.values()
        ]

    async def kill_sandbox(self, sandbox_id: str) -> None:
        """End the sandbox as if its machine were lost."""
        sandbox = self._cloud.sandbox(sandbox_id)
        failed = pb.GenericResult.GENERIC_STATUS_INTERNAL_FAILURE
        sandbox.finish(pb.GenericResult(status=failed, exception="worker lost"))
        await sandbox.finished.wait()

    async def revoke_tokens(self) -> None:
        self._cloud.revoke_tokens()

    async def outage(self, seconds: float) -> None:
        """Make the server unreachable for some seconds."""
        await self._server.close()
        await asyncio.sleep(seconds)
        await self._server.start()


async def serve(
    mode: str,
    port: int,
    ready: Callable[[EmulatorServer], object],
    *,
    follow: int | None = None,
    owner: asyncio.StreamReader | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, or until the process `follow` or the stream `owner` ends. Then clean up."""
    server = EmulatorServer(Cloud(_folder(), namespaces=mode == "namespaces"), port)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, server.stopped.set)
    try:
        await server.start()
        ready(server)
        async with asyncio.TaskGroup() as group:
            waits = [group.create_task(_follow(server, follow)), group.create_task(_answer(owner, server))]
            await server.stopped.wait()
            for each in waits:
                each.cancel()
    finally:
        await server.close()
        await server.cloud.aclose()


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="modal-emulator-"))
    folder.chmod(0o755)  # volumes are for every user of a sandbox
    return folder


async def _follow(server: EmulatorServer, pid: int | None) -> None:
    if pid is not None:
        await wait_for_exit(pid)
        server.stopped.set()


async def serve_owner(mode: str, port: int) -> None:
    """Serve until standard input ends. Its lines are calls of `Control` as JSON."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await serve(mode, port, lambda server: None, owner=reader)


async def _answer(reader: asyncio.StreamReader | None, server: EmulatorServer) -> None:
    if reader is None:
        return
    control = Control(server)

    async def answer(line: bytes) -> None:
        request = json.loads(line)
        try:
            outcome = {"value": await getattr(control, request["call"])(**request["arguments"])}
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        os.write(1, json.dumps({"id": request["id"], **outcome}).encode() + b"\n")

    async with asyncio.TaskGroup() as group:
        while line := await reader.readline():
            group.create_task(answer(line))
    server.stopped.set()


def choose_mode(wanted: str) -> str:
    """Return the mode. `auto` becomes `namespaces` if this machine allows them, and else `plain`.

    Raises:
        SystemExit: `namespaces` was requested, but is not available.
    """
    if wanted == "plain":
        return wanted
    missing = namespaces_missing()
    if missing is None:
        return "namespaces"
    if wanted == "namespaces":
        raise SystemExit(f"modal emulator: {missing}")
    return "plain"
