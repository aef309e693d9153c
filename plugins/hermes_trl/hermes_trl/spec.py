"""The spec: one object with all arguments of TRL's trainers that concern the environment, like TRL's `HarborSpec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Self

from hermes_core import Environment, RunOptions, SharedRun, validate_data
from hermes_trl.environment import (
    RewardFunction,
    RolloutEnvironment,
    environment_class,
    environment_reward,
    only_scored,
)
from hermes_trl.rollouts import rollout_columns
from hermes_trl.run import TrlRun
from hermes_trl.worker import HermesRolloutWorker


class HermesSpec:
    """An environment of hermes-rl for TRL's trainers.

        with HermesSpec("swe-smith", backend="docker", env={"dataset_name": "tasks.jsonl"}, concurrency=32) as spec:
            GRPOTrainer(
                model="Qwen/Qwen3-4B",
                args=GRPOConfig(per_device_train_batch_size=32, num_generations=8),
                train_dataset=spec.train_dataset,
                environment_factory=spec.environment_factory,
                reward_funcs=spec.reward_funcs,
            ).train()

    With `agent`, `rollout_func=spec.rollout_func` takes the place of the factory. Without `with`, the sandboxes are
    started at the first rollout, and ended when the program ends.

    Args:
        environment: the environment's name, or an instance.
        env: the environment's configuration, if it is given by name.
        agent: settings of the agent, whose rollouts are token-exact: `base_url`, `tokenizer_name`, …, and `name` if the
            agent is a program. Without `agent`, TRL runs the model.
        rewards: more reward functions. A rollout without a reward of the environment gets no reward of these, either.
        refills: number of failed rollouts of a group that `rollout_func` and `rollout_worker` may replace.
        options: options of the run (`RunOptions`): `backend`, `isolation`, `rollout_timeout`, … `concurrency` is the
            number of rollouts at the same time, in each process.

    Raises:
        UsageError: an option does not exist, or has a wrong value.
    """

    def __init__(
        self,
        environment: str | Environment,
        *,
        env: Mapping[str, Any] | None = None,
        agent: Mapping[str, Any] | None = None,
        rewards: Sequence[RewardFunction] = (),
        refills: int = 4,
        **options: Any,
    ) -> None:
        self._rewards = tuple(rewards)
        run_options = validate_data(RunOptions, options, "the options of HermesSpec")
        self._shared = SharedRun(partial(TrlRun, environment, env, agent, run_options, refills))

    @property
    def run(self) -> TrlRun:
        """Return the open run of this process; the first use opens it.

        Raises:
            HermesError: the run can't be opened.
        """
        return self._shared.run

    @cached_property
    def train_dataset(self) -> Any:
        """Return a `datasets.Dataset` with the column `prompt`: the prompt of each item, as messages."""
        from datasets import Dataset

        return Dataset.from_list([{"prompt": self.run.prompt(item_id)} for item_id in self.run.items])

    def environment_factory(self) -> RolloutEnvironment:
        """Return a new environment whose model TRL runs, for `environment_factory` of `GRPOTrainer`.

        Raises:
            UsageError: as `environment_class` says.
        """
        return self._environment_class(self.run)

    @cached_property
    def _environment_class(self) -> type[RolloutEnvironment]:
        return environment_class(self.run)

    @property
    def reward_funcs(self) -> list[RewardFunction]:
        """Return the reward functions: first the environment's, then `rewards`."""
        return [environment_reward, *map(only_scored, self._rewards)]

    def rollout_func(self, prompts: Sequence[Sequence[Mapping[str, Any]]], trainer: Any) -> dict[str, list[Any]]:
        """Roll out all prompts of a batch at the same time, token-exact, for `rollout_func` of `GRPOTrainer`.

        Raises:
            UsageError: the spec has no `agent`.
            ConfigError: the spec's agent samples at a temperature other than the trainer's.
            HermesError: as `GroupRoller.roll` says.
        """
        return rollout_columns(self.run, prompts, trainer)

    def rollout_worker(self, num_generations: int = 8, **limits: Any) -> HermesRolloutWorker:
        """Return a token-exact worker for `AsyncGRPOTrainer(rollout_worker=…)`; see `HermesRolloutWorker`."""
        return HermesRolloutWorker(lambda: self.run, num_generations, **limits)

    def close(self) -> None:
        """End the rollouts and the sandboxes of this process. Idempotent."""
        self._shared.close()

    def __enter__(self) -> Self:
        """Open the run and start its sandboxes."""
        self.run.call(self.run.context())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the open run: a copy in another process opens its own."""
        return {"_shared": self._shared, "_rewards": self._rewards}
