"""Reads the TERMINAL_… variables once, and decides which one counts if several set the same thing."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hermes_core.errors import ConfigError, UnknownNameError, nearest_hint
from hermes_core.sandbox.contract import SandboxConfig, TerminalVariables
from hermes_core.settings import read_dotenv, read_profiles
from hermes_core.validation import validate_data

log = logging.getLogger(__name__)

ConfigClasses = Mapping[str, Callable[[], type[SandboxConfig]]]
"""Maps each backend to a function that returns its `config_class`. Only the function of the backend in use is called,
because it may load a provider's SDK."""

_PLAIN = {
    "TERMINAL_ENV": "backend",
    "TERMINAL_TIMEOUT": "timeout_s",
    "TERMINAL_LIFETIME_SECONDS": "lifetime_s",
    "TERMINAL_CWD": "cwd",
    "TERMINAL_STATE_DIR": "state_dir",
}
_NO_SLOTS = "slots for rollouts are `hermes-rl rollout`"
_NOT_READ = {
    "TERMINAL_CONTAINER_DISK": "a container's disk has no limit here",
    "TERMINAL_CONTAINER_PERSISTENT": "a task's container ends with the task",
    "TERMINAL_SANDBOX_DIR": "files are in the sandbox alone",
    "TERMINAL_SCRATCH_DIR": "files are in the sandbox alone",
    "TERMINAL_DISK_WARNING_GB": "files are in the sandbox alone",
    **dict.fromkeys(("TERMINAL_CONTAINER_CPU", "TERMINAL_CONTAINER_MEMORY"), "this backend has no containers"),
    **dict.fromkeys(("TERMINAL_SLOT_BACKEND", "TERMINAL_SLOT_APP_NAME"), _NO_SLOTS),
}
"""Maps each variable that only other programs read to the reason why it has no effect here."""
_DEFAULT = "default"


class TerminalSettings(BaseModel):
    """Settings of the terminal tool."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str = "local"
    """The backend's name. A name that does not exist is an error; no other backend is used instead."""
    timeout_s: float = Field(default=180.0, gt=0)
    """A command's time limit in seconds."""
    lifetime_s: float = Field(default=300.0, gt=0)
    """Seconds after its last command, with nothing running in the background, after which a task's sandbox ends."""
    cwd: str | None = None
    """Directory of a task's first command; None is the slot's workspace."""
    state_dir: Path | None = None
    """Directory of the checkpoint, with which the next process continues the tasks after this one has died."""
    default_profile: str = "default"
    profiles: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Profiles by name, as settings of the backend."""
    workdirs: dict[str, str] = Field(default_factory=dict)
    """Directory by profile, which overrides `cwd`."""

    @classmethod
    def load(cls, classes: ConfigClasses, environ: Mapping[str, str] | None = None) -> TerminalSettings:
        """Read variables, `.env`, and the backend's file of profiles: the one named by
        `TERMINAL_<BACKEND>_PROFILES_FILE`, or `<backend>_profiles.yaml`, if it exists. A profile's own values override
        the variables for all profiles, and the process's variables override those of `.env`.

        Raises:
            ConfigError, UnknownNameError: a value or a file is wrong.
        """
        found = _gather(classes, os.environ if environ is None else environ)
        for line in found.not_read:
            log.warning("%s", line)
        return found.settings()

    def cwd_of(self, profile: str | None) -> str | None:
        """Return the directory of the first command of a task with this profile."""
        return self.workdirs.get(profile or self.default_profile, self.cwd)


def explain(classes: ConfigClasses, environ: Mapping[str, str] | None = None) -> tuple[TerminalSettings, list[str]]:
    """Return the settings, and lines that name the source of each, with the source that it overrides. Raises as `load`
    does."""
    found = _gather(classes, os.environ if environ is None else environ)
    settings = found.settings()
    plain = ("backend", "timeout_s", "lifetime_s", "cwd", "default_profile")
    lines = [
        f"{key}: {value} ({found.origins.get(key, _DEFAULT)})"
        for key in plain
        if (value := getattr(settings, key)) is not None
    ]
    for name in settings.profiles:
        profile = found.profiles[name]
        parts = [f"{key}={_format_value(key, each)} ({found.origin(name, key)})" for key, each in profile.items()]
        lines.append(f"profile {name}: " + (", ".join(parts) or "the backend's defaults"))
    return settings, lines + found.not_read


@dataclass
class _Found:
    """The values, and the source of each."""

    plain: dict[str, Any]
    origins: dict[str, str]
    profiles: dict[str, dict[str, Any]]
    common: dict[str, str]
    """By key: the source of the value for all profiles."""
    own: dict[str, dict[str, str]]
    """By profile and key: the source of the value for that profile."""
    not_read: list[str] = field(default_factory=list)

    def settings(self) -> TerminalSettings:
        profiles = {name: {**profile} for name, profile in self.profiles.items()}
        workdirs = {name: str(profile.pop("workdir")) for name, profile in profiles.items() if profile.get("workdir")}
        for profile in profiles.values():
            profile.pop("workdir", None)
        values = {**self.plain, "profiles": profiles, "workdirs": workdirs}
        return validate_data(TerminalSettings, values, "the terminal tool", names=self.origins)

    def origin(self, profile: str, key: str) -> str:
        """Return the source of a profile's value, and the source that it overrides."""
        specific, common = self.own.get(profile, {}).get(key), self.common.get(key)
        if specific is None:
            return common or _DEFAULT
        return f"{specific}, before {common}" if common else specific


