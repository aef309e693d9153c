"""`load_environment`: makes a subclass of `HermesAgentBaseEnv` for the environment of a plugin, by its name."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, ClassVar, NoReturn

from pydantic import Field, create_model

from hermes_atropos.config import HermesAgentEnvConfig
from hermes_atropos.env import HermesAgentBaseEnv
from hermes_core import (
    SOLVED,
    AgentResult,
    DatasetError,
    Environment,
    EnvironmentConfig,
    Group,
    InfraError,
    Item,
    Runtime,
    ToolContext,
    UnknownNameError,
    UsageError,
)
from hermes_core.runs.image_prefetch import Prefetch
from hermes_core.runs.runner import each

_OF_SUBCLASSES = ("dataset_name", "dataset_split", "prompt_field")
"""Settings that subclasses may read. An environment of a plugin need not have them."""


class PluginEnvConfig(HermesAgentEnvConfig):
    """The settings of a `PluginEnv`, to which `load_environment` adds those of the plugin's environment."""

    eval_items: int = Field(
        default=0, ge=0, description="How many items an evaluation rolls out, from the first on; 0 is all"
    )


class PluginEnv(HermesAgentBaseEnv):
    """Rolls out the items of a plugin's environment: each once in process mode, again and again in serve mode."""

    env_config_cls = PluginEnvConfig
    environment_name: ClassVar[str]
    environment_class: ClassVar[type[Environment]]
    _prefetch: Prefetch | None = None

    def make_environment(self, runtime: Runtime) -> Environment:
        """Return the plugin's environment, configured with the settings that were set.

        Raises:
            UnknownNameError: a setting was set that the environment does not have.
        """
        fields = self.environment_class.config_class.model_fields
        for key in _OF_SUBCLASSES:
            if key in self.config.model_fields_set and key not in fields:
                raise UnknownNameError("setting", key, fields, where=f"of environment {self.environment_name!r}")
        settings = {
            key: getattr(self.config, key)
            for key in self.config.model_fields_set
            if key in fields and getattr(self.config, key) is not None
        }
        self._plugin = runtime.environment(self.environment_name, {"seed": self.config.seed, **settings})
        return self._plugin

    async def setup(self) -> None:
        """Load the plugin's dataset.

        Raises:
            DatasetError: the settings select no item.
        """
        await self._plugin.setup()
        if next(iter(self._plugin.select_items()), None) is None:
            raise DatasetError(
                f"environment {self.environment_name!r} has no items, as its settings select them",
                hint="check the dataset, and the settings that choose among its items",
            )
        self._order = self._rounds()

    @asynccontextmanager
    async def running(
        self, *, start: bool = True, groups: int | None = None, evaluating: bool = False
    ) -> AsyncIterator[None]:
        """Open all that rollouts need, as in the base class. Build or pull images of the next groups in advance."""
        async with super().running(start=start, groups=groups, evaluating=evaluating):
            context = self.roller.context
            items, ahead = self._rounds(), self.config.prefetch
            async with aclosing(Prefetch(self._plugin, context.backend, context.profile, items, ahead)) as prefetch:
                self._prefetch = prefetch
                try:
                    yield
                finally:
                    self._prefetch = None

    async def get_next_item(self) -> Item | None:
        """Return the next item; None after the last, except in serve mode."""
        if self._prefetch is not None:
            self._prefetch.group_begins()
        return next(self._order, None)

    def _rounds(self) -> Iterator[Item]:
        items = list(self._plugin.select_items())
        yield from items
        for number in itertools.count(1):
            if not (self.endless and items):
                return
            if self._plugin.config.shuffle:
                random.Random(f"{self._plugin.config.seed}:{number}").shuffle(items)
            yield from items

    def format_prompt(self, item: Item) -> str:
        """Return the prompt that the plugin makes of the item."""
        return self._plugin.format_prompt(item)

    async def compute_reward(self, item: Item, result: AgentResult, ctx: ToolContext) -> NoReturn:
        """Raise an error, because the plugin's own hook verifies rollouts."""
        raise UsageError(f"environment {self.environment_name!r} is verified by its own hook")

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Roll out a group of each item, and report the mean reward and the share of solved rollouts.

        Raises:
            InfraError: no rollout has a score.
        """
        began = time.time()
        items = list(itertools.islice(self._plugin.select_items(), self.config.eval_items or None))
        groups = await self._roll_all(items)
        counted = self.evaluation.take()
        scored = [rolled for group in groups for rolled in group.kept]
        rewards = [rolled.reward for rolled in scored if rolled.reward is not None]
        if not rewards:
            raise InfraError("no rollout of the evaluation has a score", hint="the trajectories say why")
        metrics = {
            "eval/mean_reward": sum(rewards) / len(rewards),
            "eval/solved": sum(reward >= SOLVED for reward in rewards) / len(rewards),
            "eval/items": len(items),
            "eval/rollouts": len(rewards),
            "eval/failed": sum(len(group.failed) for group in groups),
        }
        samples = [{"messages": rolled.record.messages, "score": rolled.reward} for rolled in scored]
        await self.evaluate_log(metrics, start_time=began, end_time=time.time(), samples=samples, verbose=False)
        await self.wandb_log({**counted, **metrics})

    async def _roll_all(self, items: list[Item]) -> list[Group]:
        groups: dict[int, Group] = {}

        async def roll(job: tuple[int, Item]) -> None:
            place, item = job
            groups[place] = await self.roller.roll(item, self.config.group_size)

        await each(enumerate(items), roll, self.config.max_eval_workers)
        return [groups[place] for place in range(len(items))]


def load_environment(name: str, runtime: Runtime | None = None) -> type[PluginEnv]:
    """Return the Atropos class of the environment of that name.

    Args:
        runtime: the runtime with the plugin; None makes one of the installed plugins.

    Raises:
        UnknownNameError: no plugin provides the environment.
        PluginError: two plugins claim the environment, or it cannot be imported.
    """
    environment = (runtime or Runtime()).environment_class(name)
    config = _config_of(environment.config_class, name)
    attributes = {
        "name": name,
        "__doc__": f"The environment `{name}` for Atropos.",
        "__module__": __name__,
        "env_config_cls": config,
        "environment_name": name,
        "environment_class": environment,
    }
    return type(f"{environment.__name__}ForAtropos", (PluginEnv,), attributes)


def _config_of(kind: type[EnvironmentConfig], name: str) -> type[PluginEnvConfig]:
    """Return a model of our settings and the plugin's. The plugin's settings are None until they are set, because the
    plugin has their defaults."""
    own: dict[str, Any] = {
        key: (field.annotation | None, Field(default=None, description=f"{name}: {key}"))  # type: ignore[operator]
        for key, field in kind.model_fields.items()
        if key not in PluginEnvConfig.model_fields
    }
    model: type[PluginEnvConfig] = create_model(f"{kind.__name__}ForAtropos", __base__=PluginEnvConfig, **own)
    return model
