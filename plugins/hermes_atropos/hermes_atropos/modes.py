"""Two modes: `process` writes groups to a file; `Serving` keeps a trainer's queue filled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from atroposlib.envs.base import BaseEnv

from hermes_atropos.config import HermesAgentEnvConfig
from hermes_atropos.group_workers import GroupWorkers
from hermes_atropos.items import ItemSource
from hermes_atropos.reporting import RolloutReporter
from hermes_atropos.trainer import TrainerApi
from hermes_core import ConfigError, GroupRoller, HermesError, Item, together
from hermes_core.runs.runner import STOPPING

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Seconds between two looks at the queue."""


async def process(env: BaseEnv, steps: int, at_a_time: int, roller: GroupRoller, source: ItemSource) -> None:
    """Write a group for each of `steps` items, or of fewer if there are no more.

    A group that stays incomplete is counted. If sandboxes or the model are the cause, its item is rolled out again, a
    limited number of times. If getting the next item fails, the running groups are finished before the error is raised.

    Args:
        at_a_time: number of groups that run at the same time.

    Raises:
        UsageError, PolicyError, InfraError, ModelError: as `GroupRoller.roll` does.
        CostLimitReached, EndpointDown: no more groups can be rolled out. The running ones have ended.
        HermesError: getting the next item failed, or there are no items at all.
    """
    left = iter(range(steps))
    # The lock may be held during a network call. A task that gets items in advance for all workers would avoid this,
    # but would also take items that are never rolled out.
    source_lock = asyncio.Lock()

    async def next_item() -> Item | None:
        async with source_lock:  # subclasses need not support two calls at a time
            if source.failure is None:  # a failure must not cancel the running groups
                with contextlib.suppress(HermesError):
                    return await source()
        return None

    async def worker() -> None:
        for _ in left:
            if roller.fatal is not None or (item := await next_item()) is None:
                return
            while await _write_group(env, item) and roller.fatal is None:
                pass

    async with together() as workers:
        for _ in range(at_a_time):
            workers.create_task(worker())
    for failure in (roller.fatal, source.failure):
        if failure is not None:
            raise failure


async def _write_group(env: BaseEnv, item: Item) -> bool:
    """Roll out and write a group of the item. Return whether the item is to be rolled out again."""
    collected, returned_items = await env.collect_trajectories(item)
    if not collected:
        return bool(returned_items)
    ready = await env.postprocess_histories(collected)
    await env.handle_send_to_api(ready, item, do_send_to_api=False, abort_on_any_max_length_exceeded=False)
    env.curr_step += 1
    await env.wandb_log()
    return False


def check_servable(config: HermesAgentEnvConfig, *, exact: bool) -> None:
    """Refuse settings with which no group is ever sent.

    Raises:
        ConfigError: the servers return no tokens, or different scores are required of groups with only one rollout.
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


class ServingParts(Protocol):
    """The parts of an environment that `Serving` uses."""

    curr_step: int
    """The trainer's last step."""

    def apply_trainer_settings(self, registration: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """Apply the trainer's settings: the API's answers to the registration and to `/info`."""

    async def wandb_log(self) -> None:
        """Log the metrics since the last call."""


@dataclass(frozen=True)
class Serving:
    """Serve mode: keeps the trainer's queue filled, but not so full that groups get too old."""

    env: ServingParts
    config: HermesAgentEnvConfig
    api: TrainerApi
    roller: GroupRoller
    source: ItemSource
    reporter: RolloutReporter
    workers: GroupWorkers

    async def run(self) -> None:
        """Register, and send groups until the trainer has made its steps.

        Raises:
            ConfigError: sizes do not fit the trainer's.
            TrainerGone: the trainer was silent for too long.
            HermesError: getting the next item failed, or there are no items at all.
            UsageError, PolicyError, InfraError, ModelError: as `GroupRoller.roll` does.
        """
        try:
            await self._register()
            if self.reporter.wandb_run is not None:
                names = await self.api.wandb_info()
                await self.reporter.wandb_run.start(names["project"], names["group"])
            await self.roller.context.backend.start()
            await self._work()
        finally:
            await self.workers.end()
            await self.env.wandb_log()

    async def _register(self) -> None:
        """Register, and apply the trainer's settings.

        Raises:
            ConfigError: the number of steps or the size of a batch is unknown, or groups do not fit into a batch.
        """
        config = self.config
        self.env.apply_trainer_settings(await self.api.register(), await self.api.info())
        if config.total_steps == -1:
            raise ConfigError(
                "neither the trainer nor total_steps says how long to go on", hint="set --env.total_steps"
            )
        batch, group = config.batch_size, config.group_size
        if batch == -1:
            raise ConfigError("nothing says how large a batch is", hint="set batch_size in the trainer's registration")
        if batch % group:
            raise ConfigError(
                f"a batch of {batch} can't be made of groups of {group}: the API would hold them back forever",
                hint="make batch_size a multiple of group_size",
            )

    async def _work(self) -> None:
        """Watch the queue, and start and end workers by its size, until the trainer has made its steps."""
        api = self.api
        registered_id = api.env_id
        while True:
            if (fatal := self.roller.fatal) is not None:
                if isinstance(fatal, STOPPING):
                    await self.workers.wait()  # groups that are already complete are still sent
                raise fatal
            if self.source.failure is not None and self.workers.idle:  # running groups are finished first
                raise self.source.failure
            if api.env_id is None or api.env_id != registered_id:
                await self._register()
                registered_id = api.env_id
            status = await api.status()
            if status is None:
                api.check_patience()
            else:
                if status["current_step"] < self.env.curr_step:
                    api.forget(registered_id)  # this is a restarted API that has given our id to another environment
                    continue
                if is_done(self.config, status):
                    return
                await self._follow(status)
            await asyncio.sleep(POLL_S)

    async def _follow(self, status: dict[str, Any]) -> None:
        """Handle one status of the API: evaluate and log after a step, start workers if the queue has room."""
        config = self.config
        stepped = status["current_step"] != self.env.curr_step
        await self.workers.step(status)
        queued = status["queue_size"] * config.group_size
        full = 0 < config.max_batches_offpolicy * config.batch_size <= queued
        if config.min_batch_allocation is not None:
            share = config.min_batch_allocation * config.batch_size * config.max_batches_offpolicy
            full = full and status["self_queue_size"] * config.group_size >= share
        if stepped or not full:
            self.api.note_progress()
        if full:
            self.workers.return_items()  # the groups would be too old when the trainer takes them
            self.api.check_patience()
        else:
            await self.workers.fill(self.source)
        self.workers.end_overdue(config.worker_timeout)


def is_done(config: HermesAgentEnvConfig, status: dict[str, Any]) -> bool:
    """Return whether the trainer has made all its steps, or has the batches for them in its queue."""
    queued: int = status["queue_size"] * config.group_size // config.batch_size
    return bool(status["current_step"] + queued > config.total_steps)
