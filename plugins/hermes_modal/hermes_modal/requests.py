"""The requests to Modal for a profile: image, secrets, volumes, and every argument of a creation."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import modal
from modal import exception

from hermes_core import Network, ProvisionError, Sandbox, SandboxSpec
from hermes_modal.account import Account
from hermes_modal.config import ModalSandboxConfig

OWNER, CREATION_ID, PROFILE, ISOLATION, CREATED, LIFETIME, WORKSPACES = (
    f"hermes-rl.{word}"
    for word in ("owner", "creation-id", "profile", "isolation", "created", "lifetime", "workspaces")
)
"""The tags of our sandboxes: all that a driver needs in order to use a sandbox that another driver made."""


LEAST_IDLE_S = 60
"""Smallest idle time limit in seconds, because a new sandbox is idle until its guest has started."""


def name_of(creation_id: str) -> str:
    """Return a sandbox's name within its app. As Modal allows each name once at a time, creation ids are unique."""
    return f"hermes-rl-{creation_id}"[:64]


def tags_of(spec: SandboxSpec, config: ModalSandboxConfig) -> dict[str, str]:
    """Return the tags of a new sandbox."""
    return {
        OWNER: spec.owner,
        CREATION_ID: spec.creation_id,
        PROFILE: spec.config.name,
        ISOLATION: spec.isolation.label,
        CREATED: f"{time.time():.3f}",
        LIFETIME: str(config.max_lifetime),
        WORKSPACES: config.workspace_base.encode().hex(),  # app tags may have only letters and digits
    }


def workspaces(tags: Mapping[str, str]) -> str:
    """Return the workspaces' directory of a sandbox with these tags."""
    return bytes.fromhex(tags[WORKSPACES]).decode() if WORKSPACES in tags else Sandbox.workspace_base


def life_left(tags: Mapping[str, str]) -> float | None:
    """Return the seconds until Modal ends a sandbox with these tags; None if the tags don't include the time."""
    if LIFETIME not in tags or CREATED not in tags:
        return None
    return max(0.0, float(tags[CREATED]) + float(tags[LIFETIME]) - time.time())


def state_dir(workspace_base: str) -> str:
    """Return the guest's directory, in which the watchdog looks for the heartbeat."""
    return f"{workspace_base}/.hermes"


_PREPARE = """
mkdir -p "$1"
for limit in shmmni msgmni; do echo 0 >/proc/sys/kernel/$limit; done 2>/dev/null
shift
exec "$@"
"""
"""Runs before the watchdog. It makes the workspaces' directory, and disables System V objects, which slots would share,
if the kernel lets root do that."""


def main_process(spec: SandboxSpec, workspace_base: str) -> list[str]:
    """Return the command of the sandbox's main process."""
    return ["/bin/sh", "-c", _PREPARE, "hermes-prepare", workspace_base, *spec.command(state_dir(workspace_base))]


async def arguments(spec: SandboxSpec, config: ModalSandboxConfig, account: Account) -> dict[str, Any]:
    """Return the arguments of `Sandbox.create` for this spec.

    Raises:
        ProvisionError: a secret or a volume that the profile names does not exist.
    """
    client = await account.client()
    arguments: dict[str, Any] = {
        "name": name_of(spec.creation_id),
        "tags": tags_of(spec, config),
        "image": _image(config, client),
        "secrets": [await _look_up("secret", name, config, account) for name in config.secrets],
        "env": {**config.env_vars, **spec.environment},
        "timeout": config.max_lifetime,
        "idle_timeout": min(_idle_timeout(config), config.max_lifetime),
        "cpu": config.cpu,
        "memory": config.memory,
        "gpu": config.gpu,
        "cloud": config.cloud,
        "region": list(config.region) if isinstance(config.region, tuple) else config.region,
        "volumes": {path: await _look_up("volume", name, config, account) for path, name in config.volumes.items()},
        "block_network": config.network is Network.NONE,
        "client": client,
        "app": await account.app(config.get_app_name(), create=True),
    }
    for key in ("outbound_cidr_allowlist", "outbound_domain_allowlist"):
        if (allowed := getattr(config, key)) is not None:
            arguments[key] = list(allowed)
    return arguments


def _idle_timeout(config: ModalSandboxConfig) -> int:
    return config.modal_idle_timeout or max(math.ceil(config.idle_timeout), LEAST_IDLE_S)


async def check_names(config: ModalSandboxConfig, account: Account) -> None:
    """Look up everything that the profile names in Modal.

    Raises:
        ProvisionError: something does not exist.
    """
    for secret in (*config.secrets, *filter(None, [config.registry_secret])):
        await _look_up("secret", secret, config, account)
    for volume in config.volumes.values():
        await _look_up("volume", volume, config, account)


def _image(config: ModalSandboxConfig, client: Any) -> Any:
    if config.snapshot_id is not None:
        return modal.Image.from_id(config.snapshot_id, client=client)
    secret = None
    if config.registry_secret is not None:
        secret = modal.Secret.from_name(config.registry_secret, client=client)
    if config.dockerfile is not None:
        folder = Path(config.dockerfile).parent  # the SDK's default is the current directory
        return modal.Image.from_dockerfile(config.dockerfile, context_dir=folder, registry_secret=secret)
    assert config.image is not None
    return modal.Image.from_registry(config.image, secret=secret)


_KINDS: Mapping[str, tuple[Any, str]] = {"secret": (modal.Secret, " KEY=VALUE"), "volume": (modal.Volume, "")}
"""For each kind of object that profiles name: the SDK's class, and further arguments of `modal KIND create NAME`."""


async def _look_up(kind: str, name: str, config: ModalSandboxConfig, account: Account) -> Any:
    """Return the secret or the volume with this name.

    Raises:
        ProvisionError: Modal has none with this name.
    """
    sdk_class, arguments = _KINDS[kind]
    client = await account.client()
    found = sdk_class.from_name(name, client=client)
    try:
        await account.call(found.hydrate.aio(client))
    except exception.NotFoundError as error:
        raise ProvisionError(
            f"profile {config.name!r}, key '{kind}s': there is no Modal {kind} {name!r}",
            hint=f"`modal {kind} create {name}{arguments}`, or correct the name",
            retryable=False,
        ) from error
    return found
