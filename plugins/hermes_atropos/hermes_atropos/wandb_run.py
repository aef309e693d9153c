"""The run of Weights & Biases that gets an environment's metrics, if wandb is enabled."""

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
    """Check whether wandb can begin a run. Never prompts for a key.

    Raises:
        ConfigError: there is no API key, or a `WANDB_…` variable is wrong.
    """
    await asyncio.to_thread(_check_login)


class WandbRun:
    """One run of wandb, independent of other runs in this process.

    wandb blocks, so threads call it, one at a time.

    Args:
        name: the beginning of the run's name, which the date and some letters follow.
        config: the settings that wandb shows for the run.
    """

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self._name = f"{name}-{time.strftime('%Y-%m-%d')}-{uuid.uuid4().hex[:6]}"
        self._config = config
        self._run: Any = None
        self._step, self._logged = -1, set[str]()
        """The last step, and the metrics that were logged for it."""
        self._one_at_a_time = threading.Lock()

    async def start(self, project: str | None = None, group: str | None = None) -> None:
        """Begin the run.

        Args:
            project: the project; None is that of `WANDB_PROJECT`.
            group: the group of the run; None is that of `WANDB_RUN_GROUP`.

        Raises:
            InfraError: wandb can't begin the run.
        """
        await asyncio.to_thread(self._start, project, group)

    async def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log metrics at this step of the trainer, or at a later one if wandb would drop a value there.

        Does nothing before `start` and after `aclose`.
        """
        await asyncio.to_thread(self._log, dict(metrics), step)

    async def aclose(self) -> None:
        """Write or send the rest of the run, and end it. Idempotent."""
        await asyncio.to_thread(self._finish)

    # When a caller is cancelled, its thread goes on. So threads take a lock, and the thread itself stores the run.

    def _start(self, project: str | None, group: str | None) -> None:
        with self._one_at_a_time:
            try:
                self._run = wandb.init(
                    name=self._name,
                    project=project,
                    group=group,
                    config=dict(self._config),
                    reinit="create_new",  # other environments in this process have runs of their own
                    # Leave out the screen output and the command line, because they may contain secrets.
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
            # wandb drops values of a step before the last one, and a second value of a metric for the same step.
            if step < self._step or (step == self._step and not self._logged.isdisjoint(metrics)):
                step = self._step + 1
            if step > self._step:
                self._step, self._logged = step, set()
            self._logged.update(metrics)
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
