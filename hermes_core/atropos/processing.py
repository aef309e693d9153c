"""Process mode: groups into a JSONL file, some of them at a time, and an HTML page of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from hermes_core.atropos.display import write_page
from hermes_core.errors import ConfigError, HermesError

if TYPE_CHECKING:
    from hermes_core.atropos.env import HermesAgentBaseEnv
    from hermes_core.environment import Item

log = logging.getLogger(__name__)


async def process(env: HermesAgentBaseEnv) -> None:
    """Take `total_steps` items, or as many as there are, and roll out a group of each.

    A group that stays short is counted; the item is rolled out again some times if nothing of its own was the reason,
    and then the next one is taken: nothing is tried for ever. Where there is no next item for a reason of its own, the
    groups that run are finished before that is raised.

    Raises:
        UsageError, PolicyError, InfraError, ModelError: as `HermesAgentBaseEnv.running` does.
        CostLimitReached, EndpointDown: no more could be rolled out; what was begun has ended.
        HermesError: `get_next_item` failed, or there is not one item.
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
                if env.fatal is not None:
                    return
                async with asking:  # subclasses need not expect two calls at a time
                    item = await _next(env)
                if item is None:
                    return
                while await _one(env, item) and env.fatal is None:
                    pass

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(at_a_time):
                    workers.create_task(worker())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            if env.metrics.pending:
                await env.wandb_log()
        if env.fatal is not None:
            raise env.fatal
        if env.source.failure is not None:
            raise env.source.failure
    if config.data_path_to_save_groups is not None:
        groups = Path(config.data_path_to_save_groups)
        page = groups.with_suffix(".html")
        await asyncio.to_thread(write_page, groups, page, f"{env.name}: {groups.name}")
        log.info("wrote %s and %s", groups, page)


async def _next(env: HermesAgentBaseEnv) -> Item | None:
    """The next item; None as well once there was a failure, which must not cancel the groups that run."""
    if env.source.failure is not None:
        return None
    with contextlib.suppress(HermesError):
        return await env.source()
    return None


async def _one(env: HermesAgentBaseEnv, item: Item) -> bool:
    """Roll out a group of the item; whether it was put back."""
    collected, put_back = await env.collect_trajectories(item)
    if not collected:
        return bool(put_back)
    ready = await env.postprocess_histories(collected)
    await env.handle_send_to_api(ready, item, do_send_to_api=False, abort_on_any_max_length_exceeded=False)
    env.curr_step += 1
    await env.wandb_log()
    return False
