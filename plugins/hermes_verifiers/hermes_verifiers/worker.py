"""The run that a process of verifiers opens once and shares among its rollouts. This module does not import
verifiers."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import Any, Literal

from pydantic import Field

from hermes_core import Rolled, RunOptions, TrainerRun, complete, open_trainer_session
from hermes_verifiers.places import Places


class WorkerOptions(RunOptions):
    """The options of a run. Options that verifiers decides have fixed values."""

    concurrency: int = Field(default=32, ge=1, le=1 << 16)
    """Maximum number of rollouts at the same time, over all processes of this user on this host."""
    group_size: Literal[1] = 1
    """verifiers plans each rollout of a group by itself (`-r`)."""
    infra_retries: Literal[0] = 0
    """verifiers repeats failed rollouts (`--env.retries`). The turns of an attempt that we repeat stay in the trace
    and would be trained on, too."""
    stop_on_infra: None = None
    max_cost: None = None


class WorkerRun(TrainerRun):
    """The run of a worker, with the places for its rollouts."""

    @cached_property
    def places(self) -> Places:
        """Return the places, which all processes of this user on this host share."""
        session = self.session
        directory = session.runtime.settings.state_dir / "verifiers" / socket.gethostname()
        return Places(directory, session.options.concurrency)


class Worker:
    """One environment in this process. Its first user opens the run, and its last user closes it.

    Args:
        environment: the environment's name.
        env: the environment's configuration.
        options: options of the run.
    """

    def __init__(self, environment: str, env: Mapping[str, Any], options: RunOptions) -> None:
        self._new_run = partial(WorkerRun, partial(open_trainer_session, environment, options, env=env))
        self._run: WorkerRun | None = None
        self._users = 0

    def prompts(self) -> dict[str, list[dict[str, Any]]]:
        """Return the prompt of each item by the item's id. Blocks while the dataset is read; an event loop may run.

        Raises:
            HermesError: as `open_trainer_session` says.
        """
        with self._new_run() as run:
            environment = run.session.environment
            return {item_id: environment.initial_messages(item) for item_id, item in run.items.items()}

    async def roll(self, item_id: str, agent: str, settings: Mapping[str, Any] | None = None) -> Rolled:
        """Roll out an item once. All rollouts of an item share a sandbox if they fit.

        Args:
            agent: the agent's name.
            settings: the agent's settings.

        Raises:
            HermesError: the run can't be opened with these options, or the model's endpoint is gone.
        """
        async with self.open() as run:
            session = run.session
            if agent == "oracle":
                session.hooks.check_solve()
            worker = session.runtime.agent(agent, settings)
            try:
                async with run.places.one():
                    return await run.roll_one(item_id, agent=worker, group_id=item_id)
            finally:
                await session.runtime.close(worker)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[WorkerRun]:
        """Keep the run open, with its sandboxes, during the block.

        Raises:
            HermesError: as `TrainerRun.open` says.
        """
        run = self._run = self._run or self._new_run(eager=True)
        self._users += 1
        try:
            yield await run.open()
        finally:
            self._users -= 1
            if not self._users:
                self._run = None  # so that the next user opens another run, without waiting for this run to close
                await complete(run.aclose())
