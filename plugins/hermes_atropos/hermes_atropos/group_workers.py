"""The workers of serve mode. Each worker rolls out a group and sends it. Only this module changes Atropos' lists of
workers."""

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
    """Starts and ends the workers of an environment, and keeps the lists that Atropos' base class has of them: the
    running workers, their items, and the items to be rolled out again.

    Args:
        env: the environment whose groups the workers roll out.
        metrics: counts failed evaluations.
    """

    def __init__(self, env: BaseEnv, metrics: Metrics) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        """The tasks of workers that have not ended. Atropos forgets a worker as soon as it cancels it."""
        self._env = env
        self._metrics = metrics

    async def track(self, work: Awaitable[T]) -> T:
        """Await the work of a worker. Its task, the current one, is in `tasks` until the work ends."""
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
        """Call Atropos' checks for a step of the trainer: they evaluate, write checkpoints and log when it is time.

        For an evaluation, Atropos cancels all workers and rolls out their items again. Atropos has no item for a worker
        that is sending a group, so the group would be lost. Therefore such workers are hidden from Atropos meanwhile.

        Args:
            status: the API's answer to `/status-env`.
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
            env.eval_runner.add_done_callback(self._report_evaluation)

    def _report_evaluation(self, evaluation: asyncio.Task[Any]) -> None:
        """Count and log an evaluation that failed, because nobody awaits it. The training goes on."""
        if evaluation.cancelled() or (error := evaluation.exception()) is None:
            return
        self._metrics.count_failed_evaluation()
        log.error("the evaluation at step %d failed: %s", self._env.curr_step, error, exc_info=error)

    async def fill(self, source: ItemSource) -> None:
        """Start as many workers as Atropos asks for, as long as there are items."""
        env = self._env
        if len(env.workers) < env.max_num_workers and source.failure is None:
            try:
                await env.add_train_workers()
            except HermesError:
                if source.failure is None:
                    raise

    def return_items(self) -> None:
        """Cancel the workers that roll out a group, and roll out their items again. Workers that send a group go on."""
        for running in self._env.running_items.values():
            self._env.backlog.append(running["item"])
            self._cancel(running["worker"])
        self._env.running_items = {}

    def end_overdue(self, limit_s: float) -> None:
        """Cancel workers that have been rolling out a group for more than `limit_s` seconds. 0 or less is no limit."""
        for key, running in list(self._env.running_items.items()):
            if 0 < limit_s < time.time() - running["start_time"]:
                log.warning("a group is not done after %g s, and is given up", limit_s)
                self._cancel(running["worker"])
                self._env.running_items.pop(key)

    def _cancel(self, worker: asyncio.Task[Any]) -> None:
        worker.cancel()
        self._env.workers.discard(worker)

    async def wait(self) -> None:
        """Wait until all workers have ended."""
        if self.tasks:
            await asyncio.wait(self.tasks)

    async def end(self) -> None:
        """Cancel the workers and the evaluation that still run, and wait until their slots are released."""
        evaluation = self._env.eval_runner
        tasks = {*self.tasks, *self._env.workers, *([evaluation] if evaluation is not None else [])}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
