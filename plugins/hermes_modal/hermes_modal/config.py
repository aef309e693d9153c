"""The settings of a profile of the `modal` backend, and the places of profiles: files, variables, settings."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from hermes_core import (
    ConfigError,
    Network,
    SandboxConfig,
    TerminalVariables,
    UnknownNameError,
    nearest_hint,
    validate_data,
)
from hermes_core import read_profiles as profiles_of

LONGEST_LIFE_S = 24 * 3600
DEFAULT_APP = "atropos-sandbox"
_GPU = re.compile(r"[A-Za-z0-9+!-]+(:[1-9][0-9]?)?")
APP_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


_TERMINAL = TerminalVariables(
    settings={
        "TERMINAL_MODAL_IMAGE": "image",
        "TERMINAL_MODAL_APP_NAME": "app_name",
        "TERMINAL_MODAL_GPU": "gpu",
        "TERMINAL_MODAL_CPU": "cpu",
        "TERMINAL_MODAL_MEMORY": "memory",
        "TERMINAL_MODAL_MIN": "min_sandboxes",
        "TERMINAL_MODAL_MAX": "max_sandboxes",
        "TERMINAL_MODAL_IDLE_TIMEOUT": "idle_timeout",
        "TERMINAL_MODAL_MAX_LIFETIME": "max_lifetime",
        "TERMINAL_MODAL_ACQUIRE_TIMEOUT": "acquire_timeout_s",
        "TERMINAL_MODAL_SECRETS": "secrets",
        "TERMINAL_MODAL_SLOT_SECRETS": "slot_secrets",
        "TERMINAL_MODAL_WORKSPACE": "workspace_base",
    },
    of_profile=(
        *("IMAGE", "GPU", "CPU", "MEMORY", "MIN_POOL", "MAX_POOL", "IDLE_TIMEOUT", "MAX_LIFETIME", "SCALE_DOWN_IDLE"),
        *("WORKDIR", "SECRETS", "SLOT_SECRETS", "ENV_VARS", "USE_DOTENV"),
    ),
    defaults={"app_name": "hermes-sandbox"},
    fixed={"TERMINAL_MODAL_MODE": "pool"},
    unread={
        "TERMINAL_MODAL_SLOTS": "a task has a sandbox to itself; slots for rollouts are "
        "`hermes-rl rollout --backend modal`, or ModalToolBackend",
        "TERMINAL_MODAL_EXEC_TIMEOUT": "TERMINAL_TIMEOUT is the time limit",
    },
)


class ModalSandboxConfig(SandboxConfig):
    """A profile of the `modal` backend."""

    terminal = _TERMINAL

    app_name: str | None = None
    """The Modal app that the sandboxes belong to, which is created if it does not exist. None is `atropos-sandbox`."""
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
    """Seconds without use after which Modal itself ends the sandbox, also if its driver lives. None is `idle_timeout`,
    but at least a minute."""
    secrets: tuple[str, ...] = ()
    """Names of Modal secrets, whose variables are set in the sandbox. Commands see those that `slot_secrets` lists."""
    workspace_base: str = "/data"
    """The directory of the slots' workspaces in the sandbox."""
    volumes: dict[str, str] = Field(default_factory=dict)
    """Modal volumes by the path that they are mounted at: `{"/cache": "my-volume"}`."""
    region: str | tuple[str, ...] | None = None
    """The region, or several, as Modal names them; None is Modal's choice."""
    cloud: str | None = None
    """The cloud provider, as Modal names it; None is Modal's choice."""
    outbound_cidr_allowlist: tuple[str, ...] | None = None
    """The only addresses that the sandbox may reach; None allows all."""
    outbound_domain_allowlist: tuple[str, ...] | None = None
    """The only domains that the sandbox may reach; None allows all."""

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
        """Leave out the default of `image` if `dockerfile` or `snapshot_id` is given."""
        has_other = isinstance(given, Mapping) and (given.get("dockerfile") or given.get("snapshot_id"))
        return {**given, "image": given.get("image") or None} if has_other else given

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
            raise ValueError(f"dockerfile {self.dockerfile!r} does not exist")
        if self.network is not Network.OPEN and (self.outbound_cidr_allowlist or self.outbound_domain_allowlist):
            raise ValueError(f"network is {self.network.value}, and an allow-list is set: leave one of them out")
        return self

    @property
    def gpu_count(self) -> int:
        """Return the number of GPUs of a sandbox, such as 2 for `A100:2`."""
        if self.gpu is None:
            return 0
        _, _, count = self.gpu.partition(":")
        return int(count) if count.isdigit() else 1

    @property
    def has_secrets(self) -> bool:
        """Return whether Modal sets secrets in the sandbox."""
        return bool(self.secrets) or super().has_secrets

    def get_app_name(self, fallback: str = DEFAULT_APP) -> str:
        """Return the app that the sandboxes belong to."""
        return self.app_name or fallback

    def with_app_name(self, base: str) -> Self:
        """Return a copy with the app `{base}-{name}`. Raise `ConfigError` if that is not a valid app name."""
        return self._with({"app_name": f"{base}-{self.name}"})

    def _with(self, changes: Mapping[str, Any]) -> Self:
        values = {**self.model_dump(exclude_unset=True), **changes}
        return validate_data(type(self), values, f"profile {self.name!r} of backend 'modal'")

    @classmethod
    def from_dict(cls, name: str, data: Mapping[str, Any]) -> Self:
        """Return the profile for a mapping of its keys, which may include `min_pool`, `max_pool` and `scale_down_idle`.

        Raises:
            ConfigError, UnknownNameError: names the profile and the key.
        """
        what = f"profile {name!r} of backend 'modal'"
        if not isinstance(data, Mapping):
            raise ConfigError(
                f"{what} is a {type(data).__name__}, no mapping", hint="write `key: value` lines below it"
            )
        if str(data.get("use_dotenv") or "no").lower() not in ("no", "false", "0"):
            raise ConfigError(
                f"{what}: use_dotenv would send all of `.env` to the sandbox",
                hint="name the variables in env_vars, or make a Modal secret: `modal secret create NAME KEY=VALUE`",
            )
        if data.get("workdir"):
            raise ConfigError(
                f"{what}: workdir is where the terminal tool's commands begin; those of slots begin in their workspace",
                hint="leave it out, or set workspace_base, the directory of all workspaces",
            )
        values = {key: value for key, value in data.items() if key not in ("use_dotenv", "scale_down_idle", "workdir")}
        if isinstance(values.get("env_vars"), str):
            values["env_vars"] = _variables(values["env_vars"], what)
        for alias, key in _ALIASES.items():
            if alias in values:
                if key in values:
                    raise ConfigError(f"{what}: {alias} and {key} are the same", hint="set one of them")
                values[key] = values.pop(alias)
        # If `scale_down_idle` is given, it is our `idle_timeout`, and the given `idle_timeout` is Modal's.
        if (pause := data.get("scale_down_idle")) is not None:
            if "idle_timeout" in values:
                values["modal_idle_timeout"] = values["idle_timeout"]
            values["idle_timeout"] = pause
        if (most := values.get("max_sandboxes")) is not None:
            values.setdefault("min_sandboxes", min(1, int(most)) if _is_number(most) else 1)
        return validate_data(cls, {**values, "name": name}, what)

    @classmethod
    def from_env(cls, profile: str = "default", environ: Mapping[str, str] | None = None) -> Self:
        """Return the profile from the variables `ATROPOS_MODAL_PROFILE_<NAME>_<KEY>`, or `ATROPOS_MODAL_<KEY>` for keys
        without them."""
        environ = os.environ if environ is None else environ
        _check_words(environ)
        name = re.sub(r"[^A-Z0-9]", "_", profile.upper())
        values: dict[str, Any] = {}
        for word, key in _VARIABLES.items():
            variables = (f"{PREFIX}_PROFILE_{name}_{word}", f"{PREFIX}_{word}")
            if variable := next(filter(environ.get, variables), None):
                text = environ[variable]
                values[key] = _variables(text, variable) if key == "env_vars" else text
        return cls.from_dict(profile, values)

    @classmethod
    def from_yaml(cls, path: str | Path, profile: str | None = None) -> Self:
        """Return one profile of a profiles file; the default one if none is named."""
        found, default = read_profiles(cls, path)
        if (profile or default) not in found:
            raise UnknownNameError("profile", str(profile), found, where=f"of {path}")
        return found[profile or default]

    @classmethod
    def from_agent_env_config(cls, config: Any, profile: str = "default") -> Self:
        """Return the profile from the attributes (or keys) `modal_image`, `modal_gpu`, … of `config`. The value None
        counts as not set."""
        values: dict[str, Any] = {}
        for key in _AGENT_KEYS:
            name = f"modal_{key}"
            value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
            if value not in (None, ""):
                values[key] = _variables(value, name) if key == "env_vars" and isinstance(value, str) else value
        return cls.from_dict(profile, values)


