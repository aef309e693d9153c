"""Environments of hermes-rl for Tinker's cookbook: `Env`, `EnvGroupBuilder` and a dataset with its builder."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hermes_core import Record, StopReason
from hermes_tinker.stepped import Rollouts, SteppedRollout
from hermes_tinker.versions import COOKBOOK

with COOKBOOK.imports():
    import chz
    from tinker import ModelInput
    from tinker_cookbook.rl.types import (
        ActionExtra,
        Env,
        EnvGroupBuilder,
        InitialObservationOverflow,
        RLDataset,
        RLDatasetBuilder,
        StepResult,
    )

_STOPS: Mapping[str | None, str] = {
    StopReason.FINISHED: "completed",
    StopReason.MAX_TURNS: "max_turns",
    StopReason.LENGTH: "max_tokens",
    StopReason.CONTEXT_LENGTH: "context_overflow",
    StopReason.TIME_LIMIT: "rollout_timeout",
}
"""The cookbook's names of our stop reasons. It has no names for the other stop reasons."""


class CookbookEnv(Env):
    """One rollout, for which the cookbook samples. Tool calls and the verification happen here; the last step has the
    reward.

    A rollout that failed has no reward. Its step raises the failure, and the cookbook's strategy decides what follows.
    """

    def __init__(self, rollout: SteppedRollout) -> None:
        self._rollout = rollout
        self._stop_tokens = rollout.stop_tokens

    async def initial_observation(self) -> tuple[ModelInput, list[int]] | InitialObservationOverflow:
        """Begin the rollout in a fresh slot, and return its first prompt; or its reward, if it ended before.

        Raises:
            InfraError, SetupFailed, ModelError: the rollout could not begin, or its prompt is too long.
        """
        prompt = await self._rollout.begin()
        if prompt is not None:
            return ModelInput.from_ints(prompt), self._stop_tokens
        record = self._rollout.record()
        return InitialObservationOverflow(record.reward or 0.0, _metrics(record), _logs(record))

    async def step(self, action: list[int], *, extra: ActionExtra | None = None) -> StepResult:
        """Run the tool calls of an answer, and return the next prompt, or the reward.

        Raises:
            InfraError, SetupFailed, ModelError, VerifierError: the rollout failed, so it has no reward.
        """
        has_ended = bool(action) and action[-1] in self._stop_tokens
        prompt = await self._rollout.step(
            action, (extra or {}).get("stop_reason") or ("stop" if has_ended else "length")
        )
        if prompt is not None:
            return StepResult(0.0, False, ModelInput.from_ints(prompt), self._stop_tokens)
        record = self._rollout.record()
        reward, no_prompt = record.reward or 0.0, ModelInput.from_ints([])
        return StepResult(reward, True, no_prompt, self._stop_tokens, metrics=_metrics(record), logs=_logs(record))

    async def aclose(self) -> None:
        """End the rollout, if it has not ended. Idempotent."""
        await self._rollout.aclose()


def _metrics(record: Record) -> dict[str, float]:
    stop = _STOPS.get(record.stop_reason)
    return {"turns": len(record.turns), **({f"stop/{stop}": 1.0} if stop else {})}


def _logs(record: Record) -> dict[str, str]:
    return {"trajectory_id": record.trajectory_id, "stop_reason": str(record.stop_reason)}


@dataclass
class HermesGroupBuilder(EnvGroupBuilder):
    """Makes the rollouts of one item, which share a sandbox if they fit.

    Args:
        rollouts: opens the run. Copies of this object in one process share the run.
        item_id: the item.
        size: number of rollouts.
    """

    rollouts: Rollouts
    item_id: str
    size: int
    _open: list[CookbookEnv] = field(default_factory=list, init=False, repr=False)

    async def make_envs(self) -> Sequence[Env]:
        """Return environments whose rollouts have not begun. The first call in a process opens the run.

        Raises:
            HermesError: the run can't be opened.
        """
        run = await asyncio.to_thread(lambda: self.rollouts.run)
        group = f"{self.item_id}#{uuid.uuid4().hex[:8]}"
        environments = [CookbookEnv(SteppedRollout(run, self.item_id, group)) for _ in range(self.size)]
        self._open += environments
        return environments

    async def cleanup(self) -> None:
        """End the rollouts that have not ended. Idempotent."""
        environments, self._open = self._open, []
        await asyncio.gather(*(each.aclose() for each in environments))

    def logging_tags(self) -> list[str]:
        """Return the name of the environment."""
        return [self.rollouts.name]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": []}


@dataclass
class HermesDataset(RLDataset):
    """Batches of groups: the items of an environment in their order."""

    rollouts: Rollouts
    item_ids: Sequence[str]
    groups_per_batch: int
    group_size: int

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Return the groups of a batch. The last batch may have fewer."""
        begin = index * self.groups_per_batch
        item_ids = self.item_ids[begin : begin + self.groups_per_batch]
        return [HermesGroupBuilder(self.rollouts, item_id, self.group_size) for item_id in item_ids]

    def __len__(self) -> int:
        return math.ceil(len(self.item_ids) / self.groups_per_batch)


@chz.chz
class HermesDatasetBuilder(RLDatasetBuilder):
    """Opens an environment of hermes-rl, and makes a dataset of its items.

    Config(dataset_builder=HermesDatasetBuilder(environment="swe-smith", tokenizer="Qwen/Qwen3-8B", max_length=32768,
        env={"dataset_name": "tasks.jsonl"}, options={"backend": "docker", "concurrency": 64}), …)
    """

    environment: str
    tokenizer: str
    """Folder or hub name of the model's tokenizer."""
    max_length: int
    """Maximum number of tokens of a conversation."""
    env: Mapping[str, Any] = chz.field(default_factory=dict)
    """The environment's configuration."""
    agent: Mapping[str, Any] = chz.field(default_factory=dict)
    """More settings of the agent `model`, such as `max_turns` and `tool_call_parser`."""
    options: Mapping[str, Any] = chz.field(default_factory=dict)
    """Options of the run (`RunOptions`)."""
    groups_per_batch: int = 8
    group_size: int = 8

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Return the dataset for training, and None in place of a dataset for tests.

        Raises:
            HermesError: the run can't be opened.
        """
        agent = {**self.agent, "tokenizer_name": self.tokenizer, "max_token_length": self.max_length}
        rollouts = Rollouts(self.environment, self.env, agent, **self.options)
        run = await asyncio.to_thread(lambda: rollouts.run)
        return HermesDataset(rollouts, list(run.items), self.groups_per_batch, self.group_size), None
