"""The abilities of the daemon, for `hermes-rl doctor` and for checks before a container is created."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hermes_core import Diagnosis, Isolation, PolicyError, ProvisionError, SandboxSpec
from hermes_docker.config import SYS_ADMIN, DockerConfig
from hermes_docker.daemon import ASK_THE_DOCTOR, DaemonError, DockerDaemon

_LIMITS = {"memory": "MemoryLimit", "cpu": "CpuCfsQuota", "pids_limit": "PidsLimit"}
"""The limits of a profile, each with the field of `docker info` that says whether the daemon enforces it."""

_DELEGATION = "give the rootless daemon's user the memory, cpu and pids controllers of cgroup v2 (systemd `Delegate=`)"


def is_rootless(info: Mapping[str, Any]) -> bool:
    """Return whether an ordinary user runs the daemon. Docker has a security option for this, Podman a field."""
    return bool(info.get("Rootless")) or any("name=rootless" in option for option in info["SecurityOptions"] or ())


def cant_enforce(info: Mapping[str, Any], ability: str) -> bool:
    """Return whether the daemon ignores a limit. A rootless Podman with cgroup v1 can't enforce any, but claims to."""
    return info.get(ability) is False or (is_rootless(info) and str(info.get("CgroupVersion")) == "1")


def maps_users(info: Mapping[str, Any]) -> bool:
    """Return whether containers' user ids differ outside: with a rootless daemon, or one with `userns-remap`."""
    return is_rootless(info) or any("name=userns" in option for option in info["SecurityOptions"] or ())


def check_spec(spec: SandboxSpec, config: DockerConfig, info: Mapping[str, Any]) -> None:
    """Refuse settings that this daemon can't enforce, or that contradict the profile.

    Raises:
        PolicyError: the message names the setting.
    """
    namespaces = spec.isolation in (Isolation.NAMESPACE, Isolation.PRIVATE_ROOT)
    own_users = namespaces or spec.isolation is Isolation.USER
    if own_users and config.user not in (None, "0", "root", "0:0"):
        raise PolicyError(
            f"profile {config.name!r} sets user {config.user!r}: only root can keep slots apart",
            hint="leave user out (every slot has one of its own), or take level dedicated",
        )
    if namespaces and SYS_ADMIN not in config.cap_add:
        level = spec.isolation.label
        raise PolicyError(
            f"profile {config.name!r}: slots of level {level!r} need the capability SYS_ADMIN in the container",
            hint="set cap_add: [SYS_ADMIN] if you accept that, or take level user or dedicated",
        )
    for key, ability in _LIMITS.items():
        is_set = getattr(config, key) is not None and (key != "pids_limit" or key in config.model_fields_set)
        if is_set and cant_enforce(info, ability):
            raise PolicyError(f"this daemon can't enforce {key}, which profile {config.name!r} sets", hint=_DELEGATION)


def not_made(error: DaemonError, what: str = "a container") -> ProvisionError:
    """Return the error for something that the daemon could not make."""
    message = f"{what} could not be made: {error.message}"
    for sign, advice in _ADVICE.items():
        if sign in error.message:
            return ProvisionError(message, hint=advice, retryable=False)
    hint = error.hint or "`docker info` and the daemon's log say more"
    return ProvisionError(message, hint=hint, retryable=error.status is None or error.status >= 500)


_ADVICE = {
    "init binary not found": "install the init that the daemon gives to containers: catatonit, for Podman",
    "no such file or directory": "the image needs /bin/sh, and every volume's source must exist on the daemon's host",
    "exec format error": "the image is for another processor: set platform, or take another image",
    "does not match the specified platform": "set platform to what the image is for",
    "could not select device driver": "install the NVIDIA container toolkit on the daemon's host, or leave gpus out",
    "bind source path does not exist": "the source of a volume must exist on the daemon's host",
    "no space left on device": "`docker system prune` frees room on the daemon's disk",
    "network": "see `docker network ls` for the existing networks",
}
"""Hints by a part of the daemon's message, the first match counts. None of these problems is temporary."""


async def diagnose(daemon: DockerDaemon) -> Diagnosis:
    """Ask the daemon about itself. Never raises."""
    where = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    try:
        info = await daemon.info()
        version = await daemon.call(lambda api: api.version())
    except DaemonError as error:
        return Diagnosis(False, f"no Docker daemon answers at {where}: {error.message}", advice=_unreachable(error))
    podman = any("podman" in str(part.get("Name", "")).lower() for part in version.get("Components") or ())
    rootless = is_rootless(info)
    name = "Podman" if podman else "Docker"
    details = [
        f"{name} {version['Version']} at {where}{', rootless' if rootless else ''}, storage {info.get('Driver')}",
        f"levels: shared, user, dedicated; namespace and private-root with `cap_add: [{SYS_ADMIN}]`",
    ]
    advice = []
    missing = [key for key, ability in _LIMITS.items() if cant_enforce(info, ability)]
    if missing:
        details.append(f"it can't enforce: {', '.join(missing)}; profiles that set them are refused")
        advice.append(_DELEGATION if rootless else "start it where the cgroup controllers are available to it")
    if maps_users(info):
        details.append("it maps user ids: room for some 85 sandboxes at a time")
    if podman:
        details.append("Podman's socket: images without a registry in their name need `unqualified-search-registries`")
    return Diagnosis(True, f"{name} {version['Version']}", tuple(details), tuple(advice))


def _unreachable(error: DaemonError) -> tuple[str, ...]:
    if error.hint not in (None, ASK_THE_DOCTOR):
        return (str(error.hint),)
    if "Permission denied" in error.message:
        return (
            "add yourself to the group of its socket (`usermod -aG docker $USER`, then log in anew), or run rootless",
        )
    return (
        "start it: `systemctl start docker`, or `dockerd` as root",
        "elsewhere: DOCKER_HOST=unix:///run/user/$UID/docker.sock (rootless), …/podman/podman.sock",
    )
