"""The settings of a profile of the `nomad` backend."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from hermes_core import SandboxConfig, TerminalVariables

SYS_ADMIN = "SYS_ADMIN"
DEFAULT_ADDRESS = "http://127.0.0.1:4646"
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OPERATORS = ("=", "!=", ">", ">=", "<", "<=", "regexp", "set_contains", "set_contains_any", "version", "semver")
_ALONE = ("is_set", "is_not_set", "distinct_hosts")


class NomadConfig(SandboxConfig):
    """A profile of the `nomad` backend."""

    terminal = TerminalVariables(
        {
            "TERMINAL_NOMAD_ADDRESS": "address",
            "TERMINAL_NOMAD_JOB_ID": "job_prefix",
            "TERMINAL_NOMAD_IMAGE": "image",
            "TERMINAL_NOMAD_DRIVER": "driver",
            "TERMINAL_NOMAD_MIN": "min_sandboxes",
            "TERMINAL_NOMAD_MAX": "max_sandboxes",
            "TERMINAL_CONTAINER_CPU": "cpu",
            "TERMINAL_CONTAINER_MEMORY": "memory",
        },
        unread={
            "TERMINAL_NOMAD_SLOTS": "a task has a sandbox to itself; slots for rollouts are "
            "`hermes-rl rollout --backend nomad`",
        },
    )

    address: str = Field(default_factory=lambda: os.environ.get("NOMAD_ADDR") or DEFAULT_ADDRESS)
    """The address of the cluster's HTTP API; NOMAD_ADDR unless set."""
    region: str | None = Field(default_factory=lambda: os.environ.get("NOMAD_REGION") or None)
    """The region; NOMAD_REGION unless set. None is the region of the agent at `address`."""
    namespace: str = Field(default_factory=lambda: os.environ.get("NOMAD_NAMESPACE") or "default")
    """The namespace of the jobs; NOMAD_NAMESPACE unless set."""
    job_prefix: str = "hermes-rl"
    """The beginning of the jobs' ids. `list` finds jobs by it."""
    datacenters: tuple[str, ...] = ("*",)
    """The datacenters in which sandboxes may run, with wildcards."""
    node_pool: str | None = None
    """The node pool; None is the namespace's default."""
    priority: int | None = Field(default=None, ge=1, le=32766)
    """The jobs' priority; None is Nomad's default, 50."""
    constraints: tuple[str, ...] = ()
    """Conditions on nodes, each as `ATTRIBUTE OPERATOR VALUE`: `${node.class} = sandboxes`."""
    driver: Literal["docker", "podman"] = "docker"
    """The task driver of the nodes."""
    image: str | None = "python:3.11"
    cpu: float | None = Field(default=None, gt=0)
    """Whole cores that are reserved for a sandbox alone. None reserves `cpu_mhz` instead."""
    cpu_mhz: int = Field(default=1000, ge=1)
    """The share of a node's CPU in MHz, if `cpu` is not set. A sandbox may use more if nobody else does."""
    memory: int | None = Field(default=2048, ge=10)
    """Memory in MiB: reserved, and a limit."""
    disk: int | None = Field(default=None, ge=10)
    """Disk in MiB that Nomad counts for placement; it is no limit. None is Nomad's default."""
    gpus: int = Field(default=0, ge=0)
    """How many devices of the kind `gpu_device`."""
    gpu_device: str = "nvidia/gpu"
    """The device as a device plugin of Nomad's names it: `nvidia/gpu`, `nvidia/gpu/Tesla T4`."""
    volumes: tuple[str, ...] = ()
    """The driver's mounts: `/on/the/node:/in/sandbox`, with `:ro` if read-only. The nodes must allow them."""
    shm_size: int | None = Field(default=None, gt=0)
    """The size of /dev/shm in MiB; None is the driver's default."""
    pids_limit: int = Field(default=4096, ge=64)
    """Maximum number of processes of the whole sandbox; `max_processes` is the limit of one slot."""
    cap_add: tuple[str, ...] = ()
    """Kernel capabilities beside those that slots of level `user` need. `namespace` needs SYS_ADMIN. The nodes'
    `allow_caps` must include them."""
    security_opt: tuple[str, ...] = ()
    """Further security options, such as `apparmor=unconfined`."""
    placement_timeout_s: float = Field(default=60.0, ge=0)
    """Seconds to wait for a node with room. A cluster that grows on demand needs more."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds until a placed sandbox must run, including the pull of its image."""

    @property
    def gpu_count(self) -> int:
        """Return the number of GPUs of a sandbox."""
        return self.gpus

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        with suppress(ValueError):  # the port is no number
            if parts.scheme in ("http", "https") and parts.hostname and not parts.username and parts.port != 0:
                return parts.geturl().rstrip("/")
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT")  # what it is may hold a password

    @field_validator("job_prefix")
    @classmethod
    def _can_begin_an_id(cls, prefix: str) -> str:
        if not _PREFIX.fullmatch(prefix):
            raise ValueError(f"must be at most 64 letters, digits, '.', '_' and '-', not {prefix!r}")
        return prefix

    @field_validator("namespace")
    @classmethod
    def _is_a_namespace(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9-]{1,128}", name):
            raise ValueError(f"must be at most 128 letters, digits and '-', not {name!r}")
        return name

    @field_validator("datacenters", "volumes", "cap_add", "security_opt", mode="before")
    @classmethod
    def _from_commas(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("cap_add")
    @classmethod
    def _without_prefix(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.upper().removeprefix("CAP_") for name in names)

    @field_validator("constraints")
    @classmethod
    def _are_constraints(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            split_constraint(text)
        return texts

    @field_validator("driver", mode="before")
    @classmethod
    def _can_hold_a_sandbox(cls, driver: Any) -> Any:
        if driver in ("raw_exec", "exec", "java", "qemu", "singularity"):
            raise ValueError(f"{driver!r} gives a sandbox no container of its own: use docker or podman")
        return driver

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if not self.image:
            raise ValueError("image is empty: name an image that the nodes can pull")
        if self.cpu is not None and self.cpu != int(self.cpu):
            raise ValueError(f"cpu is {self.cpu}, but Nomad reserves whole cores: set cpu_mhz for a share of one")
        if self.cpu is not None and "cpu_mhz" in self.model_fields_set:
            raise ValueError("cpu and cpu_mhz are both set: Nomad reserves cores or MHz, not both")
        return self


def split_constraint(text: str) -> dict[str, str]:
    """Return a line of `constraints` as Nomad's API has it.

    Raises:
        ValueError: the line is not valid.
    """
    attribute, _, rest = text.strip().partition(" ")
    operator, _, value = rest.strip().partition(" ")
    if operator in _ALONE and not value:
        return {"LTarget": attribute, "Operand": operator, "RTarget": ""}
    if not attribute or operator not in _OPERATORS or not value.strip():
        raise ValueError(f"must be ATTRIBUTE OPERATOR VALUE, such as '${{node.class}} = sandboxes', not {text!r}")
    return {"LTarget": attribute, "Operand": operator, "RTarget": value.strip()}
