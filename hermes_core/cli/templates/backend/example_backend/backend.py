"""The backend: hermes-rl's contract on one side, the provider's SDK on the other."""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence

from hermes_core import (
    AsyncioStreamChannel,
    Backend,
    Capabilities,
    Channel,
    Diagnosis,
    Isolation,
    ProvisionError,
    Sandbox,
    SandboxConfig,
    SandboxInfo,
    SandboxLost,
    SandboxSpec,
    SandboxStatus,
    Settings,
)

from . import provider


class ExampleBackendConfig(SandboxConfig):
    """A profile's settings: `--backend.greeting=hello` on the command line. Add those of your provider."""

    unsupported = ("image", "cpu", "memory")  # settings that are refused, as the provider can't fulfil them

    greeting: str = "hello"
    """The value of the environment variable GREETING of commands."""


class ExampleBackendSandbox(Sandbox):
    """One machine of the provider."""

    def __init__(self, sandbox_id: str, environment: Mapping[str, str]) -> None:
        self.id = sandbox_id
        # A machine with a file system of its own leaves these two at /data and /data/.hermes.
        self.workspace_base = str(provider.workspace(sandbox_id))
        self.state_dir = f"{self.workspace_base}/.hermes"
        self._environment = dict(environment)

    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        """Start a program in the machine, and return the stream to it. The program outlives the stream."""
        if await self.status() is not SandboxStatus.RUNNING:
            raise SandboxLost("the machine has ended", hint="create another one", sandbox_id=self.id)
        given = {**provider.environment(self.id), **self._environment, **(env or {})}
        return await AsyncioStreamChannel.spawn(provider.program(self.id, argv), env=given)

    async def status(self) -> SandboxStatus:
        """Return the machine's status, as the provider tells it."""
        machines = await asyncio.to_thread(provider.machines)
        return SandboxStatus.RUNNING if self.id in machines else SandboxStatus.GONE

    async def terminate(self) -> None:
        """End the machine; idempotent."""
        await asyncio.to_thread(provider.destroy, self.id)


class ExampleBackend(Backend):
    """Makes sandboxes of the provider's machines."""

    name = "example-backend"
    config_class = ExampleBackendConfig
    # Without `attach=True` and a method `attach`, `hermes-rl reap` can't end sandboxes of dead drivers.
    # At level `shared`, nothing separates slots; docs/guides/writing-a-backend.md says what other levels need.
    capabilities = Capabilities(isolation=frozenset({Isolation.SHARED}), on_driver_host=True)

    def __init__(self, settings: Settings) -> None:
        """`settings` are the runtime's settings. Keys of a provider belong in environment variables."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Create a sandbox, or return the sandbox with this creation id: a lost answer makes core call this again."""
        config = spec.config
        assert isinstance(config, ExampleBackendConfig)
        sandbox_id = f"example-backend-{spec.creation_id}"
        environment = {"GREETING": config.greeting, **spec.environment}  # core adds `config.env_vars`
        labels = {"owner": spec.owner, "creation_id": spec.creation_id, "created": str(time.time())}
        command = provider.starter(sandbox_id, labels, spec.command(".hermes"))
        try:
            async with contextlib.aclosing(
                await AsyncioStreamChannel.spawn(command, env=provider.environment(sandbox_id))
            ) as creation:
                if await creation.read(100) not in (b"created\n", b"exists\n"):
                    raise ProvisionError(
                        f"no machine was created: {creation.stderr_tail}", hint="see the provider's log"
                    )
        except BaseException:  # also when cancelled: end the new machine
            await self.terminate_id(sandbox_id)
            raise
        return ExampleBackendSandbox(sandbox_id, environment)

    async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        """List the machines of all drivers by their labels, or only those of one owner."""
        found = await asyncio.to_thread(provider.machines)
        return [
            SandboxInfo(
                sandbox_id=machine,
                owner=labels["owner"],
                creation_id=labels["creation_id"],
                created=float(labels["created"]),
                status=SandboxStatus.RUNNING,
            )
            for machine, labels in found.items()
            if owner in (None, labels["owner"])
        ]

    async def terminate_id(self, sandbox_id: str) -> None:
        """End a machine by its id, without a handle of it; idempotent."""
        await asyncio.to_thread(provider.destroy, sandbox_id)

    async def check(self) -> Diagnosis:
        """Return whether the provider can be used here, and advice if not."""
        return Diagnosis(True, f"processes of this host, below {provider.MACHINES}")
