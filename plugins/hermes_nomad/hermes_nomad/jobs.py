"""The job of a sandbox: its description for Nomad, and what the states of job, evaluation and allocation mean."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hermes_core import (
    ImageError,
    InfraError,
    Isolation,
    Network,
    PolicyError,
    ProvisionError,
    Sandbox,
    SandboxInfo,
    SandboxSpec,
    SandboxStatus,
)
from hermes_nomad.api import find_part
from hermes_nomad.config import SYS_ADMIN, NomadConfig, split_constraint
from hermes_nomad.execs import TASK

OWNER, CREATION_ID, ISOLATION, CREATED, UIDS = (
    f"hermes-rl.{word}" for word in ("owner", "creation-id", "isolation", "created", "uid-base")
)
"""Keys of a job's meta data: all that a driver needs in order to use a sandbox that another driver made."""

ENDED = ("complete", "failed", "lost")
"""States of an allocation whose processes have ended."""

_UIDS = range(2_000_000_000 + (512 << 16), 2_147_000_000, 512)
"""First ids of blocks of user ids. The kernel counts processes by id and host; so many blocks make a clash unlikely."""
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETPCAP", "SETUID")
_NAMESPACE_CAPABILITIES = ("NET_ADMIN", "SYS_CHROOT")
_NO_SYSV_IPC = {"kernel.shmmni": "0", "kernel.msgmni": "0", "kernel.sem": "0 0 0 0", "fs.mqueue.queues_max": "0"}
_SECOND = 1_000_000_000
_NO_IMAGE = ("not found", "denied", "manifest unknown", "unauthorized", "does not exist", "invalid reference")
"""Words in the error of a pull that say that no repetition helps."""


def job_id(spec: SandboxSpec, config: NomadConfig) -> str:
    """Return the id of a sandbox's job. A namespace has one job of each id, so a creation id has one sandbox."""
    return f"{config.job_prefix}-{hashlib.sha256(spec.creation_id.encode()).hexdigest()[:32]}"


def describe_job(spec: SandboxSpec, config: NomadConfig) -> dict[str, Any]:
    """Return the job of a sandbox, as Nomad's API has it.

    Raises:
        PolicyError: Nomad would change a variable's value.
    """
    for name, value in spec.environment.items():
        if "${" in value:
            raise PolicyError(f"the variable {name} holds '${{', which Nomad would replace", hint="set another value")
    meta = {
        OWNER: spec.owner,
        CREATION_ID: spec.creation_id,
        ISOLATION: spec.isolation.label,
        CREATED: f"{time.time():.3f}",
        UIDS: str(random.choice(_UIDS)),
        **{f"hermes-rl.{key}": value for key, value in spec.labels.items()},
    }
    task = {
        "Name": TASK,
        "Driver": config.driver,
        "User": "0:0",
        "Config": _escape(_driver_config(spec, config)),
        "Env": dict(spec.environment),
        "Resources": _resources(config),
        "KillSignal": "SIGKILL",  # nothing in a sandbox needs time to end
        "KillTimeout": 5 * _SECOND,
        "LogConfig": {"Disabled": True},
    }
    group = {
        "Name": TASK,
        "Count": 1,
        "Tasks": [task],
        "RestartPolicy": {"Attempts": 0, "Mode": "fail", "Interval": 60 * _SECOND, "Delay": 5 * _SECOND},
        "ReschedulePolicy": {"Attempts": 0, "Unlimited": False},
        # A node that was cut off and returns in time keeps the sandbox. Afterwards, the watchdog has ended it anyway.
        "Disconnect": {"LostAfter": int(spec.config.orphan_ttl_s * _SECOND), "Replace": False},
        **({"EphemeralDisk": {"SizeMB": config.disk}} if config.disk else {}),
    }
    job = {
        "ID": job_id(spec, config),
        "Type": "batch",
        "Namespace": config.namespace,
        "Region": config.region,
        "Datacenters": list(config.datacenters),
        "NodePool": config.node_pool,
        "Priority": config.priority,
        "Constraints": [split_constraint(text) for text in config.constraints],
        "Meta": meta,
        "TaskGroups": [group],
    }
    return {key: value for key, value in job.items() if value is not None}


