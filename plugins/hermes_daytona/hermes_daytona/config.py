"""The settings of a profile of the `daytona` backend."""

from __future__ import annotations

import os
from collections.abc import Mapping
from ipaddress import ip_network
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from hermes_core import Network, SandboxConfig, TerminalVariables

DEFAULT_IMAGE = "python:3.11"


class DaytonaConfig(SandboxConfig):
    """A profile of the `daytona` backend."""

    terminal = TerminalVariables(
        {
            "TERMINAL_DAYTONA_IMAGE": "image",
            "TERMINAL_CONTAINER_CPU": "cpu",
            "TERMINAL_CONTAINER_MEMORY": "memory",
        }
    )

    image: str | None = DEFAULT_IMAGE
    """An image of a registry, for linux/amd64. Daytona pulls it once, and keeps it for later sandboxes."""
    snapshot_id: str | None = None
    """A Daytona snapshot by its name or id, instead of `image`. It has its own `cpu`, `memory`, `disk` and `gpus`."""
    user: str | None = None
    """The user of the sandbox's processes; None is the image's user. The level `user` needs root."""
    disk: int | None = Field(default=None, ge=1)
    """Disk of one sandbox in GiB. None is Daytona's default."""
    gpus: int = Field(default=0, ge=0)
    """The number of GPUs."""
    gpu_type: tuple[str, ...] = ()
    """The acceptable types of GPU, the best one first, as Daytona names them: `H100`, …"""
    target: str | None = Field(default_factory=lambda: os.environ.get("DAYTONA_TARGET") or None)
    """The region, as Daytona names it. None is the variable DAYTONA_TARGET, or else the organization's default."""
    auto_stop_interval: int = Field(default=5, ge=1)
    """Minutes without a sign of life from the driver after which Daytona itself ends the sandbox. It is for sandboxes
    that could not end themselves after `orphan_ttl_s`."""
    max_lifetime: int | None = Field(default=None, ge=60)
    """Seconds after which Daytona ends the sandbox, whatever it does; rounded up to minutes. The sandbox is replaced
    before that. None is the organization's limit."""
    network_allow_list: tuple[str, ...] = ()
    """The only addresses that the sandbox may reach, in CIDR notation; empty allows all."""
    domain_allow_list: tuple[str, ...] = ()
    """The only domains that the sandbox may reach; empty allows all."""
    volumes: dict[str, str] = Field(default_factory=dict)
    """Daytona volumes by the path that they are mounted at: `{"/cache": "my-volume"}`."""
    secrets: dict[str, str] = Field(default_factory=dict)
    """Secrets of Daytona's vault by the variable that holds them. Commands see those that `slot_secrets` lists."""
    workspace_base: str = "/data"
    """The directory of the slots' workspaces in the sandbox. The sandbox's user must be able to make it."""
    namespaces: bool = False
    """Whether the sandbox's user may make namespaces, so that slots can have the level `namespace`."""

    @property
    def gpu_count(self) -> int:
        """Return the number of GPUs of a sandbox."""
        return self.gpus

    @property
    def has_secrets(self) -> bool:
        """Return whether Daytona sets secrets in the sandbox."""
        return bool(self.secrets) or super().has_secrets

    @field_validator("network_allow_list", "domain_allow_list", "gpu_type", mode="before")
    @classmethod
    def _from_commas(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("network_allow_list")
    @classmethod
    def _are_addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            ip_network(address)
        return addresses

    @field_validator("workspace_base")
    @classmethod
    def _is_absolute(cls, path: str) -> str:
        if not path.startswith("/") or ".." in path.split("/") or path == "/":
            raise ValueError(f"must be a directory from the root on, such as /data, not {path!r}")
        return path.rstrip("/")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Leave out the default of `image` if `snapshot_id` is given, and show slots the volumes."""
        if not isinstance(given, Mapping):
            return given
        values = dict(given)
        if given.get("snapshot_id"):
            values.setdefault("image", None)
        if isinstance(volumes := given.get("volumes"), Mapping):
            values["visible_paths"] = [*given.get("visible_paths", ()), *volumes]
        return values

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if bool(self.image) == bool(self.snapshot_id):
            raise ValueError("exactly one of image and snapshot_id is to be set")
        sizes = [key for key in ("cpu", "memory", "disk", "gpus") if getattr(self, key)]
        if self.snapshot_id and sizes:
            raise ValueError(f"{sizes[0]} is set, and snapshot_id: a snapshot has its own size, so leave it out")
        if self.gpu_type and not self.gpus:
            raise ValueError("gpu_type is set, and gpus is not: set the number of GPUs, such as `gpus: 1`")
        if self.network is not Network.OPEN and (self.network_allow_list or self.domain_allow_list):
            raise ValueError(f"network is {self.network}, and an allow-list is set: leave one of them out")
        if self.auto_stop_interval * 60 < self.orphan_ttl_s:
            raise ValueError("auto_stop_interval, which is in minutes, is shorter than orphan_ttl_s: make it longer")
        return self
