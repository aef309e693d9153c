"""`HermesAgentEnvConfig`: the settings of an Atropos environment, which backends, runs and agents get as their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from atroposlib.envs.base import BaseEnvConfig
from pydantic import ConfigDict, field_validator, model_validator

from hermes_atropos.flat import FlatSettings
from hermes_core import EnvironmentConfig, RunOptions, SandboxConfig
from hermes_core.agents.model import ModelSettings

_SECONDS = {"acquire_timeout": "acquire_timeout_s", "execution_timeout": "execution_timeout_s"}
"""Settings of sandboxes that have no unit in their name here, and the name that the core has for each."""

_BACKENDS = ("local", "docker", "ssh", "modal", "nomad")
"""Backends whose settings `NAME_KEY` are always accepted. Settings of another backend are accepted if it is in use."""

_OF_NOMAD = {
    "driver": "driver",
    "max_containers": "max_sandboxes",
    "min_containers": "min_sandboxes",
    "sandbox_image": "image",
    "sandbox_job_id": "job_prefix",
    "slots_per_container": "slots_per_sandbox",
}
"""Names without a prefix that `nomad` has had for settings of its sandboxes, accepted if it is in use."""


class HermesAgentEnvConfig(FlatSettings, BaseEnvConfig):  # type: ignore[misc]  # atroposlib has no types
    """The settings of Atropos' base class, and those of `FlatSettings`. An unknown key is an error.

    A setting of sandboxes is written `BACKEND_KEY`, such as `modal_image` or `docker_memory`, for any key of the
    backend's profiles. The validator moves it to `sandbox[BACKEND][KEY]`; the backend checks it when it is used.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=False)

    @model_validator(mode="before")
    @classmethod
    def _gather_sandbox_settings(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        used = {str(values.get(key) or "") for key in ("tool_pool_mode", "terminal_backend")}
        prefixes = {*_BACKENDS, *used} - {"default", ""}
        sandbox = {str(name): dict(settings) for name, settings in dict(values.get("sandbox") or {}).items()}
        rest = {}
        for key, value in values.items():
            name, _, setting = str(key).partition("_")
            if "nomad" in used and key in _OF_NOMAD:
                name, setting = "nomad", _OF_NOMAD[key]
            if key in cls.model_fields or name not in prefixes or not setting:
                rest[key] = value
            elif value is not None:
                sandbox.setdefault(name, {})[_SECONDS.get(setting, setting)] = value
        return {**rest, "sandbox": sandbox}

    @field_validator("enabled_toolsets", "disabled_toolsets", mode="before")
    @classmethod
    def _split_commas(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("extra_body", "chat_template_kwargs", "agent_options", mode="before")
    @classmethod
    def _parse_json(cls, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_one_source_of_tools(self) -> HermesAgentEnvConfig:
        if self.enabled_toolsets is not None and self.distribution is not None:
            raise ValueError("enabled_toolsets and distribution exclude each other: name one of them")
        return self

    @property
    def backend(self) -> str:
        """Return the name of the backend in use."""
        return self.terminal_backend if self.tool_pool_mode == "default" else self.tool_pool_mode

    def run_options(self, groups: int) -> RunOptions:
        """Return the options of a run with this many groups at the same time."""
        shared = RunOptions.model_fields.keys() & HermesAgentEnvConfig.model_fields.keys()
        return RunOptions(
            **{name: getattr(self, name) for name in shared},
            backend=self.backend,
            backend_config=self.backend_config(),
            concurrency=min(self.tool_pool_size, groups * self.group_size),
        )

    def backend_config(self) -> dict[str, Any]:
        """Return the settings of the sandboxes of the backend in use, by the keys of its profiles."""
        return {**self.settings_of(SandboxConfig), **self.sandbox.get(self.backend, {})}

    def agent_settings(self) -> ModelSettings:
        """Return the settings of the agent `model`, without its server."""
        patience_s = max(self.endpoint_patience, 1.0)  # the trainer may start the server after us
        return ModelSettings(**self.settings_of(ModelSettings), check_patience_s=patience_s)

    def environment_settings(self) -> dict[str, Any]:
        """Return the settings of `EnvironmentConfig` that were set."""
        keys = EnvironmentConfig.model_fields.keys() & self.model_fields_set
        return {key: value for key in keys if (value := getattr(self, key)) is not None}
