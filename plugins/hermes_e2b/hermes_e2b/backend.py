"""The `e2b` backend: sandboxes of E2B, with a program of its daemon for each channel."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from importlib.metadata import version
from typing import Any, ClassVar

from hermes_core import CommandError, PluginError, ProvisionError, SandboxLost

try:
    import e2b

    from hermes_e2b.api import E2bApi, VirtualMachine
    from hermes_e2b.programs import Program, is_running
except ImportError as missing:
    hint = "`pip install hermes-rl-e2b` installs a version of E2B's SDK that this plugin was tested with"
    raise PluginError(f"E2B's SDK is not installed, or lacks a part: {missing}", hint=hint) from missing

from hermes_core import (
    AsyncStreamChannel,
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
    Settings,
    SingleFlight,
    TaskSet,
    complete,
    uid_base_in_own_kernel,
)
from hermes_e2b.config import LEAST_TIMEOUT_S, E2bConfig
from hermes_e2b.failures import KEY_HINT, creation_errors, sandbox_errors, say
from hermes_e2b.keep_alive import KeepAlive

log = logging.getLogger(__name__)

MARK, OWNER, CREATION_ID, PROFILE, ISOLATION, LIFETIME, TIMEOUT = (
    f"hermes-rl.{word}" for word in ("sandbox", "owner", "creation-id", "profile", "isolation", "lifetime", "timeout")
)
"""The keys of our sandboxes' metadata. All have MARK, by which E2B finds them."""

AT_A_TIME = 8
"""Maximum number of creations at the same time."""

_MAIN = "hermes-main"
_MAIN_SCRIPT = """
mkdir -p "$1" || exit 1
cd /proc/sys/kernel && for limit in shmmni msgmni; do echo 0 >$limit; done && echo 0 0 0 0 >sem
shift
echo begun
exec >/dev/null 2>&1
"$@"
exec reboot -f
"""
"""The sandbox's main process, which ends with the micro-VM: a Firecracker VM ends when its kernel reboots. First, it
makes the workspaces' directory, and disables System V objects, which slots would share."""


