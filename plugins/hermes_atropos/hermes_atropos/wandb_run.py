"""The run of Weights & Biases that an environment's metrics go to, where wandb is asked for."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

import wandb

from hermes_core import ConfigError, InfraError


async def check_login() -> None:
    """Find out before anything is begun whether a run could be logged. Asks nobody for a key.

    Raises:
        ConfigError: there is no API key, or a `WANDB_…` variable is wrong.
    """
    await asyncio.to_thread(_check_login)


class WandbRun:
    """One run, beside any others of this process. Its calls block: threads make them, one at a time.

    Args:
        name: the beginning of its name; the date and some letters follow.
        config: what is shown as the run's settings.
    """

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self._name = f"{name}-{time.strftime('%Y-%m-%d')}-{uuid.uuid4().hex[:6]}"
        self._config = config
        self._run: Any = None
        self._step, self._told = -1, set[str]()
        self._one_at_a_time = threading.Lock()

    async def start(self, project: str | None = None, group: str | None = None) -> None:
        """Begin the run.

        Args:
            project: None is what `WANDB_PROJECT` says.

        Raises:
            InfraError: wandb can't begin it.
        """
        await asyncio.to_thread(self._start, project, group)

    async def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log these at this step of the trainer, or at the next one that loses nothing.

        Nothing happens before `start` and after `aclose`.
        """
        await asyncio.to_thread(self._log, dict(metrics), step)

    async def aclose(self) -> None:
        """End the run when all of it is written, or sent. Idempotent."""
        await asyncio.to_thread(self._finish)

    # A thread goes on when who waits for it is cancelled: hence the lock, and what it makes is kept by itself.

    def _start(self, project: str | None, group: str | None) -> None:
        with self._one_at_a_time:
            try:
                self._run = wandb.init(
                    name=self._name,
                    project=project,
                    group=group,
                    config=dict(self._config),
                    reinit="create_new",  # of other environments in this process, each has its own
                    # What is written on the screen and on the command line nobody has redacted.
                    settings=wandb.Settings(console="off", x_disable_meta=True),
                )
            except (wandb.Error, ValueError, OSError) as error:
                raise InfraError(
                    f"wandb can't begin a run: {error}",
                    hint="WANDB_MODE=offline keeps everything in files; --env.use_wandb=false does without",
                ) from error

    def _log(self, metrics: dict[str, Any], step: int) -> None:
        with self._one_at_a_time:
            if self._run is None:
                return
            # wandb takes no earlier step than the last one, and of each name one value for a step.
            if step < self._step or (step == self._step and not self._told.isdisjoint(metrics)):
                step = self._step + 1
            if step > self._step:
                self._step, self._told = step, set()
            self._told.update(metrics)
            self._run.log(metrics, step=step)

    def _finish(self) -> None:
        with self._one_at_a_time:
            if self._run is not None:
                self._run.finish()
                self._run = None


def _check_login() -> None:
    try:
        mode = wandb.setup().settings.mode
        if mode in ("offline", "dryrun", "disabled") or wandb.login(prompt=False):
            return
    except (wandb.Error, ValueError, OSError) as error:
        raise ConfigError(
            f"wandb can't be used: {error}",
            hint="look at the WANDB_… variables and the network; WANDB_MODE=offline keeps everything in files",
        ) from error
    raise ConfigError(
        "wandb is asked for, and has no API key",
        hint="set WANDB_API_KEY, or run `wandb login`; WANDB_MODE=offline needs none and keeps everything in files",
    )
