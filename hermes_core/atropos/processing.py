"""Process mode: groups into a JSONL file, some of them at a time, and an HTML page of them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from hermes_core.atropos.display import write_page
from hermes_core.errors import ConfigError

if TYPE_CHECKING:
    from hermes_core.atropos.env import HermesAgentBaseEnv
    from hermes_core.envs.base import Item

log = logging.getLogger(__name__)


async def process(env: HermesAgentBaseEnv) -> None:
    """Take `total_steps` items, or as many as there are, and roll out a group of each.

    A group that stays short is counted, and the next item is taken: nothing is tried for ever.

    Raises:
        UsageError, PolicyError, InfraError, ModelError: as `HermesAgentBaseEnv.running` does.
    """
    config = env.config
    if config.total_steps < 1:
        raise ConfigError(f"total_steps is {config.total_steps}", hint="name the number of groups")
    at_a_time = max(1, min(env.max_num_workers, config.total_steps))
    async with env.running(groups=at_a_time):
        left = iter(range(config.total_steps))
        # Held over what may be a network call, and no single-flight: each worker wants an item of its own. A task that
        # asks ahead for all of them would take items that nobody rolls out.
        asking = asyncio.Lock()

        async def worker() -> None:
            for _ in left:
                async with asking:  # subclasses need not expect two calls at a time
                    item = await env.get_next_item()
                if item is None:
                    return
                await _one(env, item)

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(at_a_time):
                    workers.create_task(worker())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            if env.metrics.pending:
                await env.wandb_log()
    if config.data_path_to_save_groups is not None:
        groups = Path(config.data_path_to_save_groups)
        page = groups.with_suffix(".html")
        await asyncio.to_thread(write_page, groups, page, f"{env.name}: {groups.name}")
        log.info("wrote %s and %s", groups, page)


async def _one(env: HermesAgentBaseEnv, item: Item) -> None:
    collected, _ = await env.collect_trajectories(item)
    if not collected:
        return
    ready = await env.postprocess_histories(collected)
    await env.handle_send_to_api(ready, item, do_send_to_api=False, abort_on_any_max_length_exceeded=False)
    env.curr_step += 1
    await env.wandb_log()