class E2bBackend(Backend):
    """Sandboxes of the E2B account that E2B_API_KEY names."""

    name: ClassVar[str] = "e2b"
    config_class: ClassVar[type[SandboxConfig]] = E2bConfig
    capabilities = Capabilities(
        frozenset({Isolation.SHARED, Isolation.USER, Isolation.NAMESPACE, Isolation.DEDICATED}),
        network=frozenset({Network.OPEN, Network.NONE}),
        attach=True,
    )

    def __init__(self, settings: Settings | None = None) -> None:
        key = None if settings is None else settings.secrets.get("E2B_API_KEY")
        self._api = E2bApi(None if key is None else key.get_secret_value())
        self._keep_alive = KeepAlive(self._api.extend)
        self._work = TaskSet()
        self._creations: SingleFlight[E2bSandbox] = SingleFlight("the creation")
        self._places = asyncio.Semaphore(AT_A_TIME)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Create the sandbox of this spec, or return the running one with its creation id."""
        sandbox = await self._creations.get(self._work, lambda: self._create(spec), spec.creation_id)
        spec.check_existing(sandbox.isolation, sandbox.id)
        return sandbox

    async def _create(self, spec: SandboxSpec) -> E2bSandbox:
        async with self._places:
            with creation_errors(spec.config.name, spec.config.image):
                existing = await self._running(spec.creation_id)
                return await (self._take(existing[0], spec) if existing else self._make(spec))

    async def _make(self, spec: SandboxSpec) -> E2bSandbox:
        """Create a sandbox. If that fails or is cancelled, end whatever has its creation id."""
        config = spec.config
        assert isinstance(config, E2bConfig)
        try:
            machine = await complete(self._api.create(_request(spec, config)))
            # Another driver, or an attempt whose answer was lost, may have made one at the same time: the oldest stays.
            oldest, *others = await self._running(spec.creation_id) or [machine.sandbox_id]
            for other in others:
                await self._api.kill(other)
            if oldest != machine.sandbox_id:
                return await self._take(oldest, spec)
            sandbox = self._sandbox(machine, _metadata(spec, config), config.max_lifetime)
            await sandbox.begin(spec)
        except BaseException:
            await complete(self._end(spec.creation_id))
            raise
        self._keep_alive.add(sandbox.id, sandbox.timeout_s)
        return sandbox

    async def _take(self, sandbox_id: str, spec: SandboxSpec) -> E2bSandbox:
        """Return a sandbox that exists already, with its main process."""
        sandbox = await self._handle(sandbox_id)
        if not await is_running(sandbox.machine.processes, _MAIN):
            await sandbox.begin(spec)
        self._keep_alive.add(sandbox.id, sandbox.timeout_s)
        return sandbox

    async def _running(self, creation_id: str) -> list[str]:
        """Return the ids of the running sandboxes with this creation id, the oldest first."""
        found = await self._api.list({MARK: "1", CREATION_ID: creation_id})
        running = [(each.started_at, each.sandbox_id) for each in found if each.state == "running"]
        return [sandbox_id for _, sandbox_id in sorted(running)]

    async def _end(self, creation_id: str) -> None:
        try:
            for sandbox_id in await self._running(creation_id):
                await self._api.kill(sandbox_id)
        except Exception as error:  # nobody keeps these sandboxes alive, so E2B ends them
            log.warning("a sandbox with creation id %s may live until its timeout: %s", creation_id, say(error))

    async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        """Return the running and paused sandboxes with our metadata."""
        with sandbox_errors(""):
            found = await self._api.list({MARK: "1"} if owner is None else {MARK: "1", OWNER: owner})
        return [
            SandboxInfo(
                sandbox_id=each.sandbox_id,
                owner=each.metadata.get(OWNER, ""),
                creation_id=each.metadata.get(CREATION_ID, ""),
                created=each.started_at.timestamp(),
                status=SandboxStatus.RUNNING if each.state == "running" else SandboxStatus.ENDED,
            )
            for each in found
        ]

    async def terminate_id(self, sandbox_id: str) -> None:
        """End a sandbox by its id, if it exists."""
        self._keep_alive.drop(sandbox_id)
        with sandbox_errors(sandbox_id):
            await self._api.kill(sandbox_id)

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Return a handle on a running sandbox, and keep the sandbox alive. Raise `SandboxLost` if it does not run."""
        with sandbox_errors(sandbox_id):
            sandbox = await self._handle(sandbox_id)
        self._keep_alive.add(sandbox_id, sandbox.timeout_s)
        return sandbox

    async def _handle(self, sandbox_id: str) -> E2bSandbox:
        detail = await self._api.find(sandbox_id)
        if detail is None or detail.state != "running":
            raise SandboxLost("no such sandbox runs", hint="create another one", sandbox_id=sandbox_id)
        metadata = detail.metadata if isinstance(detail.metadata, dict) else {}
        left = float(metadata.get(LIFETIME, "inf")) - (time.time() - detail.started_at.timestamp())
        return self._sandbox(self._api.machine(detail), metadata, left)

    def _sandbox(self, machine: VirtualMachine, metadata: Mapping[str, str], lifetime_s: float) -> E2bSandbox:
        return E2bSandbox(machine, metadata, lifetime_s, self._api, self._keep_alive)

    async def check(self) -> Diagnosis:
        """Return whether E2B answers, and takes the key."""
        if not self._api.has_key:
            return Diagnosis(False, "there is no E2B API key", advice=(KEY_HINT,))
        try:
            found = await self._api.list({MARK: "1"})
        except e2b.AuthenticationException as error:
            return Diagnosis(False, f"E2B does not take the key: {say(error)}", advice=(KEY_HINT,))
        except Exception as error:
            advice = "check the network, and https://status.e2b.dev; E2B_DOMAIN or E2B_API_URL names another server"
            return Diagnosis(False, f"E2B does not answer at {self._api.url}: {say(error)}", advice=(advice,))
        details = ("levels: shared, user, namespace, dedicated", f"{len(found)} sandboxes of hermes-rl")
        return Diagnosis(True, f"E2B at {self._api.url}, SDK {version('e2b')}", details)

    async def aclose(self) -> None:
        """Stop keeping sandboxes alive: E2B ends those that are left."""
        await self._work.aclose()
        await self._keep_alive.aclose()


