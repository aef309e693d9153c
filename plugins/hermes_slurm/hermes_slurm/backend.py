"""The `slurm` backend: a sandbox is a job of one node, which Slurm places, limits and ends."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from hermes_core import (
    Backend,
    Capabilities,
    Channel,
    ChannelLost,
    Diagnosis,
    Isolation,
    Network,
    ProvisionError,
    Sandbox,
    SandboxConfig,
    SandboxInfo,
    SandboxLost,
    SandboxSpec,
    SandboxStatus,
    Settings,
    SingleFlight,
    TaskSet,
)
from hermes_slurm.config import SlurmConfig
from hermes_slurm.diagnosis import diagnose
from hermes_slurm.jobs import JobHost, make_sandbox
from hermes_slurm.queue import END_S, JobQueue, SlurmJob


class SlurmBackend(Backend):
    """Sandboxes in Slurm jobs, made by any account that may submit jobs.

    The levels that a node allows the account are known only when a sandbox is made there. A stronger level is then
    refused, with the reason.

    Args:
        settings: the runtime's settings, of which it needs none.
    """

    name: ClassVar[str] = "slurm"
    config_class: ClassVar[type[SandboxConfig]] = SlurmConfig
    capabilities = Capabilities(
        isolation=frozenset({Isolation.SHARED, Isolation.USER, Isolation.NAMESPACE, Isolation.PRIVATE_ROOT}),
        network=frozenset({Network.OPEN, Network.NONE}),
        attach=True,
        gpu=True,
        memory_limit=False,
    )

    def __init__(self, settings: Settings | None = None) -> None:
        self._queue = JobQueue()
        self._work = TaskSet()
        self._making: SingleFlight[tuple[SlurmJob, dict[str, Any]]] = SingleFlight("the making of a sandbox")

    def levels(self, config: SandboxConfig) -> frozenset[Isolation]:
        """Return the levels for this profile. Slots see devices, such as GPUs, only at `shared`."""
        if isinstance(config, SlurmConfig) and config.gres is not None:
            return frozenset({Isolation.SHARED})
        return self.capabilities.isolation

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Submit the job of this spec and make its sandbox, or return the sandbox with the spec's creation id."""
        config = spec.config if isinstance(spec.config, SlurmConfig) else SlurmConfig(**spec.config.model_dump())
        make = partial(make_sandbox, self._queue, config, spec)
        job, answer = await self._making.get(self._work, make, spec.creation_id)
        spec.check_existing(answer["isolation"], job.sandbox_id)
        return SlurmSandbox(self._queue, job, answer)

    async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        """Return the sandboxes of this account's jobs in the queue, also of those that wait."""
        return [
            SandboxInfo(
                job.sandbox_id,
                job.label.owner,
                job.label.creation_id,
                job.submitted,
                SandboxStatus.RUNNING if job.runs or job.waits else SandboxStatus.ENDED,
            )
            for job in (await self._queue.look()).values()
            if owner in (None, job.label.owner)
        ]

    async def terminate_id(self, sandbox_id: str) -> None:
        """End a sandbox by its id, which begins with the id of its job."""
        job = await self._find(sandbox_id)
        if job is not None:
            await self._queue.cancel(job.name, job_id=job.job_id, patience_s=END_S)

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Return a handle on a running sandbox. Raises `SandboxLost` if none with this id runs."""
        job = await self._find(sandbox_id)
        if job is not None and job.runs:
            name = sandbox_id.partition("/")[2]
            found = (await JobHost(job).ask({"op": "find", "sandbox_id": name}))["sandbox"]
            if found is not None and found["running"]:
                return SlurmSandbox(self._queue, job, found)
        raise SandboxLost("no such sandbox runs there", hint="create another one", sandbox_id=sandbox_id)

    async def check(self) -> Diagnosis:
        """Return whether jobs can be submitted here, and what the cluster has."""
        return await diagnose()

    async def aclose(self) -> None:
        """Cancel all work in progress. Sandboxes stay."""
        await self._work.aclose()
        await self._queue.aclose()

    async def _find(self, sandbox_id: str) -> SlurmJob | None:
        jobs = await self._queue.look()
        return next((job for job in jobs.values() if job.sandbox_id == sandbox_id), None)


class SlurmSandbox(Sandbox):
    """A process tree in a job, with a directory on the job's node. Made by `SlurmBackend`."""

    def __init__(self, queue: JobQueue, job: SlurmJob, answer: Mapping[str, Any]) -> None:
        self._queue, self._job, self._host = queue, job, JobHost(job)
        self._name = str(answer["sandbox_id"])
        self.id = job.sandbox_id
        self.uid_base: int | None = answer["uid_base"]
        self.workspace_base = str(answer["workspace_base"])
        self.state_dir = f"{self.workspace_base}/.hermes"
        self.lifetime_s = None if job.ends is None else max(1.0, job.ends - time.time())

    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        """Start `argv` in the sandbox, over a step of the job. The program outlives its channel."""
        try:
            return await self._host.enter(self._name, argv, env or {})
        except ChannelLost as error:
            if await self._has_ended():
                raise SandboxLost("its job has ended", hint="create another one", sandbox_id=self.id) from error
            raise

    async def status(self) -> SandboxStatus:
        """Return RUNNING while the job runs, and GONE when it has left the queue."""
        job = (await self._queue.look()).get(self._job.job_id)
        if job is None:
            return SandboxStatus.GONE
        return SandboxStatus.RUNNING if job.runs else SandboxStatus.ENDED

    async def terminate(self) -> None:
        """End the job, and with it the sandbox. Return when the job has left the queue."""
        await self._queue.cancel(self._job.name, job_id=self._job.job_id, patience_s=END_S)

    async def _has_ended(self) -> bool:
        try:
            return await self.status() is not SandboxStatus.RUNNING
        except ProvisionError:  # the controller does not answer
            return False
