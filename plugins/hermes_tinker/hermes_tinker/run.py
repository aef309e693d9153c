"""The run of a training loop: its environment, its sandboxes and its rollouts, in an event loop of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Self

from hermes_core import (
    AgentSettings,
    ConfigError,
    Environment,
    Group,
    GroupRoller,
    Item,
    LoopThread,
    RunOptions,
    Runtime,
    open_session,
    validated,
)
from hermes_core.envs.session import check_scored
from hermes_tinker.server import Policy, TinkerServer
from hermes_tinker.versions import check_version


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
        environment: its name, or an instance.
        training: the `TrainingClient`. The caller trains with it.
        env: the environment's configuration, if it is given by name.
        agent: settings of the agent `model`: `max_turns`, `max_tokens`, `max_token_length`, … The model and its
            tokenizer are those of `training` unless they are named here.
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
        check_version("tinker")
        given = validated(RunOptions, options, "the options of TinkerRun")
        self.training = training
        self._policy = Policy(training)
        self._stack = AsyncExitStack()
        self._loop = LoopThread("hermes-rl for Tinker", self._stack.aclose)
        try:
            self._roller, items = self._loop.call(self._open(environment, env, agent or {}, given, refills))
        except BaseException:
            self._loop.close()
            raise
        self.items: Mapping[str, Item] = items
        """The items of the environment, by id."""
        self._upcoming = itertools.cycle(items.values())

    @property
    def version(self) -> int:
        """Return how often the weights that are sampled from were replaced."""
        return self._policy.current[1]

    def roll(self, groups: int, size: int) -> list[Group]:
        """Roll out the next items, each `size` times, all at the same time. After the last item comes the first.

        Returns:
            The groups. What failed is not in `kept`; see `docs/trainers.md`.

        Raises:
            HermesError: as `GroupRoller.roll` says.
        """
        return self._loop.call(self._roll(list(itertools.islice(self._upcoming, groups)), size))

    def use_new_weights(self) -> None:
        """Save the weights as they are trained now. What is rolled out from now on is sampled from them."""
        self._policy.save()

    def close(self) -> None:
        """End the rollouts and the sandboxes. Idempotent."""
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _roll(self, items: list[Item], size: int) -> list[Group]:
        try:
            async with asyncio.TaskGroup() as tasks:
                groups = [tasks.create_task(self._roller.roll(item, size)) for item in items]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [group.result() for group in groups]

    async def _open(
        self,
        environment: str | Environment,
        env: Mapping[str, Any] | None,
        agent: Mapping[str, Any],
        options: RunOptions,
        refills: int,
    ) -> tuple[GroupRoller, dict[str, Item]]:
        runtime = await self._stack.enter_async_context(Runtime())
        settings = await self._settings(runtime, agent)
        await asyncio.to_thread(self._policy.save)
        opening = open_session(
            runtime,
            environment,
            "model",
            options,
            env=env,
            settings=settings,
            server=lambda chat: TinkerServer(settings, self._policy, chat),
        )
        session = await self._stack.enter_async_context(opening)
        check_scored(session.environment)
        context = await self._stack.enter_async_context(session.sandboxes())
        roller = GroupRoller(context, session.tools, room=session.room, refills=refills, exact=True)
        made = session.environment
        return roller, {made.item_id(item): item for item in made.selected_items()}

    async def _settings(self, runtime: Runtime, agent: Mapping[str, Any]) -> AgentSettings:
        data = (await self._policy.info()).model_data
        own = {"tool_call_parser": "auto", "model": data.model_name, "tokenizer_name": data.tokenizer_id}
        settings = runtime.agent_settings({**own, **agent, "base_url": self._policy.name, "api_key": None}, "model")
        if settings.temperature != 1:
            raise ConfigError(
                f"the agent samples at temperature {settings.temperature:g}, and Tinker computes logprobs at 1",
                hint="leave the temperature at 1",
            )
        return settings
