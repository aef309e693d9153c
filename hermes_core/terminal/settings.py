"""What the TERMINAL_… variables say, read once, and which of them counts where several say the same."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hermes_core.errors import ConfigError, UnknownNameError, nearest_hint
from hermes_core.settings import read_dotenv, read_profiles
from hermes_core.validation import validated

log = logging.getLogger(__name__)

PROFILES_FILE = "modal_profiles.yaml"

_KEYS = {
    "modal": {
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
    "docker": {
        "TERMINAL_DOCKER_IMAGE": "image",
        "TERMINAL_DOCKER_VOLUMES": "volumes",
        "TERMINAL_CONTAINER_CPU": "cpu",
        "TERMINAL_CONTAINER_MEMORY": "memory",
    },
    "ssh": {
        "TERMINAL_SSH_HOST": "host",
        "TERMINAL_SSH_USER": "user",
        "TERMINAL_SSH_PORT": "port",
        "TERMINAL_SSH_KEY": "identity",
    },
    "local": {},
}
"""By backend: the variables, and the key of a profile that each sets where the profile does not."""
_DEFAULTS: dict[str, dict[str, Any]] = {"modal": {"app_name": "hermes-sandbox"}}
_PLAIN = {
    "TERMINAL_ENV": "backend",
    "TERMINAL_TIMEOUT": "timeout_s",
    "TERMINAL_LIFETIME_SECONDS": "lifetime_s",
    "TERMINAL_CWD": "cwd",
    "TERMINAL_MODAL_DEFAULT_PROFILE": "default_profile",
    "TERMINAL_STATE_DIR": "state_dir",
}
_OF_ONE_PROFILE = re.compile(  # the name is as short as can be: X_SLOT_SECRETS is of X
    "TERMINAL_MODAL_PROFILE_(.+?)_(IMAGE|GPU|CPU|MEMORY|MIN_POOL|MAX_POOL|IDLE_TIMEOUT|MAX_LIFETIME|SCALE_DOWN_IDLE|"
    "WORKDIR|SECRETS|SLOT_SECRETS|ENV_VARS|USE_DOTENV)"
)
_FILE_VARIABLE, _MODE_VARIABLE = "TERMINAL_MODAL_PROFILES_FILE", "TERMINAL_MODAL_MODE"
_NO_SLOTS = "slots for rollouts are `hermes-rl rollout --backend modal`, or ModalToolBackend"
_NOT_READ = {
    "TERMINAL_CONTAINER_DISK": "a container's disk has no limit here",
    "TERMINAL_CONTAINER_PERSISTENT": "a task's container ends with the task",
    "TERMINAL_SANDBOX_DIR": "files are in the sandbox alone",
    "TERMINAL_SCRATCH_DIR": "files are in the sandbox alone",
    "TERMINAL_DISK_WARNING_GB": "files are in the sandbox alone",
    "TERMINAL_SINGULARITY_IMAGE": "there is no such backend",
    "TERMINAL_MODAL_SLOTS": f"a task has a sandbox to itself; {_NO_SLOTS}",
    "TERMINAL_MODAL_EXEC_TIMEOUT": "TERMINAL_TIMEOUT is the time limit",
    **dict.fromkeys(("TERMINAL_SLOT_BACKEND", "TERMINAL_SLOT_APP_NAME"), _NO_SLOTS),
}
"""Variables that others read, and why they say nothing here."""
_DEFAULT = "default"


class TerminalSettings(BaseModel):
    """How the terminal tool works."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str = "local"
    """The backend by name. One that does not exist is an error, never another."""
    timeout_s: float = Field(default=180.0, gt=0)
    """A command's time limit in seconds."""
    lifetime_s: float = Field(default=300.0, gt=0)
    """Seconds after its last command, and with nothing left in the background, after which a task's sandbox ends."""
    cwd: str | None = None
    """Where a task's first command runs; None is the slot's workspace."""
    state_dir: Path | None = None
    """Where the checkpoint is by which the next process goes on with the tasks when this one has died."""
    default_profile: str = "default"
    profiles: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """In the backend's terms."""
    workdirs: dict[str, str] = Field(default_factory=dict)
    """By profile, what stands before `cwd`."""

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> TerminalSettings:
        """Read variables, `.env`, and for Modal `modal_profiles.yaml` (or TERMINAL_MODAL_PROFILES_FILE). What a profile
        says comes before the variables for all, and the process's variables before those of `.env`.

        Raises:
            ConfigError, UnknownNameError: a value or a file is wrong.
        """
        found = _gather(os.environ if environ is None else environ)
        for line in found.not_read:
            log.warning("%s", line)
        return found.settings()

    def cwd_of(self, profile: str | None) -> str | None:
        """Where the first command of a task with this profile runs."""
        return self.workdirs.get(profile or self.default_profile, self.cwd)


def explain(environ: Mapping[str, str] | None = None) -> tuple[TerminalSettings, list[str]]:
    """The settings, and in a line each where they are from, and what says them as well but does not count. Raises as
    `load` does.
    """
    found = _gather(os.environ if environ is None else environ)
    settings = found.settings()
    plain = ("backend", "timeout_s", "lifetime_s", "cwd", "default_profile")
    lines = [
        f"{key}: {value} ({found.origins.get(key, _DEFAULT)})"
        for key in plain
        if (value := getattr(settings, key)) is not None
    ]
    for name in settings.profiles:
        told = (
            f"{key}={_shown(key, value)} ({found.origin(name, key)})" for key, value in found.profiles[name].items()
        )
        lines.append(f"profile {name}: " + (", ".join(told) or "the backend's defaults"))
    return settings, lines + found.not_read


