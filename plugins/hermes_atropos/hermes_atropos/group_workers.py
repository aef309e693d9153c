"""The workers of serve mode, which roll out groups and send them. Only this module changes Atropos' record of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

from atroposlib.envs.base import BaseEnv

from hermes_atropos.items import ItemSource
from hermes_atropos.metrics import Metrics
from hermes_core import HermesError

log = logging.getLogger(__name__)

T = TypeVar("T")


class GroupWorkers:
    """What atroposlib's base environment records of its workers: which run, on which item, and what was put back.

    Args:
        env: the environment that they work for.
        metrics: counts failed evaluations.
    """

    def __init__(self, env: BaseEnv, metrics: Metrics) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        """Those that have not ended, with those that Atropos has forgotten as it cancelled them."""
        self._env = env
        self._metrics = metrics

    async def known(self, work: Awaitable[T]) -> T:
        """Do a worker's work, in its task, which is remembered until it ends."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            return await work
        finally:
            self.tasks.discard(task)

    @property
    def idle(self) -> bool:
        """Return whether no worker runs."""
        return not self._env.workers

    async def step(self, status: Mapping[str, Any]) -> None:
        """Do what a step of the trainer asks for: an evaluation, a checkpoint and a log.

        Atropos cancels all workers for an evaluation, and puts their items back. A group that is being sent is no item
        any more: it would be neither sent nor rolled out again. So its worker is left alone.
        """
        env = self._env
        env.status_dict = status
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
        self._metrics.evaluation_failed()
        log.error("the evaluation at step %d failed: %s", self._env.curr_step, error, exc_info=error)

    async def fill(self, source: ItemSource) -> None:
        """Start as many as the queue has room for, as long as there are items."""
        env = self._env
        if len(env.workers) < env.max_num_workers and source.failure is None:
            try:
                await env.add_train_workers()
            except HermesError:
                if source.failure is None:
                    raise

    def put_back(self) -> None:
        """Give up the groups that are being rolled out, and put their items back; those that are being sent go on."""
        for running in self._env.running_items.values():
            self._env.backlog.append(running["item"])
            self._give_up(running["worker"])
        self._env.running_items = {}

    def end_overdue(self, limit_s: float) -> None:
        """Give up the groups that have taken longer, if there is a limit."""
        for key, running in list(self._env.running_items.items()):
            if 0 < limit_s < time.time() - running["start_time"]:
                log.warning("a group is not done after %g s, and is given up", limit_s)
                self._give_up(running["worker"])
                self._env.running_items.pop(key)

    def _give_up(self, worker: asyncio.Task[Any]) -> None:
        worker.cancel()
        self._env.workers.discard(worker)

    async def wait(self) -> None:
        """Wait until all have ended."""
        if self.tasks:
            await asyncio.wait(self.tasks)

    async def end(self) -> None:
        """Cancel what still runs, an evaluation too, and wait until its slots are released."""
        evaluation = self._env.eval_runner
        tasks = {*self.tasks, *self._env.workers, *([evaluation] if evaluation is not None else [])}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
