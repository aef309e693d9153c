"""What a profile of the `modal` backend can say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from hermes_core import Network, SandboxConfig
from hermes_core.validation import validated

LONGEST_LIFE_S = 24 * 3600
DEFAULT_APP = "atropos-sandbox"
_GPU = re.compile(r"[A-Za-z0-9+!-]+(:[1-9][0-9]?)?")
APP_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class ModalSandboxConfig(SandboxConfig):
    """A profile of the `modal` backend."""

    app_name: str | None = None
    """The Modal app that the sandboxes belong to; made if it is not there. None is `atropos-sandbox`."""
    image: str | None = "python:3.11"
    """An image of a registry; for linux/amd64."""
    dockerfile: str | None = None
    """A Dockerfile on this host that Modal builds, instead of `image`; its folder is the context, less what a
    `.dockerignore` in it names."""
    snapshot_id: str | None = None
    """A Modal image by id (`im-…`), such as a snapshot, instead of `image`."""
    registry_secret: str | None = None
    """The Modal secret that holds the registry's credentials."""
    cpu: float | None = Field(default=1.0, gt=0)
    memory: int | None = Field(default=2048, gt=0)
    gpu: str | None = None
    """`T4`, `A10G`, `A100`, `H100`, …, with `:N` for N of them."""
    max_lifetime: int = Field(default=3600, ge=10, le=LONGEST_LIFE_S)
    """Seconds after which Modal ends the sandbox, whatever it does. It is replaced before that."""
    modal_idle_timeout: int | None = Field(default=None, gt=0)
    """Seconds without use after which Modal itself ends the sandbox, whoever lives; None is `idle_timeout`, but a
    minute at least."""
    secrets: tuple[str, ...] = ()
    """Modal secrets by name; their variables are set in the sandbox. Commands see those that `slot_secrets` names."""
    workspace_base: str = "/data"
    """Where slots' workspaces are in the sandbox."""
    volumes: dict[str, str] = Field(default_factory=dict)
    """Modal volumes by the path that they are mounted at: `{"/cache": "my-volume"}`."""
    region: str | tuple[str, ...] | None = None
    cloud: str | None = None
    outbound_cidr_allowlist: tuple[str, ...] | None = None
    """The only addresses that the sandbox may reach; None is all."""
    outbound_domain_allowlist: tuple[str, ...] | None = None
    """The only domains that the sandbox may reach; None is all."""

    @field_validator("app_name")
    @classmethod
    def _can_be_an_app(cls, name: str | None) -> str | None:
        if name is not None and not APP_NAME.fullmatch(name):
            raise ValueError(f"must be at most 64 letters, digits, '.', '_' and '-', not {name!r}")
        return name

    @field_validator(
        "secrets",
        "slot_secrets",
        "slot_variables",
        "outbound_cidr_allowlist",
        "outbound_domain_allowlist",
        mode="before",
    )
    @classmethod
    def _from_commas(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("workspace_base")
    @classmethod
    def _is_absolute(cls, path: str) -> str:
        if not path.startswith("/") or ".." in path.split("/") or path == "/":
            raise ValueError(f"must be a directory from the root on, such as /data, not {path!r}")
        return path.rstrip("/")

    @model_validator(mode="before")
    @classmethod
    def _one_source(cls, given: Any) -> Any:
        """`image` has a default, which the other two stand in for."""
        if isinstance(given, Mapping) and (given.get("dockerfile") or given.get("snapshot_id")):
            if given.get("image"):
                return {**given}
            return {**given, "image": None}
        return given

    @field_validator("gpu")
    @classmethod
    def _is_a_gpu(cls, gpu: str | None) -> str | None:
        if gpu is not None and not _GPU.fullmatch(gpu):
            raise ValueError(f"must be a GPU's name, such as T4, or A100:2 for two, not {gpu!r}")
        return gpu

    @model_validator(mode="after")
    def _agree(self) -> Self:
        sources = [key for key in ("image", "dockerfile", "snapshot_id") if getattr(self, key)]
        if len(sources) != 1:
            raise ValueError(f"exactly one of image, dockerfile and snapshot_id is to be set, not {sources or 'none'}")
        if self.dockerfile is not None and not Path(self.dockerfile).is_file():
            raise ValueError(f"dockerfile {self.dockerfile!r} is not there")
        if self.network is not Network.OPEN and (self.outbound_cidr_allowlist or self.outbound_domain_allowlist):
            raise ValueError(f"network is {self.network.value}, and an allow-list is set: leave one of them out")
        return self

    @property
    def gpu_count(self) -> int:
        """How many GPUs a sandbox has: `A100:2` is two."""
        if self.gpu is None:
            return 0
        _, _, count = self.gpu.partition(":")
        return int(count) if count.isdigit() else 1

    @property
    def has_secrets(self) -> bool:
        """Whether Modal sets secrets in the sandbox."""
        return bool(self.secrets) or super().has_secrets

    def get_app_name(self, fallback: str = DEFAULT_APP) -> str:
        """The app that the sandboxes belong to."""
        return self.app_name or fallback

    def with_app_name(self, base: str) -> Self:
        """A copy whose app is `{base}-{name}`. `ConfigError` if no app can be called that."""
        return self._with({"app_name": f"{base}-{self.name}"})

    def _with(self, changes: Mapping[str, Any]) -> Self:
        given = {**self.model_dump(exclude_unset=True), **changes}
        return validated(type(self), given, f"profile {self.name!r} of backend 'modal'")

    @classmethod
    def from_dict(cls, name: str, data: Mapping[str, Any]) -> Self:
        """A profile from a mapping of its keys, as YAML has them. `ConfigError` names the profile and the key."""
        from hermes_modal.profiles import from_dict

        return from_dict(cls, name, data)

    @classmethod
    def from_env(cls, profile: str = "default", environ: Mapping[str, str] | None = None) -> Self:
        """A profile from `ATROPOS_MODAL_PROFILE_<NAME>_<KEY>` and, for what that leaves open, `ATROPOS_MODAL_<KEY>`."""
        from hermes_modal.profiles import from_env

        return from_env(cls, profile, environ)

    @classmethod
    def from_yaml(cls, path: str | Path, profile: str | None = None) -> Self:
        """One profile of a profiles file; its default one if none is named."""
        from hermes_modal.profiles import from_yaml

        return from_yaml(cls, path, profile)

    @classmethod
    def from_agent_env_config(cls, config: Any, profile: str = "default") -> Self:
        """A profile from the `modal_…` attributes of an environment's settings."""
        from hermes_modal.profiles import from_agent_env_config

        return from_agent_env_config(cls, config, profile)
