"""The `docker` backend: containers as sandboxes, each reached over attached exec streams."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from docker import APIClient

from hermes_core.errors import ChannelLost, SandboxLost
from hermes_core.sandbox.channels import BlockingStreamChannel
from hermes_core.sandbox.contract import (
    Backend,
    Capabilities,
    Channel,
    Diagnosis,
    Isolation,
    Network,
    Sandbox,
    SandboxConfig,
    SandboxInfo,
    SandboxSpec,
    SandboxStatus,
)
from hermes_docker import containers, diagnosis
from hermes_docker.config import DockerConfig
from hermes_docker.daemon import Daemon, DaemonError
from hermes_docker.images import Images
from hermes_docker.limits import Throttle

if TYPE_CHECKING:
    from hermes_core.settings import Settings

_STDERR = 2
_POLL_S = (0.005, 0.25)


class DockerBackend(Backend):
    """Sandboxes that are containers of the daemon that DOCKER_HOST names, or of this host's."""

    name: ClassVar[str] = "docker"
    config_class: ClassVar[type[SandboxConfig]] = DockerConfig
    capabilities = Capabilities(frozenset(Isolation), network=frozenset(Network), attach=True, gpu=True)

    def __init__(self, settings: Settings | None = None) -> None:
        self._daemon = Daemon()
        self._images = Images(self._daemon)
        self._throttle = Throttle()

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start the container of this spec, or give the one that its lease has."""
        config = spec.config
        assert isinstance(config, DockerConfig)
        try:
            info = await self._daemon.info()
            diagnosis.check_spec(spec, config, info)
            image = await self._images.ensure(config)
            async with self._throttle.turn():
                running = await self._daemon.call(
                    lambda api: containers.start(api, spec, config, image, mapped=diagnosis.maps_users(info)),
                    undo=lambda api, started: containers.remove(api, started.name),
                )
        except DaemonError as error:
            raise diagnosis.not_started(error) from error
        return DockerSandbox(running.name, running.uid_base, self._daemon, self._throttle)

    async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        """The containers that carry our label."""
        return await self._daemon.call(lambda api: containers.found(api, owner))

    async def terminate_id(self, sandbox_id: str) -> None:
        """End a container by its name, if it is one of ours."""
        await (await self._handle(sandbox_id)).terminate()

    async def attach(self, sandbox_id: str) -> Sandbox:
        """A handle on a container that runs already.

        Raises:
            SandboxLost: there is none of that name with our label, or it has ended.
        """
        sandbox = await self._handle(sandbox_id)
        if await sandbox.status() is not SandboxStatus.RUNNING:
            raise SandboxLost("no such sandbox runs", hint="create another one", sandbox_id=sandbox_id)
        return sandbox

    async def check(self) -> Diagnosis:
        """Whether the daemon can be used, what it lacks, and what to do about it."""
        return await diagnosis.diagnose(self._daemon)

    async def aclose(self) -> None:
        """Let the daemon go. Containers stay."""
        await self._images.aclose()
        await self._daemon.aclose()

    async def _handle(self, name: str) -> DockerSandbox:
        _, labels = await self._daemon.call(lambda api: containers.labels_of(api, name))
        return DockerSandbox(name, containers.uid_base_of(labels), self._daemon, self._throttle)


class DockerSandbox(Sandbox):
    """One container. Made by `DockerBackend`."""

    def __init__(self, name: str, uid_base: int | None, daemon: Daemon, throttle: Throttle) -> None:
        self.id = name
        self.uid_base = uid_base
        self._daemon = daemon
        self._throttle = throttle

    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        """Start `argv` by an exec of the daemon's, with its three streams attached."""

        def start(api: APIClient) -> ExecStream:
            made = api.exec_create(self.id, list(argv), stdin=True, environment=dict(env or {}))
            return ExecStream(api, made["Id"], api.exec_start(made["Id"], socket=True))

        try:
            stream = await self._daemon.call(start, undo=lambda _, late: late.close())
        except DaemonError as error:
            if error.status in (404, 409):  # no such container; it is not running
                raise SandboxLost(f"the sandbox has ended: {error.message}", sandbox_id=self.id) from error
            raise ChannelLost(error.message, hint=error.hint, sandbox_id=self.id) from error
        return ExecChannel(stream)

    async def status(self) -> SandboxStatus:
        """What the daemon says of the container."""
        return (await self._daemon.call(lambda api: containers.labels_of(api, self.id)))[0]

    async def terminate(self) -> None:
        """End the container, and what it has written. It is gone when this returns."""
        if await self.status() is SandboxStatus.GONE:
            return
        async with self._throttle.turn():
            await self._daemon.call(lambda api: containers.remove(api, self.id))


class ExecStream:
    """The connection of an exec, in the daemon's frames: eight bytes that say which stream and how long, then bytes."""

    def __init__(self, api: APIClient, exec_id: str, stream: Any) -> None:
        self._api, self._exec_id = api, exec_id
        self._response = stream._response
        self._frames = self._response.raw._fp.fp  # not the socket below it: it may hold what came with the headers
        self._socket = getattr(stream, "_sock", stream)
        self._socket.settimeout(None)
        self._left, self._kind, self._closed = 0, 0, False
        self.write = self._socket.sendall

    def read(self, n: int) -> tuple[int, bytes]:
        """Up to n bytes, and the number of their stream."""
        while not self._left:
            header = self._frames.read(8)
            if not header:
                return 1, b""
            if len(header) < 8:
                raise ConnectionError("the stream ended in the middle")
            self._kind, self._left = header[0], int.from_bytes(header[4:], "big")
        data = self._frames.read1(min(n, self._left))
        if not data:
            raise ConnectionError("the stream ended in the middle")
        self._left -= len(data)
        return self._kind, data

    def wait(self) -> int:
        """The exit status; the daemon knows it a moment after the stream has ended."""
        pause, longest = _POLL_S
        while not self._closed:
            found = self._api.exec_inspect(self._exec_id)
            if not found["Running"] and found["ExitCode"] is not None:
                return int(found["ExitCode"])
            time.sleep(pause)
            pause = min(2 * pause, longest)
        raise ConnectionError("it was closed")

    def close(self) -> None:
        """End the connection; the process may live on."""
        self._closed = True
        try:
            self._socket.shutdown(2)
        except OSError:  # the far end was first
            pass
        self._frames.close()
        self._socket.close()
        self._response.close()


class ExecChannel(BlockingStreamChannel):
    """Standard output of an exec's stream, its standard error kept apart."""

    def __init__(self, stream: ExecStream) -> None:
        self._stream = stream
        super().__init__(self._stdout, stream.write, close=stream.close, wait=stream.wait)

    def _stdout(self, n: int) -> bytes:
        while True:
            kind, data = self._stream.read(n)
            if kind != _STDERR:
                return data
            self.feed_stderr(data)