def _driver_config(spec: SandboxSpec, config: NomadConfig) -> dict[str, Any]:
    program, *arguments = spec.command(Sandbox.state_dir)
    more = _NAMESPACE_CAPABILITIES if SYS_ADMIN in config.cap_add else ()
    settings: dict[str, Any] = {
        "image": config.image,
        "entrypoint": [program],
        "args": arguments,
        "init": True,
        "work_dir": Sandbox.workspace_base,  # the driver makes this directory
        "cap_drop": ["ALL"],
        "cap_add": sorted({*_CAPABILITIES, *config.cap_add, *more}),
        "security_opt": ["no-new-privileges", *config.security_opt],
        "network_mode": "none" if config.network is Network.NONE else None,
        "pids_limit": config.pids_limit,
        "shm_size": None if config.shm_size is None else config.shm_size << 20,
        "sysctl": [_NO_SYSV_IPC] if spec.isolation is Isolation.USER else None,
        "volumes": list(config.volumes) or None,
    }
    if config.driver == "podman":  # whose plugin has one mapping where the docker driver has a list of mappings
        settings["sysctl"] = _NO_SYSV_IPC if settings["sysctl"] else None
        settings["working_dir"] = settings.pop("work_dir")
        settings["shm_size"] = None if config.shm_size is None else f"{config.shm_size}m"
    return {key: value for key, value in settings.items() if value is not None}


def _resources(config: NomadConfig) -> dict[str, Any]:
    share = {"CPU": config.cpu_mhz} if config.cpu is None else {"CPU": 0, "Cores": int(config.cpu)}
    memory = {} if config.memory is None else {"MemoryMB": config.memory}
    devices = {"Devices": [{"Name": config.gpu_device, "Count": config.gpus}]} if config.gpus else {}
    return {**share, **memory, **devices}


def _escape(value: Any) -> Any:
    """Return a driver's settings so that Nomad, which reads texts as templates of HCL, takes them literally."""
    if isinstance(value, str):
        return value.replace("${", "$${").replace("%{", "%%{")
    if isinstance(value, Mapping):
        return {key: _escape(each) for key, each in value.items()}
    return [_escape(each) for each in value] if isinstance(value, Sequence) else value