def _gather(classes: ConfigClasses, environ: Mapping[str, str]) -> _Found:
    dotenv = read_dotenv(environ)
    variables = {**dotenv, **environ}

    def source_of(variable: str) -> str:
        if variable not in environ:
            return f"{variable} in .env"
        return f"{variable}, before .env" if variable in dotenv else variable

    backend = variables.get("TERMINAL_ENV") or "local"
    declared = (classes[backend]() if backend in classes else SandboxConfig).terminal
    names = {**_PLAIN, f"{_prefix(backend)}DEFAULT_PROFILE": "default_profile"}
    plain: dict[str, Any] = {key: variables[name] for name, key in names.items() if variables.get(name)}
    origins = {key: source_of(name) for name, key in names.items() if variables.get(name)}
    for name, value in declared.fixed.items():
        if variables.get(name, value) != value:
            raise ConfigError(f"{name} is {variables[name]!r}", hint=f"leave it out: the only value is `{value}`")
    keys = {name: key for name, key in declared.settings.items() if variables.get(name)}
    common = {key: _parse(declared, name, variables[name]) for name, key in keys.items()}
    own, sources = _profiles(variables, backend, declared, plain, origins)
    default = str(plain.get("default_profile", "default"))
    if default not in (own := own or {default: {}}):
        raise UnknownNameError("profile", default, own, where=f"in {origins.get('default_profile', 'the profiles')}")
    profiles = {name: {**declared.defaults, **common, **(values or {})} for name, values in own.items()}
    common_sources = {key: source_of(name) for name, key in keys.items()}
    readable = {*names, *declared.settings, *declared.fixed, f"{_prefix(backend)}PROFILES_FILE"}
    not_read = _not_read(variables, readable, backend, declared, classes)
    return _Found(plain, origins, profiles, common_sources, sources, not_read)


def _prefix(backend: str) -> str:
    """Return the prefix of one backend's variables."""
    return f"TERMINAL_{backend.upper().replace('-', '_')}_"


def _file(backend: str) -> str:
    """Return the path of the file with a backend's profiles in the current directory."""
    return f"{backend}_profiles.yaml"


