"""Creates, lists and removes containers. Blocking, so call it in threads."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import docker.errors
from docker import APIClient
from docker.types import DeviceRequest, LogConfig, Mount

from hermes_core import (
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
from hermes_docker.config import SYS_ADMIN, DockerConfig, mount

OWNER, CREATION_ID, ISOLATION, UIDS = (
    f"hermes-rl.{name}" for name in ("owner", "creation-id", "isolation", "uid-base")
)

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETPCAP", "SETUID")
"""Capabilities of the guest: it gives each slot an unprivileged user, kills the slot's processes, and removes its
files."""

_NAMESPACE_CAPABILITIES = ("NET_ADMIN", "SYS_CHROOT")
"""Capabilities for namespaces besides SYS_ADMIN: to bring up the loopback interface, and to enter the root."""
_ROOT_CAPABILITIES = ("SETFCAP",)
"""Capabilities for user namespaces in which slots are root, besides those for namespaces."""
_NO_SYSV_IPC = {"kernel.shmmni": "0", "kernel.msgmni": "0", "kernel.sem": "0 0 0 0", "fs.mqueue.queues_max": "0"}
"""Limits of 0 for kernel objects that all users of a container share, so that slots can't make any."""

UID_BLOCK = 512
"""Number of user ids of one sandbox. No two sandboxes share an id, because the kernel counts processes by user id over
all containers."""

_HOST_UIDS = range(2_000_000_000 + (UID_BLOCK << 16), 2_147_000_000, UID_BLOCK)
"""First ids of blocks, above those of `local` on the same host."""
_MAPPED_UIDS = range(20_480, 65_024, UID_BLOCK)
"""First ids of blocks where the daemon maps containers' ids, usually 65,536 of them."""

STARTING_S = 60.0
"""Seconds in which a container that was created and does not run yet counts as running."""

_GONE_S = 60.0
"""Time limit of a removal in seconds."""


@dataclass(frozen=True)
class RunningContainer:
    """A running container."""

    name: str
    uid_base: int | None


def name_of(creation_id: str) -> str:
    """Return the container's name for a creation id. As the daemon allows each name once, creation ids are unique."""
    return f"hermes-rl-{hashlib.sha256(creation_id.encode()).hexdigest()[:20]}"


def start(api: APIClient, spec: SandboxSpec, config: DockerConfig, image: str, *, mapped: bool) -> RunningContainer:
    """Create and start the spec's container, or return the one with the spec's creation id.

    Args:
        mapped: whether the daemon maps containers' user ids to others.

    Raises:
        ProvisionError: no block of user ids is free, or another container has the name.
        PolicyError: the existing container has a weaker level, or the daemon ignores a setting.
        docker.errors.APIError: the daemon refuses.
    """
    name, taken = name_of(spec.creation_id), set[int]()
    while True:
        uid_base = None if config.user else _free_block(taken, mapped)
        try:
            _create(api, spec, config, image, uid_base)
        except docker.errors.APIError as error:
            if error.status_code != 409 and "already in use" not in str(error.explanation):  # Podman's wording
                raise
            if (existing := _adopt(api, name, spec)) is not None:
                return existing
            continue
        if config.gpus and not api.inspect_container(name)["HostConfig"].get("DeviceRequests"):
            remove(api, name)
            raise PolicyError(f"this daemon ignores gpus, which profile {config.name!r} sets", hint="Docker does not")
        taken = _blocks(api, but=name)
        if uid_base in taken:  # another driver chose the same block meanwhile, and sees it, too: both choose again
            remove(api, name)
            continue
        return RunningContainer(name, _start(api, name, uid_base))


def _start(api: APIClient, name: str, uid_base: int | None) -> int | None:
    try:
        api.start(name)
    except BaseException:
        remove(api, name)
        raise
    return uid_base


def _adopt(api: APIClient, name: str, spec: SandboxSpec) -> RunningContainer | None:
    """Return the spec's container, started if need be; None if it has ended, and is removed now."""
    try:
        info = api.inspect_container(name)
    except docker.errors.NotFound:
        return None
    labels, state = info["Config"]["Labels"] or {}, info["State"]["Status"]
    if labels.get(CREATION_ID) != spec.creation_id:
        raise ProvisionError("another container has its name", hint=f"`docker rm -f {name}`", sandbox_id=name)
    if state != "created" and state not in _STATUS:
        remove(api, name)
        return None
    spec.check_existing(labels[ISOLATION], name)
    uid_base = uid_base_of(labels)
    return RunningContainer(name, _start(api, name, uid_base) if state == "created" else uid_base)


def remove(api: APIClient, name: str) -> None:
    """Remove a container and wait until it is gone. It may be gone already, or be removed by somebody else now."""
    deadline = time.monotonic() + _GONE_S
    while True:
        try:
            api.remove_container(name, force=True, v=True)
            return
        except docker.errors.APIError as error:
            if _is_gone(error):
                return
            if error.status_code != 409 or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def cut_network(api: APIClient, name: str) -> None:
    """Disconnect a container from all of its networks.

    Raises:
        InfraError: the container is still on a network.
    """
    for network in _networks(api, name):
        api.disconnect_container_from_network(name, network, force=True)
    if left := _networks(api, name):
        raise InfraError(f"the container is still on {', '.join(left)}", sandbox_id=name)


def _networks(api: APIClient, name: str) -> list[str]:
    return list(api.inspect_container(name)["NetworkSettings"]["Networks"])