Config = TypeVar("Config", bound=ModalSandboxConfig)

PREFIX = "ATROPOS_MODAL"
FILE_VARIABLE, NAMES_VARIABLE = f"{PREFIX}_PROFILES_FILE", f"{PREFIX}_PROFILES"

_VARIABLES = {
    **{key: key.lower() for key in ("IMAGE", "GPU", "CPU", "MEMORY", "SLOTS_PER_SANDBOX", "MIN_SANDBOXES")},
    **{key: key.lower() for key in ("MAX_SANDBOXES", "IDLE_TIMEOUT", "MAX_LIFETIME", "WORKSPACE_BASE", "APP_NAME")},
    **{key: key.lower() for key in ("SECRETS", "ENV_VARS", "RESERVE_SLOTS", "REGION", "CLOUD", "NETWORK")},
    **{key: key.lower() for key in ("SLOT_SECRETS", "SLOT_VARIABLES")},
    "ACQUIRE_TIMEOUT": "acquire_timeout_s",
    "EXECUTION_TIMEOUT": "execution_timeout_s",
}
"""The last part of each variable, with the key that it sets."""
_ALIASES = {
    "min_pool": "min_sandboxes",
    "max_pool": "max_sandboxes",
    "acquire_timeout": "acquire_timeout_s",
    "execution_timeout": "execution_timeout_s",
}
"""Maps names in `modal_profiles.yaml` and of the `modal_…` settings to our names."""
_AGENT_KEYS = (*_VARIABLES.values(), "acquire_timeout", "execution_timeout")


