"""Refuses overrides of methods of Atropos that are never called here, because core's rollout does their work."""

from __future__ import annotations

import inspect

from hermes_core import ConfigError

_HOOKS = "setup_trajectory_workspace, compute_reward or verify_and_score_trajectory"

INSTEAD = {
    "collect_trajectory": f"{_HOOKS} for one rollout, or collect_trajectories for a group",
    "_use_sandbox_backend": "the settings terminal_backend and isolation: every rollout has a sandbox",
    "_collect_trajectory_local": f"{_HOOKS}, with the setting terminal_backend=local",
    "_collect_trajectory_sandbox": _HOOKS,
    "_run_agent_loop": "format_prompt and the settings of the agent, or collect_trajectories for a loop of your own",
    "_build_scored_item": "postprocess_histories",
    "_resolve_tools_for_group": "the settings enabled_toolsets, disabled_toolsets and distribution",
    "_use_managed_server": "the setting --openai.server_type: vllm and sglang give tokens",
    "_format_trajectory_for_display": "add_rollouts_for_wandb, or the records in trajectories_path",
    "setup_wandb": "the setting use_wandb, and wandb_log for metrics of your own",
    "register_env": "the settings wandb_name, inference_weight, min_batch_allocation and group_size",
    "_register_env": "the settings wandb_name, inference_weight, min_batch_allocation and group_size",
    "get_server_info": "the trainer's registration, whose batch_size and max_token_len are taken",
    "get_status": "status_dict, which has the API's last answer",
    "_post_json_with_compression": "handle_send_to_api, or postprocess_histories for what is sent",
    "_run_evaluate": "evaluate",
    "get_cli_serve_config_cls": "env_config_cls and config_init, which the command line reads",
    "get_cli_process_config_cls": "env_config_cls and config_init, which the command line reads",
    "get_cli_evaluate_config_cls": "env_config_cls and config_init, which the command line reads",
    "server_cls": "the setting --openai.server_type",
}
"""Methods of Atropos, and of the `HermesAgentBaseEnv` of hermes-agent, that are never called here. Each has a hint on
what to use instead."""


def check_overrides(kind: type, base: type) -> None:
    """Refuse a subclass that overrides a method which is never called.

    Args:
        base: the class that the methods are compared with.

    Raises:
        ConfigError: the subclass overrides such a method. The hint names the replacement.
    """
    for name, instead in INSTEAD.items():
        if inspect.getattr_static(kind, name, None) is not inspect.getattr_static(base, name, None):
            raise ConfigError(f"{kind.__qualname__}.{name} would never be called", hint=f"use {instead}")
