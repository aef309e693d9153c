"""`FlatSettings`: the settings that our Atropos environments add to Atropos' own. It does not import atroposlib."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field

from hermes_core import EnvironmentConfig, RunOptions, SandboxConfig
from hermes_core.agents.model import ExactSettings, ModelSettings
from hermes_core.cli.settings_table import meaning
from hermes_core.runs.options import RolloutOptions


class Origin(NamedTuple):
    """The model and the field that declare a setting."""

    model: type[BaseModel]
    name: str


def _like(model: type[BaseModel], name: str, **changes: Any) -> Any:
    """Return a field with the default, bounds and meaning of the field `name` of `model`, except for `changes`."""
    field = model.model_fields[name]
    copy: Any = Field(**{"default": field.default, "description": meaning(model, name), **changes})
    bounds = [
        each for each in field.metadata if not isinstance(each, BeforeValidator)
    ]  # a `BeforeValidator` would convert to the type of the field in `model`
    copy.metadata = [*bounds, Origin(model, name)]
    return copy


class FlatSettings(RolloutOptions):
    """The settings of the model, tools, sandboxes and run in one flat list, by the names that users of Atropos know."""

    # Settings of Atropos with defaults of our own.
    use_wandb: bool = False
    """Whether to use wandb."""
    tokenizer_name: str = ""
    """Folder or hub name of the model's tokenizer."""
    max_token_length: int = Field(default=16384, ge=2)
    """Maximum number of tokens of a whole trajectory. A smaller limit of the trainer takes precedence."""
    worker_timeout: float = 7200
    """Time limit in seconds for a group in serve mode. -1 is no limit."""
    steps_per_eval: int = -1
    """Number of steps between evaluations. -1 is none."""

    enabled_toolsets: list[str] | None = _like(EnvironmentConfig, "enabled_toolsets")
    disabled_toolsets: list[str] | None = _like(EnvironmentConfig, "disabled_toolsets", default=None)
    distribution: str | None = _like(EnvironmentConfig, "distribution")
    system_prompt: str | None = _like(EnvironmentConfig, "system_prompt")
    seed: int = _like(RunOptions, "seed", default=0)
    agent: str = "model"
    """The agent: `model`, or a program that asks the servers."""
    agent_options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the program that is the agent, as JSON."""
    max_agent_turns: int = _like(ModelSettings, "max_turns")
    agent_temperature: float = _like(ModelSettings, "temperature")
    max_turn_tokens: int | None = _like(
        ModelSettings,
        "max_tokens",
        description="Maximum number of tokens in one answer. None leaves the rest of max_token_length.",
    )
    extra_body: dict[str, Any] | None = _like(ModelSettings, "extra_body")
    compact_at: float | None = _like(ModelSettings, "compact_at")
    endpoint_patience: float = _like(ModelSettings, "endpoint_patience_s")
    tool_call_parser: str = "auto"
    """Parser of tool calls for servers of type vllm and sglang. `auto` chooses it by the chat template."""
    calls_end_thinking: bool = _like(ExactSettings, "calls_end_thinking")
    chat_template: str | None = _like(ExactSettings, "chat_template")
    chat_template_kwargs: dict[str, Any] | None = _like(ExactSettings, "chat_template_kwargs")

    terminal_backend: str = _like(RunOptions, "backend")
    tool_pool_mode: str = "default"
    """Older name of `terminal_backend`. It takes precedence unless it is `default`."""
    terminal_timeout: float = _like(SandboxConfig, "execution_timeout_s", default=120.0)
    terminal_lifetime: float = _like(SandboxConfig, "idle_timeout", default=3600.0)
    tool_pool_size: int = _like(RunOptions, "concurrency", default=128)
    mcp: str | None = _like(RunOptions, "mcp")
    sandbox: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of sandboxes, by the name of their backend."""

    group_refills: int = Field(default=4, ge=0)
    """How many failed rollouts of a group may be replaced by new ones."""
    trainer_timeout: float = Field(default=1800, gt=0)
    """Seconds after which `serve` ends if the API does not answer, or the trainer makes no step."""
    trajectories_path: str | None = None
    """JSONL file with the record of every rollout, also of those that failed. None is a file beside the groups."""

    dataset_name: str | None = None
    """The dataset, as the environment's class reads it."""
    dataset_split: str = "train"
    """The split of the dataset."""
    prompt_field: str = "prompt"
    """The field of a row that holds the prompt."""

    def settings_of(self, model: type[BaseModel]) -> dict[str, Any]:
        """Return the values of the settings that `model` declares, by the names that they have there."""
        origins = [(name, each) for name, field in type(self).model_fields.items() for each in field.metadata]
        return {
            each.name: getattr(self, name) for name, each in origins if isinstance(each, Origin) and each.model is model
        }