def load_profiles(
    config_file: str | Path | None = None, environ: Mapping[str, str] | None = None
) -> dict[str, ModalSandboxConfig]:
    """Return profiles by name. There is always one called `default`.

    They come from the first of these that is set: `config_file`, the file that ATROPOS_MODAL_PROFILES_FILE names, and
    the names in ATROPOS_MODAL_PROFILES, whose settings are variables.

    Raises:
        ConfigError, UnknownNameError: names the profile and the key.
    """
    return load_profiles_and_default(config_file, environ)[0]


def load_profiles_and_default(
    config_file: str | Path | None = None, environ: Mapping[str, str] | None = None
) -> tuple[dict[str, ModalSandboxConfig], str]:
    """Return the profiles of `load_profiles`, and the name of the default one."""
    environ = os.environ if environ is None else environ
    file, default = config_file or environ.get(FILE_VARIABLE), "default"
    if file:
        found, default = read_profiles(ModalSandboxConfig, file)
    else:
        names = [name.strip() for name in environ.get(NAMES_VARIABLE, "").split(",") if name.strip()]
        found = {name: ModalSandboxConfig.from_env(name, environ) for name in names}
    if "default" not in found:
        found["default"] = ModalSandboxConfig.from_env("default", environ)
    return found, default


def read_profiles(kind: type[Config], path: str | Path) -> tuple[dict[str, Config], str]:
    """Return the profiles of a YAML file, and the name of its default one.

    Raises:
        ConfigError: the file can't be read, has no profiles, or a profile has a wrong value.
        UnknownNameError: a key, or the default profile, does not exist.
    """
    profiles, default = profiles_of(Path(path))
    return {name: kind.from_dict(name, values) for name, values in profiles.items()}, default


def _check_words(environ: Mapping[str, str]) -> None:
    """Refuse a variable with our prefix that does not end with a key. The error names no profile, because a profile's
    name may have a `_`."""
    for variable in environ:
        word = variable.removeprefix(f"{PREFIX}_")
        if word == variable or variable in (FILE_VARIABLE, NAMES_VARIABLE) or word in _VARIABLES:
            continue
        if not word.startswith("PROFILE_"):
            raise ConfigError(f"{variable} sets nothing", hint=nearest_hint(word, _VARIABLES))
        if not word.endswith(tuple(f"_{known}" for known in _VARIABLES)):
            raise ConfigError(f"{variable} ends in no key of a profile", hint=nearest_hint(word, _VARIABLES))


def _variables(value: str, named: str) -> dict[str, str]:
    """Return the variables in `KEY=VALUE;KEY=VALUE`. Errors never show the text, which may be a secret."""
    found = {}
    for number, part in enumerate(value.split(";"), 1):
        name, equals, text = part.strip().partition("=")
        if not part.strip():
            continue
        if not equals:
            raise ConfigError(f"{named}: part {number} has no `=`", hint="write KEY=VALUE;KEY=VALUE")
        found[name.strip()] = text
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, str) and value.isdigit())
