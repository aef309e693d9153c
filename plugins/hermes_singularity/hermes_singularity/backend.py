"""The `singularity` backend: Apptainer's containers on this host, entered by their namespaces."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from hermes_core import (
    Backend,
    Capabilities,
    Diagnosis,
    Isolation,
    Network,
    PolicyError,
    Sandbox,
    SandboxConfig,
    SandboxImage,
    SandboxInfo,
    SandboxLost,
    SandboxSpec,
    SandboxStatus,
    Settings,
    SingleFlight,
    TaskSet,
)
from hermes_core.sandbox.local import directories, host, launch
from hermes_core.sandbox.local.host import SandboxRecord
from hermes_core.sandbox.local.processes import MARKER
from hermes_core.sandbox.local.sandbox import LocalSandbox
from hermes_singularity import diagnosis, runtime
from hermes_singularity.config import SingularityConfig
from hermes_singularity.images import Images, host_directory


class SingularityBackend(Backend):
    """Sandboxes that are containers of Apptainer on this host.

    The driver need not be root. If it is, root of a container is an unprivileged user outside.
    """

    name: ClassVar[str] = "singularity"
    config_class: ClassVar[type[SandboxConfig]] = SingularityConfig
    capabilities = Capabilities(
        isolation=frozenset(set(Isolation) - {Isolation.PRIVATE_ROOT}),  # slots' overlays take the system's root
        network=frozenset({Network.OPEN, Network.NONE}),
        attach=True,
        gpu=True,
    )

    def __init__(self, settings: Settings | None = None) -> None:
        self._images = Images()
        self._work = TaskSet()
        self._directories: set[str | None] = {None}
        self._places: SingleFlight[str] = SingleFlight("the sweep of the state directory", keep=True)

    def note_profile(self, config: SandboxConfig) -> None:
        """Look for sandboxes also in this profile's directory, where an earlier driver may have left some."""
        if isinstance(config, SingularityConfig):
            self._directories.add(config.state_dir)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start the container of this spec, or return the running one with its creation id."""
        config = spec.config
        assert isinstance(config, SingularityConfig)
        assert config.image is not None, "validation demands one"
        self.note_profile(config)
        probe = await asyncio.to_thread(launch.probe_host)
        if not probe.isolates:
            raise PolicyError(f"containers need user namespaces: {probe.reason}", hint="; ".join(host.remedies(probe)))
        program = runtime.find_program()
        directory, image = await self._images.ensure(config.image, config, program)
        place = await self._place(config.state_dir)
        command = partial(runtime.exec_command, program, config, directory)
        report = await launch.create(_request(place, spec, config, command), "container")
        if "error" in report:
            raise diagnosis.not_started(report["error"])
        record = SandboxRecord.of(report["record"])
        spec.check_existing(record.isolation, record.sandbox_id)
        return SingularitySandbox(place, record, image)

    async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        """Return every container of this user on this host, of any driver, running or dead."""
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
        """End a container by its id."""
        sandbox = await self._find(sandbox_id)
        if sandbox is not None:
            await sandbox.terminate()

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Return a handle on a running container.

        Raises:
            SandboxLost: no container has this id, or it has ended.
        """
        sandbox = await self._find(sandbox_id)
        if sandbox is None or await sandbox.status() is not SandboxStatus.RUNNING:
            raise SandboxLost("no such sandbox runs on this host", hint="create another one", sandbox_id=sandbox_id)
        return sandbox

    async def check(self) -> Diagnosis:
        """Return whether containers can be started here, and what to do if not."""
        return await diagnosis.diagnose()

    async def aclose(self) -> None:
        """Cancel all work in progress. Containers keep running."""
        await self._images.aclose()
        await self._work.aclose()

    async def _place(self, directory: str | None) -> str:
        """Return the state directory. The first call for a directory removes dead sandboxes from it."""
        return await self._places.get(self._work, partial(asyncio.to_thread, _open, directory), directory)

    async def _all_places(self) -> set[str]:
        return {await self._place(each) for each in self._directories}

    async def _find(self, sandbox_id: str) -> SingularitySandbox | None:
        for place in await self._all_places():
            if (record := host.find(place, sandbox_id)) is not None:
                return SingularitySandbox(place, record)
        return None


class SingularitySandbox(LocalSandbox):
    """A container and its directory. Made by `SingularityBackend`."""

    own_system = True

    def __init__(self, place: str, record: SandboxRecord, image: SandboxImage | None = None) -> None:
        super().__init__(place, record)
        self.workspace_base, self.state_dir = Sandbox.workspace_base, Sandbox.state_dir
        self.image = image

    def _entry(self, argv: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
        return {
            "isolated": True,
            "init": self.record.init,
            "command": [*argv],
            "environment": {**self.record.environment, MARKER: self.id, **env},
            "directory": self.workspace_base,
        }


def _request(
    place: str, spec: SandboxSpec, config: SingularityConfig, command: partial[tuple[str, ...]]
) -> dict[str, Any]:
    """Return the supervisor's request for a container.

    Args:
        command: `runtime.exec_command`, without its last two arguments.
    """
    sandbox_id = host.sandbox_id_of(spec.creation_id, directories.CONTAINER_PREFIX)
    directory = Path(place, sandbox_id)
    disk = directory if config.tmpfs_size is None else directory / directories.DISK
    return {
        "state_root": place,
        "sandbox_id": sandbox_id,
        "isolated": True,
        "reserve_uids": os.geteuid() == 0,
        "no_network": config.network is Network.NONE,
        "no_sysv_ipc": spec.isolation is Isolation.USER,  # where slots share the container's ipc namespace
        "tmpfs_bytes": None if config.tmpfs_size is None else config.tmpfs_size << 20,
        "command": command(disk, spec.command(Sandbox.state_dir)),
        "runtime_environment": runtime.variables(directory / directories.ROOT),
        "variables": dict(spec.environment),
        "record": {
            "sandbox_id": sandbox_id,
            "owner": spec.owner,
            "creation_id": spec.creation_id,
            "isolation": spec.isolation.label,
            "created": time.time(),
            "user_namespace": True,
        },
    }


def _open(directory: str | None) -> str:
    usual = f"{host_directory()}/hermes-rl-containers"
    place = host.open_place(host.place_of(directory, usual), "state_dir")
    host.sweep(place)
    return place
