"""What an environment tells while it runs: JSON lines beside its records, and a wandb run where that is asked for."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hermes_core.atropos.display import trajectory_text
from hermes_core.atropos.log import JsonLines
from hermes_core.atropos.metrics import lengths, plain_only
from hermes_core.atropos.wandb_run import WandbRun, check_login
from hermes_core.envs.trajectory import plain

if TYPE_CHECKING:
    from hermes_core.atropos.env import HermesAgentBaseEnv
    from hermes_core.runtime import Runtime

log = logging.getLogger(__name__)


async def new_run(env: HermesAgentBaseEnv, runtime: Runtime) -> WandbRun:
    """The environment's wandb run, not begun yet.

    Raises:
        ConfigError: wandb can't be used as it is set up here.
    """
    await check_login()
    shown = plain(env.config.model_dump(mode="json"), runtime.redact)
    return WandbRun(env.config.wandb_name or str(env.name), shown)


def keep_for_table(env: HermesAgentBaseEnv, scored: Mapping[str, Any]) -> None:
    """Keep some rollouts of a group for the next table, in readable form."""
    if env.wandb_run is None:
        return
    most = env.config.num_rollouts_per_group_for_logging
    pairs = list(zip(scored["messages"], scored["scores"], strict=True))
    shown = pairs if most == -1 else pairs[:most]
    env.rollouts_for_wandb.append([(trajectory_text(messages), score) for messages, score in shown])
    del env.rollouts_for_wandb[: -env.config.num_rollouts_to_keep]


async def tell(env: HermesAgentBaseEnv, more: Mapping[str, Any]) -> None:
    """Tell what happened since the last time, and `more`."""
    counts = env.api.counts if env.api is not None else None
    told = {**env.metrics.take(counts), **lengths(env.completion_lengths, env.max_token_len), **more}
    env.completion_lengths = []
    shown = plain_only(told)
    if env.trajectories is not None:
        with JsonLines(env.trajectories.path.with_suffix(".metrics.jsonl")) as lines:
            lines.write({"step": env.curr_step, **shown})
    log.info("step %d: %s", env.curr_step, shown)
    if env.wandb_run is not None:
        told = env.perf_stats(await env.create_rollout_table(told))
        env.rollouts_for_wandb = []
        prefix = "" if env.wandb_prepend is None else f"{env.wandb_prepend}_"  # as run-api named it
        await env.wandb_run.log({prefix + key: value for key, value in told.items()}, env.curr_step)
