"""The settings of a sample's sandbox: a model, a YAML file, or the files that Inspect's Docker provider takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from inspect_ai.util import ComposeConfig, ComposeService, is_compose_yaml, is_dockerfile, parse_compose_yaml
from pydantic import BaseModel, ConfigDict, Field

from hermes_core import ConfigError, validate_data


class HermesSandboxConfig(BaseModel):
    """The sandboxes of a task's samples. Samples whose settings are equal apart from `image` and `cwd` share a pool."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str = "local"
    """The backend's name."""
    isolation: str = "namespace"
    """The minimum isolation between samples. From `namespace` on, each sample has its own /tmp and /var/tmp."""
    backend_config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the backend, as in a profile: `slots_per_sandbox`, `max_sandboxes`, `memory`, `network` and so on."""
    image: str | None = None
    """The sample's image, instead of the one of `backend_config`. Each image has a pool of its own."""
    cwd: str | None = None
    """The directory in which commands start and relative paths begin. None is the slot's workspace."""

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


def read_config(config: BaseModel | str | None) -> HermesSandboxConfig:
    """Return the settings of a sandbox. Inspect gives the provider a model, the path of a file, or None.

    Raises:
        ConfigError: the settings are wrong, or demand something that a slot can't provide.
    """
    if config is None:
        return HermesSandboxConfig()
    if isinstance(config, HermesSandboxConfig):
        return config
    if isinstance(config, ComposeConfig):
        return _of_compose(config, Path())
    if not isinstance(config, str):
        hint = "use hermes_inspect.HermesSandboxConfig"
        raise ConfigError(f"the sandbox 'hermes' takes no {type(config).__name__}", hint=hint)
    try:
        if is_dockerfile(config):
            return _container({"dockerfile": _build_folder(Path(config))})
        if is_compose_yaml(config):
            return _of_compose(parse_compose_yaml(config), Path(config).parent)
        return validate_data(HermesSandboxConfig, yaml.safe_load(Path(config).read_text()) or {}, config)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{config} can't be read: {error}", hint="correct the file") from error


# ------------------------------------------------------------------ settings for Inspect's Docker provider

_IGNORED = {"command", "entrypoint", "init", "tty", "stdin_open", "restart", "pull_policy", "stop_grace_period"}
"""Ignored keys of a service: they concern the container's main process, which is our own here."""

_UNITS = {"": 1 / 2**20, "b": 1 / 2**20, "k": 1 / 2**10, "m": 1.0, "g": 2.0**10}


def _container(settings: dict[str, Any], cwd: str | None = None) -> HermesSandboxConfig:
    """Return settings by which each sample has a container whose commands run as root, as tasks for Docker expect."""
    settings = {"slot_user": "root", **settings}
    return HermesSandboxConfig(backend="docker", isolation="dedicated", backend_config=settings, cwd=cwd)


def _of_compose(compose: ComposeConfig, folder: Path) -> HermesSandboxConfig:
    if len(compose.services) != 1:
        raise ConfigError(
            f"the compose file has the services {', '.join(compose.services)}, and a sample has one slot",
            hint="run this task with Inspect's own Docker provider",
        )
    [service] = compose.services.values()
    values = service.model_dump(exclude_none=True)
    settings: dict[str, Any] = {}
    for key in values.keys() - _IGNORED - {"x_default", "working_dir"}:
        if key not in _SETTINGS or "${" in str(values[key]):
            raise ConfigError(
                f"the sandbox 'hermes' can't give what the compose file asks for: {key}: {values[key]}",
                hint="describe the sandbox in a hermes.yaml, or run this task with Inspect's own Docker provider",
            )
        settings |= _SETTINGS[key](service, folder)
    return _container(settings, service.working_dir)


def _build(service: ComposeService, folder: Path) -> dict[str, Any]:
    build = service.build
    if build is None or isinstance(build, str):
        return {"dockerfile": _build_folder(folder / (build or "") / "Dockerfile")}
    if set(build.model_dump(exclude_none=True)) - {"context", "dockerfile"}:
        raise ConfigError("a build of the compose file has settings beside its context", hint="build the image first")
    return {"dockerfile": _build_folder(folder / (build.context or "") / (build.dockerfile or "Dockerfile"))}


def _build_folder(dockerfile: Path) -> str:
    if dockerfile.name != "Dockerfile":
        raise ConfigError(f"{dockerfile} is not called Dockerfile", hint="build the image first, and name that")
    return str(dockerfile.parent.resolve())


def _memory(service: ComposeService, _folder: Path) -> dict[str, Any]:
    size = re.fullmatch(r"([\d.]+)\s*([bkmg]?)b?", str(service.mem_limit).lower())
    if size is None:
        raise ConfigError(f"mem_limit {service.mem_limit!r} is not a size", hint="write such as 512m or 2g")
    return {"memory": max(1, round(float(size[1]) * _UNITS[size[2]]))}


def _variables(service: ComposeService, _folder: Path) -> dict[str, Any]:
    variables = service.environment or {}
    pairs = variables.items() if isinstance(variables, dict) else (line.partition("=")[::2] for line in variables)
    return {"env_vars": {name: value or "" for name, value in pairs}}


def _network(service: ComposeService, _folder: Path) -> dict[str, Any]:
    return {"network": service.network_mode}


_SETTINGS: dict[str, Callable[[ComposeService, Path], dict[str, Any]]] = {
    "image": lambda service, _folder: {"image": service.image},
    "build": _build,
    "mem_limit": _memory,
    "cpus": lambda service, _folder: {"cpu": service.cpus},
    "environment": _variables,
    "network_mode": _network,
}
"""For each supported key of a service, a function that returns our settings."""
