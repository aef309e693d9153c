"""The modes: `process` writes groups into a file; `Serving` keeps a trainer's queue filled."""

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


async def process(env: BaseEnv, steps: int, at_a_time: int, roller: GroupRoller, source: ItemSource) -> None:
    """Take `steps` items, or fewer if the dataset ends, and write a group of each.

    A group that stays too small is counted. If the item was not the reason, it is rolled out again a limited number of
    times; then the next one is taken. If getting the next item fails, the running groups are finished before that
    error is raised.

    Raises:
        UsageError, PolicyError, InfraError, ModelError: as `GroupRoller.roll` does.
        CostLimitReached, EndpointDown: no more could be rolled out; what was started has ended.
        HermesError: getting the next item failed, or there is not a single item.
    """
    left = iter(range(steps))
    # This lock is held during what may be a network call. It is not a shared attempt, as each worker needs its own
    # item. A task that asks ahead for all of them would take items that nobody rolls out.
    asking = asyncio.Lock()

    async def next_item() -> Item | None:
        async with asking:  # subclasses need not support two calls at a time
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


class ServingParts(Protocol):
    """The parts of an environment that serving uses."""

    curr_step: int
    """The trainer's last step."""

    def take_over(self, said: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """Take over what the trainer said when the environment registered, and of its sizes."""

    async def wandb_log(self) -> None:
        """Tell what happened since the last time."""


@dataclass(frozen=True)
class Serving:
    """Runs serve mode: keeps the trainer's queue filled, but never too full."""

    env: ServingParts
    config: HermesAgentEnvConfig
    api: TrainerApi
    roller: GroupRoller
    source: ItemSource
    reporter: RolloutReporter
    workers: GroupWorkers

    async def run(self) -> None:
        """Register, and send groups until the trainer has had its steps.

        Raises:
            ConfigError: sizes do not fit the trainer's.
            TrainerGone: there was no trainer for too long.
            HermesError: getting the next item failed, or there is not a single item.
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
            await self.workers.end()
            await self.env.wandb_log()

    async def _register(self) -> None:
        """Register, and have the environment take over what the trainer says."""
        config = self.config
        self.env.take_over(await self.api.register(), await self.api.info())
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
        """Watch the queue, and start, stop and replace workers as it asks for."""
        api = self.api
        known = api.env_id
        while True:
            if (fatal := self.roller.fatal) is not None:
                if isinstance(fatal, STOPPING):
                    await self.workers.wait()  # send the groups that have all they need
                raise fatal
            if self.source.failure is not None and self.workers.idle:  # running groups are finished first
                raise self.source.failure
            if api.env_id is None or api.env_id != known:
                await self._register()
                known = api.env_id
            status = await api.status()
            if status is None:
                api.check_patience()
            else:
                if status["current_step"] < self.env.curr_step:
                    api.forget(known)  # another API, which by chance knows our id
                    continue
                if is_done(self.config, status):
                    return
                await self._follow(status)
            await asyncio.sleep(POLL_S)

    async def _follow(self, status: dict[str, Any]) -> None:
        """Run one round: evaluate and log by the trainer's step, and start the workers that the queue has room for."""
        config = self.config
        stepped = status["current_step"] != self.env.curr_step
        await self.workers.step(status)
        queued = status["queue_size"] * config.group_size
        full = 0 < config.max_batches_offpolicy * config.batch_size <= queued
        if config.min_batch_allocation is not None:
            share = config.min_batch_allocation * config.batch_size * config.max_batches_offpolicy
            full = full and status["self_queue_size"] * config.group_size >= share
        if stepped or not full:
            self.api.progressed()
        if full:
            self.workers.put_back()  # running groups would be too old when the trainer takes them
            self.api.check_patience()
        else:
            await self.workers.fill(self.source)
        self.workers.end_overdue(config.worker_timeout)


def is_done(config: HermesAgentEnvConfig, status: dict[str, Any]) -> bool:
    """Return whether the trainer has, in its queue as well, all the batches that it is to have."""
    queued: int = status["queue_size"] * config.group_size // config.batch_size
    return bool(status["current_step"] + queued > config.total_steps)