class E2bSandbox(Sandbox):
    """A micro-VM, made by `E2bBackend`."""

    own_system = True

    def __init__(
        self,
        machine: VirtualMachine,
        metadata: Mapping[str, str],
        lifetime_s: float,
        api: E2bApi,
        keep_alive: KeepAlive,
    ) -> None:
        self.id = machine.sandbox_id
        self.machine = machine
        self.isolation = metadata.get(ISOLATION, Isolation.SHARED.label)
        self.lifetime_s = lifetime_s
        self.timeout_s = int(metadata.get(TIMEOUT, LEAST_TIMEOUT_S))
        self.uid_base = uid_base_in_own_kernel(metadata.get(CREATION_ID, ""))
        self._api, self._keep_alive = api, keep_alive
        self._ended = False

    async def begin(self, spec: SandboxSpec) -> None:
        """Start the sandbox's main process, and wait until the workspaces' directory is there."""
        argv = ["/bin/sh", "-c", _MAIN_SCRIPT, _MAIN, self.workspace_base, *spec.command(self.state_dir)]
        program = await Program.start(self.machine.processes, argv, has_input=False, tag=_MAIN)
        said: list[bytes] = []
        program.on_stderr = said.append
        async with aclosing(program.output()) as output:
            async for _ in output:
                return
        raise ProvisionError(
            f"the sandbox's main process ended: {b''.join(said)[:500].decode('utf-8', 'replace').strip()}",
            hint="the template needs /bin/sh, sleep and a root user who can make /data",
            retryable=False,
        )

    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        """Start `argv` as a program of the daemon, whose streams carry bytes."""
        if self._ended:
            raise SandboxLost("the sandbox was ended", sandbox_id=self.id)
        try:
            "".join([*argv, *(env or {}), *(env or {}).values()]).encode()
        except UnicodeEncodeError as error:
            message = "arguments and variables must be UTF-8: E2B's daemon takes no others"
            raise CommandError(message, code="not_utf8") from error
        with sandbox_errors(self.id):
            try:
                program = await Program.start(self.machine.processes, argv, env)
            except Exception:
                if await self.status() is not SandboxStatus.RUNNING:
                    raise SandboxLost("the sandbox has ended", sandbox_id=self.id) from None
                raise
        channel = AsyncStreamChannel(
            program.output, program.write, wait=program.wait, close=program.aclose, resumable=False
        )
        program.on_stderr = channel.feed_stderr
        return channel

    async def status(self) -> SandboxStatus:
        """Return the sandbox's status at E2B."""
        with sandbox_errors(self.id):
            detail = await self._api.find(self.id)
        if detail is None:
            return SandboxStatus.GONE
        return SandboxStatus.RUNNING if detail.state == "running" else SandboxStatus.ENDED

    async def terminate(self) -> None:
        """End the sandbox."""
        self._ended = True
        self._keep_alive.drop(self.id)
        with sandbox_errors(self.id):
            await self._api.kill(self.id)


def _metadata(spec: SandboxSpec, config: E2bConfig) -> dict[str, str]:
    return {
        MARK: "1",
        OWNER: spec.owner,
        CREATION_ID: spec.creation_id,
        PROFILE: config.name,
        ISOLATION: spec.isolation.label,
        LIFETIME: str(config.max_lifetime),
        TIMEOUT: str(config.timeout_s),
    }


def _request(spec: SandboxSpec, config: E2bConfig) -> dict[str, Any]:
    """Return the body of the request that creates the sandbox."""
    request: dict[str, Any] = {
        "templateID": config.image,
        "timeout": config.timeout_s,
        "autoPause": False,  # at its timeout, the sandbox ends
        "secure": True,
        "metadata": _metadata(spec, config),
        "envVars": dict(spec.environment),
    }
    if config.network is not Network.OPEN:
        request["allow_internet_access"] = False
    if config.deny_out:
        request["network"] = {"allowOut": [*config.allow_out], "denyOut": [*config.deny_out]}
    return request