def list_containers(api: APIClient, owner: str | None = None) -> list[SandboxInfo]:
    """Return the containers with our label, whether they run or not."""
    label = OWNER if owner is None else f"{OWNER}={owner}"
    return [
        SandboxInfo(
            sandbox_id=each["Names"][0].lstrip("/") if each["Names"] else each["Id"],
            owner=each["Labels"][OWNER],
            creation_id=each["Labels"].get(CREATION_ID, ""),
            created=float(each["Created"]),
            status=_status(each["State"], float(each["Created"])),
        )
        for each in api.containers(all=True, filters={"label": label})
    ]


def labels_of(api: APIClient, name: str) -> tuple[SandboxStatus, Mapping[str, str]]:
    """Return a container's status and labels; GONE if there is no such container with our label."""
    try:
        info = api.inspect_container(name)
    except docker.errors.APIError as error:
        if _is_gone(error):
            return SandboxStatus.GONE, {}
        raise
    labels = info["Config"]["Labels"] or {}
    if OWNER not in labels:
        return SandboxStatus.GONE, {}
    return _STATUS.get(info["State"]["Status"], SandboxStatus.ENDED), labels


def _is_gone(error: docker.errors.APIError) -> bool:
    """Return whether an error says that there is no such container. While a container is being removed, Podman does not
    answer with 404."""
    return error.status_code == 404 or "no such container" in str(error.explanation).lower()


def _status(state: str, created: float) -> SandboxStatus:
    """Return a container's status. A new container counts as running, so that clean-up does not remove it before its
    start."""
    if state == "created" and time.time() - created < STARTING_S:
        return SandboxStatus.RUNNING
    return _STATUS.get(state, SandboxStatus.ENDED)


_STATUS = {"running": SandboxStatus.RUNNING, "paused": SandboxStatus.RUNNING, "restarting": SandboxStatus.RUNNING}


def uid_base_of(labels: Mapping[str, str]) -> int | None:
    """Return the first user id of a container's block; None if it has no block."""
    return int(labels[UIDS]) if labels.get(UIDS) else None


def _free_block(taken: Collection[int], mapped: bool) -> int:
    if not mapped:  # there are so many blocks that a clash is unlikely, and found after the creation
        return random.choice(_HOST_UIDS)
    if not (free := [base for base in _MAPPED_UIDS if base not in taken]):
        raise ProvisionError("every user id that the daemon gives to containers is taken", hint="end some sandboxes")
    return random.choice(free)


def _blocks(api: APIClient, but: str) -> set[int]:
    """Return the first ids of the blocks that other containers have."""
    others = api.containers(all=True, filters={"label": UIDS})
    return {int(each["Labels"][UIDS]) for each in others if f"/{but}" not in each["Names"]}


def _labels(spec: SandboxSpec, uid_base: int | None) -> dict[str, str]:
    labels = {f"hermes-rl.{key}": value for key, value in spec.labels.items()}
    labels |= {OWNER: spec.owner, CREATION_ID: spec.creation_id, ISOLATION: spec.isolation.label}
    return labels if uid_base is None else labels | {UIDS: str(uid_base)}


def _create(api: APIClient, spec: SandboxSpec, config: DockerConfig, image: str, uid_base: int | None) -> None:
    name = name_of(spec.creation_id)
    program, *arguments = spec.command(Sandbox.state_dir)
    api.create_container(
        image,
        name=name,
        labels=_labels(spec, uid_base),
        entrypoint=[program],
        command=arguments,
        environment={**spec.environment, "HERMES_SANDBOX_ID": name},
        user=config.user or "0:0",
        working_dir=Sandbox.workspace_base,  # the daemon makes this directory
        healthcheck={"test": ["NONE"]},
        platform=config.platform,
        use_config_proxy=False,  # no variable of the driver's reaches a sandbox
        host_config=api.create_host_config(**host_settings(spec, config)),
    )


def host_settings(spec: SandboxSpec, config: DockerConfig) -> dict[str, Any]:
    """Return the limits and privileges of a container."""
    mounts = [mount(volume) for volume in config.volumes]
    own_roots = spec.isolation is Isolation.PRIVATE_ROOT
    if config.read_only or (own_roots and Sandbox.workspace_base not in config.tmpfs):
        # Slots' overlays can't lie on the container's own overlay, and a read-only image can't hold files. So the
        # workspaces get an anonymous volume, which is removed with its container.
        mounts.append(Mount(Sandbox.workspace_base, None, type="volume"))
    capabilities = [*CAPABILITIES, *config.cap_add]
    if SYS_ADMIN in config.cap_add:
        capabilities += _NAMESPACE_CAPABILITIES
    if own_roots:
        capabilities += _ROOT_CAPABILITIES
    memory = None if config.memory is None else config.memory << 20
    return {
        "auto_remove": True,
        "init": True,
        "log_config": LogConfig(type="none"),
        "cap_drop": ["ALL"],
        "cap_add": sorted(set(capabilities)),
        "security_opt": ["no-new-privileges", *config.security_opt],
        "ipc_mode": "private",
        "sysctls": _NO_SYSV_IPC if spec.isolation is Isolation.USER else None,
        "network_mode": "none" if config.network is Network.NONE else config.network_name or "bridge",
        "mem_limit": memory,
        "memswap_limit": memory,
        "nano_cpus": None if config.cpu is None else int(config.cpu * 1e9),
        "pids_limit": config.pids_limit,
        "shm_size": None if config.shm_size is None else config.shm_size << 20,
        "device_requests": [DeviceRequest(count=config.gpus, capabilities=[["gpu"]])] if config.gpus else None,
        "tmpfs": dict(config.tmpfs) or None,
        "read_only": config.read_only,
        "mounts": mounts or None,
    }
