"""The run of a training loop: its environment, its sandboxes and its rollouts, in a separate event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

from hermes_core import (
    Environment,
    Group,
    Item,
    RunOptions,
    Session,
    TrainerRun,
    check_temperature,
    open_trainer_session,
    validate_data,
)
from hermes_tinker.server import Policy, TinkerServer
from hermes_tinker.versions import TINKER


class TinkerRun:
    """Rolls out groups with the weights that a `TrainingClient` of Tinker trains. Every call blocks.

        training = tinker.ServiceClient().create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=32)
        with TinkerRun("swe-smith", training, backend="docker", env={"dataset_name": "tasks.jsonl"}) as run:
            for _ in range(100):
                groups = run.roll(8, 16)
                training.forward_backward(datums(groups), "importance_sampling").result()
                training.optim_step(tinker.AdamParams(learning_rate=1e-5)).result()
                run.use_new_weights()

    The run lives in a thread. The sandboxes are started at once, and end with the block, or else with the program.

    Args:
        environment: the environment's name, or an instance.
        training: the `TrainingClient`, with which the caller trains.
        env: the environment's configuration, if it is given by name.
        agent: settings of the agent: `max_turns`, `max_tokens`, `max_token_length`, … The model and its tokenizer come
            from `training` unless they are set here. `name` selects an agent that is a program, in place of `model`.
        refills: number of failed rollouts of a group that may be replaced.
        options: options of the run (`RunOptions`): `backend`, `isolation`, `rollout_timeout`, … `concurrency` is the
            number of rollouts at the same time.

    Raises:
        ConfigError: the temperature is not 1, or the length of the context is not known.
        HermesError: the run can't be opened, as `open_session` says.
    """

    def __init__(
        self,
        environment: str | Environment,
        training: Any,
        *,
        env: Mapping[str, Any] | None = None,
        agent: Mapping[str, Any] | None = None,
        refills: int = 4,
        **options: Any,
    ) -> None:
        TINKER.check()
        run_options = validate_data(RunOptions, options, "the options of TinkerRun")
        self.training = training
        self._policy = Policy(training)
        opening = partial(_open_session, self._policy, environment, env, agent or {}, run_options)
        self._run = TrainerRun(opening, exact=True, refills=refills, eager=True).start()
        self.items: Mapping[str, Item] = self._run.items
        """The items of the environment, by id."""
        self._upcoming = itertools.cycle(self.items)

    @property
    def version(self) -> int:
        """Return the version of the weights that rollouts are sampled from; 0 until `use_new_weights` is called."""
        return self._policy.current[1]

    def roll(self, groups: int, size: int) -> list[Group]:
        """Roll out the next `groups` items, each `size` times, all at the same time. After the last item, start over.

        Returns:
            The groups. Rollouts that failed are in `Group.failed`, not in `kept`; see `docs/reference/trainers.md`.

        Raises:
            HermesError: as `GroupRoller.roll` says.
        """
        return self._run.call(self._run.roll([(item_id, size) for item_id in itertools.islice(self._upcoming, groups)]))

    def use_new_weights(self) -> None:
        """Save the trained weights. Later rollouts are sampled from them."""
        self._policy.save()

    def close(self) -> None:
        """End the rollouts and the sandboxes. Idempotent."""
        self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@asynccontextmanager
async def _open_session(
    policy: Policy,
    environment: str | Environment,
    env: Mapping[str, Any] | None,
    agent: Mapping[str, Any],
    options: RunOptions,
) -> AsyncIterator[Session]:
    """Open a session whose agent samples with Tinker, from the weights as they are now.

    Raises:
        ConfigError: the temperature is not 1, or another setting is wrong.
    """
    data = (await policy.info()).model_data
    defaults = {"model": data.model_name, "tokenizer_name": data.tokenizer_id}
    settings = {**defaults, **agent, "base_url": policy.name, "api_key": None}
    server = partial(TinkerServer, policy)
    async with open_trainer_session(environment, options, env=env, agent=settings, server=server) as session:
        check_temperature(session, 1)
        await asyncio.to_thread(policy.save)
        yield session
