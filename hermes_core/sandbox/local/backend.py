"""The `local` backend: sandboxes on this host, in namespaces of their own, made by root or by an ordinary user."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hermes_core.aio import SingleFlight, TaskSet
from hermes_core.errors import PolicyError, ProvisionError, SandboxLost
from hermes_core.sandbox.contract import (
    Backend,
    Capabilities,
    Diagnosis,
    Isolation,
    Network,
    Sandbox,
    SandboxConfig,
    SandboxInfo,
    SandboxSpec,
)
from hermes_core.sandbox.local import diagnosis, directories, processes, records, view
from hermes_core.sandbox.local.launch import start_supervisor
from hermes_core.sandbox.local.probe import Probe, probe_host
from hermes_core.sandbox.local.records import Record
from hermes_core.sandbox.local.sandbox import LocalSandbox, end

if TYPE_CHECKING:
    from hermes_core.settings import Settings

log = logging.getLogger(__name__)

_START_S = 30.0
_ATTEMPTS = 5


class LocalConfig(SandboxConfig):
    """A profile of the `local` backend. The processor, the memory and the system are the host's own."""

    tmpfs_size: int | None = Field(default=None, gt=0)
    """Keep the sandbox's files in memory, at most so many MiB; None keeps them on disk, in the state directory."""
    state_dir: str | None = None
    """Where sandboxes are kept; None is `hermes-rl-<uid>` in the directory for temporary files."""
    hidden_paths: tuple[str, ...] = ()
    """Directories of the host that no sandbox may see, besides our home, working directory and checkout."""


