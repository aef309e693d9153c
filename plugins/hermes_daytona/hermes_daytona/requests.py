"""The requests to Daytona for a profile, and what the descriptions in its answers say of our sandboxes."""

from __future__ import annotations

import math
import time
from datetime import datetime
from typing import Any

from daytona_api_client_async import CreateBuildInfo, CreateSandbox, GpuType, SandboxVolume

from hermes_core import Network, PolicyError, SandboxInfo, SandboxSpec
from hermes_daytona.config import DaytonaConfig
from hermes_daytona.service import status_of

MARK, OWNER, CREATION_ID, WORKSPACES = (
    f"hermes-rl.{word}" for word in ("sandbox", "owner", "creation-id", "workspaces")
)
"""The labels of our sandboxes: all that a driver needs in order to use a sandbox that another driver made."""
MIB_PER_GIB = 1024

COUNT_IDS = """
read -r first outside count </proc/self/uid_map
echo "ready $count"
"""
"""Prints the number of user ids that the sandbox has."""

PREPARE = (
    """
exec 2>&1
ends=$1
shift
mkdir -p "$ends" && chmod 700 "$ends" || exit
for limit in shmmni msgmni; do echo 0 >/proc/sys/kernel/$limit; done
echo 0 0 0 0 >/proc/sys/kernel/sem
if mkdir "$ends/watchdog"; then
  (trap "" HUP; "$@"; kill -TERM 1; sleep 5; kill -KILL -1) </dev/null >/dev/null 2>&1 &
fi
"""
    + COUNT_IDS
)
"""Makes the directories, switches off System V objects (slots would share them), and starts the watchdog once. When it
ends, TERM ends the sandbox's process 1, which is Daytona's daemon, and with it the sandbox. If the daemon does not end,
all other processes are killed, and Daytona stops the sandbox after `auto_stop_interval`."""


def sandbox_request(spec: SandboxSpec, config: DaytonaConfig) -> CreateSandbox:
    """Return the request for the sandbox of this spec. Its name is unique in the account while the sandbox exists.

    It is ephemeral: Daytona deletes it when it stops.

    Raises:
        PolicyError: Daytona has no sandboxes of this size, or no such GPUs.
    """
    return CreateSandbox(
        name=f"hermes-rl-{spec.creation_id}",
        labels={
            **spec.labels,
            MARK: "1",
            OWNER: spec.owner,
            CREATION_ID: spec.creation_id,
            WORKSPACES: config.workspace_base,
        },
        env=dict(spec.environment),
        snapshot=config.snapshot_id,
        build_info=CreateBuildInfo(dockerfile_content=f"FROM {config.image}\n") if config.image else None,
        user=config.user,
        target=config.target,
        cpu=_whole("cpu", config.cpu, 1, "cores"),
        memory=_whole("memory", config.memory, MIB_PER_GIB, "GiB"),
        disk=config.disk,
        gpu=config.gpus or None,
        gpu_type=[_gpu_type(name) for name in config.gpu_type] or None,
        auto_stop_interval=config.auto_stop_interval,
        auto_delete_interval=0,
        ttl_minutes=None if config.max_lifetime is None else math.ceil(config.max_lifetime / 60),
        network_block_all=config.network is Network.NONE,
        network_allow_list=",".join(config.network_allow_list) or None,
        domain_allow_list=",".join(config.domain_allow_list) or None,
        volumes=[SandboxVolume(volume_id=name, mount_path=path) for path, name in config.volumes.items()],
        secrets=[{variable: name} for variable, name in config.secrets.items()] or None,
    )


def _whole(key: str, amount: float | None, unit: int, name: str) -> int | None:
    if amount is None:
        return None
    if amount % unit:
        raise PolicyError(f"{key} is {amount:g}, and Daytona gives whole {name}", hint=f"make it a multiple of {unit}")
    return int(amount / unit)


def _gpu_type(name: str) -> GpuType:
    known = [each.value for each in GpuType if each is not GpuType.UNKNOWN_DEFAULT_OPEN_API]
    if name not in known:
        raise PolicyError(f"gpu_type has {name!r}, which Daytona does not have", hint=f"it has {', '.join(known)}")
    return GpuType(name)


def info(found: Any) -> SandboxInfo:
    """Return the entry of `Backend.list` for one of our sandboxes."""
    created = datetime.fromisoformat(found.created_at).timestamp() if found.created_at else 0.0
    return SandboxInfo(
        sandbox_id=found.id,
        owner=found.labels.get(OWNER, ""),
        creation_id=found.labels[CREATION_ID],
        created=created,
        status=status_of(found),
    )


def life_left(found: Any) -> float | None:
    """Return the seconds until Daytona ends a sandbox in any case; None is never."""
    if not found.auto_destroy_at:
        return None
    return max(0.0, datetime.fromisoformat(found.auto_destroy_at).timestamp() - time.time())
