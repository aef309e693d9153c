"""The `nomad` backend: jobs of one allocation as sandboxes, with one exec for each channel."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from hermes_core import (
    Backend,
    Capabilities,
    Channel,
    ChannelLost,
    Diagnosis,
    InfraError,
    Isolation,
    Network,
    PolicyError,
    ProvisionError,
    Sandbox,
    SandboxConfig,
    SandboxImage,
    SandboxInfo,
    SandboxLost,
    SandboxSpec,
    SandboxStatus,
    Settings,
    complete,
)
from hermes_nomad import diagnosis, jobs
from hermes_nomad.api import NomadApi, NomadError, find_part
from hermes_nomad.config import SYS_ADMIN, NomadConfig
from hermes_nomad.execs import start_program

CREATIONS_AT_A_TIME = 8
"""Maximum number of sandboxes that are being made at the same time, over all pools."""
END_LIMIT_S = 60.0
"""Seconds until the processes of an allocation must have ended."""
T = TypeVar("T")
_NOTHING: Mapping[str, Any] = {}


class NomadBackend(Backend):
    """Sandboxes that are jobs of the clusters that profiles name, or NOMAD_ADDR."""

    name: ClassVar[str] = "nomad"
    config_class: ClassVar[type[SandboxConfig]] = NomadConfig
    capabilities = Capabilities(
        frozenset({Isolation.SHARED, Isolation.USER, Isolation.NAMESPACE, Isolation.DEDICATED}),
        network=frozenset({Network.OPEN, Network.NONE}),
        attach=True,
        gpu=True,
    )

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings
        self._apis: dict[tuple[str, str | None], NomadApi] = {}
        self._prefixes: set[tuple[NomadApi, str]] = set()
        self._places = asyncio.Semaphore(CREATIONS_AT_A_TIME)

    def levels(self, config: SandboxConfig) -> frozenset[Isolation]:
        """Return the levels that containers of this profile can give; `namespace` only with SYS_ADMIN.

        Without SYS_ADMIN, `dedicated` takes the place of `namespace`.
        """
        can_mount = isinstance(config, NomadConfig) and SYS_ADMIN in config.cap_add
        return self.capabilities.isolation - (set() if can_mount else {Isolation.NAMESPACE})

    def note_profile(self, config: SandboxConfig) -> None:
        """Include the profile's cluster and prefix in `list`."""
        assert isinstance(config, NomadConfig)
        self._prefixes.add((self._api(config), config.job_prefix))

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Register the job of this spec, or find it. Return when its allocation runs."""
        config = spec.config
        assert isinstance(config, NomadConfig)
        self.note_profile(config)
        job, api = jobs.describe_job(spec, config), self._api(config)
        handle = NomadSandbox(api, job["ID"], config.namespace)
        try:
            async with self._places:
                meta, index = await self._register(api, job, spec)
                allocation = await _wait_for_start(api, await _wait_for_place(api, handle, config, index), config)
        except PolicyError:
            raise  # the job that is there is somebody's
        except BaseException as error:
            with contextlib.suppress(InfraError):  # the first error says more; `reap` ends what is left
                await complete(handle.terminate())
            if isinstance(error, NomadError):
                raise _not_made(error, config) from error
            raise
        sandbox = NomadSandbox(api, job["ID"], config.namespace, meta=meta, allocation=allocation)
        sandbox.image = SandboxImage(config.image or "")
        return sandbox

    async def _register(self, api: NomadApi, job: dict[str, Any], spec: SandboxSpec) -> tuple[dict[str, str], int]:
        """Register a job, unless it exists. Return the meta data that it was made with, and its index."""
        for _ in range(2):
            try:
                # Index 0 means that the job must not exist yet.
                body = {"Job": job, "EnforceIndex": True, "JobModifyIndex": 0}
                return job["Meta"], _index_of((await api.call("POST", "/v1/jobs", body=body)).data)
            except NomadError as error:
                if "Enforcing job modify index" not in error.message:
                    raise
            handle = NomadSandbox(api, job["ID"], job["Namespace"])
            found = await handle.find_job()
            if found is not None and found.get("Status") != "dead":
                meta = find_part(found, "Meta", kind=dict)
                spec.check_existing(meta.get(jobs.ISOLATION, "shared"), handle.id)
                return meta, _index_of(found)
            await handle.terminate()  # it has ended: its id is free for another one
        raise ProvisionError("the job of the creation id is there, and then not, again and again", hint="try again")

    async def list(self, owner: str | None = None) -> Sequence[SandboxInfo]:
        """Return our jobs of all clusters and prefixes that profiles name, in all namespaces that we may read."""
        if not self._prefixes:
            self.note_profile(NomadConfig())
        found: dict[str, SandboxInfo] = {}
        for api, prefix in sorted(self._prefixes, key=lambda each: (each[0].address, each[1])):
            try:
                stubs = await api.get_pages("/v1/jobs", {"prefix": f"{prefix}-", "meta": "true", "namespace": "*"})
            except NomadError as error:
                raise _not_reached(error, "") from error
            infos = filter(None, map(jobs.info_of, stubs))
            found |= {info.sandbox_id: info for info in infos if owner in (None, info.owner)}
        return [*found.values()]

    async def terminate_id(self, sandbox_id: str) -> None:
        """End a job by its id and namespace, if it is one of ours."""
        handle = await self._find(sandbox_id)
        if handle is not None:
            await handle.terminate()

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Return a handle on a running sandbox. Raise `SandboxLost` if it does not run."""
        handle = await self._find(sandbox_id)
        if handle is None or await handle.status() is not SandboxStatus.RUNNING:
            raise SandboxLost("no such sandbox runs", hint="create another one", sandbox_id=sandbox_id)
        return handle

    async def _find(self, sandbox_id: str) -> NomadSandbox | None:
        """Return the sandbox with this id in any of our clusters; None if there is none."""
        if not self._prefixes:
            self.note_profile(NomadConfig())
        job, _, namespace = sandbox_id.rpartition("@")
        for api in {api: None for api, _ in self._prefixes} if job else ():
            handle = NomadSandbox(api, job, namespace)
            found = await handle.find_job()
            if found is not None and jobs.OWNER in find_part(found, "Meta", kind=dict):
                allocation = await handle.find_allocation() or {}
                return NomadSandbox(api, job, namespace, meta=found["Meta"], allocation=allocation)
        return None

    async def check(self) -> Diagnosis:
        """Return whether the cluster answers, accepts the token, and has nodes with the driver."""
        profiles = {} if self._settings is None else self._settings.profiles
        return await diagnosis.diagnose(self._api(NomadConfig()), profiles)

    async def aclose(self) -> None:
        """Close the connections. Sandboxes keep running."""
        for api in self._apis.values():
            await api.aclose()
        self._apis.clear()
        self._prefixes.clear()

    def _api(self, config: NomadConfig) -> NomadApi:
        key = config.address, config.region
        if key not in self._apis:
            self._apis[key] = NomadApi(*key, self._settings)
        return self._apis[key]


