"""The modes: `process` writes groups into a file; `Serving` keeps a trainer's queue filled.

Of an environment they see what atroposlib's own base class has: its workers, its items, its step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.base import BaseEnv

from hermes_core.atropos.config import HermesAgentEnvConfig
from hermes_core.atropos.items import ItemSource
from hermes_core.atropos.reporting import Reporter
from hermes_core.atropos.trainer import TrainerApi
from hermes_core.environment import Item
from hermes_core.envs.group import GroupRoller
from hermes_core.envs.runner import STOPPING
from hermes_core.errors import ConfigError, HermesError

log = logging.getLogger(__name__)

POLL_S = 0.2


async def process(env: BaseEnv, steps: int, at_a_time: int, roller: GroupRoller, source: ItemSource) -> None:
    """Take so many items, or as many as there are, and write a group of each.

    A group that stays short is counted; the item is rolled out again some times if nothing of its own was the reason,
    and then the next one is taken: nothing is tried for ever. Where there is no next item for a reason of its own, the
    groups that run are finished before that is raised.

    Raises:
        UsageError, PolicyError, InfraError, ModelError: as `GroupRoller.roll` does.
        CostLimitReached, EndpointDown: no more could be rolled out; what was begun has ended.
        HermesError: there is no next item for a reason of its own, or not one item.
    """
    left = iter(range(steps))
    # Held over what may be a network call, and no single-flight: each worker wants an item of its own. A task that
    # asks ahead for all of them would take items that nobody rolls out.
    asking = asyncio.Lock()

    async def next_item() -> Item | None:
        async with asking:  # subclasses need not expect two calls at a time
            if source.failure is None:  # which must not cancel the groups that run
                with contextlib.suppress(HermesError):
                    return await source()
        return None

    async def worker() -> None:
        for _ in left:
            if roller.fatal is not None or (item := await next_item()) is None:
                return
            while await _write_group(env, item) and roller.fatal is None:
                pass

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(at_a_time):
                workers.create_task(worker())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    for failure in (roller.fatal, source.failure):
        if failure is not None:
            raise failure


async def _write_group(env: BaseEnv, item: Item) -> bool:
    """Roll out a group of the item; whether it was put back."""
    collected, put_back = await env.collect_trajectories(item)
    if not collected:
        return bool(put_back)
    ready = await env.postprocess_histories(collected)
    await env.handle_send_to_api(ready, item, do_send_to_api=False, abort_on_any_max_length_exceeded=False)
    env.curr_step += 1
    await env.wandb_log()
    return False


def check_servable(config: HermesAgentEnvConfig, *, exact: bool) -> None:
    """Refuse what would send nothing.

    Raises:
        ConfigError: the servers give no tokens, or no group would ever be sent.
    """
    if not exact:
        raise ConfigError(
            "an openai server gives no tokens, and there is nothing to train on without them",
            hint="use --openai.server_type vllm or sglang; `process` works with any server",
        )
    if config.group_size == 1 and config.ensure_scores_are_not_same:
        raise ConfigError(
            "with group_size=1 and ensure_scores_are_not_same no group is ever sent: one score is always the same",
            hint="set --env.ensure_scores_are_not_same=false, or --env.group_size to 2 or more",
        )


@dataclass(frozen=True)
class Serving:
    """Serve mode at work."""

    env: BaseEnv
    config: HermesAgentEnvConfig
    api: TrainerApi
    roller: GroupRoller
    source: ItemSource
    reporter: Reporter
    tasks: Collection[asyncio.Task[Any]]
    """Workers that have not ended, those that Atropos has forgotten included."""

    async def run(self) -> None:
        """Register, and send groups until the trainer has had its steps.

        Raises:
            ConfigError: sizes do not fit the trainer's.
            TrainerGone: there was no trainer for too long.
            HermesError: there is no next item for a reason of its own, or not one item.
            UsageError, PolicyError, InfraError, ModelError: as `GroupRoller.roll` does.
        """
        try:
            await self._register()
            if self.reporter.wandb_run is not None:
                said = await self.api.wandb_info()
                await self.reporter.wandb_run.start(said["project"], said["group"])
            await self.roller.context.backend.start()
            await self._work()
        finally:
            await self._end_workers()
            await self.env.wandb_log()

    async def _register(self) -> None:
        """Register, and take over what the trainer says."""
        env, config = self.env, self.config
        said = await self.api.register()
        env.env_id, env.wandb_prepend = said["env_id"], said["wandb_name"]
        env.curr_step = said["starting_step"]
        env.checkpoint_dir, env.checkpoint_interval = said["checkpoint_dir"], said["checkpoint_interval"]
        if config.total_steps == -1:
            config.total_steps = said["num_steps"]
        if config.total_steps == -1:
            raise ConfigError(
                "neither the trainer nor total_steps says how long to go on", hint="set --env.total_steps"
            )
        info = await self.api.info()
        if info["batch_size"] != -1:
            config.batch_size = info["batch_size"]
        if info["max_token_len"] != -1:
            env.max_token_len = info["max_token_len"]
            self._limit_length(env.max_token_len)
        batch, group = config.batch_size, config.group_size
        if batch == -1:
            raise ConfigError("nothing says how large a batch is", hint="set batch_size in the trainer's registration")
        if batch % group:
            raise ConfigError(
                f"a batch of {batch} can't be made of groups of {group}: the API would hold them back for ever",
                hint="make batch_size a multiple of group_size",
            )
        if env.curr_step > 0:
            env.load_checkpoint()

    def _limit_length(self, tokens: int) -> None:
        """Keep sequences shorter than the trainer's limit, so that it does not drop their whole group."""
        agent = self.roller.context.agent
        if hasattr(agent, "max_length"):
            agent.max_length = min(self.config.max_token_length, tokens - 1)

    async def _work(self) -> None:
        """Watch the queue, and start, stop and replace workers as it asks for."""
        api = self.api
        known = api.env_id
        while True:
            if (fatal := self.roller.fatal) is not None:
                if isinstance(fatal, STOPPING) and self.tasks:
                    await asyncio.wait(self.tasks)  # groups that have all they need are sent
                raise fatal
            if self.source.failure is not None and not self.env.workers:  # nothing that runs is cancelled for it
                raise self.source.failure
            if api.env_id is None or api.env_id != known:
                await self._register()
                known = api.env_id
            status = await api.status()
            if status is None:
                api.check_patience()
            else:
                if status["current_step"] < self.env.curr_step:
                    api.forget(known)  # another API, that happens to have somebody of our id
                    continue
                if is_done(self.config, status):
                    return
                await self._follow(status)
            await asyncio.sleep(POLL_S)

    async def _follow(self, status: dict[str, Any]) -> None:
        """One round: evaluation and logs by the trainer's step, and as many workers as the queue has room for."""
        env, config = self.env, self.config
        stepped = status["current_step"] != env.curr_step
        env.status_dict = status
        await self._step_checks()
        queued = status["queue_size"] * config.group_size
        full = 0 < config.max_batches_offpolicy * config.batch_size <= queued
        if config.min_batch_allocation is not None:
            share = config.min_batch_allocation * config.batch_size * config.max_batches_offpolicy
            full = full and status["self_queue_size"] * config.group_size >= share
        if stepped or not full:
            self.api.progressed()
        if full:
            # What is on its way would be too old when its turn comes. A group that is being sent is no item any more.
            for running in env.running_items.values():
                env.backlog.append(running["item"])
                self._give_up(running["worker"])
            env.running_items = {}
            self.api.check_patience()
        elif len(env.workers) < env.max_num_workers and self.source.failure is None:
            try:
                await env.add_train_workers()
            except HermesError:
                if self.source.failure is None:
                    raise
        self._end_overdue()

    async def _step_checks(self) -> None:
        """Atropos' own: an evaluation, a checkpoint and a log, when the trainer has made the steps for it."""
        # For an evaluation it cancels all workers, and puts their items back. A group that is being sent is no item any
        # more: it would be neither sent nor rolled out again.
        env = self.env
        sending = env.workers - {running["worker"] for running in env.running_items.values()}
        evaluation = env.eval_runner
        env.workers -= sending
        try:
            await env.env_step_checks()
        finally:
            env.workers |= {worker for worker in sending if not worker.done()}
        if env.eval_runner is not None and env.eval_runner is not evaluation:
            env.eval_runner.add_done_callback(self._evaluated)

    def _evaluated(self, evaluation: asyncio.Task[Any]) -> None:
        """Say that an evaluation failed, which nobody waits for. The training goes on."""
        if evaluation.cancelled() or (error := evaluation.exception()) is None:
            return
        self.reporter.training.evaluation_failed()
        log.error("the evaluation at step %d failed: %s", self.env.curr_step, error, exc_info=error)

    def _end_overdue(self) -> None:
        limit = self.config.worker_timeout
        for key, running in list(self.env.running_items.items()):
            if 0 < limit < time.time() - running["start_time"]:
                log.warning("a group is not done after %g s, and is given up", limit)
                self._give_up(running["worker"])
                self.env.running_items.pop(key)

    def _give_up(self, worker: asyncio.Task[Any]) -> None:
        worker.cancel()
        self.env.workers.discard(worker)

    async def _end_workers(self) -> None:
        """Cancel what still runs, and wait until its slots are released."""
        evaluation = self.env.eval_runner
        tasks = {*self.tasks, *self.env.workers, *([evaluation] if evaluation is not None else [])}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def is_done(config: HermesAgentEnvConfig, status: dict[str, Any]) -> bool:
    """Whether the trainer has, in its queue as well, all the batches that it is to have."""
    queued: int = status["queue_size"] * config.group_size // config.batch_size
    return bool(status["current_step"] + queued > config.total_steps)
