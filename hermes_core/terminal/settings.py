"""What the TERMINAL_… variables say, read once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hermes_core.errors import UnknownNameError
from hermes_core.settings import read_dotenv, read_profiles, validated

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
        "TERMINAL_MODAL_WORKSPACE": "workspace_base",
    },
    "docker": {
        "TERMINAL_DOCKER_IMAGE": "image",
        "TERMINAL_CONTAINER_CPU": "cpu",
        "TERMINAL_CONTAINER_MEMORY": "memory",
    },
    "ssh": {"TERMINAL_SSH_HOST": "host"},
    "local": {},
}
"""By backend: the variables, and the key of a profile that each sets where the profile does not."""
_DEFAULTS: dict[str, dict[str, Any]] = {"modal": {"app_name": "hermes-sandbox"}}
_PLAIN = {
    "TERMINAL_ENV": "backend",
    "TERMINAL_TIMEOUT": "timeout_s",
    "TERMINAL_LIFETIME_SECONDS": "lifetime_s",
    "TERMINAL_MODAL_DEFAULT_PROFILE": "default_profile",
    "TERMINAL_STATE_DIR": "state_dir",
}


class TerminalSettings(BaseModel):
    """How the terminal tool works."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str = "local"
    """The backend by name. One that does not exist is an error, never another."""
    timeout_s: float = Field(default=180.0, gt=0)
    """A command's time limit in seconds."""
    lifetime_s: float = Field(default=300.0, gt=0)
    """Seconds after its last command, and with nothing left in the background, after which a task's sandbox ends."""
    state_dir: Path | None = None
    """Where the checkpoint is by which the next process goes on with the tasks when this one has died."""
    default_profile: str = "default"
    profiles: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """In the backend's terms."""

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> TerminalSettings:
        """Read variables, `.env`, and for Modal `modal_profiles.yaml` (or TERMINAL_MODAL_PROFILES_FILE). What a profile
        says comes before the variables for all, and the process's variables before those of `.env`.

        Raises:
            ConfigError, UnknownNameError: a value or a file is wrong.
        """
        environ = os.environ if environ is None else environ
        variables = {**read_dotenv(environ), **environ}
        given: dict[str, Any] = {key: variables[name] for name, key in _PLAIN.items() if variables.get(name)}
        backend = str(given.get("backend", "local"))
        profiles: dict[str, Any] = {}
        if backend == "modal" and (file := _profiles_file(variables)) is not None:
            profiles, default = read_profiles(file)
            given.setdefault("default_profile", default)
        found = {key: variables[name] for name, key in _KEYS.get(backend, {}).items() if variables.get(name)}
        common = {**_DEFAULTS.get(backend, {}), **found}
        default = str(given.get("default_profile", "default"))
        if not profiles:
            profiles = {default: {}}
        if default not in profiles:
            raise UnknownNameError("profile", default, profiles, where="in TERMINAL_MODAL_DEFAULT_PROFILE")
        given["profiles"] = {name: {**common, **(own or {})} for name, own in profiles.items()}
        return validated(cls, given, "the TERMINAL_… variables")


def _profiles_file(variables: Mapping[str, str]) -> Path | None:
    if named := variables.get("TERMINAL_MODAL_PROFILES_FILE"):
        return Path(named)
    return Path(PROFILES_FILE) if Path(PROFILES_FILE).is_file() else None