def _of_one_profile(backend: str, declared: TerminalVariables) -> re.Pattern[str]:
    # The name is as short as possible: X_SLOT_SECRETS belongs to X.
    return re.compile(f"{_prefix(backend)}PROFILE_(.+?)_({'|'.join(declared.of_profile) or '(?!)'})")


def _profiles(
    variables: Mapping[str, str],
    backend: str,
    declared: TerminalVariables,
    plain: dict[str, Any],
    origins: dict[str, str],
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, str]]]:
    """Return the backend's profiles, from the file or else from variables, and the source of each value by profile and
    key."""
    file = variables.get(f"{_prefix(backend)}PROFILES_FILE")
    file = file or (_file(backend) if Path(_file(backend)).is_file() else None)
    if file is not None:
        profiles, default = read_profiles(Path(file))
        for name, profile in profiles.items():
            if not isinstance(profile, Mapping):
                raise ConfigError(
                    f"profile {name!r} of {file} is not a mapping", hint="write `key: value` lines below it"
                )
        if "default_profile" not in plain:
            plain["default_profile"], origins["default_profile"] = default, file
        return profiles, {name: dict.fromkeys(profile or {}, file) for name, profile in profiles.items()}
    found: dict[str, dict[str, Any]] = {}
    sources: dict[str, dict[str, str]] = {}
    of_one_profile = _of_one_profile(backend, declared)
    for variable, value in variables.items():
        if value and (match := of_one_profile.fullmatch(variable)):
            name, key = match[1].lower().replace("_", "-"), match[2].lower()
            found.setdefault(name, {})[key] = value
            sources.setdefault(name, {})[key] = variable
    if found:
        found.setdefault(str(plain.get("default_profile", "default")), {})
    return found, sources


def _parse(declared: TerminalVariables, variable: str, value: str) -> Any:
    if variable not in declared.lists:
        return value
    try:
        result = json.loads(value)
    except ValueError:
        result = None
    if not isinstance(result, list):
        raise ConfigError(f"{variable} is {value!r}", hint='write a JSON list: ["one", "two"]')
    return result


def _not_read(
    variables: Mapping[str, str],
    known: Collection[str],
    backend: str,
    declared: TerminalVariables,
    backends: Collection[str],
) -> list[str]:
    """Return a line for each variable that is set without effect: the reason, or the name that was probably meant."""
    others = [other for other in backends if other != backend]
    lines = [
        f"{_file(other)} is not read: TERMINAL_ENV is {backend!r}, not {other!r}"
        for other in others
        if Path(_file(other)).is_file()
    ]
    of_others = tuple(map(_prefix, others))
    of_one_profile = _of_one_profile(backend, declared)
    for name, value in sorted(variables.items()):
        if not name.startswith("TERMINAL_") or name in known or of_one_profile.fullmatch(name):
            continue
        if name == "TERMINAL_CONTAINER_PERSISTENT" and value.lower() in ("false", "0", "no"):
            continue
        why = {**_NOT_READ, **declared.unread}.get(name)
        if why is None and of_others and name.startswith(of_others):
            continue
        lines.append(f"{name} is not read: {why or nearest_hint(name, known)}")
    return lines


def _format_value(key: str, value: Any) -> str:
    """Return a value as text. Of environment variables in any form, and of mappings, only the names are shown, because
    the values may be secret."""
    if key.lower().startswith("env"):  # not only `env_vars`, which may be misspelt
        return "{" + ", ".join(_names(value)) + "}"
    return "{" + ", ".join(map(str, value)) + "}" if isinstance(value, Mapping) else str(value)


def _names(variables: Any) -> list[str]:
    """Return the names in a mapping, in `KEY=VALUE;KEY=VALUE`, or in a list of either. Text without `=` may be part of
    a value."""
    if isinstance(variables, Mapping):
        return [str(name) for name in variables]
    if isinstance(variables, str):
        return [part.partition("=")[0].strip() for part in variables.split(";") if "=" in part]
    return [name for each in variables for name in _names(each)] if isinstance(variables, list) else []
