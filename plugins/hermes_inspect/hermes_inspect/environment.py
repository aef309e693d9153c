"""The environment `inspect`: the samples of an Inspect task, for agents of hermes-rl, scored by the task's scorers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from hermes_core import (
    AgentResult,
    ConfigError,
    DatasetError,
    Environment,
    EnvironmentConfig,
    Item,
    RolloutHandle,
    hookimpl,
)
from hermes_inspect import task as inspect_task
from hermes_inspect.config import HermesSandboxConfig
from hermes_inspect.sandbox import HermesSandbox
from hermes_inspect.task import LoadedTask


class InspectConfig(EnvironmentConfig):
    """The settings of `inspect`."""

    task: str
    """The task: `FILE@TASK`, a file with one task, or a name that an installed package registers."""
    task_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task."""
    use_solver: bool = True
    """Whether the task's solver writes the prompt and reads the answer. If not, the prompt is the sample's input, and
    scorers get the conversation as it is. Solvers that are agents can only be replaced: set this to false."""
    score: str | None = None
    """The score that is the reward: SCORER, or SCORER/KEY if the score has several values. Needed if there are several
    scorers."""
    grader: str | None = None
    """The model that scorers ask, as Inspect names it: `openai/MODEL`."""
    use_images: bool = False
    """Whether sandboxes use the image and the directory that a sample's compose file names, instead of the profile's.
    This needs a backend with images."""


@dataclass(frozen=True)
class _Prepared:
    """A sample with its prompt and its sandbox, which are known once the task is loaded."""

    sample: Any
    prompt: Sequence[Mapping[str, Any]]
    place: HermesSandboxConfig | None
    """The sample's sandbox; None if it has none."""


class InspectEnvironment(Environment):
    """An Inspect task. The agent replaces the solver. The scorers get the agent's slot as their sandbox."""

    name = "inspect"
    config_class = InspectConfig
    config: InspectConfig

    def __init__(self, config: InspectConfig) -> None:
        super().__init__(config)
        self.item_images = config.use_images
        self._samples: dict[str, _Prepared] = {}
        self._items: Sequence[Item] = ()
        self._task: LoadedTask

    async def setup(self) -> None:
        """Load the task, and check that it can be run here.

        Raises:
            DatasetError: the task can't be loaded, or needs something that only Inspect's eval has.
            ConfigError: a setting is missing or wrong.
        """
        config = self.config
        task = await asyncio.to_thread(inspect_task.load, config.task, config.task_args)
        self._task = LoadedTask(task, config.use_solver, config.grader)
        self._task.check()
        self._check_score(list(self._task.scorers))
        for number, sample in enumerate(task.dataset, 1):
            sample.id = number if sample.id is None else sample.id  # as Inspect numbers them
            await self._add(str(sample.id), sample)
            await asyncio.sleep(0)  # a dataset can be large
        if not self._samples:
            raise DatasetError(f"the Inspect task {config.task!r} has no samples")
        await self._task.rehearse(next(iter(self._samples.values())).sample)
        self._items = [_as_item(name, prepared.sample) for name, prepared in self._samples.items()]

    def _check_score(self, scorers: Sequence[str]) -> None:
        if self.config.score is None and len(scorers) > 1:
            hint = f"name the one that gives the reward: --env.score={scorers[0]}"
            raise ConfigError(f"the task has several scorers: {', '.join(scorers)}", hint=hint)
        if self.config.score is not None and self.config.score.partition("/")[0] not in scorers:
            raise ConfigError(f"the task has no scorer {self.config.score!r}", hint=f"it has {', '.join(scorers)}")

    async def _add(self, name: str, sample: Any) -> None:
        if name in self._samples:
            raise DatasetError(f"two samples have the id {name!r}", hint="give each sample an id of its own")
        try:
            place = await self._task.place(sample)
            if place is not None and self.config.use_images and "dockerfile" in place.backend_config:
                raise ConfigError("its sandbox is built from a Dockerfile", hint="build the image, and name that")
        except ConfigError as error:
            raise DatasetError(f"sample {name!r} does not fit: {error.message}", hint=error.hint) from error
        self._samples[name] = _Prepared(sample, await self._task.prompt(sample), place)

    def items(self) -> Sequence[Item]:
        """Return the samples in the dataset's order, with their fields: `id`, `input`, `target`, and so on."""
        return self._items

    def format_prompt(self, item: Item) -> str:
        """Return the user's last message."""
        prompt = self._samples[item["id"]].prompt
        return next((str(message["content"]) for message in reversed(prompt) if message["role"] == "user"), "")

    def initial_messages(self, item: Item) -> list[dict[str, Any]]:
        """Return the configuration's system prompt, if there is one, and then the solver's prompt or the sample's
        input."""
        system = self.config.system_prompt
        messages = [{"role": "system", "content": system}] if system else []
        return [*messages, *(dict(message) for message in self._samples[item["id"]].prompt)]

    def uses_slot(self, item: Item) -> bool:
        """Return whether the sample has a sandbox."""
        return self._samples[item["id"]].place is not None

    def toolsets(self, item: Item) -> Sequence[str] | None:
        """Return no tools for a sample without a sandbox, unless the configuration names some."""
        configured = self.config.enabled_toolsets is not None or self.config.distribution is not None
        return None if configured or self.uses_slot(item) else ()

    def image(self, item: Item) -> str | None:
        """Return the sample's image, if `use_images` is set."""
        place = self._samples[item["id"]].place
        if place is None or not self.config.use_images:
            return None
        image: str | None = place.image or place.backend_config.get("image")
        return image

    def cwd(self, item: Item) -> str | None:
        """Return the sample's directory, if `use_images` is set."""
        place = self._samples[item["id"]].place
        return place.cwd if place is not None and self.config.use_images else None

    @hookimpl
    async def setup_trajectory_workspace(self, item: Item, rollout: RolloutHandle) -> dict[str, Any]:
        """Copy the sample's files into the slot, and run its setup script."""
        if self.uses_slot(item):
            await inspect_task.prepare(self._samples[item["id"]].sample, HermesSandbox(rollout.commands, rollout.slot))
        return {}

    @hookimpl
    async def verify_and_score_trajectory(
        self, item: Item, result: AgentResult, rollout: RolloutHandle
    ) -> tuple[float, dict[str, Any]]:
        """Run the task's scorers on the conversation. The slot is their sandbox."""
        inspect_task.enter(HermesSandbox(rollout.commands, rollout.slot) if self.uses_slot(item) else None)
        sample = self._samples[item["id"]].sample
        state = await self._task.state(sample, result.messages, result.model or "none")
        scores = await self._task.score(state)
        details = {
            name: {"value": score.value, "answer": score.answer, "explanation": score.explanation}
            for name, score in scores.items()
        }
        return inspect_task.reward(scores, self.config.score), {"scores": details}


def _as_item(name: str, sample: Any) -> Item:
    fields: dict[str, Any] = sample.model_dump(mode="json", exclude_none=True, exclude={"sandbox", "checkpoint"})
    return {**fields, "id": name}
