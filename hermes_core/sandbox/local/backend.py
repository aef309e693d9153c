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
    """A profile of the `local` backend. It uses the processors, the memory and the system of the host."""

    unsupported = ("image", "cpu", "memory")

    tmpfs_size: int | None = Field(default=None, gt=0)
    """Keep the sandbox's files in memory, up to this many MiB. None keeps them on disk, in the state directory."""
    state_dir: str | None = None
    """The directory of the sandboxes. None is `hermes-rl-<uid>` in the directory for temporary files."""
    root: str | None = None
    """The directory of the host that the roots of slots start from at level `private-root`, such as one made by
    debootstrap. None is the host's own system, without what only some of its users may read."""
    hidden_paths: tuple[str, ...] = ()
    """More directories of the host that no sandbox can see. The driver's home, working directory and checkout are
    always hidden."""


class LocalBackend(Backend):
    """Sandboxes made of this host's own processes.

    At `user` and `namespace` a sandbox has its own mounts, processes and ipc. Its root shows the system's directories
    and the interpreter that runs us, but not our home, files, environment or processes. An ordinary user gets this
    through a user namespace, just like root, with user ids of its own for each slot. At `shared` a sandbox is only a
    directory, and nothing is separated.

    Args:
        settings: the runtime's settings. Its `state_dir` keeps what was found out about this host.
        state_dir: directory of sandboxes for profiles that don't set it; `LocalConfig.state_dir` has the default.
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
        """Return what this host allows. It is tested at the first access (30 ms)."""
        probe = self._probe
        levels = {Isolation.SHARED}
        networks = {Network.OPEN}
        if probe.isolates:
            levels |= {Isolation.USER, Isolation.NAMESPACE}
            levels |= set() if probe.own_roots else {Isolation.PRIVATE_ROOT}
            networks |= {Network.NONE} if probe.network else set()
        return Capabilities(isolation=frozenset(levels), network=frozenset(networks), attach=True, on_driver_host=True)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start the sandbox of this spec, or return the one that runs under its creation id."""
        config = spec.config if isinstance(spec.config, LocalConfig) else LocalConfig(**spec.config.model_dump())
        wanted = host.description(spec, tmpfs_mib=config.tmpfs_size, root=config.root)
        host.check(wanted, await asyncio.to_thread(lambda: self._probe))
        place = await self._place(config.state_dir or self._state_dir)
        request = await asyncio.to_thread(self._request, place, wanted, config.hidden_paths)
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

    def _request(self, place: str, wanted: Mapping[str, Any], hidden: Sequence[str]) -> dict[str, Any]:
        """Return the request for a sandbox. The first look at what it will see takes a while."""
        packages = package_folders(self._packages) if self._packages is not None else None
        return host.creation(place, wanted, self._probe, hidden=hidden, packages=packages)

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
        found = await self._find(sandbox_id)
        if found is not None:
            await found.terminate()

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Return a handle on a sandbox that runs already.

        Raises:
            SandboxLost: there is none with that id, or it has ended.
        """
        found = await self._find(sandbox_id)
        if found is None or await found.status() is not SandboxStatus.RUNNING:
            raise SandboxLost("no such sandbox runs on this host", hint="create another one", sandbox_id=sandbox_id)
        return found

    async def check(self) -> Diagnosis:
        """Return the levels that this host grants, tested with a real sandbox; and for the others, the reason and what
        to do."""
        probe = await asyncio.to_thread(lambda: self._probe)
        return await diagnosis.diagnose(self, probe)

    async def aclose(self) -> None:
        """Cancel the work in progress. Sandboxes stay."""
        await self._work.aclose()

    async def _place(self, wanted: str | None) -> str:
        """Return the state directory. Dead sandboxes are removed from it when it is first used."""
        return await self._places.get(self._work, partial(asyncio.to_thread, _open, wanted), wanted)

    async def _all_places(self) -> set[str]:
        return {await self._place(self._state_dir), *self._places.kept.values()}

    async def _find(self, sandbox_id: str) -> LocalSandbox | None:
        for place in await self._all_places():
            if (record := host.find(place, sandbox_id)) is not None:
                return LocalSandbox(place, record)
        return None


def _open(wanted: str | None) -> str:
    usual = str(Path(tempfile.gettempdir(), "hermes-rl").absolute())
    place = host.open_place(host.place_of(wanted, usual), "state_dir")
    removed = host.sweep(place)
    if removed:
        log.info("removed what %d dead sandboxes had left in %s", removed, place)
    return place