class NomadSandbox(Sandbox):
    """A job with one allocation, made by `NomadBackend`."""

    own_system = True

    def __init__(
        self,
        api: NomadApi,
        job: str,
        namespace: str,
        *,
        meta: Mapping[str, str] = _NOTHING,
        allocation: Mapping[str, Any] = _NOTHING,
    ) -> None:
        self.id = jobs.sandbox_id(job, namespace)
        self.uid_base = int(meta[jobs.UIDS]) if meta.get(jobs.UIDS, "").isdigit() else None
        self._api, self._job, self._namespace = api, job, namespace
        self._allocation_id = str(allocation.get("ID") or "")
        self._ended = False

    @property
    def _query(self) -> dict[str, str]:
        return {"namespace": self._namespace}

    async def open(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Channel:
        """Start `argv` with an exec of Nomad's."""
        if self._ended:
            raise SandboxLost("the sandbox was ended", sandbox_id=self.id)
        try:
            return await start_program(self._api, self._allocation_id, self._namespace, argv, env or {})
        except NomadError as error:
            allocation = await self._look()
            if allocation is None or not jobs.is_alive(allocation):
                reason = "Nomad no longer knows it" if allocation is None else jobs.end_of(allocation)
                raise SandboxLost(f"the sandbox has ended: {reason}", sandbox_id=self.id) from error
            raise _not_reached(error, self.id) from error

    async def status(self) -> SandboxStatus:
        """Return what Nomad says about the allocation."""
        allocation = None if self._ended else await self._look()
        if allocation is None:
            return SandboxStatus.GONE
        return SandboxStatus.RUNNING if jobs.is_alive(allocation) else SandboxStatus.ENDED

    async def terminate(self) -> None:
        """Purge the job. Return when the processes of its allocations have ended."""
        if self._ended:
            return
        allocations = await self._allocations()
        try:
            await self._api.call("DELETE", f"/v1/job/{self._job}", query={**self._query, "purge": "true"})
        except NomadError as error:
            if error.status != 404:
                raise _not_reached(error, self.id) from error
        allocations = [*allocations, *await self._allocations()]  # also one that was placed meanwhile
        for allocation_id in {each.get("ID") for each in allocations if each.get("ClientStatus") not in jobs.ENDED}:
            await self._wait_for_end(allocation_id)
        self._ended = True

    async def _wait_for_end(self, allocation_id: str) -> None:
        def has_ended(allocation: Any) -> bool:
            return allocation.get("ClientStatus") in jobs.ENDED

        try:
            left = await self._api.get_until(
                f"/v1/allocation/{allocation_id}", self._query, has_ended, limit_s=END_LIMIT_S, kind=dict
            )
        except NomadError as error:
            if error.status != 404:
                raise _not_reached(error, self.id) from error
            return
        if not has_ended(left):
            hint = "if its node is down, its watchdog ends it; see `nomad node status`"
            raise InfraError(f"allocation {allocation_id} has not ended: {jobs.end_of(left)}", hint=hint)

    async def find_job(self) -> dict[str, Any] | None:
        """Return the job; None if Nomad has none with this id."""
        return await self._get(f"/v1/job/{self._job}", dict)

    async def find_allocation(self) -> Mapping[str, Any] | None:
        """Return the allocation that is the sandbox; None if there is none yet."""
        return jobs.first_allocation(await self._allocations())

    async def _allocations(self) -> list[Any]:
        return await self._get(f"/v1/job/{self._job}/allocations", list) or []

    async def _look(self) -> dict[str, Any] | None:
        return await self._get(f"/v1/allocation/{self._allocation_id}", dict) if self._allocation_id else None

    async def _get(self, path: str, kind: type[T]) -> T | None:
        """Return a value of the API; None if there is none."""
        try:
            return await self._api.get_until(path, self._query, lambda _: True, limit_s=0.0, kind=kind)
        except NomadError as error:
            if error.status == 404:
                return None
            raise _not_reached(error, self.id) from error


async def _wait_for_place(api: NomadApi, sandbox: NomadSandbox, config: NomadConfig, index: int) -> str:
    """Return the id of a job's allocation as soon as there is one.

    Args:
        index: the job's index. An evaluation of an earlier job of this id has a lower one.

    Raises:
        ProvisionError: the job is not placed.
    """
    job, _, namespace = sandbox.id.rpartition("@")
    query, loop = {"namespace": namespace}, asyncio.get_running_loop()
    placed_by = loop.time() + config.placement_timeout_s

    def find_first(evaluations: list[Any]) -> Any:
        ours = [each for each in evaluations if _index_of(each) >= index and each.get("Status") != "pending"]
        return min(ours, key=lambda each: find_part(each, "CreateIndex", kind=int), default=None)

    path, limit_s = f"/v1/job/{job}/evaluations", config.placement_timeout_s
    evaluation = find_first(await api.get_until(path, query, find_first, limit_s=limit_s, kind=list))
    wait_s = max(0.0, placed_by - loop.time()) if evaluation is not None and jobs.can_wait(evaluation) else 0.0
    found = await api.get_until(f"/v1/job/{job}/allocations", query, bool, limit_s=wait_s, kind=list)
    if (first := jobs.first_allocation(found)) is None:
        raise jobs.not_placed(evaluation, config)
    return find_part(first, "ID", kind=str)


async def _wait_for_start(api: NomadApi, allocation_id: str, config: NomadConfig) -> Mapping[str, Any]:
    """Return an allocation as soon as its task runs. Raise `ProvisionError` if it does not start."""
    path, query = f"/v1/allocation/{allocation_id}", {"namespace": config.namespace}
    allocation = await api.get_until(path, query, _has_started, limit_s=config.start_timeout_s, kind=dict)
    if not jobs.is_alive(allocation):
        raise jobs.not_started(allocation, config)
    if not _has_started(allocation):
        hint = "a large image needs a larger start_timeout_s, or nodes that have it"
        raise ProvisionError(f"the sandbox did not start: {jobs.end_of(allocation)}", hint=hint)
    return allocation


def _index_of(value: Mapping[str, Any] | None) -> int:
    """Return the index of the job that a value of the API is about."""
    return find_part(value, "JobModifyIndex", kind=int)


def _has_started(allocation: Any) -> bool:
    return allocation.get("ClientStatus") == "running" or not jobs.is_alive(allocation)


def _not_made(error: NomadError, config: NomadConfig) -> ProvisionError:
    message = f"profile {config.name!r}: Nomad at {config.address}: {error.message}"
    return ProvisionError(message, hint=diagnosis.advise(error), retryable=error.passing)


def _not_reached(error: NomadError, sandbox_id: str) -> ChannelLost:
    return ChannelLost(f"Nomad: {error.message}", hint=diagnosis.advise(error), sandbox_id=sandbox_id or None)