def first_allocation(allocations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the allocation that is the sandbox. A later one replaces a lost one: it is empty, and ends by itself."""
    return min(allocations, key=lambda each: find_part(each, "CreateIndex", kind=int), default=None)


def is_alive(allocation: Mapping[str, Any]) -> bool:
    """Return whether an allocation may go on, because neither it nor Nomad has ended it."""
    return allocation.get("ClientStatus") not in ENDED and allocation.get("DesiredStatus", "run") == "run"


def end_of(allocation: Mapping[str, Any]) -> str:
    """Return why an allocation has ended, for people."""
    said_of = ("DesiredDescription", "ClientDescription")
    reasons = [*(find_part(allocation, key, kind=str) for key in said_of), _last_event(allocation)]
    node = allocation.get("NodeName") or "?"
    said = "; ".join(dict.fromkeys(filter(None, reasons)))
    return f"{allocation.get('ClientStatus', 'gone')} on node {node}" + (f": {said}" if said else "")


def _last_event(allocation: Mapping[str, Any], kinds: Sequence[str] = ()) -> str:
    events = find_part(allocation, "TaskStates", TASK, "Events", kind=list)
    of_kind = [each for each in events if not kinds or find_part(each, "Type", kind=str) in kinds]
    texts = [find_part(each, "DisplayMessage", kind=str) for each in of_kind]
    return texts[-1][:500] if texts else ""


def not_started(allocation: Mapping[str, Any], config: NomadConfig) -> InfraError:
    """Return the error for an allocation that ended before it was used."""
    failure = _last_event(allocation, ("Driver Failure", "Setup Failure", "Failed Validation"))
    if failure and "pull" in failure.lower():
        if any(word in failure.lower() for word in _NO_IMAGE):
            hint = "check the image's name, and the registry's credentials in the configuration of the nodes' driver"
            return ImageError(f"image {config.image!r}: {failure}", hint=hint)
        return ProvisionError(f"image {config.image!r}: {failure}", hint="see whether the nodes reach the registry")
    if failure:
        hint = "change what the profile asks for, or what the nodes' driver allows (`allow_caps`, `volumes`)"
        return ProvisionError(f"the driver {config.driver!r} failed: {failure}", hint=hint, retryable=False)
    return ProvisionError(f"the allocation ended at its start: {end_of(allocation)}", hint="see `nomad alloc status`")


def not_placed(evaluation: Mapping[str, Any] | None, config: NomadConfig) -> ProvisionError:
    """Return the error for a job without an allocation."""
    metrics = find_part(evaluation, "FailedTGAllocs", TASK, kind=dict)
    if not metrics:
        said = find_part(evaluation, "StatusDescription", kind=str) or "Nomad has not evaluated the job"
        return ProvisionError(f"no node was found: {said}", hint="see `nomad job status` and the servers' logs")
    exhausted = [*find_part(metrics, "DimensionExhausted", kind=dict), *find_part(metrics, "QuotaExhausted", kind=list)]
    if metrics.get("NodesExhausted") or exhausted:
        what = ", ".join(map(str, exhausted)) or "resources"
        hint = "lower max_sandboxes or what a sandbox reserves, end other jobs, or add nodes; a cluster that grows on "
        hint += "demand needs a larger placement_timeout_s"
        return ProvisionError(f"no node has room for the sandbox: {what} exhausted", hint=hint)
    filtered = ", ".join(find_part(metrics, "ConstraintFiltered", kind=dict))
    if filtered:
        hint = "change the profile's constraints, driver, gpu_device or volumes; `nomad node status -verbose` has all"
        return ProvisionError(f"no node is suitable: {filtered}", hint=hint, retryable=False)
    places = f"datacenters {', '.join(config.datacenters)}" + (f", pool {config.node_pool}" if config.node_pool else "")
    hint = "`nomad node status` lists nodes; set datacenters or node_pool"
    return ProvisionError(f"no node is ready in {places}", hint=hint)


def can_wait(evaluation: Mapping[str, Any]) -> bool:
    """Return whether a job that was not placed may be placed later, because nodes are full or still to come."""
    metrics = find_part(evaluation, "FailedTGAllocs", TASK, kind=dict)
    return bool(metrics.get("NodesExhausted") or metrics.get("QuotaExhausted") or not metrics.get("ConstraintFiltered"))


def info_of(stub: Mapping[str, Any]) -> SandboxInfo | None:
    """Return the entry of `list` for a job of Nomad's list; None if it is none of ours."""
    meta = find_part(stub, "Meta", kind=dict)
    if OWNER not in meta or CREATION_ID not in meta:
        return None
    ended = stub.get("Status") == "dead" or stub.get("Stop")
    return SandboxInfo(
        sandbox_id=sandbox_id(str(stub.get("ID")), str(stub.get("Namespace") or "default")),
        owner=meta[OWNER],
        creation_id=meta[CREATION_ID],
        created=find_part(stub, "SubmitTime", kind=int) / 1e9,
        status=SandboxStatus.ENDED if ended else SandboxStatus.RUNNING,
    )


def sandbox_id(job: str, namespace: str) -> str:
    """Return the id of a sandbox: its job's id and namespace."""
    return f"{job}@{namespace}"
