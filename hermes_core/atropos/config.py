"""The settings of our Atropos environments, and their translation for backends, rollouts and the agent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from atroposlib.envs.base import BaseEnvConfig
from pydantic import ConfigDict, Field, field_validator, model_validator

from hermes_core.agents.model import ModelSettings
from hermes_core.environment import EnvironmentConfig
from hermes_core.runs.options import MOST_AT_A_TIME, RolloutOptions, RunOptions

_RENAMED = {"acquire_timeout": "acquire_timeout_s", "execution_timeout": "execution_timeout_s"}
"""Users' names for some settings of sandboxes."""

_BACKENDS = ("local", "docker", "ssh", "modal")
"""Backends whose `NAME_…` settings are always accepted. Those of other backends are accepted only for the one in
use."""


class HermesAgentEnvConfig(RolloutOptions, BaseEnvConfig):  # type: ignore[misc]  # atroposlib has no types
    """Atropos' own settings, and ours. Unknown keys are errors.

    Settings of sandboxes are written `BACKEND_KEY`: `modal_image`, `docker_memory`, …: any that the backend's profiles
    have. They are gathered in `sandbox`, and checked by the backend when it is used.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=False)

    # Atropos' own, with other defaults.
    use_wandb: bool = Field(default=False, description="Whether to use wandb")
    tokenizer_name: str = Field(default="", description="Folder or hub name of the model's tokenizer")
    max_token_length: int = Field(
        default=16384, ge=2, description="Tokens of a whole trajectory at most; the trainer's own limit comes before it"
    )
    worker_timeout: float = Field(default=7200, description="Seconds for a group in serve mode, -1 for no limit")
    steps_per_eval: int = Field(default=-1, description="Steps between evaluations, -1 for none")

    enabled_toolsets: list[str] | None = Field(default=None, description="The model's toolsets [terminal,file]")
    disabled_toolsets: list[str] | None = Field(default=None, description="Toolsets taken away from those")
    distribution: str | None = Field(
        default=None, description="Draw each group's toolsets from this, instead of enabled_toolsets"
    )
    agent: str = Field(default="model", description="The agent: `model`, or a program that asks the servers")
    agent_options: dict[str, Any] = Field(default_factory=dict, description="A program's own settings, as JSON")
    max_agent_turns: int = Field(default=30, ge=1, description="Answers that the model may give in one rollout")
    max_turn_tokens: int | None = Field(
        default=None, ge=1, description="Tokens of one answer at most; None leaves the rest of max_token_length"
    )
    compact_at: float | None = Field(
        default=None,
        gt=0,
        description="Tokens from which the model sums the conversation up and goes on from that; up to 1, a share of"
        " the context of vllm and sglang servers",
    )
    system_prompt: str | None = Field(default=None, description="The first message of every rollout")
    agent_temperature: float = Field(default=1.0, ge=0, description="Sampling temperature")
    extra_body: dict[str, Any] | None = Field(default=None, description="More keys for requests to an openai server")
    tool_call_parser: str = Field(
        default="auto", description="Reads the calls of vllm and sglang servers' models; auto is by the chat template"
    )
    calls_end_thinking: bool = Field(
        default=False, description="Make calls inside of thinking that was never closed, not only report them"
    )
    chat_template: str | None = Field(
        default=None, description="Jinja file or text, in place of the tokenizer's; for vllm and sglang servers"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables of the chat template, such as enable_thinking; for vllm and sglang servers"
    )

    terminal_backend: str = Field(default="local", description="What makes the sandboxes")
    tool_pool_mode: str = Field(default="default", description="The same, by the older name; it comes first")
    terminal_timeout: float = Field(default=120, gt=0, description="Seconds for a command that names no limit")
    terminal_lifetime: float = Field(default=3600, gt=0, description="Seconds after which an unused sandbox is ended")
    tool_pool_size: int = Field(default=128, ge=1, le=MOST_AT_A_TIME, description="Rollouts at the same time, at most")
    mcp: str | None = Field(default=None, description="File of MCP servers whose tools rollouts get [none]")
    sandbox: dict[str, dict[str, Any]] = Field(default_factory=dict, description="Settings of sandboxes by backend")

    endpoint_patience: float = Field(default=300, ge=0, description="Seconds to wait for a model server that fails")
    group_refills: int = Field(default=4, ge=0, description="Rollouts of a group that may be replaced by others")
    trainer_timeout: float = Field(
        default=1800, gt=0, description="Seconds without the API, or without a step of the trainer, before serve ends"
    )
    trajectories_path: str | None = Field(
        default=None, description="JSONL of every rollout, those that failed included [beside the groups]"
    )

    dataset_name: str | None = Field(default=None, description="The dataset")
    dataset_split: str = Field(default="train", description="Its split")
    prompt_field: str = Field(default="prompt", description="The field of a row that holds the prompt")
    seed: int = Field(default=0, description="Seed of the order of items and the tools drawn")

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
        common = {"execution_timeout_s": self.terminal_timeout, "idle_timeout": self.terminal_lifetime}
        return {**common, **self.sandbox.get(self.backend, {})}

    def agent_settings(self) -> ModelSettings:
        """Return the agent's sampling settings, without the server."""
        return ModelSettings(
            max_turns=self.max_agent_turns,
            temperature=self.agent_temperature,
            max_tokens=self.max_turn_tokens,
            extra_body=self.extra_body,
            compact_at=self.compact_at,
            endpoint_patience_s=self.endpoint_patience,
            check_patience_s=max(self.endpoint_patience, 1.0),  # its trainer starts the model's server meanwhile
        )

    def environment_settings(self) -> dict[str, Any]:
        """Return the settings that belong to `EnvironmentConfig`, if they were set."""
        known = set(EnvironmentConfig.model_fields) & set(type(self).model_fields)
        return {key: getattr(self, key) for key in known & self.model_fields_set if getattr(self, key) is not None}
