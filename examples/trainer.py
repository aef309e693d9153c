"""An adapter for a trainer of your own that runs the model itself, and a tiny policy that learns with it."""

import asyncio
import json
import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from hermes_core import DrivenRollout, Rolled, RolloutEnded, RunOptions, TrainerRun, open_trainer_session, validate_data

WORDS = ("ant", "bee", "cow", "fox")
TASKS = [{"id": "animal", "prompt": "Write an animal to out.txt.", "check": "grep -qx fox out.txt"}]


class Rollouts:
    """Rollouts for a trainer without an event loop: it writes the commands, and gets the rewards.

    Args:
        environment: its name.
        env: its configuration.
        options: options of the run (`RunOptions`).
    """

    def __init__(self, environment: str, *, env: Mapping[str, Any] | None = None, **options: Any) -> None:
        checked = validate_data(RunOptions, options, "the options of Rollouts")
        self._run = TrainerRun(partial(open_trainer_session, environment, checked, env=env)).start()
        self.item_ids = list(self._run.items)

    def rewards(self, item_id: str, commands: Sequence[str]) -> list[float | None]:
        """Return the reward of each command, run in a fresh slot; None for a rollout that failed."""
        return self._run.call(self._rewards(item_id, commands))

    async def _rewards(self, item_id: str, commands: Sequence[str]) -> list[float | None]:
        ended = await asyncio.gather(*(self._work(item_id, command) for command in commands))
        records = await self._run.end([(rollout, "Done.") for rollout in ended])
        return [Rolled.of(record, exact=False).reward for record in records]

    async def _work(self, item_id: str, command: str) -> DrivenRollout:
        rollout = await self._run.begin(item_id)
        with suppress(RolloutEnded):  # it could not begin, or its time is up: the record says so
            await rollout.call("terminal", {"command": command})
        return rollout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._run.close()


def learn(rollouts: Rollouts, steps: int, size: int) -> list[float]:
    """Train with REINFORCE. Return the mean reward of each step."""
    chance, weights, means = random.Random(7), dict.fromkeys(WORDS, 0.0), []
    for _ in range(steps):
        words = chance.choices(WORDS, [math.exp(weight) for weight in weights.values()], k=size)
        rewards = rollouts.rewards(rollouts.item_ids[0], [f"echo {word} > out.txt" for word in words])
        scored = [(word, reward) for word, reward in zip(words, rewards, strict=True) if reward is not None]
        means.append(sum(reward for _, reward in scored) / len(scored))
        for word, reward in scored:
            weights[word] += reward - means[-1]
    return means


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        (tasks := Path(name) / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
        with Rollouts("tasks", env={"dataset_name": str(tasks)}, concurrency=8) as rollouts:
            means = learn(rollouts, steps=4, size=8)
    print("mean rewards:", *(f"{mean:.3f}" for mean in means))


main()
