"""The `ssh` backend: a sandbox is a process tree and a directory on a host, which is reached over SSH."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hermes_core import (
    Backend,
    Capabilities,
    Channel,
    ConfigError,
    Diagnosis,
    Isolation,
    Network,
    Sandbox,
    SandboxConfig,
    SandboxInfo,
    SandboxLost,
    SandboxSpec,
    SandboxStatus,
    Settings,
)
from hermes_core.sandbox.remote.host import creation_request
from hermes_ssh.config import SshConfig
from hermes_ssh.diagnosis import ask_all, diagnose, find_hosts
from hermes_ssh.hosts import Host, HostPool


class SshBackend(Backend):
    """Sandboxes on hosts that are reached by SSH. The account there need not be root.

    The levels that a host allows the account are known only when a sandbox is made there. A stronger level is then
    refused, with the reason.

    Args:
        settings: the runtime's settings, with secrets for keys and accounts, and with profiles that name hosts.
    """

    name: ClassVar[str] = "ssh"
    config_class: ClassVar[type[SandboxConfig]] = SshConfig
    capabilities = Capabilities(
        isolation=frozenset({Isolation.SHARED, Isolation.USER, Isolation.NAMESPACE, Isolation.PRIVATE_ROOT}),
        network=frozenset({Network.OPEN, Network.NONE}),
        attach=True,
    )

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings
        self._pool = HostPool(self._secret)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start the sandbox of this spec on one of the profile's hosts, or return the one with the spec's creation
        id."""
        config = spec.config
        if not isinstance(config, SshConfig) or not config.all_hosts:
            raise ConfigError(f"profile {config.name!r} names no host", hint="set `host`, or several `hosts`")
        host, answer = await self._pool.place(config, spec.creation_id, creation_request(spec))
        spec.check_existing(answer["isolation"], f"{host.name}/{answer['sandbox_id']}")
        return SshSandbox(self._pool, host, answer)

    async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        """Return the sandboxes of our accounts on the hosts that were used so far, and on those of the profiles."""
        return [
            SandboxInfo(
                f"{host.name}/{each['sandbox_id']}",
                each["owner"],
                each["creation_id"],
                each["created"],
                SandboxStatus.RUNNING if each["running"] else SandboxStatus.ENDED,
            )
            for host, answer in await ask_all(find_hosts(self._pool, self._settings), {"op": "list"})
            for each in answer["sandboxes"]
            if owner is None or each["owner"] == owner
        ]

    async def terminate_id(self, sandbox_id: str) -> None:
        """End a sandbox by its id, which begins with its host."""
        for host, name in self._places(sandbox_id):
            await host.ask({"op": "terminate", "sandbox_id": name})

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Return a handle on a running sandbox. Raises `SandboxLost` if none with this id runs."""
        for host, name in self._places(sandbox_id):
            found = (await host.ask({"op": "find", "sandbox_id": name}))["sandbox"]
            if found is not None and found["running"]:
                return SshSandbox(self._pool, host, found)
        raise SandboxLost("no such sandbox runs there", hint="create another one", sandbox_id=sandbox_id)

    def _places(self, sandbox_id: str) -> Sequence[tuple[Host, str]]:
        """Return each host that may have a sandbox with this id, with the sandbox's id on the host."""
        host_name, _, name = sandbox_id.rpartition("/")
        return [(host, name) for host in find_hosts(self._pool, self._settings) if host.name == host_name]

    async def check(self) -> Diagnosis:
        """Return whether the hosts of the profiles can be reached, and what each one allows."""
        return await diagnose(find_hosts(self._pool, self._settings))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._pool.aclose()

    def _secret(self, name: str) -> str:
        secrets = {} if self._settings is None else self._settings.secrets
        if name not in secrets:
            raise ConfigError(f"there is no secret {name!r}", hint="name it in `secrets`, or set the variable")
        return secrets[name].get_secret_value()


class SshSandbox(Sandbox):
    """A process tree on a host with a directory there, made by `SshBackend`."""

    def __init__(self, pool: HostPool, host: Host, answer: Mapping[str, Any]) -> None:
        self._pool, self._host = pool, host
        self._name, self._creation_id = str(answer["sandbox_id"]), str(answer["creation_id"])
        self.id = f"{host.name}/{self._name}"
        self.uid_base: int | None = answer["uid_base"]
        self.workspace_base = str(answer["workspace_base"])
        self.state_dir = f"{self.workspace_base}/.hermes"

    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        """Start `argv` in the sandbox, over a new connection if the last one is lost. The program may outlive its
        channel."""
        return await self._host.enter(self._name, argv, env or {})

    async def status(self) -> SandboxStatus:
        """Return the sandbox's status on the host."""
        return SandboxStatus((await self._host.ask({"op": "status", "sandbox_id": self._name}))["status"])

    async def terminate(self) -> None:
        """End the sandbox: kill its processes, and remove its directory."""
        await self._host.ask({"op": "terminate", "sandbox_id": self._name})
        self._pool.forget(self._host, self._creation_id)
