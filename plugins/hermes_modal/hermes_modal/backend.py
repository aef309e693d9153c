"""The `modal` backend: Modal's sandboxes, with one exec for each channel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from hermes_core import PluginError, SandboxLost

try:
    import modal
    from modal import exception
except ModuleNotFoundError as missing:
    hint = "`pip install modal`, then `modal token new`"
    raise PluginError(f"the Modal package is not installed: {missing}", hint=hint) from missing

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
    SandboxImage,
    SandboxInfo,
    SandboxSpec,
    SandboxStatus,
    Settings,
    uid_base_in_own_kernel,
)
from hermes_modal import diagnosis, requests
from hermes_modal.account import CALL_LIMIT_S, CREATE_LIMIT_S, FAILURES, Account, errors_of, not_created, pace
from hermes_modal.apps import Apps
from hermes_modal.config import DEFAULT_APP, ModalSandboxConfig

log = logging.getLogger(__name__)

SNAPSHOT_LIMIT_S = 600
"""Time limit of a snapshot in seconds."""
CHUNK_BYTES = 1 << 20
"""Maximum size of one write. The SDK refuses more than 16 MiB, and a server refuses messages above its own limit."""


class ModalBackend(Backend):
    """Sandboxes of the Modal account that MODAL_TOKEN_ID or `~/.modal.toml` names."""

    name: ClassVar[str] = "modal"
    config_class: ClassVar[type[SandboxConfig]] = ModalSandboxConfig
    capabilities = Capabilities(
        frozenset({Isolation.SHARED, Isolation.USER, Isolation.DEDICATED}),
        network=frozenset(Network),
        attach=True,
        snapshot=True,
        gpu=True,
        memory_limit=False,
    )

    def __init__(self, settings: Settings | None = None) -> None:
        self._account = Account()
        self._profiles = {} if settings is None else settings.profiles
        names = (str(each["app_name"]) for each in self._profiles.values() if each.get("app_name"))
        file = None if settings is None else settings.state_dir / "modal-apps"
        self._apps = Apps((DEFAULT_APP, *names), file)

    def note_profile(self, config: SandboxConfig) -> None:
        """Include the profile's app in `list`."""
        assert isinstance(config, ModalSandboxConfig)
        self._apps.add(config.get_app_name())

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Create the sandbox of this spec, or return the running one with the spec's creation id."""
        config = spec.config
        assert isinstance(config, ModalSandboxConfig)
        await asyncio.to_thread(self._apps.note, config.get_app_name())
        command = requests.main_process(spec, config.workspace_base)
        try:
            arguments = await requests.arguments(spec, config, self._account)
            async with pace.turn():
                creating = modal.Sandbox.create.aio(*command, **arguments)
                created = await self._account.call(creating, CREATE_LIMIT_S)
        except exception.AlreadyExistsError:
            return await self._existing(spec, config)
        except FAILURES as error:
            raise not_created(error, config, "creating a sandbox") from error
        sandbox = ModalSandbox(created, config.workspace_base, spec.creation_id, self._account, config.max_lifetime)
        image_id = arguments["image"].object_id
        sandbox.image = SandboxImage(config.image or image_id, image_id)
        return sandbox

    async def snapshot(self, sandbox: Sandbox) -> str:
        """Save the sandbox's files as a Modal image, which Modal removes after 30 days. Return its id."""
        assert isinstance(sandbox, ModalSandbox)
        return await sandbox.snapshot()

    async def restore(self, spec: SandboxSpec, snapshot_id: str) -> Sandbox:
        """Create a sandbox from a snapshot's image. Otherwise like `create`."""
        source = {"image": None, "dockerfile": None, "snapshot_id": snapshot_id}
        return await self.create(replace(spec, config=spec.config.model_copy(update=source)))

    async def _existing(self, spec: SandboxSpec, config: ModalSandboxConfig) -> Sandbox:
        client, name = await self._account.client(), requests.name_of(spec.creation_id)
        try:
            found = await self._account.call(modal.Sandbox.from_name.aio(config.get_app_name(), name, client=client))
            tags = await self._account.call(found.get_tags.aio())
        except FAILURES as error:
            raise not_created(error, config, "finding the sandbox of its name") from error
        spec.check_existing(tags.get(requests.ISOLATION, "shared"), found.object_id)
        return self._sandbox(found, tags)

    async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        """Return the running sandboxes with our tags, in the apps that this user's drivers have used."""
        tags = {} if owner is None else {requests.OWNER: owner}
        names = await asyncio.to_thread(self._apps.names)
        with errors_of(""):
            async with asyncio.timeout(CALL_LIMIT_S):
                found = []
                for name in names:
                    if (app := await self._account.app(name, create=False)) is not None:
                        client = await self._account.client()
                        listing = modal.Sandbox.list.aio(app_id=app.app_id, tags=tags, client=client)
                        found += [sandbox async for sandbox in listing]
                answers = await asyncio.gather(*map(_info, found), return_exceptions=True)
                for answer in answers:
                    if isinstance(answer, BaseException):
                        raise answer
        return [info for info in answers if isinstance(info, SandboxInfo)]

    async def terminate_id(self, sandbox_id: str) -> None:
        """End a sandbox by its id, if it exists."""
        try:
            await (await self._handle(sandbox_id)).terminate()
        except SandboxLost:
            return

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Return a handle on a running sandbox. Raise `SandboxLost` if it does not run."""
        sandbox = await self._handle(sandbox_id)
        if await sandbox.status() is not SandboxStatus.RUNNING:
            raise SandboxLost("no such sandbox runs", hint="create another one", sandbox_id=sandbox_id)
        return sandbox

    async def _handle(self, sandbox_id: str) -> ModalSandbox:
        with errors_of(sandbox_id):
            client = await self._account.client()
            found = await self._account.call(modal.Sandbox.from_id.aio(sandbox_id, client=client))
            tags = await self._account.call(found.get_tags.aio())
        return self._sandbox(found, tags)

    def _sandbox(self, found: Any, tags: Mapping[str, str]) -> ModalSandbox:
        base, creation_id = requests.workspaces(tags), tags.get(requests.CREATION_ID, "")
        return ModalSandbox(found, base, creation_id, self._account, requests.life_left(tags))

    async def check(self) -> Diagnosis:
        """Return whether Modal accepts the token, and whether everything that the profiles name exists there."""
        return await diagnosis.diagnose(self._account, self._profiles)

    async def aclose(self) -> None:
        """Close the connection to Modal. Sandboxes stay."""
        await self._account.aclose()


class ModalSandbox(Sandbox):
    """A sandbox of Modal's, made by `ModalBackend`."""

    own_system = True

    def __init__(
        self, sandbox: Any, workspace_base: str, creation_id: str, account: Account, lifetime_s: float | None = None
    ) -> None:
        self.id: str = sandbox.object_id
        self.lifetime_s = lifetime_s
        self.workspace_base = workspace_base
        self.state_dir = requests.state_dir(workspace_base)
        self.uid_base = uid_base_in_own_kernel(creation_id)
        self._sandbox, self._account = sandbox, account
        self._ended = False

    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        """Start `argv` with an exec whose streams carry bytes."""
        if self._ended:
            raise SandboxLost("the sandbox was ended", sandbox_id=self.id)
        with errors_of(self.id):
            process = await self._exec(argv, env)
        put, drain = process.stdin.write, process.stdin.drain.aio  # here, because each access makes the SDK wrap them

        async def write(data: bytes) -> None:
            for at in range(0, len(data), CHUNK_BYTES):
                put(data[at : at + CHUNK_BYTES])
                await drain()

        return AsyncStreamChannel(
            process.stdout.__aiter__, write, wait=process.wait.aio, stderr=process.stderr.__aiter__
        )

    async def _exec(self, argv: Sequence[str], env: Mapping[str, str] | None) -> Any:
        try:
            return await self._account.call(self._sandbox.exec.aio(*argv, env=dict(env or {}), text=False))
        except exception.AuthError:  # a handle keeps a refused token until it expires, so get another handle
            client, old = await self._account.client(), self._sandbox
            self._sandbox = await self._account.call(modal.Sandbox.from_id.aio(self.id, client=client))
            await self._detach(old)
            return await self._account.call(self._sandbox.exec.aio(*argv, env=dict(env or {}), text=False))

    async def _detach(self, sandbox: Any) -> None:
        """Close a handle's connection, which would otherwise stay open for half a minute."""
        try:
            await self._account.call(sandbox.detach.aio())
        except FAILURES as error:
            log.debug("sandbox %s: a handle's connection was not closed: %s", self.id, error)

    async def snapshot(self) -> str:
        """Save the sandbox's files as an image. Return the image's id."""
        with errors_of(self.id):
            saving = self._sandbox.snapshot_filesystem.aio(SNAPSHOT_LIMIT_S)
            return str((await self._account.call(saving, SNAPSHOT_LIMIT_S)).object_id)

    async def status(self) -> SandboxStatus:
        """Return the sandbox's status on Modal."""
        if self._ended:
            return SandboxStatus.ENDED
        with errors_of(self.id):
            try:
                code = await self._account.call(self._sandbox.poll.aio())
            except exception.NotFoundError:
                return SandboxStatus.GONE
        return SandboxStatus.RUNNING if code is None else SandboxStatus.ENDED

    async def terminate(self) -> None:
        """End the sandbox; it has ended when this returns."""
        if self._ended:
            return
        with errors_of(self.id):
            try:
                await self._account.call(self._sandbox.terminate.aio(wait=True))
            except exception.NotFoundError:
                log.debug("sandbox %s is not known to Modal any more", self.id)
        self._ended = True
        await self._detach(self._sandbox)


async def _info(sandbox: Any) -> SandboxInfo | None:
    try:
        tags = await sandbox.get_tags.aio()
    except exception.NotFoundError:  # it has ended meanwhile
        return None
    if requests.CREATION_ID not in tags:
        return None
    return SandboxInfo(
        sandbox_id=sandbox.object_id,
        owner=tags.get(requests.OWNER, ""),
        creation_id=tags[requests.CREATION_ID],
        created=float(tags.get(requests.CREATED, 0)),
        status=SandboxStatus.RUNNING,
    )