@dataclass
class _Found:
    """What was found, and where."""

    plain: dict[str, Any]
    origins: dict[str, str]
    profiles: dict[str, dict[str, Any]]
    common: dict[str, str]
    """By key, what says it for every profile."""
    own: dict[str, dict[str, str]]
    """By profile and key, what says it for that one."""
    not_read: list[str] = field(default_factory=list)

    def settings(self) -> TerminalSettings:
        profiles = {name: {**given} for name, given in self.profiles.items()}
        workdirs = {name: str(given.pop("workdir")) for name, given in profiles.items() if given.get("workdir")}
        for given in profiles.values():
            given.pop("workdir", None)
        given = {**self.plain, "profiles": profiles, "workdirs": workdirs}
        return validated(TerminalSettings, given, "the terminal tool", names=self.origins)

    def origin(self, profile: str, key: str) -> str:
        own, common = self.own.get(profile, {}).get(key), self.common.get(key)
        if own is None:
            return common or _DEFAULT
        return f"{own}, before {common}" if common else own


def _gather(environ: Mapping[str, str]) -> _Found:
    dotenv = read_dotenv(environ)
    variables = {**dotenv, **environ}

    def named(variable: str) -> str:
        if variable not in environ:
            return f"{variable} in .env"
        return f"{variable}, before .env" if variable in dotenv else variable

    plain: dict[str, Any] = {key: variables[name] for name, key in _PLAIN.items() if variables.get(name)}
    origins = {key: named(name) for name, key in _PLAIN.items() if variables.get(name)}
    backend = str(plain.get("backend", "local"))
    if backend == "modal" and variables.get(_MODE_VARIABLE, "pool") != "pool":
        raise ConfigError(f"{_MODE_VARIABLE} is {variables[_MODE_VARIABLE]!r}", hint="there is `pool`: leave it out")
    keys = _KEYS.get(backend, {})
    common = {key: _parsed(name, variables[name]) for name, key in keys.items() if variables.get(name)}
    own, places = _profiles(variables, backend, plain, origins)
    default = str(plain.get("default_profile", "default"))
    if default not in (own := own or {default: {}}):
        raise UnknownNameError("profile", default, own, where=f"in {origins.get('default_profile', 'the profiles')}")
    profiles = {name: {**_DEFAULTS.get(backend, {}), **common, **(given or {})} for name, given in own.items()}
    told = {key: named(name) for name, key in keys.items() if variables.get(name)}
    return _Found(plain, origins, profiles, told, places, _not_read(variables))


def _profiles(
    variables: Mapping[str, str], backend: str, plain: dict[str, Any], origins: dict[str, str]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, str]]]:
    """Modal's profiles, of the file or else of variables; and by profile and key, where each is from."""
    if backend != "modal":
        return {}, {}
    file = variables.get(_FILE_VARIABLE) or (PROFILES_FILE if Path(PROFILES_FILE).is_file() else None)
    if file is not None:
        profiles, default = read_profiles(Path(file))
        for name, given in profiles.items():
            if not isinstance(given, Mapping):
                raise ConfigError(f"profile {name!r} of {file} is no mapping", hint="write `key: value` lines below it")
        if "default_profile" not in plain:
            plain["default_profile"], origins["default_profile"] = default, file
        return profiles, {name: dict.fromkeys(given or {}, file) for name, given in profiles.items()}
    found: dict[str, dict[str, Any]] = {}
    places: dict[str, dict[str, str]] = {}
    for variable, value in variables.items():
        if value and (match := _OF_ONE_PROFILE.fullmatch(variable)):
            name, key = match[1].lower().replace("_", "-"), match[2].lower()
            found.setdefault(name, {})[key] = value
            places.setdefault(name, {})[key] = variable
    if found:
        found.setdefault(str(plain.get("default_profile", "default")), {})
    return found, places


def _parsed(variable: str, value: str) -> Any:
    if variable != "TERMINAL_DOCKER_VOLUMES":
        return value
    try:
        volumes = json.loads(value)
    except ValueError:
        volumes = None
    if not isinstance(volumes, list):
        raise ConfigError(f"{variable} is {value!r}", hint='write a JSON list: ["/on/the/host:/in/the/sandbox:ro"]')
    return volumes


def _not_read(variables: Mapping[str, str]) -> list[str]:
    """What is set and says nothing, each with why, or with what was meant."""
    known = {*_PLAIN, *(name for keys in _KEYS.values() for name in keys), _FILE_VARIABLE, _MODE_VARIABLE}
    lines = []
    for name, value in sorted(variables.items()):
        if not name.startswith("TERMINAL_") or name in known or _OF_ONE_PROFILE.fullmatch(name):
            continue
        if name == "TERMINAL_CONTAINER_PERSISTENT" and value.lower() in ("false", "0", "no"):
            continue
        why = _NO_SLOTS if name.startswith("TERMINAL_NOMAD_") else _NOT_READ.get(name)
        lines.append(f"{name} is not read: {why or nearest_hint(name, known)}")
    return lines


def _shown(key: str, value: Any) -> str:
    """As in a line. Of variables, however they are written, and of any mapping, which may hold what nobody is to see,
    only the names.
    """
    if key.lower().startswith("env"):  # and not `env_vars` alone: it may be misspelt
        return "{" + ", ".join(_names(value)) + "}"
    return "{" + ", ".join(map(str, value)) + "}" if isinstance(value, Mapping) else str(value)


def _names(variables: Any) -> list[str]:
    """Those of a mapping, of `KEY=VALUE;KEY=VALUE`, or of a list of either. What has no `=` may be part of a value."""
    if isinstance(variables, Mapping):
        return [str(name) for name in variables]
    if isinstance(variables, str):
        return [part.partition("=")[0].strip() for part in variables.split(";") if "=" in part]
    return [name for each in variables for name in _names(each)] if isinstance(variables, list) else []
