"""The rollout worker for `AsyncGRPOTrainer`: groups of the exact loop, for as long as the trainer trains."""

from __future__ import annotations

import asyncio
import itertools
import queue
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from hermes_core import Group, TaskSet, describe, together
from hermes_trl.rollouts import check_exact, ids_and_mask
from hermes_trl.run import TrlRun

FULL_S = 0.05
"""Seconds between looks at a full queue."""

BEAT_S = 0.5
"""Seconds between two beats. They show the trainer that the event loop runs."""


class HermesRolloutWorker:
    """Rolls out groups without end, several at a time; implements TRL's `RolloutWorkerProtocol`.

    Advantages are computed within a group, also if some of its rollouts failed. A group with fewer than two scored
    rollouts is left out. Every sequence of a rollout is trained on, with the rollout's advantage.

    Args:
        run: opens the run, when the trainer starts the worker.
        num_generations: rollouts of a group.
        groups: maximum number of groups that are rolled out at the same time.
        queue_size: number of queued sequences from which on no new group begins.
        temperature: the temperature at which the trainer computes logprobs.
    """

    def __init__(
        self,
        run: Callable[[], TrlRun],
        num_generations: int,
        *,
        groups: int = 8,
        queue_size: int = 256,
        temperature: float = 1.0,
    ) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._open = run
        self._run: TrlRun | None = None
        self._size, self._groups = num_generations, groups
        self._most, self._temperature = queue_size, temperature
        self._tasks = TaskSet()
        self._working: asyncio.Task[None] | None = None
        self._version = 0
        self._beat = time.monotonic()
        self._fruitless: tuple[float, str] | None = None
        """Time and reason of the first in the current row of groups without a sample; None if the last group gave
        samples."""

    def start(self) -> None:
        """Start rolling out, in the run's own thread.

        Raises:
            HermesError: the run can't be opened, or is not token-exact.
        """
        self._run = self._open()
        check_exact(self._run, self._temperature)
        self._run.call(self._begin())

    def stop(self) -> None:
        """Cancel the running rollouts. Idempotent."""
        if self._run is not None and not self._run.closed:
            self._run.call(self._tasks.aclose())

    def update_model_version(self, model_version: int) -> None:
        """Set the version of the model that is recorded in the samples of later groups."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Check that rollouts go on and give samples. The duration of a single rollout is not checked.

        Raises:
            RuntimeError: the worker has failed; or for `stale_after_s` seconds the event loop has not run, or every
                group that ended had too few scored rollouts.
        """
        working, now = self._working, time.monotonic()
        if working is not None and working.done() and not working.cancelled():
            error = working.exception()
            raise RuntimeError(f"the rollouts ended: {describe(error) if error else 'no items'}") from error
        if now - self._beat > stale_after_s:
            raise RuntimeError(f"the event loop of the rollouts has not run for {now - self._beat:.0f} s")
        if self._fruitless is not None and now - self._fruitless[0] > stale_after_s:
            since, reason = self._fruitless
            raise RuntimeError(f"no group could be trained on for {now - since:.0f} s. The first had: {reason}")

    async def _begin(self) -> None:
        self._tasks.spawn(self._keep_beating(), "the beat of the rollouts for TRL")
        self._working = self._tasks.spawn(self._work(), "rollouts for TRL")

    async def _keep_beating(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(BEAT_S)

    async def _work(self) -> None:
        assert self._run is not None  # see start
        numbers = itertools.count()
        items = itertools.cycle(list(self._run.items))

        async def work() -> None:
            for item_id in items:
                while self.rollout_buffer.qsize() >= self._most:  # noqa: ASYNC110 (TRL sets no event)
                    await asyncio.sleep(FULL_S)
                await self._roll(item_id, next(numbers))

        async with together() as tasks:
            for _ in range(self._groups):
                tasks.create_task(work())

    async def _roll(self, item_id: str, number: int) -> None:
        assert self._run is not None  # see start
        version = self._version
        (group,) = await self._run.roll([(item_id, self._size)])
        self.metrics_queue.put({"hermes/unscored": (len(group.failed), len(group.failed) + len(group.kept))})
        samples = list(_samples(group, version, number))
        for sample in samples:
            self.rollout_buffer.put(sample)
        if samples:
            self._fruitless = None
        elif self._fruitless is None:
            reasons = [str(rolled.refused) for rolled in group.failed[-1:]]
            self._fruitless = time.monotonic(), "; ".join(reasons) or "one rollout, which has nothing to compare with"


def _samples(group: Group, version: int, number: int) -> Iterator[Any]:
    """Yield the sequences of a group as TRL's `RolloutSample`s."""
    import numpy as np
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    rewards = [rolled.reward or 0.0 for rolled in group.kept]  # a kept rollout has a reward
    if len(rewards) < 2:
        return
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    for rolled, reward in zip(group.kept, rewards, strict=True):
        for sequence in rolled.sequences:
            tokens, mask, logprobs = ids_and_mask(sequence)
            yield RolloutSample(
                prompt=list(rolled.record.messages[:1]),
                completion=list(rolled.record.messages[1:]),
                input_ids=np.asarray(tokens, np.int64),
                completion_mask=np.asarray(mask, np.int64),
                old_log_probs=np.asarray(logprobs, np.float32),
                advantage=(reward - mean) / (deviation + 1e-8),
                model_version=version,
                group_id=number,
                metrics={"reward": reward, "reward_std": deviation},
                enqueued_at=time.time(),
            )