class LocalBackend(Backend):
    """Sandboxes made of this host's own processes.

    At `user` and `namespace` a sandbox has its own mounts, processes and ipc. Its root shows the system's directories
    and the interpreter that runs us; not our home, files, environment or processes. An ordinary user gets that by way
    of a user namespace, root as it is, with user ids of its own for each slot. At `shared` there is a directory, and
    nothing is kept apart.

    Args:
        settings: of the runtime; none of them matters here.
        state_dir: where sandboxes are kept for profiles that do not say; `LocalConfig.state_dir` has the default.
    """

    name: ClassVar[str] = "local"
    config_class: ClassVar[type[SandboxConfig]] = LocalConfig

    def __init__(self, settings: Settings | None = None, *, state_dir: str | None = None) -> None:
        self._state_dir = state_dir
        self._work = TaskSet()
        self._roots: SingleFlight[Path] = SingleFlight("the sweep of the state directory", keep=True)

    @cached_property
    def _probe(self) -> Probe:
        return probe_host()

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """What this host allows, tried out at the first look (30 ms)."""
        probe = self._probe
        levels = {Isolation.SHARED}
        networks = {Network.OPEN}
        if probe.isolates:
            levels |= {Isolation.USER, Isolation.NAMESPACE}
            networks |= {Network.NONE} if probe.network else set()
        return Capabilities(isolation=frozenset(levels), network=frozenset(networks), attach=True, on_driver_host=True)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start the sandbox of this spec, or give the one that runs under its creation id."""
        config = spec.config if isinstance(spec.config, LocalConfig) else LocalConfig(**spec.config.model_dump())
        await asyncio.to_thread(lambda: self.capabilities)
        self._check_spec(spec, config)
        root = await self._root(config.state_dir or self._state_dir)
        request = await asyncio.to_thread(self._request, spec, config, root)  # the first one looks around on the disk
        path = root / records.sandbox_id_of(spec.creation_id)
        for _ in range(_ATTEMPTS):
            report = await start_supervisor(request, path)
            if "record" in report:
                record = Record.of(report["record"])
                log.debug("sandbox %s runs, kept by process %d", record.sandbox_id, record.supervisor[0])
                return LocalSandbox(record, path)
            if "error" in report:
                raise ProvisionError(
                    f"a local sandbox could not be started: {report['error']}",
                    hint="`hermes-rl doctor` says what this host allows",
                )
            existing = await self._existing(path)
            if existing is not None:
                return _accept(existing, path, spec)
        raise ProvisionError(f"the directory {path} is in the way", hint="remove it", sandbox_id=path.name)

    async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        """Every sandbox that this user has on this host, living or dead, whoever's driver made it."""
        root = await self._root(self._state_dir)
        found = []
        for place in {root, *self._roots.kept.values()}:
            found += [records.info_of(place, record) for record in records.all_records(place)]
        return [info for info in found if owner is None or info.owner == owner]

    async def terminate_id(self, sandbox_id: str) -> None:
        """End a sandbox by its id."""
        found = await self._find(sandbox_id)
        if found is not None:
            await end(*found)

    async def attach(self, sandbox_id: str) -> Sandbox:
        """A handle on a sandbox that runs already.

        Raises:
            SandboxLost: there is none of that id, or it has ended.
        """
        found = await self._find(sandbox_id)
        if found is None or not directories.held(str(found[1])):
            raise SandboxLost("no such sandbox runs on this host", hint="create another one", sandbox_id=sandbox_id)
        return LocalSandbox(*found)

    async def check(self) -> Diagnosis:
        """What levels this host grants, tried out with a real sandbox; why not the others, and what to do."""
        probe = await asyncio.to_thread(lambda: self._probe)
        return await diagnosis.diagnose(self, probe)

    async def aclose(self) -> None:
        """Break off what is under way. Sandboxes stay."""
        await self._work.aclose()

    async def _root(self, wanted: str | None) -> Path:
        """The state directory, swept of dead sandboxes when first used."""
        return await self._roots.get(self._work, partial(_opened, wanted), wanted)

    def _check_spec(self, spec: SandboxSpec, config: LocalConfig) -> None:
        config.refuse(self.name, "image", "cpu", "memory")
        capabilities = self.capabilities
        if spec.isolation not in capabilities.isolation:
            known = ", ".join(level.label for level in sorted(capabilities.isolation))
            raise PolicyError(
                f"this host's local sandboxes can't give isolation {spec.isolation.label!r}; they can give {known}"
                + (f" ({self._probe.reason})" if self._probe.reason else ""),
                hint="`hermes-rl doctor` says what to do about it",
            )
        shared = spec.isolation is Isolation.SHARED
        if config.network is Network.NONE and (shared or Network.NONE not in capabilities.network):
            raise PolicyError("network 'none' needs namespaces", hint="ask for isolation 'user' or 'namespace'")
        if config.tmpfs_size is not None and shared:
            raise PolicyError("tmpfs_size needs namespaces", hint="ask for isolation 'user' or 'namespace'")

    def _request(self, spec: SandboxSpec, config: LocalConfig, root: Path) -> dict[str, Any]:
        """What the supervisor is told."""
        sandbox_id = records.sandbox_id_of(spec.creation_id)
        isolated = spec.isolation is not Isolation.SHARED
        hidden = (*config.hidden_paths, str(root))  # other slots' files are an ordinary user's own
        shown = view.view(config.visible_paths, hidden) if isolated else view.View((), (), ())
        by_user = isolated and not self._probe.namespaces
        record = {
            "sandbox_id": sandbox_id,
            "owner": spec.owner,
            "creation_id": spec.creation_id,
            "isolation": spec.isolation.label,
            "created": time.time(),
            "user_namespace": by_user,
            "environment": {**config.env_vars, **spec.environment},
        }
        return {
            "state_root": str(root),
            "sandbox_id": sandbox_id,
            "isolated": isolated,
            "user_namespace": by_user,
            "reserve_uids": isolated and self._probe.root and not by_user,
            "no_network": config.network is Network.NONE,
            "tmpfs_bytes": None if config.tmpfs_size is None else config.tmpfs_size << 20,
            "binds": shown.binds,
            "symlinks": shown.symlinks,
            "masks": shown.masks,
            "command": list(spec.command(".hermes")),
            "environment": view.base_environment({processes.MARKER: sandbox_id}),
            "record": record,
        }

    async def _existing(self, path: Path) -> Record | None:
        """The record of the sandbox whose directory is there already; None if it is dead, and now out of the way."""
        deadline = time.monotonic() + _START_S
        while directories.held(str(path)):
            record = records.read(path)
            if record is not None:
                return record
            if time.monotonic() > deadline:
                raise ProvisionError("another driver does not get this sandbox started", sandbox_id=path.name)
            await asyncio.sleep(0.01)
        await asyncio.to_thread(directories.discard_dead, str(path))
        return None

    async def _find(self, sandbox_id: str) -> tuple[Record, Path] | None:
        root = await self._root(self._state_dir)
        if not sandbox_id.startswith(directories.PREFIX) or "/" in sandbox_id:
            return None
        for place in {root, *self._roots.kept.values()}:
            record = records.read(place / sandbox_id)
            if record is not None:
                return record, place / sandbox_id
        return None


async def _opened(wanted: str | None) -> Path:
    root = records.open_state_root(wanted)
    removed = await asyncio.to_thread(records.sweep, root)
    if removed:
        log.info("removed what %d dead sandboxes had left in %s", removed, root)
    return root


def _accept(record: Record, path: Path, spec: SandboxSpec) -> LocalSandbox:
    if Isolation.parse(record.isolation) < spec.isolation:
        raise PolicyError(
            f"the sandbox was made with isolation {record.isolation!r}, not {spec.isolation.label!r}",
            hint="terminate it first, or use another creation id",
            sandbox_id=record.sandbox_id,
        )
    return LocalSandbox(record, path)
