"""The settings of our Atropos environments, and their translation for backends, rollouts and the agent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from atroposlib.envs.base import BaseEnvConfig
from pydantic import ConfigDict, field_validator, model_validator

from hermes_atropos.flat import FlatSettings
from hermes_core import EnvironmentConfig, RunOptions, SandboxConfig
from hermes_core.agents.model import ModelSettings

_RENAMED = {"acquire_timeout": "acquire_timeout_s", "execution_timeout": "execution_timeout_s"}
"""Users' names for some settings of sandboxes."""

_BACKENDS = ("local", "docker", "ssh", "modal")
"""Backends whose `NAME_…` settings are always accepted. Those of other backends are accepted only for the one in
use."""


class HermesAgentEnvConfig(FlatSettings, BaseEnvConfig):  # type: ignore[misc]  # atroposlib has no types
    """Atropos' own settings, and ours. Unknown keys are errors.

    Settings of sandboxes are written `BACKEND_KEY`: `modal_image`, `docker_memory`, …: any that the backend's profiles
    have. They are gathered in `sandbox`, and checked by the backend when it is used.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=False)

    @model_validator(mode="before")
    @classmethod
    def _gather_sandbox_settings(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        used = {str(given.get(key) or "") for key in ("tool_pool_mode", "terminal_backend")}
        prefixes = {*_BACKENDS, *used} - {"default", ""}
        sandbox = {str(name): dict(settings) for name, settings in dict(given.get("sandbox") or {}).items()}
        rest = {}
        for key, value in given.items():
            name, _, setting = str(key).partition("_")
            if key in cls.model_fields or name not in prefixes or not setting:
                rest[key] = value
            elif value is not None:
                sandbox.setdefault(name, {})[_RENAMED.get(setting, setting)] = value
        return {**rest, "sandbox": sandbox}

    @field_validator("enabled_toolsets", "disabled_toolsets", mode="before")
    @classmethod
    def _from_commas(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("extra_body", "chat_template_kwargs", "agent_options", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_source_of_tools(self) -> HermesAgentEnvConfig:
        if self.enabled_toolsets is not None and self.distribution is not None:
            raise ValueError("enabled_toolsets and distribution exclude each other: name one of them")
        return self

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self.terminal_backend if self.tool_pool_mode == "default" else self.tool_pool_mode

    def run_options(self, groups: int) -> RunOptions:
        """Return core's options for running this many groups at the same time."""
        same = RunOptions.model_fields.keys() & HermesAgentEnvConfig.model_fields.keys()
        return RunOptions(
            **{name: getattr(self, name) for name in same},
            backend=self.backend,
            backend_config=self.backend_config(),
            concurrency=min(self.tool_pool_size, groups * self.group_size),
        )

    def backend_config(self) -> dict[str, Any]:
        """Return the sandboxes' settings under the backend's own names."""
        return {**self.settings_of(SandboxConfig), **self.sandbox.get(self.backend, {})}

    def agent_settings(self) -> ModelSettings:
        """Return the agent's sampling settings, without the server."""
        patience_s = max(self.endpoint_patience, 1.0)  # its trainer starts the model's server meanwhile
        return ModelSettings(**self.settings_of(ModelSettings), check_patience_s=patience_s)

    def environment_settings(self) -> dict[str, Any]:
        """Return the settings that belong to `EnvironmentConfig`, if they were set."""
        known = EnvironmentConfig.model_fields.keys() & self.model_fields_set
        return {key: value for key in known if (value := getattr(self, key)) is not None}
