"""The emulator's state: apps, images, secrets, volumes, sandboxes, and the tokens that it gave out."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpclib import GRPCError, Status
from modal_proto import api_pb2 as pb

from hermes_modal_emulator.faults import Faults, RequestLog
from hermes_modal_emulator.machines import Machine, MachineError, NamespaceMachine, PlainMachine
from hermes_modal_emulator.sandboxes import EmulatedSandbox, v1_id

LONGEST_S = 24 * 3600
"""Maximum lifetime of a sandbox in seconds."""


@dataclass
class Options:
    """Settings that can be changed while the emulator runs."""

    max_sandboxes: int | None = None
    """Maximum number of sandboxes at the same time, over all apps; None is no limit."""
    auth_ttl_s: float = 1200.0
    router_ttl_s: float = 600.0
    page_size: int = 100
    """Number of sandboxes on one page of a list."""
    refused_tokens: list[str] = field(default_factory=list)
    """Token ids that are not accepted."""
    missing_images: list[str] = field(default_factory=lambda: [":missing"])
    """Texts that make the build of an image fail if its commands contain one. The default is the tag `missing`."""


@dataclass(frozen=True)
class Image:
    """An image: the variables of its ENV lines, and the snapshot that it was made from."""

    env: dict[str, str]
    snapshot: Path | None = None


class Cloud:
    """The state that outlives a call.

    Args:
        folder: for volumes, snapshots and mount points; removed by `aclose`.
        namespaces: whether sandboxes have namespaces of their own.
    """

    def __init__(self, folder: Path, *, namespaces: bool) -> None:
        self.folder = folder
        self.namespaces = namespaces
        self.url = ""
        self.options = Options()
        self.faults, self.requests = Faults(), RequestLog()
        self.apps: dict[str, str] = {}
        self.images: dict[str, Image] = {}
        self.files: set[str] = set()
        """Hashes of the files of mounts. The files themselves are not kept, because nothing is built from them."""
        self.secrets: dict[str, dict[str, str]] = {}
        self.named_secrets: dict[str, str] = {}
        self.volumes: dict[str, str] = {}
        self.sandboxes: dict[str, EmulatedSandbox] = {}
        self._answers: dict[str, asyncio.Task[EmulatedSandbox]] = {}
        self._router_valid_from = 0.0

    # --- tokens

    def token(self, ttl_s: float, **claims: str) -> str:
        """Return an unsigned JWT."""
        now = time.time()
        claim = {"iat": now, "exp": now + ttl_s, "jti": uuid.uuid4().hex, **claims}
        parts = ({"alg": "none"}, claim)
        return ".".join(
            [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts] + ["x"]
        )

    def check_token(self, token: str, *, router: bool = False) -> None:
        """Raise `GRPCError` if the token can't be read, has expired, or was revoked."""
        try:
            body = token.split(".")[1]
            claim = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        except (IndexError, ValueError):
            raise GRPCError(Status.UNAUTHENTICATED, "the token can't be read") from None
        if claim["exp"] < time.time() or (router and claim["iat"] < self._router_valid_from):
            raise GRPCError(Status.UNAUTHENTICATED, "the token has expired")

    def revoke_tokens(self) -> None:
        """Make all router tokens issued so far invalid."""
        self._router_valid_from = time.time()

    # --- secrets

    def add_secret(self, name: str, values: dict[str, str]) -> str:
        """Add a secret, and return its id. An empty name makes a secret without a name."""
        secret_id = self.named_secrets.setdefault(name, v1_id("st")) if name else v1_id("st")
        self.secrets[secret_id] = dict(values)
        return secret_id

    def values(self, ids: Any = (), sources: Any = ()) -> dict[str, str]:
        """Return the variables of secrets that are given by id, or as sources with the variables themselves."""
        variables: dict[str, str] = {}
        for secret_id in ids:
            variables.update(self._secret(secret_id))
        for source in sources:
            variables.update(dict(source.env.contents) if source.HasField("env") else self._secret(source.secret_id))
        return variables

    def _secret(self, secret_id: str) -> dict[str, str]:
        if secret_id not in self.secrets:
            raise GRPCError(Status.NOT_FOUND, f"Secret {secret_id} not found")
        return self.secrets[secret_id]

    # --- sandboxes

    async def create(self, request: Any, *, v2: bool, key: str) -> EmulatedSandbox:
        """Create the sandbox of a request. A repeated request, with the same idempotency key, gets the same sandbox."""
        if key not in self._answers:
            self._answers[key] = asyncio.create_task(self._create(request, v2=v2))
        try:
            return await asyncio.shield(self._answers[key])
        except (GRPCError, asyncio.CancelledError):
            if self._answers[key].done():
                self._answers.pop(key, None)
            raise

    async def _create(self, request: Any, *, v2: bool) -> EmulatedSandbox:
        definition = request.definition
        alive = [each for each in self.sandboxes.values() if each.result is None]
        if self.options.max_sandboxes is not None and len(alive) >= self.options.max_sandboxes:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "Workspace sandbox limit reached")
        if definition.timeout_secs > LONGEST_S:
            raise GRPCError(Status.INVALID_ARGUMENT, "timeout must be at most 24 hours")
        if definition.name and any(s.definition.name == definition.name and s.app_id == request.app_id for s in alive):
            raise GRPCError(Status.ALREADY_EXISTS, f"Sandbox with name {definition.name!r} already exists")
        image = self.images.get(definition.image_id, Image({}))
        values = self.values(definition.secret_ids, getattr(request, "secret_sources", ()))
        sandbox = EmulatedSandbox(request, v2=v2, env={**image.env, **values})
        self.sandboxes[sandbox.id] = sandbox
        try:
            await sandbox.start(self._machine(sandbox, image))
        except (MachineError, OSError) as error:
            del self.sandboxes[sandbox.id]
            raise GRPCError(Status.INTERNAL, f"the sandbox could not be started: {error}") from error
        return sandbox

    def _machine(self, sandbox: EmulatedSandbox, image: Image) -> Machine:
        base = self.folder / "sandboxes" / sandbox.id
        if not self.namespaces:
            return PlainMachine(base)
        definition = sandbox.definition
        blocked = definition.network_access.network_access_type == pb.NetworkAccess.NetworkAccessType.BLOCKED
        return NamespaceMachine(
            base,
            snapshot=image.snapshot,
            volumes={each.mount_path: self.folder / "volumes" / each.volume_id for each in definition.volume_mounts},
            network=not (blocked or definition.block_network),
            workdir=definition.workdir,
        )

    def sandbox(self, sandbox_id: str) -> EmulatedSandbox:
        """Return a sandbox by its id, also one that has ended."""
        if sandbox_id not in self.sandboxes:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox with ID {sandbox_id} not found.")
        return self.sandboxes[sandbox_id]

    def task(self, task_id: str) -> EmulatedSandbox:
        """Return the sandbox of a task."""
        for each in self.sandboxes.values():
            if each.task_id == task_id:
                return each
        raise GRPCError(Status.NOT_FOUND, f"Task {task_id} not found")

    async def snapshot(self, sandbox: EmulatedSandbox) -> str:
        """Make an image of the files that the sandbox has written so far. Return the image's id."""
        image_id = v1_id("im")
        target = self.folder / "snapshots" / image_id
        target.parent.mkdir(parents=True, exist_ok=True)
        assert sandbox.machine is not None
        try:
            await sandbox.machine.snapshot(target)
        except MachineError as error:
            raise GRPCError(Status.INTERNAL, f"the snapshot failed: {error}") from error
        env = self.images.get(sandbox.definition.image_id, Image({})).env
        self.images[image_id] = Image(env, target if self.namespaces else None)
        return image_id

    async def aclose(self) -> None:
        """End every sandbox, and remove the folder."""
        async with asyncio.TaskGroup() as group:
            for sandbox in self.sandboxes.values():
                group.create_task(sandbox.aclose())
        shutil.rmtree(self.folder, ignore_errors=True)
