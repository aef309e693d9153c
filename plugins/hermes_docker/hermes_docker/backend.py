"""The `docker` backend: containers as sandboxes, each reached over attached exec streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from docker import APIClient

from hermes_core import (
    Backend,
    Capabilities,
    Channel,
    ChannelLost,
    CommandError,
    Diagnosis,
    Image,
    Isolation,
    Network,
    Sandbox,
    SandboxConfig,
    SandboxImage,
    SandboxInfo,
    SandboxLost,
    SandboxSpec,
    SandboxStatus,
    Settings,
)
from hermes_docker import containers, diagnosis
from hermes_docker.config import SYS_ADMIN, DockerConfig
from hermes_docker.daemon import DaemonError, DockerDaemon
from hermes_docker.execs import Exec, ExecChannel
from hermes_docker.images import Images
from hermes_docker.limits import Throttle


class DockerBackend(Backend):
    """Sandboxes that are containers of the daemon that DOCKER_HOST names, or of this host's daemon."""

    name: ClassVar[str] = "docker"
    config_class: ClassVar[type[SandboxConfig]] = DockerConfig
    capabilities = Capabilities(frozenset(Isolation), network=frozenset(Network), attach=True, builds=True, gpu=True)

    def __init__(self, settings: Settings | None = None) -> None:
        self._daemon = DockerDaemon()
        self._images = Images(self._daemon, None if settings is None else settings.state_dir / "docker-builds")
        self._throttle = Throttle()

    def levels(self, config: SandboxConfig) -> frozenset[Isolation]:
        """Return the levels that containers of this profile can give; `private-root` only with SYS_ADMIN.

        Without SYS_ADMIN, `dedicated` takes the place of `private-root`. (`namespace` is refused later, with advice.)
        """
        can_mount = isinstance(config, DockerConfig) and SYS_ADMIN in config.cap_add
        return self.capabilities.isolation - (set() if can_mount else {Isolation.PRIVATE_ROOT})

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start the container of this spec, or return the one that has its creation id."""
        config = spec.config
        assert isinstance(config, DockerConfig)
        try:
            info = await self._daemon.info()
            diagnosis.check_spec(spec, config, info)
            image = await self._images.ensure(config.source, config)
            image_info = await self._images.about(image)
            async with self._throttle.turn():
                running = await self._daemon.call(
                    lambda api: containers.start(api, spec, config, image, mapped=diagnosis.maps_users(info)),
                    undo=lambda api, started: containers.remove(api, started.name),
                    settle=True,
                )
        except DaemonError as error:
            raise diagnosis.not_made(error) from error
        return DockerSandbox(running.name, running.uid_base, self._daemon, self._throttle, image_info)

    async def prepare_image(self, image: Image, config: SandboxConfig) -> str:
        """Build an image or pull it, if the daemon does not have it. Return the image's name on the daemon."""
        assert isinstance(config, DockerConfig)
        try:
            return await self._images.ensure(image, config)
        except DaemonError as error:
            raise diagnosis.not_made(error, f"image {image}") from error

    async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        """Return the containers with our label."""
        return await self._daemon.call(lambda api: containers.list_containers(api, owner))

    async def terminate_id(self, sandbox_id: str) -> None:
        """End a container by its name, if it is one of ours."""
        await (await self._handle(sandbox_id)).terminate()

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Return a handle on a running container.

        Raises:
            SandboxLost: no container has this name and our label, or it has ended.
        """
        sandbox = await self._handle(sandbox_id)
        if await sandbox.status() is not SandboxStatus.RUNNING:
            raise SandboxLost("no such sandbox runs", hint="create another one", sandbox_id=sandbox_id)
        return sandbox

    async def check(self) -> Diagnosis:
        """Return whether the daemon can be used, what it lacks, and what to do about it."""
        return await diagnosis.diagnose(self._daemon)

    async def aclose(self) -> None:
        """Close the connection to the daemon. Containers keep running."""
        await self._images.aclose()
        await self._daemon.aclose()

    async def _handle(self, name: str) -> DockerSandbox:
        _, labels = await self._daemon.call(lambda api: containers.labels_of(api, name))
        return DockerSandbox(name, containers.uid_base_of(labels), self._daemon, self._throttle)


class DockerSandbox(Sandbox):
    """A container, made by `DockerBackend`."""

    own_system = True

    def __init__(
        self,
        name: str,
        uid_base: int | None,
        daemon: DockerDaemon,
        throttle: Throttle,
        image: SandboxImage | None = None,
    ) -> None:
        self.id = name
        self.uid_base = uid_base
        self.image = image
        self._daemon = daemon
        self._throttle = throttle

    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        """Start `argv` with an exec of the daemon, with its three streams attached."""

        def start(api: APIClient) -> Exec:
            # Through a shell, because the daemon itself would report a missing program on standard output.
            command = ["/bin/sh", "-c", 'exec "$@"', "sh", *argv]
            exec_id = api.exec_create(self.id, command, stdin=True, environment=dict(env or {}))["Id"]
            return Exec(api, exec_id, api.exec_start(exec_id, socket=True))

        try:
            "".join(argv).encode()
        except UnicodeEncodeError as error:
            raise CommandError("arguments must be UTF-8: Docker's API takes no others", code="not_utf8") from error
        try:
            started = await self._daemon.call(start, undo=lambda _, late: late.close())
        except DaemonError as error:
            if error.status in (404, 409):  # no such container, or it is not running
                raise SandboxLost(f"the sandbox has ended: {error.message}", sandbox_id=self.id) from error
            raise ChannelLost(error.message, hint=error.hint, sandbox_id=self.id) from error
        return ExecChannel(started)

    async def status(self) -> SandboxStatus:
        """Return the container's status on the daemon."""
        return (await self._daemon.call(lambda api: containers.labels_of(api, self.id)))[0]

    async def cut_network(self) -> None:
        """Disconnect the container from its networks, so that only the loopback interface is left."""
        await self._daemon.call(lambda api: containers.cut_network(api, self.id))

    async def terminate(self) -> None:
        """End the container, and remove it with all that it has written."""
        if await self.status() is SandboxStatus.GONE:
            return
        async with self._throttle.turn():
            await self._daemon.call(lambda api: containers.remove(api, self.id))
