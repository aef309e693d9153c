"""What of the original's contract a subclass can't override here, as one rollout, core's, does the work."""

from __future__ import annotations

from hermes_core.errors import ConfigError

_HOOKS = "setup_trajectory_workspace, compute_reward or verify_and_score_trajectory"

INSTEAD = {
    "collect_trajectory": f"{_HOOKS} for one rollout, or collect_trajectories for a group",
    "_use_sandbox_backend": "the settings terminal_backend and isolation: every rollout has a sandbox",
    "_collect_trajectory_local": f"{_HOOKS}, with the setting terminal_backend=local",
    "_collect_trajectory_sandbox": _HOOKS,
    "_run_agent_loop": "format_prompt and the settings of the agent, or collect_trajectories for a loop of your own",
    "_build_scored_item": "postprocess_histories",
}
"""Methods of Atropos, and of the original, that nothing here would call; and what stands in for them."""


def check_overrides(kind: type, base: type) -> None:
    """Refuse a subclass whose methods would be ignored without a word.

    Args:
        base: whose own methods are no overrides.

    Raises:
        ConfigError: it has one; names what to use.
    """
    for name, instead in INSTEAD.items():
        if getattr(kind, name, None) is not getattr(base, name, None):
            raise ConfigError(f"{kind.__qualname__}.{name} would never be called", hint=f"use {instead}")
