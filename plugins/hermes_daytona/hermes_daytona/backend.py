"""The `daytona` backend: Daytona's sandboxes, with one SSH session for each channel."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hermes_core import PluginError

try:
    from hermes_daytona import diagnosis, requests
    from hermes_daytona.gateway import FAILURES, Gateway
    from hermes_daytona.service import (
        CALL_LIMIT_S,
        DaytonaService,
        ServiceFailed,
        advice,
        not_created,
        not_reached,
        status_of,
    )
except ModuleNotFoundError as missing:
    hint = "`pip install hermes-rl-daytona`, which brings it"
    raise PluginError(f"a package of the Daytona backend is not installed: {missing}", hint=hint) from missing

from hermes_core import (
    Backend,
    Capabilities,
    Channel,
    Diagnosis,
    Isolation,
    Network,
    ProvisionError,
    Sandbox,
    SandboxConfig,
    SandboxImage,
    SandboxInfo,
    SandboxLost,
    SandboxSpec,
    SandboxStatus,
    Settings,
    TaskSet,
    complete,
    uid_base_in_own_kernel,
)
from hermes_daytona.config import DaytonaConfig

log = logging.getLogger(__name__)

MINUTE_S = 60.0
SIGNS = 3
"""Signs of life that Daytona gets during each `auto_stop_interval`."""
CREATE_LIMIT_S = 900.0
"""Time limit in seconds for the start of a sandbox, including the pull of its image."""


class DaytonaBackend(Backend):
    """Sandboxes of the Daytona account that DAYTONA_API_KEY belongs to."""

    name: ClassVar[str] = "daytona"
    config_class: ClassVar[type[SandboxConfig]] = DaytonaConfig
    capabilities = Capabilities(
        frozenset({Isolation.SHARED, Isolation.USER, Isolation.NAMESPACE, Isolation.DEDICATED}),
        network=frozenset({Network.NONE, Network.OPEN}),
        attach=True,
        gpu=True,
    )

    def __init__(self, settings: Settings | None = None) -> None:
        secret = None if settings is None else settings.secrets.get("DAYTONA_API_KEY")
        self._service = DaytonaService(
            os.environ.get("DAYTONA_API_KEY") if secret is None else secret.get_secret_value()
        )
        self._work = TaskSet()
        self._open: weakref.WeakSet[DaytonaSandbox] = weakref.WeakSet()

    def levels(self, config: SandboxConfig) -> frozenset[Isolation]:
        """Return the levels that sandboxes of this profile can give; `namespace` only with `namespaces`."""
        can_isolate = isinstance(config, DaytonaConfig) and config.namespaces
        return self.capabilities.isolation - (set() if can_isolate else {Isolation.NAMESPACE})

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Create the sandbox of this spec, or return the running one with the spec's creation id."""
        config = spec.config
        assert isinstance(config, DaytonaConfig)
        request = requests.sandbox_request(spec, config)
        try:
            sandbox_id, is_new = await self._obtain(request, spec.creation_id)
            try:
                found = await self._service.wait_for_start(sandbox_id, CREATE_LIMIT_S)
                sandbox = self._handle(found)
                await sandbox.prepare(spec)
            except BaseException:
                if is_new:
                    await complete(self._discard(sandbox_id))
                raise
        except (ServiceFailed, *FAILURES) as error:
            raise not_created(error, config) from error
        self._keep(sandbox)
        return sandbox

    async def _obtain(self, request: Any, creation_id: str) -> tuple[str, bool]:
        """Return the id of the sandbox with this creation id, and whether it was made now."""
        for _ in range(3):
            try:
                return await self._make(request), True
            except ServiceFailed as error:
                if error.status != 409 and not error.unknown_outcome:
                    raise
                found = await self._service.find(request.name)
                if found is None and error.status != 409:
                    raise
                if found is not None and found.labels.get(requests.CREATION_ID) != creation_id:
                    raise
                if found is not None and status_of(found) is SandboxStatus.RUNNING:
                    return found.id, error.status != 409
                await self._service.delete(request.name)  # it has ended, or is ending, and still has the name
        raise ServiceFailed("the sandbox's name is taken", 409)

    async def _make(self, request: Any) -> str:
        """Send the request to create a sandbox. If it is cancelled, delete what it made."""
        sending = asyncio.ensure_future(self._service.create(request))
        try:
            return str((await asyncio.shield(sending)).id)
        except asyncio.CancelledError:
            await complete(self._undo(sending, request.name))
            raise

    async def _undo(self, sending: asyncio.Future[Any], name: str) -> None:
        try:
            await sending
        except ServiceFailed as error:
            if not error.unknown_outcome:
                return
        await self._discard(name)

    async def _discard(self, sandbox_id: str) -> None:
        try:
            await self._service.delete(sandbox_id)
        except ServiceFailed as error:
            log.warning("sandbox %s could not be deleted, and will end itself: %s", sandbox_id, error)

    async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        """Return the sandboxes with our labels."""
        labels = {requests.MARK: "1"} if owner is None else {requests.MARK: "1", requests.OWNER: owner}
        try:
            return [
                requests.info(found)
                async for found in self._service.list(labels)
                if found.labels.get(requests.CREATION_ID)
            ]
        except ServiceFailed as error:
            raise ProvisionError(f"Daytona's sandboxes could not be listed: {error}", hint=advice(error)) from error

    async def terminate_id(self, sandbox_id: str) -> None:
        """End a sandbox by its id, if it exists and is one of ours."""
        try:
            found = await self._service.find(sandbox_id)
            if found is not None and requests.CREATION_ID in found.labels:
                await self._service.delete(sandbox_id)
        except ServiceFailed as error:
            raise not_reached(error, sandbox_id) from error

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Return a handle on a running sandbox. Raise `SandboxLost` if it does not run."""
        try:
            found = await self._service.find(sandbox_id)
            if (
                found is None
                or status_of(found) is not SandboxStatus.RUNNING
                or requests.CREATION_ID not in found.labels
            ):
                raise SandboxLost("no such sandbox runs", hint="create another one", sandbox_id=sandbox_id)
            sandbox = self._handle(await self._service.wait_for_start(sandbox_id, CALL_LIMIT_S))
            await sandbox.learn_uids()
        except (ServiceFailed, *FAILURES) as error:
            raise not_reached(error, sandbox_id) from error
        self._keep(sandbox)
        return sandbox

    def _handle(self, found: Any) -> DaytonaSandbox:
        sandbox = DaytonaSandbox(found, self._service)
        self._open.add(sandbox)
        return sandbox

    def _keep(self, sandbox: DaytonaSandbox) -> None:
        """Let Daytona know that the sandbox is in use as long as it is."""
        self._work.spawn(sandbox.keep_in_use(), f"keeping sandbox {sandbox.id} in use")

    async def check(self) -> Diagnosis:
        """Return whether Daytona accepts the key, and what is at the other end."""
        return await diagnosis.diagnose(self._service)

    async def aclose(self) -> None:
        """Close the connections. Sandboxes stay."""
        await self._work.aclose()
        await asyncio.gather(*(sandbox.disconnect() for sandbox in tuple(self._open)))
        await self._service.aclose()


class DaytonaSandbox(Sandbox):
    """A sandbox of Daytona's, made by `DaytonaBackend`.

    Args:
        found: the API's description of it.
    """

    own_system = True

    def __init__(self, found: Any, service: DaytonaService) -> None:
        self.id: str = found.id
        self.workspace_base = found.labels.get(requests.WORKSPACES, Sandbox.workspace_base)
        self.state_dir = f"{self.workspace_base}/.hermes"
        self.lifetime_s = requests.life_left(found)
        self._creation_id = found.labels[requests.CREATION_ID]
        self._pause_s = (found.auto_stop_interval or 1) * MINUTE_S / SIGNS
        self._service = service
        self._ends = f"{self.workspace_base}/.ends"
        self._gateway = Gateway(lambda: service.grant_access(self.id), self._ends)
        self._ended = False

    async def prepare(self, spec: SandboxSpec) -> None:
        """Make the directories, and start the watchdog if it does not run. Raises as `Gateway.run` does."""
        if spec.config.image is not None:
            self.image = SandboxImage(spec.config.image)
        said = await self._gateway.run(requests.PREPARE, self._ends, *spec.command(self.state_dir))
        await self.learn_uids(said)

    async def learn_uids(self, said: str | None = None) -> None:
        """Find out how many user ids the sandbox has, from what our script said, and choose those of the slots."""
        said = await self._gateway.run(requests.COUNT_IDS) if said is None else said
        if (ready := re.search(r"^ready (\d{1,10})\n\Z", said, re.MULTILINE)) is None:
            hint = "the sandbox's user must be able to make workspace_base: set `user: root`, or another directory"
            raise ServiceFailed(f"it could not be prepared: {said.strip()[:1000] or 'nothing was said'}", 422, hint)
        self.uid_base = uid_base_in_own_kernel(self._creation_id, int(ready[1]))

    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        """Start `argv` in a session of the SSH gateway."""
        if self._ended:
            raise SandboxLost("the sandbox was ended", sandbox_id=self.id)
        try:
            return await self._gateway.open(argv, env or {})
        except (ServiceFailed, *FAILURES) as error:
            if isinstance(error, TimeoutError):
                self._gateway.drop()
            if await self.status() is not SandboxStatus.RUNNING:
                raise SandboxLost(f"the sandbox has ended: {error}", sandbox_id=self.id) from error
            raise not_reached(error, self.id) from error

    async def status(self) -> SandboxStatus:
        """Return the sandbox's status on Daytona."""
        if self._ended:
            return SandboxStatus.GONE
        try:
            found = await self._service.find(self.id)
        except ServiceFailed as error:
            raise not_reached(error, self.id) from error
        return SandboxStatus.GONE if found is None else status_of(found)

    async def keep_in_use(self) -> None:
        """Tell Daytona again and again that the sandbox is in use, until it has ended."""
        while not self._ended:
            await asyncio.sleep(self._pause_s)
            try:
                await self._service.refresh(self.id)
            except ServiceFailed as error:
                if error.status in (404, 410):
                    return
                log.warning("sandbox %s: Daytona could not be told that it is in use: %s", self.id, error)

    async def terminate(self) -> None:
        """Delete the sandbox; it is gone when this returns."""
        if self._ended:
            return
        try:
            await self._service.delete(self.id)
        except ServiceFailed as error:
            raise not_reached(error, self.id) from error
        self._ended = True
        await self.disconnect()

    async def disconnect(self) -> None:
        """Close the connection. Programs go on."""
        await self._gateway.aclose()
