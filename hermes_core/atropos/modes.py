"""Serve mode: keep a trainer's queue filled, and end cleanly whoever ends it: the trainer, the API, a signal."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from hermes_core.atropos.trainer import TrainerApi
from hermes_core.envs.runner import STOPPING
from hermes_core.errors import ConfigError, HermesError

if TYPE_CHECKING:
    from hermes_core.atropos.env import HermesAgentBaseEnv

log = logging.getLogger(__name__)

POLL_S = 0.2


async def serve(env: HermesAgentBaseEnv) -> None:
    """Register, and send groups until the trainer has had its steps.

    Raises:
        ConfigError: the servers give no tokens, no group could be sent, or sizes do not fit the trainer's.
        TrainerGone: there was no trainer for too long.
        HermesError: `get_next_item` failed, or there is not one item.
        UsageError, PolicyError, InfraError, ModelError: as `HermesAgentBaseEnv.running` does.
    """
    _check(env)
    config = env.config
    registration = {
        "max_token_length": config.max_token_length,
        "desired_name": config.wandb_name or env.name,
        "weight": config.inference_weight,
        "min_batch_allocation": config.min_batch_allocation,
        "group_size": config.group_size,
    }
    env.endless = True
    api = TrainerApi(config.rollout_server_url, registration, patience_s=config.trainer_timeout)
    env.api = api
    async with env.running(start=False), api:
        try:
            await _register(env, api)
            if env.wandb_run is not None:
                said = await api.wandb_info()
                await env.start_wandb(said["project"], said["group"])
            await env.start_sandboxes()
            await _work(env, api)
        finally:
            await _end_workers(env)
            await env.wandb_log()


def _check(env: HermesAgentBaseEnv) -> None:
    if not env.exact:
        raise ConfigError(
            "an openai server gives no tokens, and there is nothing to train on without them",
            hint="use --openai.server_type vllm or sglang; `process` works with any server",
        )
    if env.config.group_size == 1 and env.config.ensure_scores_are_not_same:
        raise ConfigError(
            "with group_size=1 and ensure_scores_are_not_same no group is ever sent: one score is always the same",
            hint="set --env.ensure_scores_are_not_same=false, or --env.group_size to 2 or more",
        )


async def _register(env: HermesAgentBaseEnv, api: TrainerApi) -> None:
    """Register, and take over what the trainer says."""
    said = await api.register()
    env.env_id, env.wandb_prepend = said["env_id"], said["wandb_name"]
    env.curr_step = said["starting_step"]
    env.checkpoint_dir, env.checkpoint_interval = said["checkpoint_dir"], said["checkpoint_interval"]
    if env.config.total_steps == -1:
        env.config.total_steps = said["num_steps"]
    if env.config.total_steps == -1:
        raise ConfigError("neither the trainer nor total_steps says how long to go on", hint="set --env.total_steps")
    info = await api.info()
    if info["batch_size"] != -1:
        env.config.batch_size = info["batch_size"]
    if info["max_token_len"] != -1:
        env.max_token_len = info["max_token_len"]
        env.limit_length(env.max_token_len)
    batch, group = env.config.batch_size, env.config.group_size
    if batch == -1:
        raise ConfigError("nothing says how large a batch is", hint="set batch_size in the trainer's registration")
    if batch % group:
        raise ConfigError(
            f"a batch of {batch} can't be made of groups of {group}: the API would hold them back for ever",
            hint="make batch_size a multiple of group_size",
        )
    if env.curr_step > 0:
        env.load_checkpoint()


async def _work(env: HermesAgentBaseEnv, api: TrainerApi) -> None:
    """Watch the queue, and start, stop and replace workers as it asks for."""
    known = api.env_id
    while True:
        if env.fatal is not None:
            if isinstance(env.fatal, STOPPING) and env.tasks:
                await asyncio.wait(env.tasks)  # groups that have all they need are sent
            raise env.fatal
        if env.source.failure is not None and not env.workers:  # nothing that runs is cancelled for it
            raise env.source.failure
        if api.env_id is None or api.env_id != known:
            await _register(env, api)
            known = api.env_id
        status = await api.status()
        if status is None:
            api.check_patience()
        else:
            if status["current_step"] < env.curr_step:
                api.forget(known)  # another API, that happens to have somebody of our id
                continue
            if _done(env, status):
                return
            await _follow(env, api, status)
        await asyncio.sleep(POLL_S)


def _done(env: HermesAgentBaseEnv, status: dict[str, Any]) -> bool:
    config = env.config
    queued: int = status["queue_size"] * config.group_size // config.batch_size
    return bool(status["current_step"] + queued > config.total_steps)


async def _follow(env: HermesAgentBaseEnv, api: TrainerApi, status: dict[str, Any]) -> None:
    """One round: evaluation and logs by the trainer's step, and as many workers as the queue has room for."""
    config = env.config
    stepped = status["current_step"] != env.curr_step
    env.status_dict = status
    await _step_checks(env)
    queued = status["queue_size"] * config.group_size
    full = 0 < config.max_batches_offpolicy * config.batch_size <= queued
    if config.min_batch_allocation is not None:
        share = config.min_batch_allocation * config.batch_size * config.max_batches_offpolicy
        full = full and status["self_queue_size"] * config.group_size >= share
    if stepped or not full:
        api.progressed()
    if full:
        # What is on its way would be too old when its turn comes. A group that is being sent is no item any more.
        for running in env.running_items.values():
            env.backlog.append(running["item"])
            _give_up(env, running["worker"])
        env.running_items = {}
        api.check_patience()
    elif len(env.workers) < env.max_num_workers and env.source.failure is None:
        try:
            await env.add_train_workers()
        except HermesError:
            if env.source.failure is None:
                raise
    _end_overdue(env)


async def _step_checks(env: HermesAgentBaseEnv) -> None:
    """Atropos' own: an evaluation, a checkpoint and a log, when the trainer has made the steps for it."""
    # For an evaluation it cancels all workers, and puts their items back. A group that is being sent is no item any
    # more: it would be neither sent nor rolled out again.
    sending = env.workers - {running["worker"] for running in env.running_items.values()}
    evaluation = env.eval_runner
    env.workers -= sending
    try:
        await env.env_step_checks()
    finally:
        env.workers |= {worker for worker in sending if not worker.done()}
    if env.eval_runner is not None and env.eval_runner is not evaluation:
        env.eval_runner.add_done_callback(partial(_evaluated, env))


def _evaluated(env: HermesAgentBaseEnv, evaluation: asyncio.Task[Any]) -> None:
    """Say that an evaluation failed, which nobody waits for. The training goes on."""
    if evaluation.cancelled() or (error := evaluation.exception()) is None:
        return
    env.metrics.evaluation_failed()
    log.error("the evaluation at step %d failed: %s", env.curr_step, error, exc_info=error)


def _end_overdue(env: HermesAgentBaseEnv) -> None:
    limit = env.config.worker_timeout
    for key, running in list(env.running_items.items()):
        if 0 < limit < time.time() - running["start_time"]:
            log.warning("a group is not done after %g s, and is given up", limit)
            _give_up(env, running["worker"])
            env.running_items.pop(key)


def _give_up(env: HermesAgentBaseEnv, worker: asyncio.Task[Any]) -> None:
    worker.cancel()
    env.workers.discard(worker)


async def _end_workers(env: HermesAgentBaseEnv) -> None:
    """Cancel what still runs, and wait until its slots are released."""
    tasks = {*env.tasks, *env.workers, *([env.eval_runner] if env.eval_runner is not None else [])}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
