"""The `local` backend: sandboxes on this host, in namespaces of their own, made by root or by an ordinary user."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from hermes_core.aio import SingleFlight, TaskSet
from hermes_core.errors import ProvisionError, SandboxLost
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
    SandboxStatus,
)
from hermes_core.sandbox.local import diagnosis, host, launch
from hermes_core.sandbox.local.host import Probe, SandboxRecord
from hermes_core.sandbox.local.packages import package_folders
from hermes_core.sandbox.local.sandbox import LocalSandbox
from hermes_core.settings import Settings

log = logging.getLogger(__name__)


class LocalConfig(SandboxConfig):
    """A profile of the `local` backend. Its sandboxes use the processors, the memory and the system of the host."""

    unsupported = ("image", "cpu", "memory")

    tmpfs_size: int | None = Field(default=None, gt=0)
    """Keep the sandbox's files in memory, up to this many MiB. None keeps them on disk, in the state directory."""
    state_dir: str | None = None
    """The directory of the sandboxes. None is `hermes-rl-<uid>` in the directory for temporary files."""
    root: str | None = None
    """The directory of the host that slots' root directories start from at level `private-root`, such as one made by
    debootstrap. None is the host's own system, without files that only some of its users may read."""
    hidden_paths: tuple[str, ...] = ()
    """More directories of the host that no sandbox can see. The driver's home, working directory and checkout are
    always hidden."""


class LocalBackend(Backend):
    """Sandboxes made of this host's own processes.

    At `user` and `namespace`, a sandbox has its own mounts, processes and ipc. It sees the system's directories and the
    interpreter that runs us, but not our home, files, environment or processes. Root gives each slot a user id. For an
    ordinary user, user namespaces isolate slots in the same way. At `shared`, a sandbox is only a directory, and
    nothing is isolated.

    Args:
        settings: the runtime's settings. Results of searches on this host are kept in its `state_dir`.
        state_dir: the directory of sandboxes for profiles that don't set one. None: see `LocalConfig.state_dir`.
    """

    name: ClassVar[str] = "local"
    config_class: ClassVar[type[SandboxConfig]] = LocalConfig

    def __init__(self, settings: Settings | None = None, *, state_dir: str | None = None) -> None:
        self._state_dir = state_dir
        self._packages = settings.state_dir / "package-folders.json" if settings is not None else None
        self._work = TaskSet()
        self._places: SingleFlight[str] = SingleFlight("the sweep of the state directory", keep=True)

    @cached_property
    def _probe(self) -> Probe:
        return launch.probe_host()

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Return the capabilities that this host allows. The first access tests the host, which takes 30 ms."""
        probe = self._probe
        levels = {Isolation.SHARED}
        networks = {Network.OPEN}
        if probe.isolates:
            levels |= {Isolation.USER, Isolation.NAMESPACE}
            levels |= set() if probe.own_roots else {Isolation.PRIVATE_ROOT}
            networks |= {Network.NONE} if probe.network else set()
        return Capabilities(isolation=frozenset(levels), network=frozenset(networks), attach=True, on_driver_host=True)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start the sandbox of this spec, or return the running one with its creation id."""
        config = spec.config if isinstance(spec.config, LocalConfig) else LocalConfig(**spec.config.model_dump())
        description = host.description(spec, tmpfs_mib=config.tmpfs_size, root=config.root)
        host.check(description, await asyncio.to_thread(lambda: self._probe))
        place = await self._place(config.state_dir or self._state_dir)
        request = await asyncio.to_thread(self._request, place, description, config.hidden_paths)
        report = await launch.create(request)
        if "error" in report:
            raise ProvisionError(
                f"a local sandbox could not be started: {report['error']}",
                hint="`hermes-rl doctor` says what this host allows",
            )
        record = SandboxRecord.of(report["record"])
        spec.check_existing(record.isolation, record.sandbox_id)
        log.debug("sandbox %s runs, kept by process %d", record.sandbox_id, record.supervisor[0])
        return LocalSandbox(place, record)

    def _request(self, place: str, description: Mapping[str, Any], hidden: Sequence[str]) -> dict[str, Any]:
        """Return the request for a sandbox. The first call searches for installed packages, which takes a while."""
        packages = package_folders(self._packages) if self._packages is not None else None
        return host.creation(place, description, self._probe, hidden=hidden, packages=packages)

    async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        """Return every sandbox of this user on this host, living or dead, of any driver."""
        return [
            SandboxInfo(
                record.sandbox_id,
                record.owner,
                record.creation_id,
                record.created,
                SandboxStatus.RUNNING if host.runs(place, record.sandbox_id) else SandboxStatus.ENDED,
            )
            for place in await self._all_places()
            for record in await asyncio.to_thread(host.records, place)
            if owner is None or record.owner == owner
        ]

    async def terminate_id(self, sandbox_id: str) -> None:
        """End a sandbox by its id."""
        sandbox = await self._find(sandbox_id)
        if sandbox is not None:
            await sandbox.terminate()

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Return a handle on a running sandbox.

        Raises:
            SandboxLost: no sandbox has this id, or it has ended.
        """
        sandbox = await self._find(sandbox_id)
        if sandbox is None or await sandbox.status() is not SandboxStatus.RUNNING:
            raise SandboxLost("no such sandbox runs on this host", hint="create another one", sandbox_id=sandbox_id)
        return sandbox

    async def check(self) -> Diagnosis:
        """Return the levels that this host grants, tried with a real sandbox, and how to get the others."""
        probe = await asyncio.to_thread(lambda: self._probe)
        return await diagnosis.diagnose(self, probe)

    async def aclose(self) -> None:
        """Cancel all work in progress. Sandboxes stay."""
        await self._work.aclose()

    async def _place(self, directory: str | None) -> str:
        """Return the state directory. The first call for a directory removes dead sandboxes from it."""
        return await self._places.get(self._work, partial(asyncio.to_thread, _open, directory), directory)

    async def _all_places(self) -> set[str]:
        return {await self._place(self._state_dir), *self._places.kept.values()}

    async def _find(self, sandbox_id: str) -> LocalSandbox | None:
        for place in await self._all_places():
            if (record := host.find(place, sandbox_id)) is not None:
                return LocalSandbox(place, record)
        return None


def _open(directory: str | None) -> str:
    usual = str(Path(tempfile.gettempdir(), "hermes-rl").absolute())
    place = host.open_place(host.place_of(directory, usual), "state_dir")
    removed = host.sweep(place)
    if removed:
        log.info("removed what %d dead sandboxes had left in %s", removed, place)
    return place
